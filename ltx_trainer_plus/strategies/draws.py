"""Everything random about a training batch, keyed so that no layout of processes and batches changes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ltx_trainer_plus.config.conditions import Stream, TrainingCondition
from ltx_trainer_plus.data.order import keyed_generator
from ltx_trainer_plus.flow.timesteps import sample_sigma


class FlowMatchingSettings(Protocol):
    """What this module reads of `flow_matching`."""

    @property
    def timestep_sampling_mode(self) -> str: ...

    @property
    def timestep_sampling_params(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class StreamDraws:
    """What was drawn for one stream.

    Attributes:
        sigma: (B,) float32 noise levels.
        noise: (B, T, C) float32 standard normal, of the target tokens.
        conditions: (B, number of conditions) bool, which conditions hold for which sample.
        references: which references the whole batch gets, in the order of the configuration.
    """

    sigma: Tensor
    noise: Tensor
    conditions: Tensor
    references: tuple[bool, ...]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "StreamDraws":
        sigma, noise, conditions = (
            tensor.to(device, non_blocking=non_blocking) for tensor in (self.sigma, self.noise, self.conditions)
        )
        return StreamDraws(sigma, noise, conditions, self.references)


@dataclass(frozen=True)
class Draws:
    """What was drawn for a batch; None for a stream that is absent or frozen."""

    video: StreamDraws | None = None
    audio: StreamDraws | None = None

    def sigmas(self) -> dict[str, Tensor]:
        """Noise levels by stream, of those that have any."""
        named = (("video", self.video), ("audio", self.audio))
        return {stream: draws.sigma for stream, draws in named if draws is not None}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Draws":
        return Draws(
            self.video and self.video.to(device, non_blocking=non_blocking),
            self.audio and self.audio.to(device, non_blocking=non_blocking),
        )


def draw_stream(
    stream: Stream,
    shape: tuple[int, int],
    ordinals: Sequence[int],
    groups: Sequence[int],
    seed: int,
    *,
    flow: FlowMatchingSettings,
    conditions: Sequence[TrainingCondition],
    references: Sequence[TrainingCondition],
) -> StreamDraws:
    """Draw for the samples of one batch, on the CPU.

    The noise has the layout of tokens, so it does not depend on which other samples are in the batch.

    Args:
        shape: (T, C) of the target tokens.
        ordinals: of the samples in the data order; with `seed` the key of their draws.
        groups: of the samples in that stream.

    Raises:
        ValueError: samples of the batch draw different references.
    """
    sigma = torch.empty(len(ordinals))
    noise = torch.empty(len(ordinals), *shape)
    holds = torch.empty(len(ordinals), len(conditions), dtype=torch.bool)
    for i, ordinal in enumerate(ordinals):
        # One generator for each purpose: a condition more or less leaves all other draws as they are.
        sigma[i] = sample_sigma(
            flow.timestep_sampling_mode,
            flow.timestep_sampling_params,
            tokens=shape[0],
            generator=keyed_generator(seed, f"{stream} sigma", ordinal),
        )
        noise[i].normal_(generator=keyed_generator(seed, f"{stream} noise", ordinal))
        for j, condition in enumerate(conditions):
            holds[i, j] = _happens(condition.probability, seed, f"{stream} condition {j}", ordinal)
    drawn = {draw_references(stream, references, group, seed) for group in groups}
    if len(drawn) > 1:
        raise ValueError(
            "samples of one batch draw different references, so their sequences differ in length. "
            "Split the batch by FlexibleStrategy.sequence_key."
        )
    return StreamDraws(sigma, noise, holds, drawn.pop())


def draw_references(stream: Stream, references: Sequence[TrainingCondition], group: int, seed: int) -> tuple[bool, ...]:
    """Which references a group of samples gets.

    A reference makes the sequence longer, so a group, which is trained on in one batch, draws once.
    """
    return tuple(
        _happens(reference.probability, seed, f"{stream} reference {j}", group)
        for j, reference in enumerate(references)
    )


def _happens(probability: float, seed: int, purpose: str, number: int) -> bool:
    return bool(torch.rand((), generator=keyed_generator(seed, purpose, number)) < probability)
