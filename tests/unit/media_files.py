"""Real media files for tests: moving shapes and a tone, small enough to encode in a moment."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from ltx_trainer_plus.media.audio import read_audio, write_wav
from ltx_trainer_plus.media.video import read_video, write_video


def pictures(frames: int, width: int = 64, height: int = 64, seed: int = 0) -> np.ndarray:
    """(F, H, W, 3) uint8: a bright square that moves over a background of its own colour."""
    generator = np.random.default_rng(seed)
    result = np.empty((frames, height, width, 3), dtype=np.uint8)
    result[:] = generator.integers(30, 120, 3)
    side = height // 4
    for index, picture in enumerate(result):
        left = round((width - side) * index / max(frames - 1, 1))
        picture[height // 3 : height // 3 + side, left : left + side] = (250, 230, 60)
    return result


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0) -> torch.Tensor:
    """(2, N) float32."""
    wave = 0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(round(seconds * rate)) / rate)
    return wave.expand(2, -1)


def make_video(
    path: Path, frames: int = 25, fps: Fraction | float = 24, *, width: int = 64, height: int = 64, seed: int = 0
) -> Path:
    write_video(path, pictures(frames, width, height, seed), fps, tone(frames / float(fps)), 16_000)
    return path


def make_sound(path: Path, seconds: float = 1.5, hertz: float = 440.0) -> Path:
    write_wav(path, tone(seconds, hertz=hertz), 16_000)
    return path


def assert_same_media(one: Path, other: Path) -> None:
    """Both files show and play the same, but for the last bits of float32 and what encoders make of them.

    Not byte by byte: the kernels that a process picks may depend on where its memory lies; guidance magnifies the last
    bit, and H.264 and AAC then quantise another way here and there (3.3 levels on average were seen once, with the
    same sound to the bit, on a busy machine). Two different samples are 15 levels apart and more.
    """
    pictures, others = (read_video(path).frames.astype(int) for path in (one, other))
    assert pictures.shape == others.shape
    assert np.abs(pictures - others).mean() < 6
    sound, other_sound = read_audio(one), read_audio(other)
    assert (sound is None) == (other_sound is None)
    if sound is not None and other_sound is not None:
        assert sound.samples.shape == other_sound.samples.shape
        assert (sound.samples - other_sound.samples).abs().mean() < 1e-2
