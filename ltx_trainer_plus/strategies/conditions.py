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
from ltx_trainer_plus.config.problems import Problem
from ltx_trainer_plus.data.batch import Batch, ReferenceClip
from ltx_trainer_plus.data.precomputed import SampleShape
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.references import ReferenceScale, audio_reference, video_reference
from ltx_trainer_plus.flow.tokens import Tokens


@dataclass(frozen=True)
class Target:
    """The tokens that a stream generates, as a condition sees them.

    Attributes:
        size: latent (frames, height, width) of a video, (steps,) of an audio stream. T is their product.
        tokens: all of them, clean.
        batch: what was read from the prepared data.
    """

    stream: Stream
    size: tuple[int, ...]
    tokens: Tokens
    batch: Batch
    geometry: LatentGeometry


def given_tokens(condition: TrainingCondition, target: Target) -> Tensor:
    """What a condition gives: clean, at noise level 0, out of the loss.

    Returns:
        (B, T) bool, True where a token is given.
    """
    clean = target.tokens.latent
    given = torch.zeros(target.size, dtype=torch.bool, device=clean.device)
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
    return given.expand(len(clean), *target.size).flatten(1)


def fault(
    condition: TrainingCondition, stream: Stream, size: tuple[int, ...], sample: SampleShape, geometry: LatentGeometry
) -> Problem | None:
    """What makes a condition impossible with samples of this shape (`size` as in `Target`), found before training.

    Its path is the condition's field.
    """
    match condition:
        case PrefixCondition(temporal_boundary=boundary) | SuffixCondition(temporal_boundary=boundary):
            if boundary >= size[0]:
                unit = "latent frames" if stream == "video" else "latent steps"
                return Problem(
                    "temporal_boundary",
                    f"gives {boundary} {unit} of a clip that has {size[0]}: nothing is left to generate. Set it below "
                    f"{size[0]}, or train longer clips",
                )
        case SpatialCropCondition(spatial_region=region):
            height, width = (cells * geometry.spatial for cells in size[1:])
            if found := region_fault(region, height, width, cell=geometry.spatial):
                return Problem("spatial_region", ". ".join(found))
        case MaskCondition(mask_dir=folder):
            mask = dict(sample.masks)[folder]
            if mask != size:
                return Problem(
                    "mask_dir",
                    f"its mask is of size {_times(mask)}, the latents are {_times(size)}: a mask has one number for "
                    "each latent position. Prepare the masks again from these clips",
                )
        case ReferenceCondition() if stream == "video":
            try:
                scale_of(condition, size, sample)
            except ValueError as error:
                text = f"{error}. Prepare the references again at a whole fraction of the target's size"
                return Problem("latents_dir", text)
    return None


def reference_tokens(condition: ReferenceCondition, target: Target) -> Tokens:
    """Another clip before the target's tokens: IC-LoRA."""
    clip = target.batch.references[condition.latents_dir]
    if target.stream == "audio":
        return audio_reference(clip.latent, target.geometry)
    scale = ReferenceScale.between(target.size, clip.latent.shape[2:])
    return video_reference(clip.latent, _rates(clip), _rates(target.batch), scale, target.geometry)


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
