"""References: clips that stand before a target's tokens (IC-LoRA), of lower resolution or frame rate if need be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, video_positions
from ltx_trainer_plus.flow.tokens import Tokens, tokens_of

# The official pipelines read the spatial factor under either of its names.
_SPATIAL_KEYS = ("reference_spatial_scale_factor", "reference_downscale_factor")
_TEMPORAL_KEY = "reference_temporal_scale_factor"


@dataclass(frozen=True)
class ReferenceScale:
    """How many times smaller a video reference is than its target.

    Attributes:
        spatial: in height and in width.
        temporal: in latent frames, without the first one, which is a single pixel frame in both.
    """

    spatial: int = 1
    temporal: int = 1

    @classmethod
    def between(cls, target: Sequence[int], reference: Sequence[int]) -> "ReferenceScale":
        """The scale of a pair of latent sizes (frames, height, width).

        A reference of one frame is a still picture beside a clip of any length.

        Raises:
            ValueError: it is no whole number; the message says which sizes would be.
        """
        frames, height, width = target
        ref_frames, ref_height, ref_width = reference
        spatial = height // ref_height
        if (ref_height * spatial, ref_width * spatial) != (height, width) or spatial < 1:
            raise ValueError(
                f"the target is {height} × {width} latents and the reference {ref_height} × {ref_width}: not smaller "
                "by one whole number in both directions"
            )
        if ref_frames == 1:
            return cls(spatial, 1)
        temporal = (frames - 1) // (ref_frames - 1)
        if (ref_frames - 1) * temporal != frames - 1 or temporal < 1:
            raise ValueError(
                f"the target has {frames} latent frames and the reference {ref_frames}: without the first, "
                f"{frames - 1} is no whole multiple of {ref_frames - 1}"
            )
        return cls(spatial, temporal)

    def as_metadata(self) -> dict[str, str]:
        """Header entries of a weights file, as the official pipelines read them; factor 1 is left out."""
        spatial = dict.fromkeys(_SPATIAL_KEYS, str(self.spatial)) if self.spatial != 1 else {}
        return spatial | ({_TEMPORAL_KEY: str(self.temporal)} if self.temporal != 1 else {})

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> "ReferenceScale":
        """The scale that a weights file was trained with.

        Raises:
            ValueError: an entry is no whole number, or the two names of the spatial factor disagree.
        """
        given = {key: metadata[key] for key in (*_SPATIAL_KEYS, _TEMPORAL_KEY) if key in metadata}
        for key, text in given.items():
            if not text.isascii() or not text.isdigit() or int(text) < 1:
                raise ValueError(f"the header entry {key} is {text!r}, not a whole number from 1.")
        spatial = {int(given[key]) for key in _SPATIAL_KEYS if key in given} or {1}
        if len(spatial) > 1:
            raise ValueError(f"the header entries {' and '.join(_SPATIAL_KEYS)} disagree: {sorted(spatial)}.")
        return cls(spatial.pop(), int(given.get(_TEMPORAL_KEY, 1)))


def video_reference(
    latent: Tensor, fps: Tensor, target_fps: Tensor, scale: ReferenceScale, geometry: LatentGeometry
) -> Tokens:
    """A video latent (B, C, F, H, W) as it stands before its target; the other arguments as below."""
    size = latent.shape[2:]
    return tokens_of(latent, reference_video_positions(size, fps, target_fps, scale, geometry, latent.device))


def audio_reference(latent: Tensor, geometry: LatentGeometry) -> Tokens:
    """An audio latent (B, C, T, M) as it stands before its target: beside it in time, from the start."""
    positions = audio_positions(latent.shape[2], geometry, latent.device)
    return tokens_of(latent, positions.expand(len(latent), -1, -1, -1))


def reference_video_positions(
    size: Sequence[int],
    fps: Tensor,
    target_fps: Tensor,
    scale: ReferenceScale,
    geometry: LatentGeometry,
    device: torch.device | str | None = None,
) -> Tensor:
    """Span of every token of a video reference, in the seconds and pixels of its target.

    Args:
        size: latent (frames, height, width) of the reference.
        fps: (B,) stored rate of the reference, which is the target's divided by `scale.temporal`.
        target_fps: (B,) rate of the target.

    Returns:
        (B, 3, T, 2) float32, as `video_positions`.

    Source: docs/design.md, "The objective"; checked against tests/reference/strategy_temporal_reference.safetensors.
    """
    frames, height, width = size
    positions = video_positions(frames, height, width, fps, geometry, device)
    time, space = positions[:, :1], positions[:, 1:]
    # The first pixel frame of a thinned-out clip is held as long as the others: without the shift all later frames
    # would lie behind those of the target that they stand for.
    shift = (scale.temporal - 1) / target_fps.to(device=positions.device, dtype=torch.float32).view(-1, 1, 1, 1)
    return torch.cat([(time - shift).clamp(min=0), space * scale.spatial], dim=1)
