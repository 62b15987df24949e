"""Everything random about a training batch, keyed so that no layout of processes and batches changes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ltx_trainer_plus.config.conditions import Stream, TrainingCondition
from ltx_trainer_plus.data.stream import keyed_generator
from ltx_trainer_plus.flow.timesteps import sample_sigma


class FlowMatchingSettings(Protocol):
    """What this module reads of `flow_matching`."""

    @property
    def timestep_sampling_mode(self) -> str: ...

    @property
    def timestep_sampling_params(self) -> Mapping[str, float]: ...


class StreamDraws(NamedTuple):
    """What was drawn for one stream; sigma, noise and given are None where it is absent or frozen.

    Attributes:
        sigma: (B,) float32 noise levels.
        noise: (B, T, C) float32 standard normal, of the target tokens.
        given: (B, number of conditions) bool, which intrinsic conditions hold for which sample.
        references: which references the whole batch gets, in the order of the configuration.
    """

    sigma: Tensor | None = None
    noise: Tensor | None = None
    given: Tensor | None = None
    references: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Draws:
    """What was drawn for both streams, as in `StreamDraws`."""

    video_sigma: Tensor | None = None
    video_noise: Tensor | None = None
    video_given: Tensor | None = None
    video_references: tuple[bool, ...] = ()
    audio_sigma: Tensor | None = None
    audio_noise: Tensor | None = None
    audio_given: Tensor | None = None
    audio_references: tuple[bool, ...] = ()

    @classmethod
    def of(cls, video: StreamDraws | None, audio: StreamDraws | None) -> "Draws":
        return cls(*(video or StreamDraws()), *(audio or StreamDraws()))

    @property
    def of_video(self) -> StreamDraws:
        return StreamDraws(self.video_sigma, self.video_noise, self.video_given, self.video_references)

    @property
    def of_audio(self) -> StreamDraws:
        return StreamDraws(self.audio_sigma, self.audio_noise, self.audio_given, self.audio_references)

    def sigmas(self) -> dict[str, Tensor]:
        """Noise levels by stream, of those that have any."""
        named = (("video", self.video_sigma), ("audio", self.audio_sigma))
        return {stream: sigma for stream, sigma in named if sigma is not None}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Draws":
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        video, audio = (
            StreamDraws(moved(draws.sigma), moved(draws.noise), moved(draws.given), draws.references)
            for draws in (self.of_video, self.of_audio)
        )
        return Draws.of(video, audio)


def draw_stream(
    stream: Stream,
    shape: tuple[int, int],
    positions: Sequence[int],
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
        positions: of the samples in the endless stream; with `seed` the key of their draws.
        groups: of the samples in that stream.

    Raises:
        ValueError: samples of the batch draw different references.
    """
    sigma = torch.empty(len(positions))
    noise = torch.empty(len(positions), *shape)
    given = torch.empty(len(positions), len(conditions), dtype=torch.bool)
    for i, position in enumerate(positions):
        # One generator for each purpose: a condition more or less leaves all other draws as they are.
        sigma[i] = sample_sigma(
            flow.timestep_sampling_mode,
            flow.timestep_sampling_params,
            tokens=shape[0],
            generator=keyed_generator(seed, f"{stream} sigma", position),
        )
        noise[i].normal_(generator=keyed_generator(seed, f"{stream} noise", position))
        for j, condition in enumerate(conditions):
            given[i, j] = _happens(condition.probability, seed, f"{stream} condition {j}", position)
    drawn = {draw_references(stream, references, group, seed) for group in groups}
    if len(drawn) > 1:
        raise ValueError(
            "samples of one batch draw different references, so their sequences differ in length. "
            "Split the batch by FlexibleStrategy.sequence_key."
        )
    return StreamDraws(sigma, noise, given, drawn.pop())


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
