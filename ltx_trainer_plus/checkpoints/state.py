"""The training state: everything beside the weights file that an exact resume needs.

It is one safetensors file; of a sharded run a folder with one for each distinct part, in the form that torch's
`HuggingFaceStorageWriter(save_distributed=True)` gives them and its reader takes. What is trained gives its tensors
their keys (`step/trained.py`); everything else is JSON in the file's header. Keys hold parameter names, never indices,
so a state does not depend on the order or the grouping in which another layout hands its parameters to the optimizer.
Nothing is pickled, and nothing is unpickled.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.models.shards import holds_own_part, is_sharded, local_part, part_offset, shard_place

StateLevel = Literal["full", "minimal"]

FORMAT = "ltx-trainer-plus training state"
VERSION = 1
OFFSETS = "DCP_SHARDING_INFO"
"""The header entry by which torch finds a part's place: `{tensor: {"saved_offsets": [...]}}`."""
_PACKAGES = ("ltx-trainer-plus", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, read or used; the message says what to do."""


@dataclass(frozen=True)
class StatePart:
    """Which part of a sharded state this process holds.

    Attributes:
        index: from 0.
        count: number of distinct parts.
        offsets: where the part of each tensor begins in the whole one, in each dimension.
    """

    index: int
    count: int
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return part_name(self.index, self.count)


def part_name(index: int, count: int) -> str:
    """The file of part `index` (from 0) of `count`, in the folder of a sharded state."""
    return f"shard_{index + 1:05d}_of_{count:05d}.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """One training state, or this process's part of one.

    Attributes:
        step: optimizer steps done.
        tensors: CPU tensors that share no memory with the model or the optimizer; of a state on disk, `SavedTensor`s.
        info: plain JSON types only: scheduler, optimizer settings, and whatever the trainer adds.
        part: None where `tensors` is everything.
    """

    step: int
    tensors: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    part: StatePart | None = None

    @property
    def level(self) -> StateLevel:
        """`full` holds the optimizer and the masters; `minimal` holds neither."""
        return self.info.get("level", "full")

    def metadata(self) -> dict[str, str]:
        """The header entries of the file (safetensors allows strings only)."""
        header = {"format": FORMAT, "version": str(VERSION), "step": str(self.step), "info": json.dumps(self.info)}
        if self.part is not None:
            offsets = {key: {"saved_offsets": list(offset)} for key, offset in self.part.offsets.items()}
            header |= {OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}
        return header


def copied_state(step: int, sources: Mapping[str, Tensor], info: Mapping[str, Any]) -> TrainingState:
    """A state that shares nothing with what is trained: this process's part of `sources`, copied.

    Raises:
        CheckpointError: an entry of `info` is not a plain type.
    """
    tensors, part = _copied_parts(sources)
    return TrainingState(step, tensors, _plain({**info, "versions": versions()}, "info"), part)


def _copied_parts(sources: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], StatePart | None]:
    """CPU copies of what this process has to save of each tensor, and which part of everything that is."""
    place = shard_place(sources.values())
    if place is None:
        return {key: _copied(source) for key, source in sources.items()}, None
    mine = {
        key: source
        for key, source in sources.items()
        if (holds_own_part(source) if is_sharded(source) else place.index == 0)
    }
    offsets = {key: part_offset(source) for key, source in mine.items()}
    tensors = {key: _copied(local_part(source)) for key, source in mine.items()}
    return tensors, StatePart(place.index, place.count, offsets)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def versions() -> dict[str, str]:
    """Python's and the relevant packages' versions."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_same_parameters(saved: Mapping[str, Any], named: Mapping[str, Tensor]) -> None:
    """Compare saved masters with what is trained now.

    Raises:
        CheckpointError: names the parameters that one side lacks, and those whose shapes differ.
    """
    differing = [
        f"{name}: saved {tuple(saved[name].shape)}, now {tuple(parameter.shape)}"
        for name, parameter in named.items()
        if name in saved and saved[name].shape != parameter.shape
    ]
    problems = [
        ("only in the training state", sorted(saved.keys() - named.keys())),
        ("only in this run", sorted(named.keys() - saved.keys())),
        ("of another shape", differing),
    ]
    if any(found for _, found in problems):
        lines = [
            f"  {len(found)} {what}: {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"
            for what, found in problems
            if found
        ]
        raise CheckpointError(
            "The training state is of a run that trained other parameters.\n" + "\n".join(lines) + "\n"
            "  Set the run's training mode, streams, lora.rank and lora.target_modules back, or set"
            " checkpoints.no_resume: true to start from the weights alone."
        )


def _plain(value: Any, path: str) -> Any:
    """`value` in JSON types, so that reading it back needs no class of ours or of torch's."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, path) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise CheckpointError(f"{path}: a {type(value).__name__} cannot be stored in a training state; pass a plain type.")
