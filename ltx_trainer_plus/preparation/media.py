"""One clip from disk to what the VAEs encode."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltx_trainer_plus.media.audio import Waveform, read_audio, resample, to_stereo
from ltx_trainer_plus.media.files import MediaError
from ltx_trainer_plus.media.geometry import cover_and_crop
from ltx_trainer_plus.media.image import is_image, read_image
from ltx_trainer_plus.media.mel import MIN_SAMPLES, SAMPLE_RATE
from ltx_trainer_plus.media.video import VideoClip, read_video
from ltx_trainer_plus.preparation.buckets import Bucket, choose_bucket
from ltx_trainer_plus.preparation.clips import Clip, Reason

# A still has no rate of its own; its one frame lasts as long as one of the usual clips'.
_STILL_FPS = Fraction(24)
# Sound beyond the last frame that the resampling filter sees.
_MARGIN_SECONDS = 0.1


class SkipClip(Exception):
    """This clip cannot be prepared; the run goes on."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason
        self.detail = detail


@dataclass(frozen=True)
class LoadedClip:
    """A clip brought to its bucket.

    Attributes:
        bucket: its size.
        frames: (F, H, W, 3) uint8.
        fps: the clip's own frame rate.
        sound: (2, N) at 16 kHz, exactly as long as the frames; None where no sound is asked for.
    """

    bucket: Bucket
    frames: NDArray[np.uint8]
    fps: Fraction
    sound: Tensor | None

    @property
    def seconds(self) -> float:
        return float(len(self.frames) / self.fps)


def load_clip(clip: Clip, buckets: Sequence[Bucket], *, with_audio: bool) -> LoadedClip:
    """Decode a clip's first frames (and their sound), resized to cover its bucket and centre-cropped.

    Raises:
        SkipClip: unreadable, too short for every bucket, or without a sound track where sound is asked for.
    """
    try:
        if is_image(clip.path):
            video = VideoClip(read_image(clip.path)[None], _STILL_FPS)
        else:
            video = read_video(clip.path, max_frames=max(bucket.frames for bucket in buckets))
        height, width = video.frames.shape[1:3]
        bucket = choose_bucket(buckets, width=width, height=height, frames=len(video.frames))
        if bucket is None:
            raise SkipClip("too short", _too_short(clip, video, buckets))
        frames = cover_and_crop(video.frames[: bucket.frames], bucket.height, bucket.width)
        sound = _sound(clip, video, bucket.frames) if with_audio else None
    except MediaError as error:
        raise SkipClip("unreadable", error.reason) from error
    return LoadedClip(bucket, frames, video.fps, sound)


def _too_short(clip: Clip, video: VideoClip, buckets: Sequence[Bucket]) -> str:
    least = min(bucket.frames for bucket in buckets)
    if is_image(clip.path):
        return "a picture is one frame, and no bucket has one; add e.g. 960x544x1 to --resolution-buckets"
    return f"it has {len(video.frames)} frames ({video.seconds:.2f} s), and the shortest bucket needs {least}"


def _sound(clip: Clip, video: VideoClip, frames: int) -> Tensor:
    """The sound that belongs to the first `frames`: cut, or padded with silence."""
    seconds = float(frames / video.fps)
    length = round(seconds * SAMPLE_RATE)
    if length < MIN_SAMPLES:
        raise SkipClip(
            "too short", f"{seconds:.3f} s are too short for the audio VAE ({MIN_SAMPLES / SAMPLE_RATE:.3f} s)"
        )
    track = None if is_image(clip.path) else read_audio(clip.path, max_seconds=video.start + seconds + _MARGIN_SECONDS)
    if track is None:
        raise SkipClip("silent", "it has no sound track; leave it out, or prepare the data set with --skip-audio")
    return fit_sound(track, start=video.start, length=length, rate=SAMPLE_RATE)


def fit_sound(track: Waveform, *, start: float, length: int, rate: int) -> Tensor:
    """(2, length) at `rate`, beginning `start` seconds into the container; silence where the track has none."""
    # The track may begin before or after the first frame.
    offset = round((start - track.start) * track.rate)
    samples = to_stereo(track.samples)
    samples = torch.nn.functional.pad(samples, (-offset, 0)) if offset < 0 else samples[:, offset:]
    needed = round((length / rate + _MARGIN_SECONDS) * track.rate)
    samples = resample(samples[:, :needed], track.rate, rate)[:, :length]
    return torch.nn.functional.pad(samples, (0, length - samples.shape[1]))
