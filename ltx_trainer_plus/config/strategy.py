"""The `training_strategy` section: which streams are trained, on which latents, under which conditions."""

from typing import Annotated, Literal

from pydantic import Field

from ltx_trainer_plus.config.base import Section
from ltx_trainer_plus.config.conditions import (
    AudioConditions,
    FirstFrameCondition,
    FolderName,
    ReferenceCondition,
    TrainingCondition,
    VideoConditions,
)

StreamRole = Literal["generated", "frozen", "absent"]
DEFAULT_STRATEGY = "text_to_video"
_FIRST_FRAME_P = 0.1  # the official default


class StreamConfig(Section):
    """One stream (video or audio) of a training sample.

    `is_generated: false` is a frozen stream: given clean, at sigma 0, without a loss.
    """

    is_generated: bool = True
    latents_dir: FolderName
    conditions: tuple[TrainingCondition, ...] = ()


class VideoStreamConfig(StreamConfig):
    latents_dir: FolderName = "latents"
    conditions: VideoConditions = ()


class AudioStreamConfig(StreamConfig):
    latents_dir: FolderName = "audio_latents"
    conditions: AudioConditions = ()


def _role(stream: StreamConfig | None) -> StreamRole:
    if stream is None:
        return "absent"
    return "generated" if stream.is_generated else "frozen"


class _Strategy(Section):
    """What the three official forms have in common for the rest of the program: `.video`, `.audio` and their roles."""

    @property
    def video_role(self) -> StreamRole:
        return _role(self.video)  # type: ignore[attr-defined]

    @property
    def audio_role(self) -> StreamRole:
        return _role(self.audio)  # type: ignore[attr-defined]


class FlexibleConfig(_Strategy):
    """The general form: each stream is described, or null when it takes no part."""

    name: Literal["flexible"] = "flexible"
    video: VideoStreamConfig | None = None
    audio: AudioStreamConfig | None = None


class _ShortForm(_Strategy):
    """An older way to write a strategy; `as_flexible` is what it means."""

    first_frame_conditioning_p: float = Field(default=_FIRST_FRAME_P, ge=0, le=1)

    def as_flexible(self) -> FlexibleConfig:
        return FlexibleConfig(video=self.video, audio=self.audio)  # type: ignore[attr-defined]

    def _first_frame(self) -> tuple[FirstFrameCondition, ...]:
        p = self.first_frame_conditioning_p
        return (FirstFrameCondition(probability=p),) if p > 0 else ()


class TextToVideoConfig(_ShortForm):
    """The short form for video from text, with or without sound."""

    name: Literal["text_to_video"] = "text_to_video"
    with_audio: bool = False
    audio_latents_dir: FolderName = "audio_latents"

    @property
    def video(self) -> VideoStreamConfig | None:
        return VideoStreamConfig(conditions=self._first_frame())

    @property
    def audio(self) -> AudioStreamConfig | None:
        return AudioStreamConfig(latents_dir=self.audio_latents_dir) if self.with_audio else None


class VideoToVideoConfig(_ShortForm):
    """The short form for video from a reference video (LoRA only)."""

    name: Literal["video_to_video"] = "video_to_video"
    reference_latents_dir: FolderName = "reference_latents"

    @property
    def video(self) -> VideoStreamConfig | None:
        reference = ReferenceCondition(latents_dir=self.reference_latents_dir)
        return VideoStreamConfig(conditions=(reference, *self._first_frame()))

    @property
    def audio(self) -> AudioStreamConfig | None:
        return None


StrategyConfig = Annotated[FlexibleConfig | TextToVideoConfig | VideoToVideoConfig, Field(discriminator="name")]
STRATEGIES: dict[str, type[Section]] = {
    "flexible": FlexibleConfig,
    "text_to_video": TextToVideoConfig,
    "video_to_video": VideoToVideoConfig,
}
