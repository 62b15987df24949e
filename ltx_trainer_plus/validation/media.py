"""Files of conditions as pictures and sound of the sample's size and rate; no model is involved."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions
from ltx_trainer_plus.media.audio import Waveform, read_audio
from ltx_trainer_plus.media.files import MediaError
from ltx_trainer_plus.media.geometry import cover_and_crop
from ltx_trainer_plus.media.image import is_image, read_image
from ltx_trainer_plus.media.mel import SAMPLE_RATE
from ltx_trainer_plus.media.video import read_video
from ltx_trainer_plus.preparation.media import fit_sound

Frames = NDArray[np.uint8]
# Rates closer than this are one rate (24 and 24000/1001): frames are neither repeated nor dropped.
_SAME_RATE = 0.002


@dataclass(frozen=True)
class Place:
    """What a sample is made of: where a clip has to fit in."""

    width: int
    height: int
    frames: int
    frame_rate: float

    @property
    def seconds(self) -> float:
        return self.frames / self.frame_rate


def first_picture(path: Path, place: Place) -> Frames:
    """(1, height, width, 3): a picture, or a video's first frame."""
    frames = _still(path) if is_image(path) else read_video(path, max_frames=1).frames
    return cover_and_crop(frames, place.height, place.width)


def first_frames(path: Path, place: Place, count: int, *, at_least: int | None = None) -> Frames:
    """The first `count` frames at the place's rate and size, (F, height, width, 3).

    Args:
        at_least: fewer than `count` frames will do, down to this many.

    Raises:
        MediaError: unreadable, or too short.
    """
    frames = _still(path) if is_image(path) else _at_rate(path, place.frame_rate, count)
    needed = count if at_least is None else at_least
    if len(frames) < needed:
        raise MediaError(path, _too_short(len(frames), needed, place.frame_rate))
    return cover_and_crop(frames[:count], place.height, place.width)


def last_frames(path: Path, place: Place, count: int, *, at_least: int) -> Frames:
    """The last `count` frames; where the file has fewer (but `at_least`), its first one is repeated in front."""
    frames = _still(path) if is_image(path) else _at_rate(path, place.frame_rate, None)
    if len(frames) < at_least:
        raise MediaError(path, _too_short(len(frames), at_least, place.frame_rate))
    frames = cover_and_crop(frames[-count:], place.height, place.width)
    return np.concatenate([frames[:1].repeat(count - len(frames), axis=0), frames])


def _still(path: Path) -> Frames:
    return np.array(read_image(path)[None])  # a copy: torch wants memory that can be written


def _at_rate(path: Path, rate: float, count: int | None) -> Frames:
    """A video's first `count` frames (None = all) as a player at `rate` frames per second would show them."""
    own_rate = read_video(path, max_frames=1).fps
    step = own_rate / Fraction(rate).limit_denominator(100_000)  # frames of the file in one of the sample
    if abs(step - 1) < _SAME_RATE:
        step = Fraction(1)
    frames = read_video(path, max_frames=None if count is None else int(step * count) + 1).frames
    shown = [min(int(step * index), len(frames) - 1) for index in range(-(-len(frames) // step))]
    return frames[shown[:count]]


def _too_short(given: int, needed: int, rate: float) -> str:
    return f"it has {given} frames at {rate:g} frames per second, and {needed} are needed"


def first_sound(path: Path, seconds: float) -> Tensor:
    """(2, N) at 16 kHz: the first `seconds`, silence where the file is shorter."""
    return fit_sound(_track(path, seconds + 1), start=0.0, length=round(seconds * SAMPLE_RATE), rate=SAMPLE_RATE)


def last_sound(path: Path, seconds: float) -> Tensor:
    """(2, N) at 16 kHz: the last `seconds`, silence in front where the file is shorter."""
    track = _track(path, None)
    end = track.start + track.samples.shape[1] / track.rate
    return fit_sound(track, start=end - seconds, length=round(seconds * SAMPLE_RATE), rate=SAMPLE_RATE)


def sound_seconds(path: Path) -> float:
    """How long the sound is."""
    track = _track(path, None)
    return track.start + track.samples.shape[1] / track.rate


def _track(path: Path, max_seconds: float | None) -> Waveform:
    track = read_audio(path, max_seconds=max_seconds)
    if track is None:
        raise MediaError(path, "it has no sound track")
    return track


def video_mask(path: Path, video: Path, place: Place, latent_size: tuple[int, int, int], causal: int) -> Tensor:
    """(F, H, W) bool of latent cells: True where the mask is 1 (white), so where the video is given.

    A picture counts for all frames. A cell is given when more than half of its pixels are. A `.pt` or `.safetensors`
    file holds the latent cells themselves, as prepared masks do.

    Args:
        video: what the mask belongs to; both have the same size in pixels, and are cropped alike.
        latent_size: latent frames, height and width of the sample.
        causal: pixel frames in the first latent frame.

    Raises:
        MediaError: unreadable, or of another size.
    """
    if _holds_tensors(path):
        return _stored_mask(path, latent_size)
    pictures = _still(path) if is_image(path) else _at_rate(path, place.frame_rate, place.frames)
    height, width = read_video(video, max_frames=1).frames.shape[1:3]
    if pictures.shape[1:3] not in ((height, width), (place.height, place.width)):
        raise MediaError(
            path,
            f"the mask is {pictures.shape[2]}x{pictures.shape[1]}; it must be as large as the video "
            f"({width}x{height}) or the sample ({place.width}x{place.height})",
        )
    if len(pictures) not in (1, place.frames):
        raise MediaError(path, _too_short(len(pictures), place.frames, place.frame_rate))
    pictures = cover_and_crop(pictures, place.height, place.width)
    given = torch.tensor(pictures, dtype=torch.float32).mean(-1).div(255)  # (frames, height, width)
    frames, rows, columns = latent_size
    cells = given.view(len(given), rows, place.height // rows, columns, place.width // columns).mean((2, 4))
    if len(cells) == 1:
        return (cells > 0.5).expand(latent_size)
    first, rest = cells[:causal].mean(0, keepdim=True), cells[causal:]
    if frames == 1:
        return first > 0.5
    return torch.cat([first, rest.view(frames - 1, -1, rows, columns).mean(1)]) > 0.5


def audio_mask(path: Path, steps: int, geometry: LatentGeometry) -> Tensor:
    """(steps,) bool of audio latent steps: True where the sound is given.

    A sound file is one whose level is 1 where the sound is given and 0 elsewhere; `.pt` and `.safetensors` files hold
    the latent steps themselves, as prepared masks do.
    """
    if _holds_tensors(path):
        return _stored_mask(path, (steps,))
    track = _track(path, None)
    level = track.samples.abs().amax(0)
    spans = (audio_positions(steps, geometry)[0, 0] * track.rate).round().long()
    parts = [level[start:end] for start, end in spans.tolist()]
    return torch.tensor([bool(len(part)) and float(part.mean()) > 0.5 for part in parts])


def _holds_tensors(path: Path) -> bool:
    return path.suffix.lower() in (".pt", ".safetensors")


def _stored_mask(path: Path, shape: tuple[int, ...]) -> Tensor:
    try:
        # weights_only: a pickled object could run code.
        stored = torch.load(path, weights_only=True) if path.suffix.lower() == ".pt" else load_file(path)
    except (SafetensorError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise MediaError(path, f"it cannot be read ({str(error).splitlines()[0]})") from error
    except Exception as error:  # torch raises pickle.UnpicklingError and others
        raise MediaError(path, "it holds a pickled object, which could run code; save the mask as a tensor") from error
    mask = stored.get("mask") if isinstance(stored, dict) else stored
    if not isinstance(mask, Tensor):
        raise MediaError(path, "it holds no tensor named mask")
    if tuple(mask.shape) != shape:
        wanted, given = "x".join(map(str, shape)), "x".join(map(str, mask.shape))
        raise MediaError(path, f"the mask has {given} latent cells, and the sample has {wanted}")
    if not bool(mask.float().isfinite().all()):
        raise MediaError(path, "the mask holds values that are not finite")
    return mask.float() > 0.5
