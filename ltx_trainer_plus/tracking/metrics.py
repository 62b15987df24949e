"""The numbers of a step: summed on the device, reduced over the ranks once, read when they have long arrived.

window = MetricWindow(device, world_size)
pending = None
for step in ...:
    for micro_batch in ...:
        window.add(video=(losses.video, video_sigma), audio=None, tokens=...)
    window.add_update(grad_norm, skipped)
    previous, pending = pending, window.reduce_async()
    if previous is not None:
        metrics = previous.read()  # of the step before: no waiting for the device
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKETS = 10
"""Sigma buckets: ten equal widths of [0, 1]; sigma 1 belongs to the last."""

# One flat vector, so that a step costs one collective and one copy. Each stream has: samples, loss sum, samples per
# bucket, loss sum per bucket.
_RANKS, _STOP, _SKIPPED, _GRAD_NORM, _TOKENS, _SAMPLES, _LOSS = range(7)
_STREAM = 2 + 2 * BUCKETS
_VIDEO = 7
_AUDIO = _VIDEO + _STREAM
_SIZE = _AUDIO + _STREAM


class MetricWindow:
    """Sums of one step on this rank's device. Nothing here waits for the device."""

    def __init__(self, device: torch.device | str, world_size: int = 1) -> None:
        self._device = torch.device(device)
        self._world_size = world_size
        self._edges = torch.arange(BUCKETS, device=self._device)
        # A stream of its own: the compute stream must not wait for the slowest rank only to count.
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._sums = self._empty()

    @torch.no_grad()
    def add(
        self,
        *,
        video: tuple[Tensor, Tensor] | None = None,
        audio: tuple[Tensor, Tensor] | None = None,
        tokens: int = 0,
    ) -> None:
        """Count one micro-batch.

        Args:
            video, audio: (B,) loss of each sample and (B,) its sigma in [0, 1]; None for a stream that is not trained.
            tokens: target tokens, video and audio, of the whole micro-batch.
        """
        for start, stream in ((_VIDEO, video), (_AUDIO, audio)):
            if stream is not None:
                loss, sigma = stream[0].detach().double(), stream[1].detach()
                self._sums[start : start + _STREAM].add_(self._stream_sums(loss, sigma))
                self._sums[_LOSS].add_(loss.sum())
        samples = next(len(stream[0]) for stream in (video, audio) if stream is not None)
        self._sums[_SAMPLES].add_(samples)
        self._sums[_TOKENS].add_(tokens)

    @torch.no_grad()
    def add_update(self, grad_norm: Tensor | float, skipped: Tensor | bool = False) -> None:
        """Count the optimizer step. Both values are those of the whole run, equal on every rank.

        Args:
            grad_norm: () before clipping.
            skipped: () non-zero where the step was left out because something was not finite.
        """
        self._sums[_GRAD_NORM].add_(grad_norm)
        self._sums[_SKIPPED].add_(skipped)

    def request_stop(self) -> None:
        """This rank wants to stop (a signal came): every rank reads it in the same step's metrics."""
        self._sums[_STOP].add_(1)

    def reduce_async(self) -> "PendingMetrics":
        """Start summing over the ranks and copying out, and begin an empty window. Collective: every rank calls it."""
        sums, self._sums = self._sums, self._empty()
        if self._side is None:
            work = dist.all_reduce(sums, async_op=True) if self._world_size > 1 else None
            return PendingMetrics(sums, work=work)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            if self._world_size > 1:
                # Makes the side stream wait for the collective, not the host.
                dist.all_reduce(sums, async_op=True).wait()
            host = torch.empty(_SIZE, dtype=torch.float64, pin_memory=True)
            host.copy_(sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._side)
        # The allocator would otherwise give the memory away while the side stream still reads it.
        sums.record_stream(self._side)
        return PendingMetrics(host, arrived=arrived)

    def _empty(self) -> Tensor:
        # Double: sums over any number of ranks stay exact counts, and the loss hardly depends on the order of summing.
        sums = torch.zeros(_SIZE, dtype=torch.float64, device=self._device)
        sums[_RANKS] = 1
        return sums

    def _stream_sums(self, loss: Tensor, sigma: Tensor) -> Tensor:
        bucket = (sigma.to(loss.device, torch.float32, non_blocking=True) * BUCKETS).long().clamp(0, BUCKETS - 1)
        member = bucket[:, None] == self._edges  # (B, BUCKETS)
        # where, not a product: one sample's NaN must not spread to the other buckets.
        parts = torch.where(member, loss[:, None], 0.0)
        return torch.cat([member.sum().view(1), loss.sum().view(1), member.sum(0), parts.sum(0)])


class PendingMetrics:
    """A step's sums on their way to the host."""

    def __init__(self, sums: Tensor, *, work: Any = None, arrived: Any = None) -> None:
        self._sums, self._work, self._arrived = sums, work, arrived

    def read(self) -> "StepMetrics":
        """The sums over all ranks. Waits only if they have not arrived yet."""
        if self._work is not None:
            self._work.wait()
        if self._arrived is not None:
            self._arrived.synchronize()
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


def ratio(total: float, count: float) -> float:
    """`total / count`, or NaN where there is nothing to divide."""
    return total / count if count else math.nan
