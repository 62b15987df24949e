"""Sound tracks to waveforms and back."""

import math
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.media.files import MediaError, open_media

# Resampling filter: zero crossings of the sinc on each side, and the cut-off as a share of the lower Nyquist rate.
_ZERO_CROSSINGS = 6
_ROLL_OFF = 0.99


@dataclass(frozen=True)
class Waveform:
    """Decoded sound.

    Attributes:
        samples: (1 or 2, N) float32, full scale is [-1, 1].
        rate: samples per second.
        start: seconds from the container's zero to the first sample.
    """

    samples: Tensor
    rate: int
    start: float = 0.0


def read_audio(path: str | Path, max_seconds: float | None = None) -> Waveform | None:
    """Decode a file's first sound track at its own rate; None where it has none.

    More than two channels are mixed down to stereo with ffmpeg's matrix; mono stays mono.

    Args:
        path: any container ffmpeg reads.
        max_seconds: stop soon after so many seconds from the container's zero; None = all.

    Raises:
        MediaError: damaged, or a track without samples.
    """
    path = Path(path)
    chunks: list[NDArray[np.float32]] = []
    start = 0.0
    with open_media(path) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        rate = stream.rate
        layout = "mono" if stream.channels == 1 else "stereo"
        # Changes the sample format and mixes channels; the rate stays, since ffmpeg's resampler is audibly worse.
        converter = av.AudioResampler(format="fltp", layout=layout, rate=rate)
        for frame in container.decode(stream):
            if not chunks:
                start = frame.time or 0.0
            chunks.extend(_float32(converter.resample(frame)))
            if max_seconds is not None and start + sum(chunk.shape[1] for chunk in chunks) / rate >= max_seconds:
                break
        else:
            if chunks:
                chunks.extend(_float32(converter.resample(None)))
    if not chunks:
        raise MediaError(path, "its sound track has no samples")
    return Waveform(torch.from_numpy(np.concatenate(chunks, axis=1)), rate, start)


def _float32(frames: list[av.AudioFrame]) -> list[NDArray[np.float32]]:
    return [frame.to_ndarray().astype(np.float32, copy=False) for frame in frames]


def to_stereo(samples: Tensor) -> Tensor:
    """(1 or 2, N) to (2, N): mono plays at full level on both sides."""
    return samples.expand(2, -1)


def resample(samples: Tensor, rate: int, new_rate: int) -> Tensor:
    """Band-limited resampling along the last dimension.

    Args:
        samples: (..., N) float.
        rate: samples per second of the input, in Hz.
        new_rate: of the output.

    Returns:
        (..., ceil(N * new_rate / rate)).

    Source: Hann-windowed sinc interpolation with torchaudio's default parameters, as official preparation resamples.
    """
    if rate == new_rate:
        return samples
    cutoff = min(rate, new_rate) * _ROLL_OFF
    reach = math.ceil(_ZERO_CROSSINGS * rate / cutoff)
    taps = torch.arange(-reach, reach + 1)
    padded = torch.nn.functional.pad(samples.float(), (reach, reach))
    pieces = []
    # A second at a time: each output sample has weights of its own, so that any two rates work.
    for outputs in torch.arange(math.ceil(samples.shape[-1] * new_rate / rate)).split(new_rate):
        nearest = outputs * rate // new_rate
        beyond = (outputs * rate % new_rate).double() / new_rate
        distance = ((taps - beyond[:, None]) / rate * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
        window = torch.cos(distance * math.pi / _ZERO_CROSSINGS / 2) ** 2
        weights = (torch.sinc(distance) * window * cutoff / rate).float()
        pieces.append((padded[..., nearest[:, None] + taps + reach] * weights).sum(-1))
    return torch.cat(pieces, dim=-1)


def write_wav(path: str | Path, samples: Tensor | NDArray[Any], rate: int) -> None:
    """Write a 16-bit WAV file, whole or not at all.

    Args:
        path: ends in .wav.
        samples: (channels, N) in [-1, 1]; louder samples are clipped.
        rate: samples per second.
    """
    waveform = torch.as_tensor(samples).detach().float().cpu()
    if waveform.ndim != 2 or not 1 <= waveform.shape[0] <= 8:
        raise ValueError(f"Audio must be (channels, samples) with at most 8 channels; this is {tuple(waveform.shape)}.")
    pcm = (waveform.nan_to_num().clamp(-1, 1) * 32767).round().short()
    with replacing(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(waveform.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm.T.contiguous().numpy().astype("<i2").tobytes())
