"""Files that validation writes: exactly the frames, rate and length that were asked for, in the right format."""

import logging
import wave
from fractions import Fraction
from pathlib import Path

import av
import pytest
import torch

from ltx_trainer_plus.flow.positions import LatentGeometry, unpatchify_video
from ltx_trainer_plus.media.audio import read_audio
from ltx_trainer_plus.media.image import read_image
from ltx_trainer_plus.media.video import read_video
from ltx_trainer_plus.models.components import load_video_vae
from ltx_trainer_plus.validation.decode import DecodedSample, SampleDecoder, write_sample
from ltx_trainer_plus.validation.requests import SampleRequest

REQUEST = SampleRequest(index=0, prompt="", width=96, height=64, frames=9, frame_rate=24.0, seed=0)
CPU = torch.device("cpu")


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, 128, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def decoder(tiny_pipeline: Path) -> SampleDecoder:
    return SampleDecoder(tiny_pipeline, LatentGeometry(), CPU)


@pytest.fixture(scope="module")
def decoded(decoder: SampleDecoder) -> DecodedSample:
    steps = REQUEST.audio_latent_steps(LatentGeometry())
    # Two steps more than the video lasts, so that there is something to trim.
    return decoder.decode(REQUEST, tokens(12), tokens(steps + 2, 1))


def test_frames_are_the_vaes_and_sound_is_no_longer_than_the_video(decoded: DecodedSample, tiny_pipeline: Path) -> None:
    assert decoded.frames is not None
    assert decoded.waveform is not None
    assert decoded.frames.shape == (9, 64, 96, 3)
    assert decoded.waveform.shape == (2, round(9 / 24 * 48000))
    latent = unpatchify_video(tokens(12), 2, 2, 3)
    pixels = load_video_vae(tiny_pipeline, torch.float32).decode(latent)
    shown = decoded.frames.permute(3, 0, 1, 2) / 127.5 - 1
    torch.testing.assert_close(shown, pixels[0], atol=1 / 255 + 1e-5, rtol=0)


@pytest.mark.parametrize("rate", [24.0, 24000 / 1001, 12.5])
def test_an_mp4_has_exactly_the_frames_and_the_rate(decoded: DecodedSample, rate: float, tmp_path: Path) -> None:
    sample = DecodedSample(decoded.frames, rate, decoded.waveform, decoded.sample_rate)
    path = write_sample(tmp_path / "samples/step_000250_1", sample)
    assert path == tmp_path / "samples/step_000250_1.mp4"
    clip = read_video(path)
    assert clip.fps == Fraction(rate).limit_denominator(1001)
    assert clip.frames.shape == (9, 64, 96, 3)
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        assert container.streams.audio[0].codec_context.name == "aac"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_sound_in_the_file_is_the_samples(decoded: DecodedSample, tmp_path: Path) -> None:
    seconds = torch.arange(18000) / 48000
    tone = torch.stack([torch.sin(2 * torch.pi * 440 * seconds), torch.zeros_like(seconds)]) * 0.5
    path = write_sample(tmp_path / "tone", DecodedSample(decoded.frames, 24.0, tone, 48000))
    sound = read_audio(path)
    assert sound is not None
    assert sound.rate == 48000
    heard = sound.samples[:, :18000]
    assert (heard - tone).abs().mean() < 0.02


def test_audio_alone_is_a_wav_trimmed_to_the_duration(decoder: SampleDecoder, tmp_path: Path) -> None:
    path = write_sample(tmp_path / "step_000000_2", decoder.decode(REQUEST, None, tokens(11)))
    assert path.name == "step_000000_2.wav"
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 48000, 18000)


@pytest.mark.parametrize("has_sound", [False, True])
def test_one_frame_is_a_png(decoder: SampleDecoder, tmp_path: Path, has_sound: bool) -> None:
    request = SampleRequest(index=0, prompt="", width=64, height=32, frames=1, frame_rate=24.0, seed=0)
    decoded = decoder.decode(request, tokens(2), tokens(1) if has_sound else None)
    path = write_sample(tmp_path / "step_000000_1", decoded)
    assert path.name == "step_000000_1.png"
    assert decoded.frames is not None
    assert torch.equal(torch.from_numpy(read_image(path).copy()), decoded.frames[0])


def test_a_silent_video_has_no_sound_track(decoder: SampleDecoder, tmp_path: Path) -> None:
    path = write_sample(tmp_path / "silent", decoder.decode(REQUEST, tokens(12), None))
    assert path.name == "silent.mp4"
    assert read_audio(path) is None


def test_a_model_that_has_diverged_is_reported_and_does_not_end_the_run(
    decoder: SampleDecoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        decoded = decoder.decode(REQUEST, tokens(12) * torch.nan, tokens(9) * torch.nan)
    assert "Validation sample 1 is not finite" in caplog.text
    assert len(read_video(write_sample(tmp_path / "nan", decoded)).frames) == 9
