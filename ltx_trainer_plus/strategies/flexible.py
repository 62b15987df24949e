"""The flexible training strategy: what the transformer receives, and the velocity it must predict."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ltx_trainer_plus.data.batch import Batch
from ltx_trainer_plus.data.stream import keyed_generator
from ltx_trainer_plus.flow.positions import (
    LatentGeometry,
    audio_positions,
    patchify_audio,
    patchify_video,
    video_positions,
)
from ltx_trainer_plus.flow.timesteps import sample_sigma
from ltx_trainer_plus.modality import Modality, TextContext


class StreamSettings(Protocol):
    """What this module reads of `training_strategy.video` and `.audio`."""

    @property
    def is_generated(self) -> bool: ...


class FlowMatchingSettings(Protocol):
    """What this module reads of `flow_matching`."""

    @property
    def timestep_sampling_mode(self) -> str: ...

    @property
    def timestep_sampling_params(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Draws:
    """Everything random about one batch; None for a stream that is absent or frozen.

    Attributes:
        video_sigma, audio_sigma: (B,) float32 noise levels.
        video_noise, audio_noise: (B, T, C) float32 standard normal, of the target tokens.
    """

    video_sigma: Tensor | None = None
    video_noise: Tensor | None = None
    audio_sigma: Tensor | None = None
    audio_noise: Tensor | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Draws":
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        return Draws(
            video_sigma=moved(self.video_sigma),
            video_noise=moved(self.video_noise),
            audio_sigma=moved(self.audio_sigma),
            audio_noise=moved(self.audio_noise),
        )


@dataclass(frozen=True)
class ModelInputs:
    """What the transformer receives, and what it is held to.

    Attributes:
        video, audio: the streams; None where the run has no such stream.
        video_target, audio_target: (B, T, C) float32 velocity to be predicted; None where nothing is learnt.
        video_loss_mask, audio_loss_mask: (B, T) float32, 1 = in the loss; None where nothing is learnt.
    """

    video: Modality | None = None
    audio: Modality | None = None
    video_target: Tensor | None = None
    video_loss_mask: Tensor | None = None
    audio_target: Tensor | None = None
    audio_loss_mask: Tensor | None = None

    @property
    def target_tokens(self) -> int:
        """Tokens of the batch, video and audio, that the model learns to predict."""
        return sum(target[..., 0].numel() for target in (self.video_target, self.audio_target) if target is not None)


class _Stream(NamedTuple):
    modality: Modality
    target: Tensor | None
    loss_mask: Tensor | None


class FlexibleStrategy:
    """Every training mode: which streams there are, which are generated and which are given.

    Pure: no method changes what it is lent, and randomness comes in as `Draws`.

    Args:
        video, audio: settings of each stream; None = the stream is absent. A stream that is not generated is clean
            conditioning: sigma 0, no loss ("frozen").
        geometry: the VAEs' factors.
        flow_matching: how sigmas are drawn.
        uses_keyframes: whether the model marks single-frame tokens (LTX-2.5).
    """

    def __init__(
        self,
        video: StreamSettings | None,
        audio: StreamSettings | None,
        geometry: LatentGeometry,
        flow_matching: FlowMatchingSettings,
        *,
        uses_keyframes: bool = False,
    ) -> None:
        self.video = video
        self.audio = audio
        self.geometry = geometry
        self.flow_matching = flow_matching
        self.uses_keyframes = uses_keyframes

    def draw(self, batch: Batch, seed: int) -> Draws:
        """Noise and noise levels of every sample, keyed by (seed, its position in the stream), on the CPU.

        The noise has the layout of tokens, so it does not depend on which other samples are in the batch.
        """
        draws = Draws()
        if self.video is not None and self.video.is_generated:
            sigma, noise = self._draw("video", _token_shape(batch.video_latent, "video"), batch.positions, seed)
            draws = replace(draws, video_sigma=sigma, video_noise=noise)
        if self.audio is not None and self.audio.is_generated:
            sigma, noise = self._draw("audio", _token_shape(batch.audio_latent, "audio"), batch.positions, seed)
            draws = replace(draws, audio_sigma=sigma, audio_noise=noise)
        return draws

    def _draw(
        self, stream: str, shape: tuple[int, int], positions: tuple[int, ...], seed: int
    ) -> tuple[Tensor, Tensor]:
        flow = self.flow_matching
        sigma = torch.empty(len(positions))
        noise = torch.empty(len(positions), *shape)
        for i, position in enumerate(positions):
            # One generator for each purpose: what is drawn later on for conditions leaves these as they are.
            sigma[i] = sample_sigma(
                flow.timestep_sampling_mode,
                flow.timestep_sampling_params,
                tokens=shape[0],
                generator=keyed_generator(seed, f"{stream} sigma", position),
            )
            noise[i].normal_(generator=keyed_generator(seed, f"{stream} noise", position))
        return sigma, noise

    def prepare(self, batch: Batch, draws: Draws, context: TextContext) -> ModelInputs:
        """Noisy tokens, their timesteps and positions, and the velocity to predict.

        Args:
            batch, draws, context: on the device of the model. `context` is what the connectors made of `batch.text`,
                or `batch.text` itself where its kind is "context".

        Returns:
            float32 throughout, but for the context, which passes through. Timesteps are (B, 1) where all tokens of a
            sample share one noise level.
        """
        video = self._video(batch, draws, context) if self.video is not None else None
        audio = self._audio(batch, draws, context) if self.audio is not None else None
        return ModelInputs(
            video=video.modality if video else None,
            audio=audio.modality if audio else None,
            video_target=video.target if video else None,
            video_loss_mask=video.loss_mask if video else None,
            audio_target=audio.target if audio else None,
            audio_loss_mask=audio.loss_mask if audio else None,
        )

    def _video(self, batch: Batch, draws: Draws, context: TextContext) -> _Stream:
        latent = _present(batch.video_latent, "video")
        frames, height, width = latent.shape[2:]
        positions = video_positions(
            frames, height, width, _present(batch.fps, "video"), self.geometry, device=latent.device
        )
        stream = _stream(
            patchify_video(latent), draws.video_sigma, draws.video_noise, positions, context.video, context.mask
        )
        if not self.uses_keyframes:
            return stream
        # The causal first latent frame is one pixel frame. Inference marks it; a model trained without the mark
        # would meet it there for the first time.
        keyframes = torch.zeros(*stream.modality.latent.shape[:2], 1, device=latent.device)
        keyframes[:, : height * width] = 1
        return stream._replace(modality=replace(stream.modality, keyframes_mask=keyframes))

    def _audio(self, batch: Batch, draws: Draws, context: TextContext) -> _Stream:
        latent = _present(batch.audio_latent, "audio")
        positions = audio_positions(latent.shape[2], self.geometry, device=latent.device).expand(
            len(latent), -1, -1, -1
        )
        return _stream(
            patchify_audio(latent), draws.audio_sigma, draws.audio_noise, positions, context.audio, context.mask
        )


def _stream(
    clean: Tensor,
    sigma: Tensor | None,
    noise: Tensor | None,
    positions: Tensor,
    context: Tensor,
    context_mask: Tensor | None,
) -> _Stream:
    """One stream at its noise level; without one it is frozen: clean, and out of the loss."""
    clean = clean.float()
    if sigma is None or noise is None:
        sigma = torch.zeros(len(clean), device=clean.device)
        latent, target, loss_mask = clean, None, None
    else:
        # Linear path x_σ = (1 − σ)·x₀ + σ·ε, whose velocity is ε − x₀ (DESIGN §5).
        level = sigma.view(-1, 1, 1)
        latent, target = (1 - level) * clean + level * noise, noise - clean
        loss_mask = torch.ones(clean.shape[:2], device=clean.device)
    modality = Modality(
        latent=latent,
        sigma=sigma,
        timesteps=sigma.view(-1, 1),
        positions=positions,
        context=context,
        context_mask=context_mask,
    )
    return _Stream(modality, target, loss_mask)


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
