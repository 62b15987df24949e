"""Where a validation sample starts: its noise, the place of every token, and what is given instead of generated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, video_positions
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.validation.requests import SampleRequest


@dataclass(frozen=True)
class StreamState:
    """One stream before its first denoising step.

    Attributes:
        latent: (B, T, C) float32 tokens at noise level 1; given tokens are already clean in it.
        positions: (B, 3, T, 2) for video, (B, 1, T, 2) for audio, as in `Modality`.
        denoise_mask: (B, T, 1) float32, 1 where a token is generated, 0 where it is given; None = all generated.
        keyframes_mask: as in `Modality`.
        is_frozen: the whole stream is given: it conditions the other one and is not denoised.
    """

    latent: Tensor
    positions: Tensor
    denoise_mask: Tensor | None = None
    keyframes_mask: Tensor | None = None
    is_frozen: bool = False

    def with_given(self, clean: Tensor, denoise_mask: Tensor) -> "StreamState":
        """The same stream with the tokens where `denoise_mask` is 0 taken from `clean` (B, T, C)."""
        latent = torch.lerp(clean.to(self.latent), self.latent, denoise_mask.to(self.latent))
        return StreamState(latent, self.positions, denoise_mask.to(self.latent), self.keyframes_mask, self.is_frozen)


@dataclass(frozen=True)
class SampleState:
    """Everything a denoising run needs: one or both streams, and the text with its negative."""

    video: StreamState | None
    audio: StreamState | None
    positive: TextContext
    negative: TextContext | None = None


def initial_state(
    request: SampleRequest,
    positive: TextContext,
    negative: TextContext | None,
    *,
    geometry: LatentGeometry,
    transformer_config: Mapping[str, Any],
    device: torch.device,
) -> SampleState:
    """The noise that a sample grows from, on `device`.

    The noise comes from the sample's own seed, on the CPU, and each stream has a generator of its own: the same
    sample starts from the same numbers on any device, on any rank, with or without the other stream.
    """
    video = audio = None
    if request.has_video:
        size = request.video_latent_size(geometry)
        tokens = size[0] * size[1] * size[2]
        fps = torch.tensor([request.frame_rate])
        keyframes = None
        if transformer_config.get("use_keyframes_abs_pos_embedding"):
            # The causal video VAE makes the first latent frame from a single pixel frame.
            keyframes = torch.zeros(1, tokens, 1, device=device)
            keyframes[:, : size[1] * size[2]] = 1
        video = StreamState(
            latent=_noise(tokens, transformer_config["in_channels"], 2 * request.seed).to(device),
            positions=video_positions(*size, fps, geometry, device),
            keyframes_mask=keyframes,
        )
    if request.has_audio:
        steps = request.audio_latent_steps(geometry)
        audio = StreamState(
            latent=_noise(steps, transformer_config["audio_in_channels"], 2 * request.seed + 1).to(device),
            positions=audio_positions(steps, geometry, device),
        )
    return SampleState(video, audio, positive, negative)


def _noise(tokens: int, channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(1, tokens, channels, generator=generator)
