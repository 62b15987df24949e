"""The training state: everything beside the weights file that an exact resume needs.

It is one safetensors file; of a sharded run a folder with one for each distinct part, in the form that torch's
`HuggingFaceStorageWriter(save_distributed=True)` gives them and its reader takes. Tensors are stored as
`parameter.<name>` (the master of a trained parameter, in its own dtype) and `optimizer.<key>.<name>`, a moving average
as `average.<name>`; everything else is JSON in the file's header. Names are parameter names, never indices, so a state
does not depend on the order or the grouping in which another layout hands its parameters to the optimizer.
Nothing is pickled, and nothing is unpickled.
"""

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.models.shards import (
    copy_into,
    is_sharded,
    local_part,
    part_offset,
    shard_place,
    sharded_like,
)

StateLevel = Literal["full", "minimal"]

FORMAT = "ltx-trainer-plus training state"
VERSION = 1
OFFSETS = "DCP_SHARDING_INFO"
"""The header entry by which torch finds a part's place: `{tensor: {"saved_offsets": [...]}}`."""
_PACKAGES = ("ltx-trainer-plus", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, read or used; the message says what to do."""


class Scheduler(Protocol):
    """What a learning-rate scheduler must offer to be saved."""

    def state_dict(self) -> dict[str, Any]: ...


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


def collect_state(
    *,
    step: int,
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer,
    scheduler: Scheduler | None = None,
    level: StateLevel = "full",
    info: Mapping[str, Any] | None = None,
    averages: Mapping[str, Tensor] | None = None,
) -> TrainingState:
    """Copy everything out that training will change next, so that the result can be written at leisure.

    Of what is spread over processes each copies its own part, without communication; what every process has whole is
    in the first part.

    Args:
        step: optimizer steps done.
        named_parameters: every trained parameter with its clean name.
        level: `minimal` leaves out the optimizer and the masters.
        averages: the moving average of each parameter, where the run keeps one.
        info: the trainer's own entries (seed, data position, resolved configuration, W&B run id, ...): JSON types.

    Raises:
        CheckpointError: the optimizer holds a parameter without a name, or an entry is not a plain type.
    """
    sources: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    named = dict(named_parameters)
    names = _names_by_identity(named, optimizer)
    if level == "full":
        for name, parameter in named.items():
            sources[f"parameter.{name}"] = parameter
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    sources[f"optimizer.{key}.{names[id(parameter)]}"] = value
                else:
                    plain.setdefault(names[id(parameter)], {})[key] = value
        for name, average in (averages or {}).items():
            sources[f"average.{name}"] = average
    tensors, part = _copied_parts(sources)
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    entries = {
        **(info or {}),
        "level": level,
        "optimizer": {"type": type(optimizer).__name__, "groups": groups, "state": plain},
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "versions": versions(),
    }
    return TrainingState(step, tensors, _plain(entries, "info"), part)


@torch.no_grad()
def restore_state(
    state: TrainingState,
    *,
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer,
) -> None:
    """Put a training state back, in place: masters and the optimizer's moments; nothing of a `minimal` state.

    The optimizer's settings (learning rate, weight decay, betas, ...) stay as the present configuration made them.

    Raises:
        CheckpointError: names, shapes or the kind of optimizer differ; nothing has been changed then.
    """
    named = dict(named_parameters)
    names = _names_by_identity(named, optimizer)
    saved = state.info["optimizer"]
    if state.level == "full":
        _check_same_parameters(state, named)
        if saved["type"] != type(optimizer).__name__:
            raise CheckpointError(
                f"The training state holds {saved['type']}, this run uses {type(optimizer).__name__}.\n"
                "  Set optimization.optimizer_type back, or start from the weights alone: checkpoints.no_resume: true."
            )
        for name, parameter in named.items():
            copy_into(parameter, state.tensors[f"parameter.{name}"])
        optimizer.load_state_dict(_optimizer_state_dict(state, optimizer, named, names))


def _copied_parts(sources: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], StatePart | None]:
    """CPU copies of what this process has to save of each tensor, and which part of everything that is."""
    place = shard_place(sources.values())
    if place is None:
        return {key: _copied(source) for key, source in sources.items()}, None
    mine = {
        key: source
        for key, source in sources.items()
        # A process may hold nothing of a small tensor.
        if (local_part(source).numel() if is_sharded(source) else place.index == 0)
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


def _names_by_identity(named: Mapping[str, Tensor], optimizer: Optimizer) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in named.items()}
    nameless = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if nameless:
        raise CheckpointError(
            f"The optimizer holds {len(nameless)} parameters that are not among the named ones"
            f" (shapes {nameless[:3]}).\n"
            "  Build the optimizer from the same prepared parameters whose names are passed here."
        )
    return names


def _check_same_parameters(state: TrainingState, named: Mapping[str, Tensor]) -> None:
    prefix = "parameter."
    saved = {key.removeprefix(prefix): tensor for key, tensor in state.tensors.items() if key.startswith(prefix)}
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


def _optimizer_state_dict(
    state: TrainingState, optimizer: Optimizer, named: Mapping[str, Tensor], names: Mapping[int, str]
) -> dict[str, Any]:
    """The saved entries in the form that `Optimizer.load_state_dict` takes: keyed by running index."""
    by_name: dict[str, dict[str, Any]] = {
        name: dict(entries) for name, entries in state.info["optimizer"]["state"].items()
    }
    for key, tensor in state.tensors.items():
        if key.startswith("optimizer."):
            _, entry, name = key.split(".", 2)
            parameter = named[name]
            # Moments are laid out as their parameter is; a step count has no layout.
            is_moment = tensor.shape == parameter.shape
            by_name.setdefault(name, {})[entry] = sharded_like(parameter, tensor) if is_moment else tensor[...].clone()
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {index: by_name[name] for index, name in enumerate(order) if name in by_name},
        "param_groups": optimizer.state_dict()["param_groups"],
    }


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
