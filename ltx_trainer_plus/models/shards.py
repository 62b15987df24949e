"""Tensors that may be spread over processes (DTensor): read them whole, or write this process's part of them."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def is_spread(tensor: Tensor) -> bool:
    """Whether this process holds a part of the tensor only."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of the tensor, sharing its memory; all of an ordinary tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. A collective of all processes for a spread one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, source: Any) -> Any:
    """The part of `source` that this process holds of `tensor`.

    Args:
        source: the whole value: a tensor, or a safetensors slice, of which then no more is read than that part.
    """
    if not isinstance(tensor, DTensor):
        return source[...] if isinstance(source, Tensor) else source[:]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return source[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


@torch.no_grad()
def copy_into(tensor: Tensor, source: Any) -> None:
    """Write the whole value `source` into `tensor`, which keeps its dtype, device and layout. No communication.

    Args:
        source: as for `part_of`; every process passes the same.
    """
    local_part(tensor).copy_(part_of(tensor, source))


@torch.no_grad()
def spread_like(tensor: Tensor, source: Tensor) -> Tensor:
    """`source` with the layout and device of `tensor`, in its own dtype. No communication."""
    if not isinstance(tensor, DTensor):
        return source.to(tensor.device)
    local = part_of(tensor, source).to(tensor.to_local().device, copy=True).contiguous()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
