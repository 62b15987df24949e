"""The flexible training strategy: what the transformer receives, and the velocity it must predict."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ltx_trainer_plus.config.conditions import ReferenceCondition, Stream, TrainingCondition
from ltx_trainer_plus.data.batch import Batch
from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, video_positions
from ltx_trainer_plus.flow.tokens import Given, tokens_of
from ltx_trainer_plus.modality import Modality, TextContext
from ltx_trainer_plus.strategies.conditions import Target, given_tokens, reference_tokens
from ltx_trainer_plus.strategies.draws import Draws, FlowMatchingSettings, StreamDraws, draw_references, draw_stream


class StreamSettings(Protocol):
    """What this module reads of `training_strategy.video` and `.audio`."""

    @property
    def is_generated(self) -> bool: ...

    @property
    def conditions(self) -> Sequence[TrainingCondition]: ...


@dataclass(frozen=True)
class StreamInputs:
    """What the transformer receives of one stream, and what it is held to.

    Attributes:
        target: (B, T, C) float32 velocity to be predicted, of the target tokens, which are the last of the stream: R
            tokens of references come before them. None where the stream is frozen.
        loss_mask: (B, R + T) float32, 1 = in the loss; None with `target`.
    """

    modality: Modality
    target: Tensor | None = None
    loss_mask: Tensor | None = None


@dataclass(frozen=True)
class ModelInputs:
    """What the transformer receives for a batch; None for a stream that the run has not."""

    video: StreamInputs | None = None
    audio: StreamInputs | None = None

    @property
    def modalities(self) -> dict[str, Modality | None]:
        """Arguments of the transformer."""
        return {
            "video": None if self.video is None else self.video.modality,
            "audio": None if self.audio is None else self.audio.modality,
        }

    @property
    def target_tokens(self) -> int:
        """Tokens of the batch, video and audio, that the model learns to predict."""
        targets = [stream.target for stream in (self.video, self.audio) if stream is not None]
        return sum(target[..., 0].numel() for target in targets if target is not None)


class FlexibleStrategy:
    """Every training mode: which streams there are, which are generated, and what is given of them.

    Pure: no method changes what it is lent, and randomness comes in as `Draws`.

    Args:
        video, audio: settings of each stream; None = the stream is absent. A stream that is not generated is clean
            conditioning: sigma 0, no loss ("frozen").
        geometry: the VAEs' factors.
        flow_matching: how sigmas are drawn.
        uses_keyframes: whether the model marks single-frame tokens (LTX-2.5).
        shape_group: samples that stay together in the data order, and so draw their references together.
    """

    def __init__(
        self,
        video: StreamSettings | None,
        audio: StreamSettings | None,
        geometry: LatentGeometry,
        flow_matching: FlowMatchingSettings,
        *,
        uses_keyframes: bool = False,
        shape_group: int = 1,
    ) -> None:
        self.video = video
        self.audio = audio
        self.geometry = geometry
        self.flow_matching = flow_matching
        self.uses_keyframes = uses_keyframes
        self.shape_group = shape_group
        self._conditions: dict[Stream, list[TrainingCondition]] = {"video": [], "audio": []}
        self._references: dict[Stream, list[ReferenceCondition]] = {"video": [], "audio": []}
        streams: tuple[tuple[Stream, StreamSettings | None], ...] = (("video", video), ("audio", audio))
        for stream, settings in streams:
            for condition in settings.conditions if settings is not None else ():
                if isinstance(condition, ReferenceCondition):
                    self._references[stream].append(condition)
                else:
                    self._conditions[stream].append(condition)

    def draw(self, batch: Batch, seed: int) -> Draws:
        """Noise, noise levels and conditions of a batch, on the CPU.

        Raises:
            ValueError: samples of the batch draw different references; `sequence_key` tells before.
        """
        video = audio = None
        if self.video is not None and self.video.is_generated:
            video = self._draw("video", _token_shape(batch.video_latent, "video"), batch.ordinals, seed)
        if self.audio is not None and self.audio.is_generated:
            audio = self._draw("audio", _token_shape(batch.audio_latent, "audio"), batch.ordinals, seed)
        return Draws(video, audio)

    def sequence_key(self, ordinal: int, seed: int) -> tuple[bool, ...]:
        """Which references the sample with this ordinal gets: samples of one batch must agree in it."""
        streams: tuple[Stream, ...] = ("video", "audio")
        return tuple(
            drawn
            for stream in streams
            for drawn in draw_references(stream, self._references[stream], ordinal // self.shape_group, seed)
        )

    def _draw(self, stream: Stream, shape: tuple[int, int], ordinals: tuple[int, ...], seed: int) -> StreamDraws:
        groups = [ordinal // self.shape_group for ordinal in ordinals]
        return draw_stream(
            stream,
            shape,
            ordinals,
            groups,
            seed,
            flow=self.flow_matching,
            conditions=self._conditions[stream],
            references=self._references[stream],
        )

    def prepare(self, batch: Batch, draws: Draws, context: TextContext) -> ModelInputs:
        """Noisy tokens, their timesteps and positions, and the velocity to predict.

        Args:
            batch, draws, context: on the device of the model. `context` is what the connectors made of `batch.text`,
                or `batch.text` itself where its kind is "context".

        Returns:
            float32 throughout, but for the context, which passes through. Timesteps are (B, 1) where all tokens of a
            sample share one noise level.
        """
        return ModelInputs(
            video=self._video(batch, draws.video, context) if self.video is not None else None,
            audio=self._audio(batch, draws.audio, context) if self.audio is not None else None,
        )

    def _video(self, batch: Batch, drawn: StreamDraws | None, context: TextContext) -> StreamInputs:
        latent = _present(batch.video_latent, "video")
        frames, height, width = latent.shape[2:]
        fps = _present(batch.fps, "video")
        tokens = tokens_of(latent, video_positions(frames, height, width, fps, self.geometry, latent.device))
        if not self.uses_keyframes:
            tokens = replace(tokens, keyframes_mask=None)
        target = Target("video", (frames, height, width), tokens, batch, self.geometry)
        return self._stream(target, drawn, context.video, context.mask)

    def _audio(self, batch: Batch, drawn: StreamDraws | None, context: TextContext) -> StreamInputs:
        latent = _present(batch.audio_latent, "audio")
        positions = audio_positions(latent.shape[2], self.geometry, latent.device).expand(len(latent), -1, -1, -1)
        target = Target("audio", (latent.shape[2],), tokens_of(latent, positions), batch, self.geometry)
        return self._stream(target, drawn, context.audio, context.mask)

    def _stream(
        self, target: Target, drawn: StreamDraws | None, context: Tensor, context_mask: Tensor | None
    ) -> StreamInputs:
        """One stream at its noise level; without draws it is frozen: clean, and out of the loss."""
        clean = target.tokens.latent
        if drawn is None:
            frozen = replace(target.tokens, is_frozen=True)
            return StreamInputs(frozen.modality(clean.new_zeros(len(clean)), context, context_mask))
        # Linear path x_σ = (1 − σ)·x₀ + σ·ε, whose velocity is ε − x₀ (DESIGN §5).
        level = drawn.sigma.view(-1, 1, 1)
        noisy = replace(target.tokens, latent=(1 - level) * clean + level * drawn.noise)
        tokens = noisy.with_given(self._given(target, drawn))
        return StreamInputs(
            tokens.modality(drawn.sigma, context, context_mask),
            target=drawn.noise - clean,
            loss_mask=tokens.is_generated.float(),
        )

    def _given(self, target: Target, drawn: StreamDraws) -> Given:
        conditions, references = self._conditions[target.stream], self._references[target.stream]
        if not (conditions or references):
            return Given()
        clean = target.tokens.latent
        # Per token also where this batch drew no condition: a second form of the inputs would be compiled apart.
        is_given = torch.zeros(clean.shape[:2], dtype=torch.bool, device=clean.device)
        for j, condition in enumerate(conditions):
            is_given = is_given | (given_tokens(condition, target) & drawn.conditions[:, j : j + 1])
        chosen = zip(references, drawn.references, strict=True)
        return Given(clean, is_given, tuple(reference_tokens(one, target) for one, holds in chosen if holds))


def _token_shape(latent: Tensor | None, stream: str) -> tuple[int, int]:
    """(T, C) of a stream's tokens."""
    latent = _present(latent, stream)
    if stream == "video":
        return latent[0, 0].numel(), latent.shape[1]
    return latent.shape[2], latent.shape[1] * latent.shape[3]


def _present(tensor: Tensor | None, stream: str) -> Tensor:
    if tensor is None:
        raise ValueError(
            f"training_strategy.{stream}: the batch holds no {stream} latents. "
            f"Give the data set the folder of training_strategy.{stream}.latents_dir."
        )
    return tensor
