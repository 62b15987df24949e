"""Where a validation sample starts: its noise, the place of every token, and what is given instead of generated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, video_positions
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.validation.given import NOTHING_GIVEN, GivenSample, GivenStream, Reference
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
        reference_tokens: how many tokens, the first ones, are references: the model sees them, the result has none.
    """

    latent: Tensor
    positions: Tensor
    denoise_mask: Tensor | None = None
    keyframes_mask: Tensor | None = None
    is_frozen: bool = False
    reference_tokens: int = 0

    def with_given(self, clean: Tensor, denoise_mask: Tensor) -> "StreamState":
        """The same stream with the tokens where `denoise_mask` is 0 taken from `clean` (B, T, C)."""
        latent = torch.lerp(clean.to(self.latent), self.latent, denoise_mask.to(self.latent))
        return replace(self, latent=latent, denoise_mask=denoise_mask.to(self.latent))

    def behind(self, reference: Reference) -> "StreamState":
        """The same stream with a reference before it (before those that it has already: add the last one first)."""
        tokens = reference.tokens.to(self.latent)
        count = tokens.shape[1]
        generated = torch.ones_like(self.latent[..., :1]) if self.denoise_mask is None else self.denoise_mask
        keyframes = self.keyframes_mask
        if keyframes is not None:
            marks = torch.zeros_like(tokens[..., :1])
            marks[:, : reference.keyframe_tokens] = 1
            keyframes = torch.cat([marks, keyframes], dim=1)
        return replace(
            self,
            latent=torch.cat([tokens, self.latent], dim=1),
            positions=torch.cat([reference.positions.to(self.positions), self.positions], dim=2),
            denoise_mask=torch.cat([torch.zeros_like(tokens[..., :1]), generated], dim=1),
            keyframes_mask=keyframes,
            reference_tokens=count + self.reference_tokens,
        )

    def with_conditions(self, given: GivenStream) -> "StreamState":
        """The same stream with everything that it is given."""
        state = self
        if given.clean is not None and given.is_given is not None:
            if given.is_frozen:
                return replace(state, latent=given.clean.to(state.latent), is_frozen=True)
            state = state.with_given(given.clean, (~given.is_given).float().unsqueeze(-1).to(state.latent.device))
        for reference in reversed(given.references):
            state = state.behind(reference)
        return state


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
    given: GivenSample = NOTHING_GIVEN,
) -> SampleState:
    """The noise that a sample grows from and what it is given, on `device`.

    The noise comes from the sample's own seed, on the CPU, and each stream has a generator of its own: the same
    sample starts from the same numbers on any device, on any rank, with or without the other stream.
    """
    video = audio = None
    if request.video != "absent":
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
        ).with_conditions(given.video)
    if request.audio != "absent":
        steps = request.audio_latent_steps(geometry)
        audio = StreamState(
            latent=_noise(steps, transformer_config["audio_in_channels"], 2 * request.seed + 1).to(device),
            positions=audio_positions(steps, geometry, device),
        ).with_conditions(given.audio)
    return SampleState(video, audio, positive, negative)


def _noise(tokens: int, channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(1, tokens, channels, generator=generator)
