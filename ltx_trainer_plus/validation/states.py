"""Where a validation sample starts: its noise, the place of every token, and what is given instead of generated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, video_positions
from ltx_trainer_plus.flow.tokens import Tokens, keyframe_marks
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.validation.given import NOTHING_GIVEN, GivenSample
from ltx_trainer_plus.validation.requests import SampleRequest


@dataclass(frozen=True)
class SampleState:
    """Everything a denoising run needs: one or both streams, and the text with its negative."""

    video: Tokens | None
    audio: Tokens | None
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
        fps = torch.tensor([request.frame_rate])
        latent = _noise(math.prod(size), transformer_config["in_channels"], 2 * request.seed).to(device)
        uses_keyframes = transformer_config.get("use_keyframes_abs_pos_embedding")
        marks = keyframe_marks(latent, size[1] * size[2]) if uses_keyframes else None
        video = Tokens(latent, video_positions(*size, fps, geometry, device), keyframes_mask=marks)
        video = video.with_given(given.video)
    if request.audio != "absent":
        steps = request.audio_latent_steps(geometry)
        latent = _noise(steps, transformer_config["audio_in_channels"], 2 * request.seed + 1).to(device)
        audio = Tokens(latent, audio_positions(steps, geometry, device)).with_given(given.audio)
    return SampleState(video, audio, positive, negative)


def _noise(tokens: int, channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(1, tokens, channels, generator=generator)
