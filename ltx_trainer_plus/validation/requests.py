"""What validation is asked to make: the run file's samples with every default filled in."""

from dataclasses import dataclass

from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.positions import LatentGeometry


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate.

    Attributes:
        index: its place in `validation.samples`, from 0.
        frames: pixel frames; with `frame_rate` (per second) they set the duration, of audio alone too.
        has_video: whether there is a video stream.
        has_audio: whether there is an audio stream.
    """

    index: int
    prompt: str
    width: int
    height: int
    frames: int
    frame_rate: float
    seed: int
    has_video: bool = True
    has_audio: bool = True

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.frames / self.frame_rate

    def video_latent_size(self, geometry: LatentGeometry) -> tuple[int, int, int]:
        """Latent frames, height and width."""
        frames = (self.frames - 1) // geometry.temporal + 1
        return frames, self.height // geometry.spatial, self.width // geometry.spatial

    def audio_latent_steps(self, geometry: LatentGeometry) -> int:
        """As many as the public pipelines generate for this duration, and at least one."""
        return max(1, round(self.duration * geometry.audio_latents_per_second))


def sample_requests(config: ValidationConfig) -> tuple[SampleRequest, ...]:
    """The configured samples; what a sample leaves out it takes from the section."""
    requests = []
    for index, sample in enumerate(config.samples):
        width, height, frames = sample.video_dims or config.video_dims
        requests.append(
            SampleRequest(
                index=index,
                prompt=sample.prompt,
                width=width,
                height=height,
                frames=frames,
                frame_rate=config.frame_rate,
                seed=config.seed if sample.seed is None else sample.seed,  # 0 is a seed
                has_video=config.generate_video,
                has_audio=config.generate_audio,
            )
        )
    return tuple(requests)
