"""Tensors that may be sharded (DTensor): read them whole, write this process's part, or measure all parts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class ShardPlace:
    """Which part of everything that is sharded this process holds.

    Attributes:
        index: of the part, from 0.
        count: number of distinct parts.
        is_copy: another process holds the same part (HSDP) and comes before this one.
    """

    index: int
    count: int
    is_copy: bool


def shard_place(tensors: Iterable[Tensor]) -> ShardPlace | None:
    """This process's place among those that the tensors are sharded over, all alike; None where none is."""
    sharded = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    if sharded is None:
        return None
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # every process of a run is in its mesh
    index, count, is_copy = 0, 1, False
    for at, size, placement in zip(coordinate, mesh.shape, sharded.placements, strict=True):
        if placement.is_replicate():
            is_copy = is_copy or at > 0
        else:
            index, count = index * size + at, count * size
    return ShardPlace(index, count, is_copy)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of the tensor only."""
    return isinstance(tensor, DTensor)


def holds_own_part(tensor: Tensor) -> bool:
    """Whether this process holds a part of a spread tensor, which no process before it holds too."""
    assert isinstance(tensor, DTensor)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    is_first = all(at == 0 for at, place in zip(coordinate, tensor.placements, strict=True) if place.is_replicate())
    # Of a small tensor there may be nothing for this process.
    return is_first and tensor.to_local().numel() > 0


def is_partial_sum(tensor: Tensor) -> bool:
    """Whether each process holds a summand of the tensor."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of the tensor, sharing its memory; all of an ordinary tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_offset(tensor: Tensor) -> tuple[int, ...]:
    """Where this process's part begins in the whole tensor, in each dimension."""
    return _shape_and_offset(tensor)[1] if isinstance(tensor, DTensor) else (0,) * tensor.dim()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. A collective of all processes for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, source: Any) -> Any:
    """The part of `source` that this process holds of `tensor`.

    Args:
        source: the whole value: a tensor, or what reads one from a file in slices (a safetensors slice, a
            `SavedTensor`), of which then no more is read than that part.
    """
    if not isinstance(tensor, DTensor):
        return source[...]
    shape, offset = _shape_and_offset(tensor)
    return source[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


@torch.no_grad()
def copy_into(tensor: Tensor, source: Any) -> None:
    """Write the whole value `source` into `tensor`, which keeps its dtype, device and layout. No communication.

    Args:
        source: as for `part_of`; every process passes the same.
    """
    local_part(tensor).copy_(part_of(tensor, source))


def compute_device(tensor: Tensor) -> torch.device:
    """Where what is computed with the tensor has to be. Offloaded shards lie in host memory, and are gathered on the
    accelerator."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != "cpu":
        return torch.device(tensor.device_mesh.device_type, torch.accelerator.current_device_index())
    return tensor.device


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, over all their parts; all are sharded alike, or none.  # ()

    A collective for sharded ones: one small reduction, whatever the number of tensors.
    """
    norm = torch.nn.utils.get_total_norm([local_part(tensor) for tensor in tensors])
    if not tensors or not isinstance(tensors[0], DTensor):
        return norm
    mesh = tensors[0].device_mesh
    squares = norm.square().to(mesh.device_type)
    for dimension, placement in enumerate(tensors[0].placements):
        if placement.is_shard():
            torch.distributed.all_reduce(squares, group=mesh.get_group(dimension))
    return squares.sqrt().to(norm.device)


def _shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
