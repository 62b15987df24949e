"""Training states on disk, one file or a folder of parts: their tensors are read when asked for, slice by slice."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ltx_trainer_plus.checkpoints.state import FORMAT, OFFSETS, VERSION, CheckpointError, TrainingState, part_name

_FIRST_PART = re.compile(r"^shard_00001_of_(\d+)\.safetensors$")


@dataclass(frozen=True)
class _Piece:
    """A contiguous part of a tensor, and what reads it."""

    source: Any
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensor:
    """A tensor of a training state: indexing it with slices reads what they ask for, and nothing else.

    Attributes:
        shape: of the whole tensor, however many files it lies in.
    """

    def __init__(self, name: str, pieces: Iterable[_Piece]) -> None:
        self._name = name
        self._pieces = tuple(pieces)
        ends = ([o + s for o, s in zip(p.offset, p.shape, strict=True)] for p in self._pieces)
        self.shape = torch.Size(max(column) for column in zip(*ends, strict=True))

    def __getitem__(self, part: tuple[slice, ...] | EllipsisType) -> Tensor:
        """The part as a CPU tensor; `...` is the whole.

        Raises:
            CheckpointError: the files do not hold all of it.
        """
        wanted = [(0, size) for size in self.shape] if part is ... else [(s.start, s.stop) for s in part]
        found = []
        for piece in self._pieces:
            spans = [
                (max(start, offset), min(stop, offset + size))
                for (start, stop), offset, size in zip(wanted, piece.offset, piece.shape, strict=True)
            ]
            if all(start < stop for start, stop in spans) or not spans:
                inside = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, piece.offset, strict=True))
                target = tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(spans, wanted, strict=True))
                found.append((target, piece.source[inside]))
        shape = torch.Size(stop - start for start, stop in wanted)
        if sum(tensor.numel() for _, tensor in found) != shape.numel():
            raise CheckpointError(f"{self._name}: parts of it are missing in the training state, or are there twice.")
        if len(found) == 1:
            return found[0][1]
        # A process may hold no part of a small tensor.
        result = torch.empty(shape, dtype=found[0][1].dtype if found else self._pieces[0].source[...].dtype)
        for target, tensor in found:
            result[target] = tensor
        return result


def read_state(path: Path) -> TrainingState:
    """Open a training state, whose `tensors` are then `SavedTensor`s.

    Args:
        path: a file, or a folder of parts.

    Raises:
        CheckpointError: it is not a training state of this trainer, is damaged or incomplete, or is from a newer
            version.
    """
    paths = _files(path)
    state = _header(paths[0])
    pieces: dict[str, list[_Piece]] = {}
    for each in paths:
        if (step := _header(each).step) != state.step:
            raise CheckpointError(f"{path}: {each.name} is of step {step}, {paths[0].name} of step {state.step}.")
        file = safe_open(each, framework="pt")
        offsets = json.loads(file.metadata().get(OFFSETS, "{}"))
        for key in file.keys():  # noqa: SIM118
            source = file.get_slice(key)
            shape = tuple(source.get_shape())
            offset = tuple(offsets[key]["saved_offsets"]) if key in offsets else (0,) * len(shape)
            pieces.setdefault(key, []).append(_Piece(source, offset, shape))
    return TrainingState(state.step, {key: SavedTensor(key, found) for key, found in pieces.items()}, state.info)


def read_state_header(path: Path) -> TrainingState:
    """The state without its tensors: cheap, whatever its size. Errors as `read_state`."""
    return _header(_files(path)[0])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    firsts = sorted((int(m[1]), p) for p in path.iterdir() if (m := _FIRST_PART.match(p.name)))
    if len(firsts) != 1:
        what = " and ".join(first.name for _, first in firsts) or "no first part"
        raise CheckpointError(
            f"{path} is not a training state: it holds {what}.\n"
            "  To continue from the weights alone, set checkpoints.no_resume: true."
        )
    count = firsts[0][0]
    files = [path / part_name(index, count) for index in range(count)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {', '.join(missing)} of {count} parts {'is' if len(missing) == 1 else 'are'} missing.\n"
            "  Copy the whole folder, or set checkpoints.no_resume: true to continue from the weights alone."
        )
    return files


def _header(path: Path) -> TrainingState:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}).\n"
            "  It is damaged or was written by another program; it is never unpickled.\n"
            "  To continue from the weights alone, set checkpoints.no_resume: true."
        ) from error
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a training state of this trainer (its header has no entry format: {FORMAT!r}).\n"
            "  To continue from the weights alone, set checkpoints.no_resume: true."
        )
    if int(header["version"]) > VERSION:
        raise CheckpointError(
            f"{path} has training-state version {header['version']}; this release reads up to {VERSION}.\n"
            "  Use the release that wrote it, or set checkpoints.no_resume: true to continue from the weights alone."
        )
    return TrainingState(int(header["step"]), {}, json.loads(header["info"]))
