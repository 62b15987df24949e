"""The conditions of training: which tokens are given clean, and what is put before the target."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ltx_trainer_plus.data.batch import Batch, ReferenceClip
from ltx_trainer_plus.data.precomputed import SampleShape
from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, patchify_audio, patchify_video
from ltx_trainer_plus.flow.references import ReferenceScale, reference_video_positions

Stream = Literal["video", "audio"]


@dataclass(frozen=True)
class Target:
    """The tokens that a stream generates, as a condition sees them.

    Attributes:
        size: latent (frames, height, width) of a video, (steps,) of an audio stream. T is their product.
        positions: (B, 3, T, 2) or (B, 1, T, 2), as in `Modality`.
        batch: what was read from the prepared data.
    """

    stream: Stream
    size: tuple[int, ...]
    positions: Tensor
    batch: Batch
    geometry: LatentGeometry

    @property
    def steps(self) -> Tensor:
        """(T,) number of each token's latent frame or audio latent step, from 0."""
        steps = torch.arange(self.size[0], device=self.positions.device)
        return steps.repeat_interleave(self.positions.shape[2] // self.size[0])


@dataclass(frozen=True)
class Fault:
    """Why a condition cannot work with a sample: the field to change (of the condition) and a sentence."""

    field: str
    text: str


class Condition(ABC):
    """A part of the target that is given: clean, at noise level 0, out of the loss.

    Args:
        settings: its entry in the configuration (config/conditions.py).
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def given(self, target: Target) -> Tensor:
        """(T,) or (B, T) bool, True where a token is given."""

    def fault(
        self, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
    ) -> Fault | None:
        """What makes it impossible with samples of this shape (`size` as in `Target`), found before training."""
        return None


class FirstFrame(Condition):
    """The first latent frame: image to video."""

    def given(self, target: Target) -> Tensor:
        return target.steps == 0


class Prefix(Condition):
    """The first latent frames or steps: forward extension."""

    def given(self, target: Target) -> Tensor:
        return target.steps < self.settings.temporal_boundary

    def fault(
        self, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
    ) -> Fault | None:
        return _boundary_fault(self.settings.temporal_boundary, stream, size[0])


class Suffix(Condition):
    """The last latent frames or steps: backward extension."""

    def given(self, target: Target) -> Tensor:
        return target.steps >= target.size[0] - self.settings.temporal_boundary

    def fault(
        self, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
    ) -> Fault | None:
        return _boundary_fault(self.settings.temporal_boundary, stream, size[0])


class SpatialCrop(Condition):
    """A rectangle of every frame: outpainting. Tokens that lie in it only in part are generated."""

    def given(self, target: Target) -> Tensor:
        top, left, bottom, right = self.settings.spatial_region
        _, rows, columns = target.positions.unbind(dim=1)  # (B, T, 2) pixels
        return (rows[..., 0] >= top) & (rows[..., 1] <= bottom) & (columns[..., 0] >= left) & (columns[..., 1] <= right)

    def fault(
        self, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
    ) -> Fault | None:
        top, left, bottom, right = self.settings.spatial_region
        step = geometry.spatial
        height, width = size[1] * step, size[2] * step
        if bottom > height or right > width:
            return Fault(
                "spatial_region",
                f"reaches to row {bottom} and column {right}, the clip is {height} pixels high and {width} wide. It is "
                "y1, x1, y2, x2: lower y2 and x2",
            )
        if bottom // step <= -(-top // step) or right // step <= -(-left // step):
            return Fault(
                "spatial_region",
                f"holds no whole square of {step} × {step} pixels, the grid of the latents. Give multiples of {step}",
            )
        if (top, left, bottom, right) == (0, 0, height, width):
            return Fault("spatial_region", f"is the whole frame ({height} × {width}): nothing is left to generate")
        return None


class Mask(Condition):
    """What a prepared mask marks with more than 0.5: inpainting."""

    def given(self, target: Target) -> Tensor:
        return target.batch.masks[self.settings.mask_dir].flatten(1) > 0.5

    def fault(
        self, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
    ) -> Fault | None:
        mask = dict(sample.masks)[self.settings.mask_dir]
        if mask == size:
            return None
        return Fault(
            "mask_dir",
            f"its mask is of size {_times(mask)}, the latents are {_times(size)}: a mask has one number for each "
            "latent position. Prepare the masks again from these clips",
        )


@dataclass(frozen=True)
class ReferenceTokens:
    """Clean tokens (B, R, C) float32 that come before the target's, and where they lie.

    `single_frame`: how many of them, from the first, are of a latent frame that is a single pixel frame.
    """

    latent: Tensor
    positions: Tensor
    single_frame: int


class Reference:
    """Another clip before the target's tokens: IC-LoRA."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def tokens(self, target: Target) -> ReferenceTokens:
        clip = target.batch.references[self.settings.latents_dir]
        if target.stream == "audio":
            positions = audio_positions(clip.latent.shape[2], target.geometry, clip.latent.device)
            return ReferenceTokens(
                patchify_audio(clip.latent).float(), positions.expand(len(clip.latent), -1, -1, -1), 0
            )
        size = clip.latent.shape[2:]
        positions = reference_video_positions(
            size,
            _rates(clip),
            _rates(target.batch),
            ReferenceScale.between(target.size, size),
            target.geometry,
            clip.latent.device,
        )
        return ReferenceTokens(patchify_video(clip.latent).float(), positions, single_frame=size[1] * size[2])

    def scale(self, size: Sequence[int], sample: SampleShape) -> ReferenceScale:
        """Of a video reference.

        Raises:
            ValueError: it is no whole number.
        """
        return ReferenceScale.between(size, dict(sample.references)[self.settings.latents_dir][1:])

    def fault(
        self, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
    ) -> Fault | None:
        if stream == "audio":
            return None
        try:
            self.scale(size, sample)
        except ValueError as error:
            return Fault(
                "latents_dir", f"{error}. Prepare the references again at a whole fraction of the target's size"
            )
        return None


# By the `type` of the entry in the configuration.
CONDITIONS: dict[str, type[Condition] | type[Reference]] = {
    "first_frame": FirstFrame,
    "prefix": Prefix,
    "suffix": Suffix,
    "spatial_crop": SpatialCrop,
    "mask": Mask,
    "reference": Reference,
}


def _boundary_fault(boundary: int, stream: Stream, steps: int) -> Fault | None:
    if boundary < steps:
        return None
    unit = "latent frames" if stream == "video" else "latent steps"
    return Fault(
        "temporal_boundary",
        f"gives {boundary} {unit} of a clip that has {steps}: nothing is left to generate. Set it below {steps}, or "
        "train longer clips",
    )


def _rates(clip: Batch | ReferenceClip) -> Tensor:
    if clip.fps is None:
        raise ValueError("a video without a frame rate has no place in time.")
    return clip.fps


def _times(size: Sequence[int]) -> str:
    return " × ".join(map(str, size)) or "a single number"
