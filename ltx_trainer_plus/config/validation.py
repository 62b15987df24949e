"""The `validation` section: what is generated during training, how often, and with which guidance."""

from typing import Annotated, Literal

from pydantic import Field

from ltx_trainer_plus.config.base import FromList, LocalPath, Section
from ltx_trainer_plus.config.strategy import StreamRole
from ltx_trainer_plus.config.validation_conditions import Conditions, Stream, frozen_stream

# Our own words; the official sentence is not copied.
DEFAULT_NEGATIVE_PROMPT = (
    "low quality, blurry or out of focus picture, heavy noise, compression blocks, flicker, jitter, ghosting, "
    "distorted faces, extra or fused fingers, deformed bodies, unnatural motion, washed-out or clipped colours, "
    "watermark, subtitles, on-screen text, muffled or crackling sound, speech out of sync with the lips, silence"
)

Positive = Annotated[int, Field(gt=0)]
VideoDims = Annotated[tuple[Positive, Positive, Positive], FromList]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class SampleConfig(Section):
    """One thing to generate. What is null comes from the `validation` section."""

    prompt: str
    conditions: Conditions = ()
    video_dims: VideoDims | None = None  # width, height, frames
    seed: Seed | None = None


class HeldOutConfig(Section):
    """The held-out loss. Exactly one of `preprocessed_data_root` (samples prepared apart) and `fraction` (of the data
    set: chosen by the hash of their names, and never trained on). `interval: null` = validation.interval."""

    preprocessed_data_root: LocalPath | None = None
    fraction: float | None = Field(default=None, gt=0, lt=1)
    sigmas: int = Field(default=4, gt=0)  # noise levels of each sample: quantiles of what training draws
    interval: int | None = Field(default=None, gt=0)


class ValidationConfig(Section):
    """Samples and sampling. `interval: null` means never, at start and end included."""

    samples: Annotated[tuple[SampleConfig, ...], FromList] = ()
    negative_prompt: str = DEFAULT_NEGATIVE_PROMPT
    video_dims: VideoDims = (960, 544, 89)  # width, height, frames
    frame_rate: float = Field(default=24.0, gt=0)
    seed: Seed = 42
    inference_steps: int = Field(default=30, gt=0)
    interval: int | None = Field(default=100, gt=0)
    video_cfg_scale: float = Field(default=3.0, ge=1)
    audio_cfg_scale: float = Field(default=7.0, ge=1)
    video_stg_scale: float = Field(default=1.0, ge=0)
    audio_stg_scale: float = Field(default=1.0, ge=0)
    # null = every block. Indices are compared with the model's number of blocks when the model is read.
    stg_blocks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], FromList] | None = (28,)
    guidance_rescale: float = Field(default=0.7, ge=0, le=1)
    video_modality_guidance_scale: float = Field(default=3.0, ge=1)
    audio_modality_guidance_scale: float = Field(default=3.0, ge=1)
    generate_audio: bool = True
    generate_video: bool = True
    skip_initial_validation: bool = False
    loss: HeldOutConfig | None = None
    on_error: Literal["raise", "warn"] = "raise"  # what samples that cannot be made do to the run

    @property
    def makes_samples(self) -> bool:
        """Whether a run ever generates samples."""
        return self.interval is not None and bool(self.samples)

    @property
    def loss_interval(self) -> int | None:
        """Steps between two held-out losses; None = there are none."""
        return None if self.loss is None else self.loss.interval or self.interval

    def dims_of(self, sample: SampleConfig) -> tuple[int, int, int]:
        """Width, height and frames of a sample."""
        return self.video_dims if sample.video_dims is None else sample.video_dims

    def seed_of(self, sample: SampleConfig) -> int:
        """The sample's own seed (0 is one), else the section's."""
        return self.seed if sample.seed is None else sample.seed

    def role_of(self, sample: SampleConfig, stream: Stream) -> StreamRole:
        """What a stream is to a sample: a frozen one is given as a whole, whether or not it would be generated."""
        if frozen_stream(sample.conditions) == stream:
            return "frozen"
        generated = self.generate_video if stream == "video" else self.generate_audio
        return "generated" if generated else "absent"
