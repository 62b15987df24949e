"""Video files to frames and back."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from numpy.typing import NDArray
from torch import Tensor

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.media.audio import Waveform, resample, to_stereo
from ltx_trainer_plus.media.files import MediaError, open_media

# ffmpeg's own threshold (-fps_mode cfr): timestamps closer than this to the constant rate are jitter, not a gap.
_JITTER_FRAMES = 1.1
_MAX_FPS = 480
_BT709 = 1
_AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)


@dataclass(frozen=True)
class VideoClip:
    """Decoded pictures at a constant rate.

    Attributes:
        frames: (F, H, W, 3) uint8 RGB, upright, square pixels.
        fps: frames per second, exact (24000/1001 stays that).
        start: seconds from the container's zero to the first frame; a sound track has its own.
    """

    frames: NDArray[np.uint8]
    fps: Fraction
    start: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration of the frames."""
        return float(len(self.frames) / self.fps)


def read_video(path: str | Path, max_frames: int | None = None) -> VideoClip:
    """Decode a video's first frames as a player shows them: rotated upright, square pixels.

    The rate is the file's average rate. A variable-rate file is brought to it by its timestamps (frames are repeated
    or dropped where they drift by more than a frame), so that pictures and sound stay together.

    Args:
        path: any container ffmpeg reads.
        max_frames: stop after so many frames; None = all.

    Raises:
        MediaError: not a video, damaged, or without frames.
    """
    path = Path(path)
    frames: list[NDArray[np.uint8]] = []
    start = 0.0
    with open_media(path) as container:
        if not container.streams.video:
            raise MediaError(path, "it has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        # Browsers record WebM with an average rate of 1000: their clock's, not the pictures'.
        rates = (stream.average_rate, stream.guessed_rate, stream.base_rate)
        fps = next((rate for rate in rates if rate and 0 < rate <= _MAX_FPS), None)
        if fps is None:
            raise MediaError(path, "it states no usable frame rate; convert it: ffmpeg -i IN -r 30 OUT.mp4")
        for frame in container.decode(stream):
            if not frames:
                start = frame.time or 0.0
            # How far this frame's time lies behind its place at the constant rate; without a timestamp: not at all.
            drift = 0.0 if frame.time is None else (frame.time - start) * float(fps) - len(frames)
            if drift < -_JITTER_FRAMES:
                continue
            if drift > _JITTER_FRAMES:
                room = round(drift) if max_frames is None else min(round(drift), max_frames - len(frames))
                frames.extend(frames[-1:] * room)
            if len(frames) != max_frames:
                frames.append(_upright_rgb(frame, stream.sample_aspect_ratio))
            if len(frames) == max_frames:
                break
    if not frames:
        raise MediaError(path, "no frame could be decoded")
    if any(frame.shape != frames[0].shape for frame in frames):
        raise MediaError(path, "its frames change size")
    return VideoClip(np.stack(frames), fps, start)


def _upright_rgb(frame: av.VideoFrame, pixel_aspect: Fraction | None) -> NDArray[np.uint8]:
    width = max(round(frame.width * pixel_aspect), 1) if pixel_aspect else frame.width
    picture = frame.to_ndarray(format="rgb24", width=width, interpolation=Interpolation.BICUBIC)
    # ffmpeg applies the display matrix in its own players only; decoded frames come as stored.
    return np.ascontiguousarray(np.rot90(picture, k=frame.rotation // 90))


def exact_frame_rate(fps: Fraction | float) -> Fraction:
    """The rate that a float means: 23.976 is 24000/1001, 12.5 is 25/2; a Fraction is taken as it is.

    Raises:
        ValueError: not a positive number.
    """
    if not fps > 0 or fps == float("inf"):
        raise ValueError(
            f"A frame rate of {fps} is impossible: give frames per second, e.g. 24 or Fraction(24000, 1001)."
        )
    if isinstance(fps, Fraction):
        return fps
    ntsc = Fraction(round(fps * 1.001) * 1000, 1001)
    if abs(float(ntsc) - fps) < 2e-4:
        return ntsc
    return Fraction(fps).limit_denominator(1001)


def write_video(
    path: str | Path,
    frames: NDArray[Any] | Tensor,
    fps: Fraction | float,
    audio: NDArray[Any] | Tensor | None = None,
    sample_rate: int | None = None,
) -> None:
    """Write an H.264 (and AAC) file that browsers play, at exactly this frame rate, whole or not at all.

    Args:
        path: its suffix chooses the container: .mp4, .mov or .mkv.
        frames: (F, H, W, 3) uint8 RGB, or floats in [0, 1]. Even sizes, as 4:2:0 colour needs.
        fps: frames per second; 23.976 and the like mean the NTSC rate (24000/1001).
        audio: (2, N) stereo or (1, N) mono in [-1, 1], or None for a silent file.
        sample_rate: of `audio`, in Hz.

    Raises:
        ValueError: shapes, sizes or values that cannot be written.
    """
    pictures = _as_uint8(frames)
    height, width = pictures.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(
            f"{path}: H.264 with 4:2:0 colour stores even sizes only, and these frames are {width}x{height}.\n"
            f"  Crop or resize them to {width + width % 2}x{height + height % 2}."
        )
    rate = exact_frame_rate(fps)
    waveform = None if audio is None else _as_stereo(audio, sample_rate)
    with replacing(path) as temporary, av.open(str(temporary), mode="w", options=_container_options(path)) as container:
        video = container.add_stream("libx264", rate=rate, options={"crf": "17", "preset": "medium"})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        # Tagged, because players guess the matrix of an untagged file from its size and show other colours.
        video.codec_context.colorspace = video.codec_context.color_primaries = video.codec_context.color_trc = _BT709
        video.codec_context.color_range = ColorRange.MPEG
        # Both streams must exist before the first packet: the container's header lists them.
        sound = container.add_stream("aac", rate=waveform.rate, layout="stereo", bit_rate=192_000) if waveform else None
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None and waveform is not None:
            samples = av.AudioFrame.from_ndarray(waveform.samples.numpy(), format="fltp", layout="stereo")
            samples.sample_rate = waveform.rate
            # With a time stamp the encoder dates its priming samples before zero, and players leave them out; without
            # one all sound would come 1,024 samples late.
            samples.pts, samples.time_base = 0, Fraction(1, waveform.rate)
            container.mux(sound.encode(samples))
            container.mux(sound.encode(None))


def _container_options(path: str | Path) -> dict[str, str]:
    # The index first, so that a browser starts playing before it has the whole file.
    return {"movflags": "+faststart"} if Path(path).suffix.lower() in (".mp4", ".mov") else {}


def _as_uint8(frames: NDArray[Any] | Tensor) -> NDArray[np.uint8]:
    if isinstance(frames, Tensor):
        frames = frames.detach().cpu()
        frames = (frames.float() if frames.is_floating_point() else frames).numpy()
    array = np.asarray(frames)
    if array.ndim != 4 or array.shape[-1] != 3 or 0 in array.shape:
        raise ValueError(f"Frames must be (F, H, W, 3) with at least one frame; these are {tuple(array.shape)}.")
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"Frames must be uint8, or floats in [0, 1]; these are {array.dtype}.")
    low, high = float(array.min()), float(array.max())
    if not (low >= -0.01 and high <= 1.01):
        raise ValueError(
            f"Float frames must lie in [0, 1]; these reach from {low:.3g} to {high:.3g}.\n"
            "  Map them first: x / 2 + 0.5 for a VAE's [-1, 1], x / 255 for [0, 255]."
        )
    return np.rint(array.astype(np.float32).clip(0, 1) * 255).astype(np.uint8)


def _as_stereo(audio: NDArray[Any] | Tensor, sample_rate: int | None) -> Waveform:
    waveform = torch.as_tensor(audio).detach().float().cpu()
    if waveform.ndim != 2 or waveform.shape[0] not in (1, 2) or not sample_rate:
        raise ValueError(
            f"Audio must be (2, samples) or (1, samples) with its sample rate; this is {tuple(waveform.shape)} "
            f"at {sample_rate} Hz."
        )
    if sample_rate not in _AAC_RATES:
        waveform, sample_rate = resample(waveform, sample_rate, 48000), 48000
    # The encoder fails on what is not finite; a diverged model's sample shall be silent, not fatal.
    return Waveform(to_stereo(waveform).nan_to_num().clamp(-1, 1).contiguous(), sample_rate)
