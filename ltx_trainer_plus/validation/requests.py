"""What validation is asked to make: the run file's samples with every default filled in."""

from dataclasses import dataclass

from ltx_trainer_plus.config import StreamRole, ValidationConfig
from ltx_trainer_plus.config.validation_conditions import Condition, ReferenceCondition
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.references import ReferenceScale


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate.

    Attributes:
        index: its place in `validation.samples`, from 0.
        frames: pixel frames; with `frame_rate` (per second) they set the duration, of audio alone too.
        video: what the video stream is to it: generated, frozen (given as a whole) or absent.
        audio: the same of the sound.
        conditions: what is given instead of generated.
    """

    index: int
    prompt: str
    width: int
    height: int
    frames: int
    frame_rate: float
    seed: int
    video: StreamRole = "generated"
    audio: StreamRole = "generated"
    conditions: tuple[Condition, ...] = ()

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.frames / self.frame_rate

    def video_latent_size(self, geometry: LatentGeometry) -> tuple[int, int, int]:
        """Latent frames, height and width."""
        return geometry.video_size(self.frames, self.height, self.width)

    def audio_latent_steps(self, geometry: LatentGeometry) -> int:
        return geometry.audio_steps(self.duration)


def sample_requests(config: ValidationConfig) -> tuple[SampleRequest, ...]:
    """The configured samples; what a sample leaves out it takes from the section."""
    requests = []
    for index, sample in enumerate(config.samples):
        width, height, frames = config.dims_of(sample)
        requests.append(
            SampleRequest(
                index=index,
                prompt=sample.prompt,
                width=width,
                height=height,
                frames=frames,
                frame_rate=config.frame_rate,
                seed=config.seed_of(sample),
                video=config.role_of(sample, "video"),
                audio=config.role_of(sample, "audio"),
                conditions=sample.conditions,
            )
        )
    return tuple(requests)


def with_reference_scale(config: ValidationConfig, scale: ReferenceScale) -> ValidationConfig:
    """The same samples with `scale` in those video references that leave theirs open."""

    def filled(condition: Condition) -> Condition:
        if not isinstance(condition, ReferenceCondition) or condition.stream != "video":
            return condition
        factors = {
            "downscale_factor": condition.downscale_factor or scale.spatial,
            "temporal_scale_factor": condition.temporal_scale_factor or scale.temporal,
        }
        return condition.model_copy(update=factors)

    samples = tuple(
        sample.model_copy(update={"conditions": tuple(map(filled, sample.conditions))}) for sample in config.samples
    )
    return config.model_copy(update={"samples": samples})
