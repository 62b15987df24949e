"""The log-mel spectrogram that the LTX-2 audio VAE was trained on."""

from functools import lru_cache

import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

SAMPLE_RATE = 16_000
_WINDOW = 1024
_HOP = 160
_BANDS = 64
_FLOOR = 1e-5
# Below this the centred window's reflected edge has no samples to mirror.
MIN_SAMPLES = _WINDOW // 2 + 1


def log_mel(waveform: Tensor) -> Tensor:
    """Spectrogram of a stereo waveform at 16 kHz.

    Args:
        waveform: (2, N) float in [-1, 1], at least 513 samples.

    Returns:
        (1, 2, T, 64) natural log of the mel magnitudes, T = N // 160 + 1.

    Raises:
        ValueError: too short for one window.

    Source: the official audio processing: 1024-point periodic Hann window, hop 160, centred with reflected edges,
        magnitude (not power), 64 Slaney mel bands from 0 to 8000 Hz with Slaney normalisation.
    """
    if waveform.ndim != 2 or waveform.shape[0] != 2:
        raise ValueError(f"The waveform must be stereo, (2, samples); this is {tuple(waveform.shape)}.")
    if waveform.shape[1] < MIN_SAMPLES:
        raise ValueError(
            f"{waveform.shape[1]} samples at {SAMPLE_RATE} Hz are too few: the spectrogram's window needs at least "
            f"{MIN_SAMPLES} ({MIN_SAMPLES / SAMPLE_RATE:.3f} s).\n  Use a longer clip, or leave its sound out."
        )
    window = torch.hann_window(_WINDOW, device=waveform.device)
    spectrum = torch.stft(
        waveform.float(), _WINDOW, _HOP, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    mel = _filters().to(waveform.device) @ spectrum.abs()  # (2, 64, T)
    return mel.clamp(min=_FLOOR).log().transpose(1, 2)[None]


@lru_cache(maxsize=1)
def _filters() -> Tensor:
    """(64, 513) triangles, equally spaced in mel, each of unit area in Hz."""
    filters = mel_filter_bank(
        _WINDOW // 2 + 1, _BANDS, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(filters).T.float()
