"""Sound tracks in and out."""

import math
import wave
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from ltx_trainer_plus.media.audio import read_audio, resample, to_stereo, write_wav
from ltx_trainer_plus.media.files import MediaError
from ltx_trainer_plus.media.video import write_video


def tone(hertz: float, rate: int, seconds: float = 1.0) -> torch.Tensor:
    return (
        0.5 * torch.sin(2 * math.pi * hertz * torch.arange(round(seconds * rate), dtype=torch.float64) / rate).float()
    )


@pytest.mark.parametrize("rate", [44_100, 48_000, 22_050, 8_000, 16_000])
def test_a_resampled_tone_is_the_tone_at_the_new_rate(rate: int) -> None:
    result = resample(tone(440, rate).expand(2, -1), rate, 16_000)
    assert result.shape == (2, 16_000)
    # The filter's ripple is below 1e-3; away from the ends, where it looks beyond the signal.
    assert (result[1, 100:-100] - tone(440, 16_000)[100:-100]).abs().max() < 1e-3


def test_what_the_new_rate_cannot_hold_is_filtered_out() -> None:
    assert resample(tone(11_000, 48_000), 48_000, 16_000)[100:-100].abs().max() < 5e-3


def test_the_length_rounds_up() -> None:
    assert resample(torch.zeros(1, 1001), 48_000, 16_000).shape == (1, 334)
    assert resample(torch.zeros(3, 2, 1001), 44_100, 16_000).shape == (3, 2, math.ceil(1001 * 160 / 441))


def test_rates_without_a_common_divisor_keep_the_pitch() -> None:
    result = resample(tone(440, 47_999), 47_999, 16_000)
    assert (result[100:-100] - tone(440, 16_000)[100 : len(result) - 100]).abs().max() < 1e-3


def test_mono_becomes_stereo_at_full_level() -> None:
    mono = tone(440, 16_000)[None]
    assert torch.equal(to_stereo(mono), torch.cat([mono, mono]))
    both = torch.stack([mono[0], -mono[0]])
    assert torch.equal(to_stereo(both), both)


def test_a_wav_file_reads_back(tmp_path: Path) -> None:
    samples = torch.stack([tone(440, 24_000), tone(660, 24_000)])
    samples[0, 5] = 3.0  # louder than full scale: clipped, not wrapped round
    write_wav(tmp_path / "a.wav", samples, 24_000)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 24_000, 24_000)
    sound = read_audio(tmp_path / "a.wav")
    assert sound is not None
    assert sound.rate == 24_000
    assert (sound.samples - samples.clamp(-1, 1)).abs().max() < 1e-4
    assert list(tmp_path.iterdir()) == [tmp_path / "a.wav"]


def test_a_mono_track_stays_at_its_level(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", tone(440, 48_000)[None], 48_000)
    sound = read_audio(tmp_path / "a.wav")
    assert sound is not None
    assert sound.samples.shape == (1, 48_000)
    assert abs(float(sound.samples.max()) - 0.5) < 1e-3


def test_surround_is_mixed_down_to_stereo(tmp_path: Path) -> None:
    channels = np.zeros((6, 48_000), np.float32)
    channels[2] = tone(440, 48_000).numpy()  # the centre speaker only
    with av.open(str(tmp_path / "a.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=48_000, layout="5.1")
        frame = av.AudioFrame.from_ndarray((channels * 32767).astype(np.int16).T.reshape(1, -1), "s16", "5.1")
        frame.sample_rate = 48_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    sound = read_audio(tmp_path / "a.wav")
    assert sound is not None
    assert sound.samples.shape[0] == 2
    assert torch.allclose(sound.samples[0], sound.samples[1])
    assert 0.05 < float(sound.samples.max()) < 0.5


def test_a_file_without_a_track_gives_none(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", np.zeros((5, 32, 32, 3), np.uint8), 24)
    assert read_audio(tmp_path / "a.mp4") is None


def test_reading_stops_soon_after_the_seconds_asked_for(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", tone(440, 16_000, 5.0)[None], 16_000)
    sound = read_audio(tmp_path / "a.wav", max_seconds=1.0)
    assert sound is not None
    assert 16_000 <= sound.samples.shape[1] < 32_000


def test_a_file_that_is_no_sound_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(MediaError, match=r"a\.wav"):
        read_audio(tmp_path / "a.wav")
