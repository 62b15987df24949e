"""The `conditions` of a validation sample: which files it is given instead of generating everything."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ltx_trainer_plus.config.base import FromList, LocalPath, Section
from ltx_trainer_plus.config.conditions import Region, Stream

Count = Annotated[int, Field(ge=1)]


class _Condition(Section):
    """Whatever the kind: which stream it is about, and which files it reads."""

    @property
    def stream(self) -> Stream:
        return "video" if getattr(self, "audio", None) is None else "audio"

    @property
    def files(self) -> dict[str, Path]:
        """Field name and path of every file that is named."""
        return {name: value for name, value in self if isinstance(value, Path)}


class FirstFrameCondition(_Condition):
    """The first frame is given: a picture, or the first frame of a video."""

    type: Literal["first_frame"] = "first_frame"
    image_or_video: LocalPath


class _Boundary(_Condition):
    video: LocalPath | None = None
    num_frames: Count | None = None  # of the video, in frames of the sample's rate
    audio: LocalPath | None = None
    duration: float | None = Field(default=None, gt=0)  # of the audio, in seconds


class PrefixCondition(_Boundary):
    """The sample begins with the first frames of a video, or the first seconds of a sound."""

    type: Literal["prefix"] = "prefix"


class SuffixCondition(_Boundary):
    """The sample ends with the last frames of a video, or the last seconds of a sound."""

    type: Literal["suffix"] = "suffix"


class SpatialCropCondition(_Condition):
    """A rectangle of the video (brought to the sample's size) is given, all around it is generated."""

    type: Literal["spatial_crop"] = "spatial_crop"
    video: LocalPath
    spatial_region: Region  # in the sample's pixels


class MaskCondition(_Condition):
    """The video or the sound is given where the mask is 1 (white), and generated elsewhere."""

    type: Literal["mask"] = "mask"
    video: LocalPath | None = None
    audio: LocalPath | None = None
    mask: LocalPath


class ReferenceCondition(_Condition):
    """A whole clip stands before the sample for the model to look at (IC-LoRA).

    A scale that is null is the trained LoRA's own where that is known, else 1.
    """

    type: Literal["reference"] = "reference"
    video: LocalPath | None = None
    audio: LocalPath | None = None
    downscale_factor: Count | None = None  # the reference is so many times smaller than the sample
    temporal_scale_factor: Count | None = None  # the reference has one frame for so many of the sample
    include_in_output: bool = False  # beside the result


class VideoToAudioCondition(_Condition):
    """The whole video is given; its sound is generated."""

    type: Literal["video_to_audio"] = "video_to_audio"
    video: LocalPath


class AudioToVideoCondition(_Condition):
    """The whole sound is given; the video to it is generated."""

    type: Literal["audio_to_video"] = "audio_to_video"
    audio: LocalPath


Condition = (
    FirstFrameCondition
    | PrefixCondition
    | SuffixCondition
    | SpatialCropCondition
    | MaskCondition
    | ReferenceCondition
    | VideoToAudioCondition
    | AudioToVideoCondition
)
Conditions = Annotated[tuple[Annotated[Condition, Field(discriminator="type")], ...], FromList]


def frozen_stream(conditions: tuple[Any, ...]) -> Stream | None:
    """The stream that is given as a whole, if one is."""
    for condition in conditions:
        if isinstance(condition, VideoToAudioCondition | AudioToVideoCondition):
            return condition.stream
    return None
