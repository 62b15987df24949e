"""The entries of `training_strategy.video.conditions` and `.audio.conditions`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ltx_trainer_plus.config.base import FromList, Section

Stream = Literal["video", "audio"]


def _inside_data_root(value: str) -> str:
    if not value.strip() or value.startswith(("/", "~")) or ".." in value.split("/"):
        raise PydanticCustomError(
            "latents_dir", "must be the name of a folder inside data.preprocessed_data_root, such as latents"
        )
    return value


def _is_a_region(value: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    top, left, bottom, right = value
    if top >= bottom or left >= right:
        raise PydanticCustomError("region", "is empty: y1 must be below y2, and x1 below x2")
    return value


FolderName = Annotated[str, AfterValidator(_inside_data_root)]
Pixel = Annotated[int, Field(ge=0)]
Region = Annotated[tuple[Pixel, Pixel, Pixel, Pixel], FromList, AfterValidator(_is_a_region)]  # y1, x1, y2, x2


def region_fault(region: Region, height: int, width: int, *, cell: int = 1) -> tuple[str, str] | None:
    """Why a region cannot be given of a frame of so many pixels, and what to do; None = it can.

    Args:
        cell: pixels in a row or column of the latent; only whole cells are given.
    """
    top, left, bottom, right = region
    if bottom > height or right > width:
        return (
            f"reaches outside the frame, which is {height} pixels high and {width} wide",
            "It is y1, x1, y2, x2: lower y2 and x2",
        )
    if bottom // cell <= -(-top // cell) or right // cell <= -(-left // cell):
        return f"holds no whole square of {cell} × {cell} pixels, the grid of the latents", f"Give multiples of {cell}"
    if (top, left, bottom, right) == (0, 0, height, width):
        return f"is the whole frame ({height} × {width}): nothing is left to generate", "Make it smaller"
    return None


class TrainingCondition(Section):
    """What every condition has: how often a sample (for `reference`: a batch) is trained with it."""

    type: str
    probability: float = Field(default=1.0, ge=0, le=1)


class FirstFrameCondition(TrainingCondition):
    """The first latent frame is given."""

    type: Literal["first_frame"] = "first_frame"


class PrefixCondition(TrainingCondition):
    """The first `temporal_boundary` latent frames (audio: latent steps) are given."""

    type: Literal["prefix"] = "prefix"
    temporal_boundary: int = Field(ge=1)


class SuffixCondition(TrainingCondition):
    """The last `temporal_boundary` latent frames (audio: latent steps) are given."""

    type: Literal["suffix"] = "suffix"
    temporal_boundary: int = Field(ge=1)


class SpatialCropCondition(TrainingCondition):
    """A rectangle is given."""

    type: Literal["spatial_crop"] = "spatial_crop"
    spatial_region: Region


class MaskCondition(TrainingCondition):
    """What a prepared mask marks is given."""

    type: Literal["mask"] = "mask"
    mask_dir: FolderName


class ReferenceCondition(TrainingCondition):
    """Another clip's tokens are put before the target's."""

    type: Literal["reference"] = "reference"
    latents_dir: FolderName


VideoCondition = (
    FirstFrameCondition | PrefixCondition | SuffixCondition | SpatialCropCondition | MaskCondition | ReferenceCondition
)
AudioCondition = PrefixCondition | SuffixCondition | MaskCondition | ReferenceCondition
VideoConditions = Annotated[tuple[Annotated[VideoCondition, Field(discriminator="type")], ...], FromList]
AudioConditions = Annotated[tuple[Annotated[AudioCondition, Field(discriminator="type")], ...], FromList]
