"""The spectrogram, compared with other implementations of the same definition."""

import math

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from ltx_trainer_plus.media.mel import MIN_SAMPLES, SAMPLE_RATE, log_mel


def noise_and_tones(samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(samples) / SAMPLE_RATE
    tones = torch.stack([torch.sin(2 * math.pi * hertz * time) for hertz in (440.0, 3000.0)])
    return 0.3 * tones + 0.05 * torch.randn(2, samples, generator=generator)


def test_the_spectrogram_equals_the_one_transformers_computes() -> None:
    waveform = noise_and_tones(16_667)
    result = log_mel(waveform)
    assert result.shape == (1, 2, 16_667 // 160 + 1, 64)
    filters = mel_filter_bank(513, 64, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    for channel in range(2):
        expected = spectrogram(
            waveform[channel].double().numpy(),
            window_function(1024, "hann", periodic=True),
            frame_length=1024,
            hop_length=160,
            power=1.0,
            center=True,
            pad_mode="reflect",
            mel_filters=filters,
            mel_floor=1e-5,
            log_mel="log",
        )
        # float32 against float64
        assert np.abs(result[0, channel].numpy() - expected.T).max() < 2e-4


def test_the_bands_are_slaneys_64_triangles_from_0_to_8000_hertz() -> None:
    """By the definition of the scale, linear up to 1000 Hz (15 mel) and then 27 mel to each factor of 6.4."""
    mel = np.linspace(0, 15 + 27 * math.log(8) / math.log(6.4), 66)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * math.log(6.4) / 27))
    window = torch.hann_window(1024, dtype=torch.float64)
    # One impulse: a flat spectrum of the window's height there, so that a band shows the sum of its triangle.
    impulse = torch.zeros(2, 16_000)
    impulse[:, 8000] = 1
    found = log_mel(impulse)[0, 0, 50].double().exp()
    frequencies = np.arange(513) * SAMPLE_RATE / 1024
    for band in range(64):
        low, middle, high = edges[band : band + 3]
        triangle = np.interp(frequencies, [low, middle, high], [0, 1, 0]) * 2 / (high - low)
        assert float(found[band]) == pytest.approx(float(window[512]) * triangle.sum(), rel=1e-5)


def test_silence_is_the_floor() -> None:
    assert torch.equal(log_mel(torch.zeros(2, 4000)), torch.full((1, 2, 26, 64), 1e-5).log())


def test_a_second_gives_about_a_hundred_and_one_frames() -> None:
    assert log_mel(torch.zeros(2, SAMPLE_RATE)).shape == (1, 2, 101, 64)


def test_too_short_a_waveform_is_refused_with_the_least_length() -> None:
    assert log_mel(torch.zeros(2, MIN_SAMPLES)).shape[2] == 4
    with pytest.raises(ValueError, match="at least 513"):
        log_mel(torch.zeros(2, MIN_SAMPLES - 1))
    with pytest.raises(ValueError, match="stereo"):
        log_mel(torch.zeros(1, 16_000))
