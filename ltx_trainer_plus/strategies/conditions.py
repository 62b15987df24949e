"""The conditions of training: which tokens are given clean, and what is put before the target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ltx_trainer_plus.config.conditions import (
    FirstFrameCondition,
    MaskCondition,
    PrefixCondition,
    ReferenceCondition,
    SpatialCropCondition,
    Stream,
    SuffixCondition,
    TrainingCondition,
    region_fault,
)
from ltx_trainer_plus.data.batch import Batch, ReferenceClip
from ltx_trainer_plus.data.precomputed import SampleShape
from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, patchify_audio, patchify_video
from ltx_trainer_plus.flow.references import ReferenceScale, reference_video_positions


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


@dataclass(frozen=True)
class Fault:
    """Why a condition cannot work with a sample: the field to change (of the condition) and a sentence."""

    field: str
    text: str


def given_cells(condition: TrainingCondition, target: Target) -> Tensor:
    """What a condition gives: clean, at noise level 0, out of the loss.

    Returns:
        (*size) or (B, *size) bool, True where a latent cell (audio: a latent step) is given.
    """
    given = torch.zeros(target.size, dtype=torch.bool, device=target.positions.device)
    match condition:
        case FirstFrameCondition():
            given[:1] = True
        case PrefixCondition(temporal_boundary=count):
            given[:count] = True
        case SuffixCondition(temporal_boundary=count):
            given[-count:] = True
        case SpatialCropCondition(spatial_region=region):
            given[:, *target.geometry.cells_in(region)] = True
        case MaskCondition(mask_dir=folder):
            given = target.batch.masks[folder] > 0.5
        case _:
            raise NotImplementedError(f"{condition.type}: nothing says which tokens it gives. Add a case above.")
    return given


def fault(
    condition: TrainingCondition, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
) -> Fault | None:
    """What makes a condition impossible with samples of this shape (`size` as in `Target`), found before training."""
    match condition:
        case PrefixCondition(temporal_boundary=boundary) | SuffixCondition(temporal_boundary=boundary):
            if boundary >= size[0]:
                unit = "latent frames" if stream == "video" else "latent steps"
                return Fault(
                    "temporal_boundary",
                    f"gives {boundary} {unit} of a clip that has {size[0]}: nothing is left to generate. Set it below "
                    f"{size[0]}, or train longer clips",
                )
        case SpatialCropCondition(spatial_region=region):
            height, width = (cells * geometry.spatial for cells in size[1:])
            if found := region_fault(region, height, width, cell=geometry.spatial):
                return Fault("spatial_region", ". ".join(found))
        case MaskCondition(mask_dir=folder):
            mask = dict(sample.masks)[folder]
            if mask != size:
                return Fault(
                    "mask_dir",
                    f"its mask is of size {_times(mask)}, the latents are {_times(size)}: a mask has one number for "
                    "each latent position. Prepare the masks again from these clips",
                )
        case ReferenceCondition() if stream == "video":
            try:
                scale_of(condition, size, sample)
            except ValueError as error:
                text = f"{error}. Prepare the references again at a whole fraction of the target's size"
                return Fault("latents_dir", text)
    return None


@dataclass(frozen=True)
class ReferenceTokens:
    """Clean tokens (B, R, C) float32 that come before the target's, and where they lie.

    `single_frame`: how many of them, from the first, are of a latent frame that is a single pixel frame.
    """

    latent: Tensor
    positions: Tensor
    single_frame: int


def reference_tokens(condition: ReferenceCondition, target: Target) -> ReferenceTokens:
    """Another clip before the target's tokens: IC-LoRA."""
    clip = target.batch.references[condition.latents_dir]
    if target.stream == "audio":
        positions = audio_positions(clip.latent.shape[2], target.geometry, clip.latent.device)
        return ReferenceTokens(patchify_audio(clip.latent).float(), positions.expand(len(clip.latent), -1, -1, -1), 0)
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


def scale_of(condition: ReferenceCondition, size: Sequence[int], sample: SampleShape) -> ReferenceScale:
    """Of a video reference to a target of this latent size.

    Raises:
        ValueError: it is no whole number.
    """
    return ReferenceScale.between(size, dict(sample.references)[condition.latents_dir][1:])


def _rates(clip: Batch | ReferenceClip) -> Tensor:
    if clip.fps is None:
        raise ValueError("a video without a frame rate has no place in time.")
    return clip.fps


def _times(size: Sequence[int]) -> str:
    return " × ".join(map(str, size)) or "a single number"
