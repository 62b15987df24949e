"""The endless order in which samples are trained on, a function of the seed alone."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import torch


def keyed_generator(seed: int, purpose: str, number: int) -> torch.Generator:
    """A CPU generator that depends on nothing but its key: the same on every rank, in any order of calls.

    The key is hashed, so that neighbouring numbers and seeds give unrelated draws.
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def epoch_length(shapes: Sequence[Hashable], shape_group: int) -> int:
    """Samples in an epoch of `SampleOrder`, those that fill the last group of a shape included."""
    return sum(-(-count // shape_group) for count in Counter(shapes).values()) * shape_group


class SampleOrder:
    """Epoch after epoch of every sample, in groups of one shape.

    An epoch is a permutation of groups, each of `shape_group` samples of one shape; where a shape's samples do not
    fill its last group, some come twice. All epochs have the same length, so that any ordinal is found directly.

    Args:
        shapes: shape of every sample of the data set, in its order.
        seed: what the permutations are drawn from.
        shape_group: samples in a group.

    Raises:
        ValueError: there are no samples, or `shape_group` is below 1.
    """

    def __init__(self, shapes: Sequence[Hashable], *, seed: int, shape_group: int) -> None:
        if not shapes:
            raise ValueError("the data set holds no sample: there is nothing to train on. Prepare some clips first.")
        if shape_group < 1:
            raise ValueError(f"data.shape_group: {shape_group} samples cannot make a group. Set it to 1 or more.")
        self.shapes = tuple(shapes)
        self.seed = seed
        self.shape_group = shape_group
        by_shape: dict[Hashable, list[int]] = {}
        for index, shape in enumerate(shapes):
            by_shape.setdefault(shape, []).append(index)
        self._by_shape = list(by_shape.values())
        self.epoch_length = epoch_length(shapes, shape_group)
        self._epoch: tuple[int, list[int]] = (-1, [])

    def item(self, ordinal: int) -> int:
        """Index in the data set of the sample with this ordinal: its number in the order, from 0, across epochs."""
        epoch, offset = divmod(ordinal, self.epoch_length)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._epoch[1][offset]

    def _order(self, epoch: int) -> list[int]:
        generator = keyed_generator(self.seed, "order", epoch)
        groups: list[list[int]] = []
        for indices in self._by_shape:
            order = torch.randperm(len(indices), generator=generator).tolist()
            order += [order[i % len(order)] for i in range(-len(order) % self.shape_group)]
            samples = [indices[i] for i in order]
            groups += [samples[i : i + self.shape_group] for i in range(0, len(samples), self.shape_group)]
        return [index for g in torch.randperm(len(groups), generator=generator).tolist() for index in groups[g]]


def micro_batches(
    order: SampleOrder, *, start: int, data_rank: int, data_ranks: int, batch_size: int
) -> Iterator[list[tuple[int, int]]]:
    """What one data rank trains on: of each micro-batch the samples, as (index in the data set, ordinal).

    The order is cut into global batches; the first micro-batch of one goes to the first micro-step of data rank 0,
    the next to that of data rank 1, and so on. Endless.

    Args:
        start: ordinal at which the first global batch begins.

    Raises:
        ValueError: micro-batches and groups of one shape do not align.
    """
    if batch_size % order.shape_group and order.shape_group % batch_size:
        raise ValueError(
            f"data.shape_group: groups of {order.shape_group} samples and micro-batches of {batch_size} do not align. "
            f"Set data.shape_group to a divisor of optimization.batch_size ({batch_size}), or leave it out."
        )
    return _micro_batches(order, start, data_rank, data_ranks, batch_size)


def _micro_batches(
    order: SampleOrder, start: int, data_rank: int, data_ranks: int, batch_size: int
) -> Iterator[list[tuple[int, int]]]:
    first = start + data_rank * batch_size
    while True:
        yield [(order.item(ordinal), ordinal) for ordinal in range(first, first + batch_size)]
        first += data_ranks * batch_size
