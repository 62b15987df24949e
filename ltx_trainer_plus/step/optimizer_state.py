"""What an optimizer keeps beside its settings, by parameter name: taken apart for a training state, and put back."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from ltx_trainer_plus.checkpoints.state import CheckpointError
from ltx_trainer_plus.models.shards import copy_into, is_partial_sum, is_sharded, local_part

_OF_PARAMETER = "optimizer."
_OF_GROUP = "optimizer_group."


@dataclass(frozen=True)
class OptimizerEntries:
    """An optimizer taken apart.

    Attributes:
        tensors: `optimizer.<entry>.<parameter>` and `optimizer_group.<entry>.<first parameter of the group>`; not
            copied. A tensor that is made of others (`__tensor_flatten__`) is in parts, `<entry>/<part>`.
        info: everything else: which optimizer, entries of its groups, entries of its state that are no tensors.
    """

    tensors: dict[str, Tensor]
    info: dict[str, Any]


def take_apart(optimizer: Optimizer, named: Mapping[str, Parameter]) -> OptimizerEntries:
    """Everything that a step of the optimizer changes, and its settings as a record.

    Raises:
        CheckpointError: it holds a parameter without a name, or tensors in a form that cannot be saved.
    """
    names = _names(optimizer, named)
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors |= {f"{_OF_PARAMETER}{part}.{name}": leaf for part, leaf in _leaves(entry, value)}
            else:
                state.setdefault(name, {})[entry] = value
    groups = []
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        changing = {key: group[key] for key in _changing(optimizer, group)}
        kept = {key: value for key, value in changing.items() if isinstance(value, Tensor)}
        tensors |= {f"{_OF_GROUP}{key}.{members[0]}": value for key, value in kept.items()}
        rest = {key: value for key, value in group.items() if key != "params" and key not in kept}
        # A rate may be a tensor; it is a setting, which is recorded and not put back.
        groups.append({**tree_map_only(Tensor, Tensor.tolist, rest), "params": members})
    return OptimizerEntries(tensors, {**_identity(optimizer), "groups": groups, "state": state})


def put_back(
    optimizer: Optimizer, named: Mapping[str, Parameter], tensors: Mapping[str, Any], info: Mapping[str, Any]
) -> None:
    """Give a fresh optimizer the state that was taken apart. The values of the parameters are lost.

    Settings (what the constructor takes, and the rate) stay as the present configuration made them.

    Args:
        tensors: whole ones, whatever layout they were saved in; others than the optimizer's are ignored.

    Raises:
        CheckpointError: it was another optimizer (nothing is changed then), or its state cannot be laid out here.
    """
    check_same_optimizer(optimizer, info)
    names = _names(optimizer, named)
    _make_state(optimizer, named)
    saved: dict[str, dict[str, Any]] = {name: {} for name in named}
    for key, tensor in tensors.items():
        if key.startswith(_OF_PARAMETER):
            entry, name = key.removeprefix(_OF_PARAMETER).split(".", 1)
            saved[name][entry] = tensor
    for name, parameter in named.items():
        _put_back_parameter(optimizer.state, name, parameter, saved[name], info["state"].get(name, {}))
    for group in optimizer.param_groups:
        first = names[id(group["params"][0])]
        before = next((other for other in info["groups"] if first in other["params"]), None)
        if before is None:
            continue
        group |= {key: before[key] for key in _changing(optimizer, before)}
        for key, tensor in tensors.items():
            if key.startswith(_OF_GROUP):
                entry, name = key.removeprefix(_OF_GROUP).split(".", 1)
                if name == before["params"][0]:
                    group[entry] = tensor[...].to(local_part(group["params"][0]).device, copy=True)


def check_same_optimizer(optimizer: Optimizer, info: Mapping[str, Any]) -> None:
    """Raises: CheckpointError: the state is another optimizer's."""
    ours, saved = _identity(optimizer), {"package": "torch", **info}
    if all(ours[key] == saved[key] for key in ours):
        return
    is_namesake = ours["type"] == saved["type"]
    mine, theirs = (f"{of['package']}'s {of['type']}" if is_namesake else of["type"] for of in (ours, saved))
    raise CheckpointError(
        f"The training state holds {theirs}, this run uses {mine}.\n"
        "  Set optimization.optimizer_type back, or start from the weights alone: checkpoints.no_resume: true."
    )


def _identity(optimizer: Optimizer) -> dict[str, str]:
    # Not the whole path: the module that a class lies in is the package's own affair.
    kind = type(optimizer)
    return {"type": kind.__name__, "package": kind.__module__.partition(".")[0]}


def _names(optimizer: Optimizer, named: Mapping[str, Parameter]) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in named.items()}
    nameless = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if nameless:
        raise CheckpointError(
            f"The optimizer holds {len(nameless)} parameters that are not among the named ones"
            f" (shapes {nameless[:3]}).\n"
            "  Build the optimizer from the same prepared parameters whose names are passed here."
        )
    return names


def _changing(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """The entries of a group that are no settings: what no constructor of the class takes, the schedule's apart."""
    settings = {"params", "initial_lr"}
    for kind in type(optimizer).__mro__:
        if issubclass(kind, Optimizer):
            settings |= inspect.signature(kind).parameters.keys()
    return [key for key in group if key not in settings]


def _leaves(entry: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the ones that it is made of, each with its place."""
    if is_sharded(value):
        if is_partial_sum(value):
            raise CheckpointError(f"{entry} of the optimizer is a sum that is not added up over the processes.")
        if is_traceable_wrapper_subclass(local_part(value)):
            raise CheckpointError(f"{entry} of the optimizer is sharded, and each part is made of several tensors.")
        yield entry, value
    elif is_traceable_wrapper_subclass(value):
        for part in value.__tensor_flatten__()[0]:
            yield from _leaves(f"{entry}/{part}", getattr(value, part))
    else:
        yield entry, value


@torch.no_grad()
def _make_state(optimizer: Optimizer, named: Mapping[str, Parameter]) -> None:
    """Let the optimizer make its state, in the layout that it gives it, by a step on gradients of zero."""
    groups = [{key: copy.deepcopy(group[key]) for key in group if key != "params"} for group in optimizer.param_groups]
    for parameter in named.values():
        # Prodigy, for one, keeps no first value of a parameter that is zero.
        parameter.fill_(1)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        parameters = group["params"]
        group.clear()
        group |= {"params": parameters, **before}


def _put_back_parameter(
    state: dict[Any, Any], name: str, parameter: Parameter, saved: Mapping[str, Any], plain: Mapping[str, Any]
) -> None:
    made = state.pop(parameter, {})
    leaves = {
        part: leaf for entry, value in made.items() if isinstance(value, Tensor) for part, leaf in _leaves(entry, value)
    }
    entries: dict[str, Any] = dict(plain)
    for part, tensor in saved.items():
        entry, leaf = part.partition("/")[0], leaves.get(part)
        if leaf is not None and leaf.shape == tensor.shape:
            copy_into(leaf, tensor)
            entries[entry] = made[entry]
        elif part == entry and (not tensor.shape or not is_sharded(parameter)):
            device = (leaf if leaf is not None else local_part(parameter)).device
            entries[entry] = tensor[...].to(device, copy=True)
        else:
            raise CheckpointError(
                f"{entry} of {name}: the optimizer's saved state has shape {tuple(tensor.shape)}, and how it is "
                "laid out in this run is not known.\n  Continue in the layout that saved it, or start from the weights "
                "alone: checkpoints.no_resume: true."
            )
    if entries:
        state[parameter] = entries
