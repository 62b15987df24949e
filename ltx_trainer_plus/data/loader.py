"""Batches for training: samples in the data order, read ahead by worker processes."""

import logging
import os
import signal
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from ltx_trainer_plus.data.batch import Batch, Sample, collate
from ltx_trainer_plus.data.order import SampleOrder, micro_batches
from ltx_trainer_plus.data.sample_files import DataError

logger = logging.getLogger(__name__)


class Samples(Protocol):
    """A data set: `PrecomputedDataset`, or anything with its items."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def training_loader(
    dataset: Samples,
    order: SampleOrder,
    *,
    start: int,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    accumulation: int,
    workers: int,
    pin_memory: bool,
    skip_unreadable: bool = False,
    sequence_key: Callable[[int], Hashable] | None = None,
) -> Generator[Batch]:
    """Endless batches of one data rank, from the global batch that begins at `start` of the order.

    A micro-batch is one `Batch`, or several where its groups differ in shape or in the references that they drew (only
    possible when `order.shape_group` is below `batch_size`). `Batch.ends_step` marks the last one of an optimizer
    step; together those of a step hold `batch_size * accumulation` samples. Closing the iterator ends the workers.

    Args:
        workers: processes that read ahead; 0 = read in this one.
        pin_memory: put batches into page-locked memory, for asynchronous copies to a GPU.
        sequence_key: what samples of one batch must agree in besides their shape, by ordinal
            (`FlexibleStrategy.sequence_key`).

    Raises:
        ValueError: micro-batches and groups of one shape do not align.
        DataError: when a sample cannot be read; raised by the batch that it belongs to. With `skip_unreadable` the next
            readable sample of its shape takes its place, and `Batch.replaced` says so.
    """
    dealt = micro_batches(
        order,
        start=start,
        data_rank=data_rank,
        data_ranks=data_ranks,
        batch_size=batch_size,
    )
    loader = DataLoader(
        _BatchReader(dataset, order.shapes, skip_unreadable=skip_unreadable),
        batch_size=None,
        sampler=_one_shape_each(dealt, order.shapes, accumulation, sequence_key),
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        worker_init_fn=_shield_from_signals,
        # Of its own, because the loader draws a seed for its workers: the global generator stays untouched.
        generator=torch.Generator(),
    )
    return _iterate(loader)


class _Work(NamedTuple):
    items: list[tuple[int, int]]
    ends_step: bool


class _BatchReader(Dataset[Batch]):
    """Reads whole batches, so that each is made in one worker."""

    def __init__(self, dataset: Samples, shapes: tuple[Hashable, ...], *, skip_unreadable: bool) -> None:
        self._dataset = dataset
        self._shapes = shapes
        self._skip_unreadable = skip_unreadable
        self._reported: set[int] = set()

    def __getitem__(self, work: _Work) -> Batch:
        read = [self._read(index) for index, _ in work.items]
        return replace(
            collate([sample for sample, _ in read], [ordinal for _, ordinal in work.items], ends_step=work.ends_step),
            replaced=tuple(name for _, name in read if name is not None),
        )

    def _read(self, index: int) -> tuple[Sample, str | None]:
        """A sample, or the next readable one of its shape and a word on the one that it replaces."""
        try:
            return self._dataset[index], None
        except DataError as error:
            if not self._skip_unreadable:
                raise
            unreadable = error
        count = len(self._shapes)
        for neighbour in ((index + distance) % count for distance in range(1, count)):
            if self._shapes[neighbour] != self._shapes[index]:
                continue
            try:
                sample = self._dataset[neighbour]
            except DataError:
                continue
            if index not in self._reported:
                self._reported.add(index)
                logger.warning("%s\n  %s takes its place (data.on_error: skip).", unreadable, sample.name)
            return sample, str(index)
        raise DataError(f"{unreadable}\n  data.on_error: skip finds no readable sample of the same shape either.")


def _one_shape_each(
    dealt: Iterator[list[tuple[int, int]]],
    shapes: tuple[Hashable, ...],
    accumulation: int,
    sequence_key: Callable[[int], Hashable] | None,
) -> Iterator[_Work]:
    for number, micro_batch in enumerate(dealt, start=1):
        by_shape: dict[Hashable, list[tuple[int, int]]] = {}
        for index, ordinal in micro_batch:
            key = (shapes[index], sequence_key(ordinal) if sequence_key is not None else None)
            by_shape.setdefault(key, []).append((index, ordinal))
        parts = list(by_shape.values())
        for i, part in enumerate(parts, start=1):
            yield _Work(part, ends_step=number % accumulation == 0 and i == len(parts))


def _iterate(loader: "DataLoader[Batch]") -> Generator[Batch]:
    yield from loader


def _as_it_is(batch: Any) -> Any:
    return batch


def _shield_from_signals(worker: int) -> None:
    # Ctrl-C, and torchrun when it stops a run, signal the whole process group. The trainer finishes its step and
    # saves then, for which it still needs its workers; they end when it closes the loader, or when it is gone.
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
