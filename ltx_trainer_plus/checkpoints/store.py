"""The folder of checkpoints: whole ones appear in it at once, and nothing half-written is ever taken for one.

A checkpoint of step 250 is `lora_weights_step_00250.safetensors` (or `model_weights_...`), a
`training_state_step_00250.safetensors` beside it (of a sharded run a folder `training_state_step_00250`), and the
marker `checkpoint_step_00250.json`, written last, with size and SHA-256 of each file. With a moving average of the
weights there is an `ema_lora_weights_...` too. Whole means: the marker is there and all of it is true.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

from torch import Tensor

from ltx_trainer_plus.atomic import flush_to_disk, remove_unfinished, replacing
from ltx_trainer_plus.checkpoints.files import NotFiniteError, Sums, check_finite, sha256, write_tensors
from ltx_trainer_plus.checkpoints.state import CheckpointError, TrainingState
from ltx_trainer_plus.checkpoints.state_parts import await_parts, write_part

logger = logging.getLogger(__name__)

Kind = Literal["lora", "full"]

_PREFIX: dict[Kind, str] = {"lora": "lora_weights", "full": "model_weights"}
_MARKER = re.compile(r"^checkpoint_step_(\d+)\.json$")
_WEIGHTS = re.compile(r"^(?:lora|model)_weights_step_(\d+)\.safetensors$")
_NUMBERED = re.compile(
    r"^(?:checkpoint|(?:ema_)?lora_weights|(?:ema_)?model_weights|training_state)_step_(\d+)(?:\.|$)"
)
# A file of the folder, or a part in the folder of a training state; nothing outside.
_MARKED = re.compile(r"^(?:training_state_step_\d+/)?[^/]+\.safetensors$")
_BEST = "best_checkpoint.json"
_TEMPORARY = ".saving"
_REMOVING = ".removing"
# Big enough for hundreds of gigabytes on a slow disk.
_PARTS_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `state` is a file or a folder, None where none was saved."""

    step: int
    weights: Path
    state: Path | None


class CheckpointStore:
    """Saves, finds and retires the checkpoints of one folder. One process at a time may write to it."""

    def __init__(self, folder: Path | str, keep_last_n: int = -1, *, parts_timeout: float = _PARTS_TIMEOUT) -> None:
        """
        Args:
            keep_last_n: how many whole checkpoints stay, by step number; negative = all, 0 = the last one.
            parts_timeout: seconds that a save waits for the other processes' parts of the training state.
        """
        self.folder = Path(folder)
        self.keep_last_n = keep_last_n
        self._parts_timeout = parts_timeout

    def save(
        self,
        step: int,
        kind: Kind,
        weights: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        state: TrainingState | None = None,
        averaged: Mapping[str, Tensor] | None = None,
        given_up: Event | None = None,
    ) -> Path:
        """Write one checkpoint, then retire the oldest beyond `keep_last_n`.

        An interruption at any moment leaves every earlier checkpoint whole. Where a whole checkpoint of this step is
        already there, it stays as it is.

        Args:
            state: where it is one part of several, every other process that holds one saves it by `save_part`.
            averaged: the weights' moving average, for a weights file of its own.
            given_up: set when the run has failed: then other processes' parts are not waited for much longer.

        Returns:
            The path of the weights file.

        Raises:
            CheckpointError: something in it is not finite, or the files could not be written (disk full, ...); the
                temporary ones are gone again.
        """
        if existing := self.whole_at(step):
            logger.info("Step %d is already saved: %s", step, existing.weights)
            return existing.weights
        contents = {f"{_PREFIX[kind]}_step_{step:05d}.safetensors": (weights, {"format": "pt", **(metadata or {})})}
        parts = state if state is not None and state.part is not None else None
        if state is not None and parts is None:
            contents[f"{_state_name(step)}.safetensors"] = (state.tensors, state.metadata())
        if averaged is not None:
            name = f"ema_{_PREFIX[kind]}_step_{step:05d}.safetensors"
            contents[name] = (averaged, {"format": "pt", **(metadata or {})})
        marker = self.folder / f"checkpoint_step_{step:05d}.json"
        try:
            files = self._write_temporaries(contents, parts, given_up or Event())
            # Already now: where this fails, nothing is under its name yet.
            temporary = self.folder / f"{marker.name}{_TEMPORARY}"
            temporary.write_text(json.dumps({"format": 1, "step": step, "files": files}, indent=2))
            flush_to_disk(temporary)
            for name in contents:
                os.replace(self.folder / f"{name}{_TEMPORARY}", self.folder / name)
            if parts is not None:
                self._name_state_folder(step)
            # The files must be under their names on the disk before the marker that vouches for them is.
            flush_to_disk(self.folder)
            os.replace(temporary, marker)
            flush_to_disk(self.folder)
        except NotFiniteError as error:
            self._remove_temporaries()
            raise CheckpointError(
                f"The checkpoint of step {step} is not saved: {error}.\n"
                "  Earlier checkpoints are untouched. Continue from the last one with a lower "
                "optimization.learning_rate."
            ) from error
        except Exception as error:
            self._remove_temporaries()
            raise CheckpointError(
                f"The checkpoint of step {step} could not be saved in {self.folder}: {error}\n"
                "  Earlier checkpoints are untouched. Free space there, or set output_dir to another disk."
            ) from error
        self._retire(step)
        return self.folder / next(iter(contents))

    def save_part(self, state: TrainingState) -> None:
        """Write this process's part of a sharded training state, for the `save` of the main process. Raises nothing:
        a failure is raised there."""
        write_part(self.folder / f"{_state_name(state.step)}{_TEMPORARY}", state)

    def whole_at(self, step: int) -> Checkpoint | None:
        """The whole checkpoint of this step, or None."""
        marker = self.folder / f"checkpoint_step_{step:05d}.json"
        found = self._read(marker) if marker.exists() else None
        return found if isinstance(found, Checkpoint) else None

    def path_of(self, step: int, kind: Kind) -> Path:
        """The weights file that `save` writes."""
        return self.folder / f"{_PREFIX[kind]}_step_{step:05d}.safetensors"

    def best(self) -> tuple[int, float] | None:
        """Step and loss of the checkpoint that is kept for being the best, or None."""
        try:
            found = json.loads((self.folder / _BEST).read_text())
            return int(found["step"]), float(found["loss"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def set_best(self, step: int, loss: float) -> None:
        """From now on retention spares the checkpoint of `step`."""
        with replacing(self.folder / _BEST) as temporary:
            temporary.write_text(json.dumps({"step": step, "loss": loss}))

    def whole(self) -> list[Checkpoint]:
        """All whole checkpoints in ascending order of step; reads every file to check its sum."""
        return [found for _, marker in self._markers() if not isinstance(found := self._read(marker), str)]

    def latest(self) -> Checkpoint | None:
        """The whole checkpoint with the highest step, or None."""
        for _, marker in reversed(self._markers()):
            if not isinstance(found := self._read(marker), str):
                return found
        return None

    def broken(self) -> list[str]:
        """One line for each checkpoint that is not whole, naming the file and what is wrong with it."""
        lines = [found for _, marker in self._markers() if isinstance(found := self._read(marker), str)]
        marked = {step for step, _ in self._markers()}
        for path in sorted(self.folder.glob("*_weights_step_*.safetensors")):
            match = _WEIGHTS.match(path.name)
            if match and int(match[1]) not in marked:
                lines.append(f"{path.name}: it has no marker, so its save did not finish or another program wrote it")
        return lines

    def check(self, weights: Path) -> str | None:
        """What is wrong with the checkpoint of this weights file, or None; without a marker nothing is known to be."""
        match = _WEIGHTS.match(weights.name)
        marker = self.folder / f"checkpoint_step_{int(match[1]):05d}.json" if match else None
        if marker is None or not marker.exists():
            return None
        found = self._read(marker)
        return found if isinstance(found, str) else None

    def clean(self) -> list[str]:
        """Remove what killed saves and killed removals left; call it once, before the first save.

        Returns:
            The names of what was removed.
        """
        removed = self._remove_temporaries() + remove_unfinished(self.folder)
        for marker in self.folder.glob(f"checkpoint_step_*.json{_REMOVING}"):
            removed += self._remove_marked(marker)
        return removed

    def set_aside_after(self, step: int) -> Path | None:
        """Move every later checkpoint into a sub-folder: a run that goes on from `step` will write these steps anew.

        Returns:
            The sub-folder, or None where there was nothing later.
        """
        later = [p for p in self.folder.glob("*_step_*") if (match := _NUMBERED.match(p.name)) and int(match[1]) > step]
        if not later:
            return None
        number = 1 + len(list(self.folder.glob("set_aside_*")))
        aside = self.folder / f"set_aside_{number:03d}"
        aside.mkdir()
        # Markers last: until then the checkpoint shows as broken here rather than as whole with files missing there.
        for path in sorted(later, key=lambda p: p.suffix == ".json"):
            shutil.move(path, aside / path.name)
        return aside

    def _markers(self) -> list[tuple[int, Path]]:
        found = [
            (int(match[1]), p) for p in self.folder.glob("checkpoint_step_*.json") if (match := _MARKER.match(p.name))
        ]
        return sorted(found)

    def _read(self, marker: Path, *, sums: bool = True) -> Checkpoint | str:
        """The checkpoint that a marker vouches for, or one line that says why it is not whole."""
        try:
            description = json.loads(marker.read_text())
            step, files = int(description["step"]), dict(description["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"{marker.name}: it is not a readable marker"
        for name, expected in files.items():
            path = self.folder / name
            if not _MARKED.match(name):
                return f"{marker.name}: it names a file that belongs to no checkpoint ({name})"
            if not path.is_file():
                return f"{name}: it is missing"
            if (size := path.stat().st_size) != expected["size"]:
                return f"{name}: it has {size} bytes instead of {expected['size']}, so it was cut off or changed"
            if sums and sha256(path) != expected["sha256"]:
                return f"{name}: its checksum is wrong, so its content was damaged or changed"
        weights = next((name for name in files if _WEIGHTS.match(name)), None)
        if weights is None:
            return f"{marker.name}: it names no weights file"
        # Of a sharded state, the folder of its parts.
        state = next((self.folder / Path(name).parts[0] for name in files if name.startswith("training_state")), None)
        return Checkpoint(step, self.folder / weights, state)

    def _write_temporaries(
        self,
        contents: Mapping[str, tuple[Mapping[str, Tensor], dict[str, str]]],
        parts: TrainingState | None,
        given_up: Event,
    ) -> dict[str, Sums]:
        """Write all files under temporary names, and wait for the other processes' parts.

        Returns:
            The sums of each file by its later name.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if parts is not None:
            self.save_part(parts)
        shards: dict[str, Sums] = {}
        try:
            for name, (tensors, _) in contents.items():
                check_finite(name, tensors)
            files = {
                name: write_tensors(self.folder / f"{name}{_TEMPORARY}", *content) for name, content in contents.items()
            }
        finally:
            # After an error too: the others may still be writing into the folder that is then removed.
            if parts is not None and parts.part is not None:
                name = _state_name(parts.step)
                unfinished = self.folder / f"{name}{_TEMPORARY}"
                shards = await_parts(unfinished, parts.part.count, timeout=self._parts_timeout, given_up=given_up)
                flush_to_disk(unfinished)
        return files | {f"{_state_name(parts.step)}/{name}": sums for name, sums in shards.items() if parts is not None}

    def _name_state_folder(self, step: int) -> None:
        folder = self.folder / _state_name(step)
        if folder.exists():  # a killed save's, for which no marker vouches; unlike a file, it is not replaced
            shutil.rmtree(folder)
        os.replace(self.folder / f"{folder.name}{_TEMPORARY}", folder)

    def _remove_temporaries(self) -> list[str]:
        leftovers = list(self.folder.glob(f"*{_TEMPORARY}"))
        for path in leftovers:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return [path.name for path in leftovers]

    def _retire(self, saved_step: int) -> None:
        """Remove the lowest steps beyond `keep_last_n`; broken ones do not count, and the one just saved stays."""
        if self.keep_last_n < 0:
            return
        whole = [
            (step, marker) for step, marker in self._markers() if not isinstance(self._read(marker, sums=False), str)
        ]
        best = self.best()
        for step, marker in whole[: -max(self.keep_last_n, 1)]:
            if step == saved_step or (best is not None and step == best[0]):
                continue
            # The marker goes first: a kill in between leaves something that `clean` finishes, not a broken checkpoint.
            removing = marker.with_name(f"{marker.name}{_REMOVING}")
            os.replace(marker, removing)
            self._remove_marked(removing)

    def _remove_marked(self, marker: Path) -> list[str]:
        names = list(json.loads(marker.read_text())["files"])
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        for folder in {(self.folder / name).parent for name in names} - {self.folder}:
            # What somebody else put there stays, and the folder with it.
            with suppress(OSError):
                folder.rmdir()
        marker.unlink()
        return names


def weights_steps(folder: Path) -> list[int]:
    """Steps of the weights files in a folder, in ascending order, whoever wrote them and whole or not."""
    return sorted({int(match[1]) for path in folder.glob("*.safetensors") if (match := _WEIGHTS.match(path.name))})


def state_of(folder: Path, step: int) -> Path | None:
    """The training state of a step, a file or a folder, whole or not; None where there is none."""
    candidates = (folder / f"{_state_name(step)}.safetensors", folder / _state_name(step))
    return next((path for path in candidates if path.exists()), None)


def _state_name(step: int) -> str:
    return f"training_state_step_{step:05d}"
