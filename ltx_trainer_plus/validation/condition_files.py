"""The files of conditions, read and brought to their sample's size, rate and place; no model is involved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ltx_trainer_plus.config import Problem
from ltx_trainer_plus.config.validation_conditions import (
    AudioToVideoCondition,
    Condition,
    FirstFrameCondition,
    MaskCondition,
    PrefixCondition,
    ReferenceCondition,
    SpatialCropCondition,
    SuffixCondition,
    VideoToAudioCondition,
)
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.media.files import MediaError
from ltx_trainer_plus.media.mel import MIN_SAMPLES, SAMPLE_RATE
from ltx_trainer_plus.validation import media
from ltx_trainer_plus.validation.media import Frames, Place
from ltx_trainer_plus.validation.requests import SampleRequest


@dataclass(frozen=True)
class LoadedCondition:
    """A condition's files, ready to be encoded.

    Attributes:
        clip: what a VAE encodes: (F, H, W, 3) uint8 frames, or (2, N) sound at 16 kHz.
        is_given: latent cells (F, H, W) or steps (T,) of the sample that are given; None for a reference.
        last: how many of the encoded latent frames (steps) count, from the end; None = all.
        at: latent frame (step) of the sample at which they stand.
    """

    clip: Frames | Tensor
    is_given: Tensor | None
    last: int | None = None
    at: int = 0


def check_condition_files(requests: Sequence[SampleRequest], geometry: LatentGeometry) -> list[Problem]:
    """Read every file of the conditions, and find those that cannot be used. No model is needed."""
    problems = []
    for request in requests:
        for number, condition in enumerate(request.conditions):
            try:
                load_condition(condition, request, geometry)
            except MediaError as error:
                problems.append(_problem(error, request, number, condition))
    return problems


def _problem(error: MediaError, request: SampleRequest, number: int, condition: Condition) -> Problem:
    names = [name for name, path in condition.files.items() if path == error.path]
    field = f".{names[0]}" if names else ""
    return Problem(f"validation.samples.{request.index}.conditions.{number}{field}", f"{error.path}: {error.reason}")


def load_condition(condition: Condition, request: SampleRequest, geometry: LatentGeometry) -> LoadedCondition:
    """Read a condition's files, brought to the sample's size and rate.

    Raises:
        MediaError: unreadable, too short, or of a wrong size.
    """
    load = _load_video if condition.stream == "video" else _load_audio
    try:
        return load(condition, request, geometry)
    except MediaError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # whatever a damaged file makes a library say
        raise MediaError(next(iter(condition.files.values())), str(error)) from error


def _load_video(condition: Condition, request: SampleRequest, geometry: LatentGeometry) -> LoadedCondition:
    place = Place(request.width, request.height, request.frames, request.frame_rate)
    size = request.video_latent_size(geometry)
    given = torch.zeros(size, dtype=torch.bool)
    match condition:
        case FirstFrameCondition():
            given[:1] = True
            return LoadedCondition(media.first_picture(condition.image_or_video, place), given)
        case PrefixCondition(video=Path() as video, num_frames=int() as count):
            given[: geometry.latent_frames(count)] = True
            return LoadedCondition(media.first_frames(video, place, count), given)
        case SuffixCondition(video=Path() as video, num_frames=int() as count):
            kept = geometry.latent_frames_at_end(count)
            given[size[0] - kept :] = True
            # One frame more in front: the VAE's first latent frame is a single frame, and stands nowhere but there.
            clip = media.last_frames(video, place, geometry.pixel_frames(1 + kept), at_least=count)
            return LoadedCondition(clip, given, last=kept, at=size[0] - kept)
        case SpatialCropCondition():
            given[:, *geometry.cells_in(condition.spatial_region)] = True
            return LoadedCondition(media.first_frames(condition.video, place, place.frames), given)
        case MaskCondition(video=Path() as video):
            given = media.video_mask(condition.mask, video, place, size, geometry.causal_offset)
            return LoadedCondition(media.first_frames(video, place, place.frames), given)
        case VideoToAudioCondition():
            return LoadedCondition(media.first_frames(condition.video, place, place.frames), ~given)
        case ReferenceCondition(video=Path() as video):
            return LoadedCondition(_load_reference(condition, video, place, geometry), None)
    raise AssertionError(f"{condition} is not about the video")


def _load_reference(condition: ReferenceCondition, video: Path, place: Place, geometry: LatentGeometry) -> Frames:
    spatial, temporal = condition.downscale_factor or 1, condition.temporal_scale_factor or 1
    small = Place(
        place.width // spatial,
        place.height // spatial,
        (place.frames - 1) // temporal + 1,
        place.frame_rate / temporal,
    )
    frames = media.first_frames(video, small, small.frames, at_least=1)
    # A shorter reference is fine; only whole latent frames of it can be used.
    return frames[: geometry.pixel_frames(geometry.latent_frames(len(frames)))]


def _load_audio(condition: Condition, request: SampleRequest, geometry: LatentGeometry) -> LoadedCondition:
    steps, seconds = request.audio_latent_steps(geometry), request.duration
    if round(seconds * SAMPLE_RATE) < MIN_SAMPLES:
        path = next(iter(condition.files.values()))
        raise MediaError(path, f"the sample lasts {seconds:.3f} s, which is too short for the audio VAE")
    given = torch.zeros(steps, dtype=torch.bool)
    match condition:
        case PrefixCondition(audio=Path() as audio, duration=float() as duration):
            _check_length(audio, duration)
            given[: geometry.audio_steps(duration)] = True
            return LoadedCondition(media.first_sound(audio, seconds), given)
        case SuffixCondition(audio=Path() as audio, duration=float() as duration):
            _check_length(audio, duration)
            given[steps - geometry.audio_steps(duration) :] = True
            # The file's end is put at the sample's end, and encoded there.
            return LoadedCondition(media.last_sound(audio, seconds), given)
        case MaskCondition(audio=Path() as audio):
            given = media.audio_mask(condition.mask, steps, geometry)
            return LoadedCondition(media.first_sound(audio, seconds), given)
        case AudioToVideoCondition():
            return LoadedCondition(media.first_sound(condition.audio, seconds), ~given)
        case ReferenceCondition(audio=Path() as audio):
            length = max(min(seconds, media.sound_seconds(audio)), MIN_SAMPLES / SAMPLE_RATE)
            return LoadedCondition(media.first_sound(audio, length), None)
    raise AssertionError(f"{condition} is not about the sound")


def _check_length(audio: Path, duration: float) -> None:
    seconds = media.sound_seconds(audio)
    # A sound track may end a few milliseconds before its pictures.
    if seconds < duration - 0.05:
        raise MediaError(audio, f"it lasts {seconds:.3f} s, and {duration:g} s of it are asked for")
