"""Geometry of latents: where every token lies in time and space, and how latents become tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LatentGeometry:
    """How one latent step maps to pixels and to seconds; the VAEs' factors.

    Attributes:
        temporal: pixel frames in a latent frame (all but the first, which is causal).
        spatial: pixels in a latent row or column.
        audio_scale: mel frames in an audio latent step (all but the first).
        audio_hop: samples in a mel frame.
        audio_rate: samples per second.
        causal_offset: pixel frames (mel frames) in the first latent frame (step).
    """

    temporal: int = 8
    spatial: int = 32
    audio_scale: int = 4
    audio_hop: int = 160
    audio_rate: int = 16000
    causal_offset: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "LatentGeometry":
        """Geometry of a transformer's config (diffusers names); what it does not say keeps its default.

        Raises:
            ValueError: the VAE's factors for height and width differ.
        """
        temporal, height, width = config.get("vae_scale_factors", (cls.temporal, cls.spatial, cls.spatial))
        if height != width:
            raise ValueError(
                f"vae_scale_factors: {height} for height and {width} for width; this trainer needs one spatial factor. "
                "Use a checkpoint whose video VAE compresses both alike."
            )
        return cls(
            temporal=temporal,
            spatial=height,
            audio_scale=config.get("audio_scale_factor", cls.audio_scale),
            audio_hop=config.get("audio_hop_length", cls.audio_hop),
            audio_rate=config.get("audio_sampling_rate", cls.audio_rate),
            causal_offset=config.get("causal_offset", cls.causal_offset),
        )

    def latent_frames(self, frames: int) -> int:
        """Latent frames that hold the first `frames` pixel frames of a video."""
        return (frames - 1) // self.temporal + 1

    def pixel_frames(self, latent_frames: int) -> int:
        """Pixel frames that so many latent frames, from the first, decode to."""
        return (latent_frames - 1) * self.temporal + 1

    def video_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent frames, rows and columns of a video of so many pixel frames, each of `height` x `width` pixels."""
        return self.latent_frames(frames), height // self.spatial, width // self.spatial

    def latent_frames_at_end(self, frames: int) -> int:
        """Latent frames that hold the last `frames` pixel frames of a video that is longer."""
        return -(-frames // self.temporal)

    def cells_in(self, region: tuple[int, int, int, int]) -> tuple[slice, slice]:
        """Rows and columns of the latent cells that lie wholly in a region (y1, x1, y2, x2 in pixels)."""
        top, left, bottom, right = region
        cell = self.spatial
        return slice(-(-top // cell), bottom // cell), slice(-(-left // cell), right // cell)

    def audio_steps(self, seconds: float) -> int:
        """Audio latent steps of a sound: as many as the public pipelines generate for it, and at least one."""
        return max(1, round(seconds * (self.audio_rate / self.audio_hop / self.audio_scale)))


def video_positions(
    frames: int,
    height: int,
    width: int,
    fps: Tensor,
    geometry: LatentGeometry,
    device: torch.device | str | None = None,
) -> Tensor:
    """Span of every video token.

    Args:
        frames, height, width: size of the latent.
        fps: (B,) pixel frames per second of each sample.

    Returns:
        (B, 3, frames * height * width, 2) float32: `[start, end)` of time in seconds, of rows and of columns in
        pixels. The first latent frame lasts one pixel frame, because the video VAE is causal.

    Source: docs/design.md, "The objective"; checked against tests/reference/*-io.safetensors.
    """
    sizes = (frames, height, width)
    starts = torch.meshgrid(*(torch.arange(n, dtype=torch.float32, device=device) for n in sizes), indexing="ij")
    start = torch.stack(starts).flatten(1)  # (3, T)
    bounds = torch.stack([start, start + 1], dim=-1)  # (3, T, 2)
    fps = fps.to(device=bounds.device, dtype=torch.float32).view(-1, 1, 1)
    time = _causal(bounds[0], geometry.temporal, geometry.causal_offset) / fps  # (B, T, 2)
    space = (bounds[1:] * geometry.spatial).expand(len(time), -1, -1, -1)  # (B, 2, T, 2)
    return torch.cat([time.unsqueeze(1), space], dim=1)


def audio_positions(steps: int, geometry: LatentGeometry, device: torch.device | str | None = None) -> Tensor:
    """Time span of every audio latent step.

    Returns:
        (1, 1, steps, 2) float32, `[start, end)` in seconds. Step 0 starts at 0: the audio VAE is causal, so its
        first latent step covers one mel frame and every later one covers four.

    Source: docs/design.md, "The objective"; checked against tests/reference/*-io.safetensors.
    """
    start = torch.arange(steps, dtype=torch.float32, device=device)
    mel_frames = _causal(torch.stack([start, start + 1], dim=-1), geometry.audio_scale, geometry.causal_offset)
    return (mel_frames * geometry.audio_hop / geometry.audio_rate).view(1, 1, steps, 2)


def _causal(latent_time: Tensor, scale: int, causal_offset: int) -> Tensor:
    return (latent_time * scale + causal_offset - scale).clamp(min=0)


def patchify_video(latent: Tensor) -> Tensor:
    """(B, C, F, H, W) to tokens (B, F * H * W, C)."""
    return latent.flatten(2).transpose(1, 2)


def unpatchify_video(tokens: Tensor, frames: int, height: int, width: int) -> Tensor:
    """(B, F * H * W, C) to a latent (B, C, F, H, W)."""
    return tokens.transpose(1, 2).unflatten(2, (frames, height, width))


def patchify_audio(latent: Tensor) -> Tensor:
    """(B, C, T, M) to tokens (B, T, C * M), M being the latent's mel bins."""
    return latent.transpose(1, 2).flatten(2)


def unpatchify_audio(tokens: Tensor, channels: int = 8) -> Tensor:
    """(B, T, C * M) to a latent (B, C, T, M)."""
    return tokens.unflatten(2, (channels, -1)).transpose(1, 2)
