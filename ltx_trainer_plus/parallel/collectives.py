"""Python objects across processes: each function does nothing but return where there is one process."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ltx_trainer_plus.parallel.topology import Topology

T = TypeVar("T")


def broadcast_object(value: T | None, topology: Topology, src: int = 0) -> T:
    """Hand `src`'s picklable value to every process (tensors in it should be on the CPU)."""
    if topology.world_size == 1:
        return value  # type: ignore[return-value]
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=src, device=topology.device)
    return box[0]


def from_main(function: Callable[[], T], topology: Topology) -> T:
    """Run `function` on the main process and hand its picklable result to every process.

    Raises:
        Exception: what `function` raised, on every process, so that none waits for a main process that is gone.
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    if topology.is_main:
        try:
            outcome = (function(), None)
        except Exception as error:
            outcome = (None, error)
    result, failure = broadcast_object(outcome, topology)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def gather_objects(value: T, topology: Topology) -> list[T]:
    """Every process's value, in rank order, on every process."""
    if topology.world_size == 1:
        return [value]
    boxes: list[Any] = [None] * topology.world_size
    dist.all_gather_object(boxes, value)
    return boxes


def gather_from_data_ranks(value: T, topology: Topology) -> list[T]:
    """One value of every data rank, in their order, on every process: what its leading process passed."""
    return gather_objects(value, topology)[:: topology.processes_per_data_rank]


def any_process(value: bool, topology: Topology) -> bool:
    """Whether the value is true on some process; every process gets the same answer. Waits for the device."""
    if topology.world_size == 1:
        return value
    flag = torch.tensor([float(value)], device=topology.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
