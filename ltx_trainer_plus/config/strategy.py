"""The `training_strategy` section: which streams are trained, and where their latents lie."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ltx_trainer_plus.config.base import FromList, Section

StreamRole = Literal["generated", "frozen", "absent"]
DEFAULT_STRATEGY = "text_to_video"


def _inside_data_root(value: str) -> str:
    if not value.strip() or value.startswith(("/", "~")) or ".." in value.split("/"):
        raise PydanticCustomError(
            "latents_dir", "must be the name of a folder inside data.preprocessed_data_root, such as latents"
        )
    return value


FolderName = Annotated[str, AfterValidator(_inside_data_root)]


class StreamConfig(Section):
    """One stream (video or audio) of a training sample.

    `is_generated: false` is a frozen stream: given clean, at sigma 0, without a loss.
    """

    is_generated: bool = True
    latents_dir: FolderName
    # Bodies are not typed before conditions exist; config/unavailable.py refuses a list that is not empty.
    conditions: Annotated[tuple[dict[str, Any], ...], FromList] = ()


class VideoStreamConfig(StreamConfig):
    latents_dir: FolderName = "latents"


class AudioStreamConfig(StreamConfig):
    latents_dir: FolderName = "audio_latents"


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


class TextToVideoConfig(_Strategy):
    """The short form for video from text, with or without sound."""

    name: Literal["text_to_video"] = "text_to_video"
    # The official default is a probability above 0. It stays 0 here as long as there are no conditions: a default
    # that is refused would refuse every file that leaves it out.
    first_frame_conditioning_p: float = Field(default=0.0, ge=0, le=1)
    with_audio: bool = False
    audio_latents_dir: FolderName = "audio_latents"

    @property
    def video(self) -> StreamConfig | None:
        return VideoStreamConfig()

    @property
    def audio(self) -> StreamConfig | None:
        return AudioStreamConfig(latents_dir=self.audio_latents_dir) if self.with_audio else None


class VideoToVideoConfig(_Strategy):
    """The short form for video from a reference video; refused in config/unavailable.py until references exist."""

    name: Literal["video_to_video"] = "video_to_video"
    first_frame_conditioning_p: float = Field(default=0.0, ge=0, le=1)  # see TextToVideoConfig
    reference_latents_dir: FolderName = "reference_latents"

    @property
    def video(self) -> StreamConfig | None:
        return VideoStreamConfig()

    @property
    def audio(self) -> StreamConfig | None:
        return None


StrategyConfig = Annotated[FlexibleConfig | TextToVideoConfig | VideoToVideoConfig, Field(discriminator="name")]
STRATEGIES: dict[str, type[Section]] = {
    "flexible": FlexibleConfig,
    "text_to_video": TextToVideoConfig,
    "video_to_video": VideoToVideoConfig,
}
