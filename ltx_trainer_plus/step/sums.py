"""The numbers of a step: summed on the device, reduced over the ranks once, read when they have long arrived.

pending = None
for step in ...:
    window = MetricWindow(device)
    for micro_batch in ...:
        window.add(inputs, losses)
    window.set_step(grad_norm=norm, skipped=skipped)
    previous, pending = pending, window.reduce_async()
    if previous is not None:
        metrics = previous.read()  # of the step before: no waiting for the device
"""

import math
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ltx_trainer_plus.strategies.flexible import ModelInputs
from ltx_trainer_plus.strategies.loss import Losses

BUCKETS = 10
"""Sigma buckets: ten equal widths of [0, 1]; sigma 1 belongs to the last."""

# One flat vector, so that a step costs one collective and one copy. From `_TOKENS` on it is about samples, before that
# about processes: any of them may ask to stop. Each stream has: samples, loss sum, samples per
# bucket, loss sum per bucket.
_RANKS, _STOP, _SKIPPED, _GRAD_NORM, _TOKENS, _SAMPLES, _LOSS, _REPLACED = range(8)
_STREAM = 2 + 2 * BUCKETS
_VIDEO = 8
_AUDIO = _VIDEO + _STREAM
_SIZE = _AUDIO + _STREAM


class MetricWindow:
    """Sums of one step on this rank's device. Nothing here waits for the device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        # Double: counts stay exact over any number of ranks, and a loss hardly depends on the order of summing.
        self._sums = torch.zeros(_SIZE, dtype=torch.float64, device=self._device)
        self._sums[_RANKS].fill_(1)

    @torch.no_grad()
    def add(self, inputs: ModelInputs, losses: Losses, *, replaced: int = 0) -> None:
        """Count one micro-batch: every trained stream's losses, by its samples' sigmas, and the target tokens.

        Args:
            replaced: samples of it that stand in for others, which could not be read.
        """
        self._sums[_REPLACED].add_(replaced)
        streams = ((_VIDEO, inputs.video, losses.video), (_AUDIO, inputs.audio, losses.audio))
        for start, stream, loss in streams:
            if stream is not None and loss is not None:
                self._sums[start : start + _STREAM].add_(_stream_sums(loss.double(), stream.modality.sigma))
        self._sums[_LOSS].add_(losses.total.double().sum())
        self._sums[_SAMPLES].add_(len(losses.total))
        self._sums[_TOKENS].add_(inputs.target_tokens)

    @torch.no_grad()
    def set_step(self, *, grad_norm: Tensor | float, skipped: Tensor | float = 0.0) -> None:
        """Count the optimizer step, once per window. Both values are the whole run's, equal on every rank.

        Args:
            grad_norm: () before clipping.
            skipped: () non-zero where the step was left out because something was not finite.
        """
        self._sums[_GRAD_NORM].fill_(grad_norm)
        self._sums[_SKIPPED].fill_(skipped)

    def request_stop(self) -> None:
        """This rank wants to stop (a signal came): every rank reads it in the same step's metrics."""
        self._sums[_STOP].add_(1)

    def reduce_async(self, *, counts_samples: bool = True) -> "PendingMetrics":
        """Start summing over the ranks and copying out; the window is done with. Collective: every rank calls it.

        Args:
            counts_samples: False where another process of this data rank counts the same samples.
        """
        if not counts_samples:
            self._sums[_TOKENS:].zero_()
        # Asked of the process group itself: a wrong answer would leave every rank with its own numbers, unnoticed.
        is_distributed = dist.is_available() and dist.is_initialized()
        if self._device.type != "cuda":
            work = dist.all_reduce(self._sums, async_op=True) if is_distributed else None
            return PendingMetrics(self._sums, work=work)
        side = _side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            if is_distributed:
                # wait() makes the side stream wait for the collective, not the host.
                dist.all_reduce(self._sums, async_op=True).wait()
            host = torch.empty(_SIZE, dtype=torch.float64, pin_memory=True)
            host.copy_(self._sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(side)
        # The allocator would otherwise give the memory away while the side stream still reads it.
        self._sums.record_stream(side)
        return PendingMetrics(host, arrived=arrived)


class PendingMetrics:
    """A step's sums on their way to the host.

    Attributes:
        finished_at: `time.perf_counter()` when the step was done; on an accelerator it is known after `read`.
    """

    def __init__(self, sums: Tensor, *, work: Any = None, arrived: Any = None) -> None:
        self._sums, self._work, self._arrived = sums, work, arrived
        # Without an event the step has been computed by now, a whole step before it is read.
        self.finished_at = time.perf_counter()

    def read(self) -> "StepMetrics":
        """The sums over all ranks. Waits only if they have not arrived yet."""
        if self._work is not None:
            self._work.wait()
        if self._arrived is not None:
            self._arrived.synchronize()
            self.finished_at = time.perf_counter()
        return StepMetrics(tuple(self._sums.tolist()))


@dataclass(frozen=True)
class StepMetrics:
    """Sums of one step over all ranks and micro-steps, on the host; the same on every rank."""

    sums: tuple[float, ...]

    @property
    def stop_requested(self) -> bool:
        return self.sums[_STOP] > 0

    @property
    def skipped(self) -> bool:
        """The optimizer step was left out."""
        return self.sums[_SKIPPED] > 0

    @property
    def replaced(self) -> int:
        """Samples that stood in for others, which could not be read."""
        return int(self.sums[_REPLACED])

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self.sums)

    @property
    def loss(self) -> float:
        """Mean over all samples of the global batch of video loss + audio loss."""
        return ratio(self.sums[_LOSS], self.sums[_SAMPLES])

    @property
    def grad_norm(self) -> float:
        return ratio(self.sums[_GRAD_NORM], self.sums[_RANKS])

    @property
    def tokens(self) -> int:
        return int(self.sums[_TOKENS])

    def losses(self) -> dict[str, float]:
        """`loss`, `loss/<stream>`, `loss/<stream>/sigma_<from>-<to>`; only what got samples."""
        found = {"loss": self.loss} if self.sums[_SAMPLES] else {}
        for stream, start in (("video", _VIDEO), ("audio", _AUDIO)):
            count, total, *buckets = self.sums[start : start + _STREAM]
            if count:
                found[f"loss/{stream}"] = total / count
            for index in range(BUCKETS):
                if buckets[index]:
                    key = f"loss/{stream}/sigma_{index / BUCKETS:.1f}-{(index + 1) / BUCKETS:.1f}"
                    found[key] = buckets[BUCKETS + index] / buckets[index]
        return found

    def __add__(self, other: "StepMetrics") -> "StepMetrics":
        return StepMetrics(tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)))


def _stream_sums(loss: Tensor, sigma: Tensor) -> Tensor:
    """A stream's part of the vector. loss: (B,) double; sigma: (B,)."""
    bucket = (sigma.float() * BUCKETS).long().clamp(0, BUCKETS - 1)
    member = bucket[:, None] == torch.arange(BUCKETS, device=loss.device)  # (B, BUCKETS)
    # where, not a product: one sample's NaN must not spread to the other buckets.
    parts = torch.where(member, loss[:, None], 0.0)
    return torch.cat([member.sum().view(1), loss.sum().view(1), member.sum(0), parts.sum(0)])


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # The compute stream must not wait for the slowest rank only to count.
    return torch.cuda.Stream(device)


def ratio(total: float, count: float) -> float:
    """`total / count`, or NaN where there is nothing to divide."""
    return total / count if count else math.nan
