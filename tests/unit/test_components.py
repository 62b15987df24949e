"""VAEs and vocoder: the same numbers as diffusers' own pipeline, normalised once, refused clearly where unsupported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import LTX2Pipeline

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models.components import (
    AudioDecoder,
    VideoVAE,
    check_components,
    load_audio_decoder,
    load_audio_vae,
    load_video_vae,
    read_vae_factors,
)


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> LTX2Pipeline:
    return LTX2Pipeline.from_pretrained(tiny_pipeline)


@pytest.fixture(scope="module")
def video_vae(tiny_pipeline: Path) -> VideoVAE:
    return load_video_vae(tiny_pipeline, torch.float32)


@pytest.fixture(scope="module")
def audio_decoder(tiny_pipeline: Path) -> AudioDecoder:
    return load_audio_decoder(tiny_pipeline, torch.float32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_video_latents_are_normalised_with_the_statistics_that_the_pipeline_uses(video_vae: VideoVAE, pipeline):
    frames = random(2, 3, 9, 32, 64).clamp(-1, 1)
    raw = pipeline.vae.encode(frames).latent_dist.mode()
    expected = pipeline._normalize_latents(raw, pipeline.vae.latents_mean, pipeline.vae.latents_std, 1.0)
    latents = video_vae.encode(frames)
    assert latents.shape == (2, 128, 2, 1, 2)
    torch.testing.assert_close(latents, expected, atol=1e-6, rtol=1e-5)
    assert (latents - raw).abs().max() > 0.1


def test_decoding_undoes_the_normalisation_and_a_small_video_is_one_tile(video_vae: VideoVAE, pipeline):
    latents = random(1, 128, 4, 2, 3)
    raw = pipeline._denormalize_latents(latents, pipeline.vae.latents_mean, pipeline.vae.latents_std, 1.0)
    expected = pipeline.vae.decode(raw).sample.clamp(-1, 1)
    whole = video_vae.decode(latents, tiled=False)
    assert whole.shape == (1, 3, 25, 64, 96)
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(video_vae.decode(latents, tiled=True), whole)


def test_tiles_in_time_lie_where_the_frames_belong(video_vae: VideoVAE):
    latents = random(1, 128, 31, 1, 1)  # three tiles
    whole = video_vae.decode(latents, tiled=False)
    tiled = video_vae.decode(latents, tiled=True)
    assert tiled.shape == whole.shape == (1, 3, 241, 32, 32)
    # The tiny decoder sees nine latent frames to each side, more than tiles share, so the tiles differ a little from
    # the whole; a tile one frame off (as diffusers places them) would be worse than at its place.
    later = slice(140, 200)
    errors = {
        shift: (tiled[:, :, later] - whole[:, :, later.start + shift : later.stop + shift]).abs().mean().item()
        for shift in (-2, -1, 0, 1, 2)
    }
    assert errors[0] < 0.5 * min(errors[shift] for shift in (-2, -1, 1, 2)), errors


def test_tiles_in_space_blend_into_the_whole_picture(video_vae: VideoVAE):
    latents = random(1, 128, 1, 1, 20)  # 640 pixels wide: two tiles
    whole = video_vae.decode(latents, tiled=False)
    tiled = video_vae.decode(latents, tiled=True)
    assert tiled.shape == whole.shape == (1, 3, 1, 32, 640)
    assert not torch.equal(tiled, whole)
    torch.testing.assert_close(tiled[..., :200], whole[..., :200], atol=1e-5, rtol=1e-5)
    # Unrelated pictures would differ by 1.4 times their size.
    assert (tiled - whole).abs().mean() < 0.3 * whole.abs().mean()


@pytest.mark.parametrize(("count", "height", "width"), [(24, 32, 32), (9, 48, 32), (9, 32, 16)])
def test_frames_that_do_not_fit_the_factors_are_refused(video_vae: VideoVAE, count: int, height: int, width: int):
    with pytest.raises(ValueError, match=rf"{count} frames of {width}x{height} do not fit"):
        video_vae.encode(torch.zeros(1, 3, count, height, width))


def test_audio_latents_are_normalised_over_packed_features(tiny_pipeline: Path, pipeline):
    mel = random(2, 2, 105, 64)
    raw = pipeline.audio_vae.encode(mel).latent_dist.mode()
    packed = pipeline._pack_audio_latents(raw)
    normal = pipeline._normalize_audio_latents(packed, pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    expected = pipeline._unpack_audio_latents(normal, raw.shape[2], num_mel_bins=16)
    audio_vae = load_audio_vae(tiny_pipeline, torch.float32)
    latents = audio_vae.encode(mel)
    assert audio_vae.sample_rate == 16000
    assert latents.shape == (2, 8, 27, 16)
    torch.testing.assert_close(latents, expected, atol=1e-6, rtol=1e-5)


def test_sound_is_decoded_as_the_pipeline_does_at_the_vocoder_rate(audio_decoder: AudioDecoder, pipeline):
    latents = random(2, 8, 26, 16)
    packed = pipeline._pack_audio_latents(latents)
    raw = pipeline._denormalize_audio_latents(packed, pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    raw = pipeline._unpack_audio_latents(raw, latents.shape[2], num_mel_bins=16)
    expected = pipeline.vocoder(pipeline.audio_vae.decode(raw).sample)
    waveform = audio_decoder.decode(latents)
    assert audio_decoder.sample_rate == 48000
    assert waveform.shape == (2, 2, (4 * 26 - 3) * 480)
    torch.testing.assert_close(waveform, expected, atol=1e-6, rtol=1e-5)
    assert waveform.std() > 0.01


def test_weights_are_frozen_and_of_the_given_dtype(tiny_pipeline: Path):
    vae = load_video_vae(tiny_pipeline, torch.bfloat16)
    assert {parameter.dtype for parameter in vae._vae.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in vae._vae.parameters())
    assert vae.encode(torch.zeros(1, 3, 1, 32, 32)).dtype == torch.float32


def test_factors_come_from_metadata_even_where_the_config_does_not_state_them(tiny_pipeline: Path, tmp_path: Path):
    assert read_vae_factors(tiny_pipeline) == (8, 32)
    shutil.copytree(tiny_pipeline / "vae", tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    config["spatial_compression_ratio"] = config["temporal_compression_ratio"] = None
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    assert read_vae_factors(tmp_path) == (8, 32)
    assert load_video_vae(tmp_path, torch.float32).spatial_factor == 32


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (load_video_vae, "video VAE"),
        (load_audio_vae, "audio VAE"),
        (load_audio_decoder, "vocoder"),
        (read_vae_factors, "video VAE"),
    ],
)
def test_official_single_files_are_refused_by_name(load, name: str, reference: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"{name} cannot be read from a single official file(.|\n)*pipeline folder"):
        load(reference / "ltx-2.3-tiny.safetensors")
    (tmp_path / "transformer").mkdir()
    with pytest.raises(ModelError, match=rf"no {name} here(.|\n)*found: transformer"):
        load(tmp_path)


def test_a_vae_of_another_kind_is_refused(tiny_pipeline: Path, tmp_path: Path):
    shutil.copytree(tiny_pipeline / "vae", tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps({**config, "_class_name": "AutoencoderKLLTXVideo"}))
    with pytest.raises(ValueError, match="AutoencoderKLLTXVideo"):
        load_video_vae(tmp_path)


EVERYTHING = ("vae", "audio_vae", "vocoder", "connectors", "text_encoder")


def test_missing_components_are_all_found_without_loading_any(tiny_pipeline: Path, reference: Path, tmp_path: Path):
    assert check_components(tiny_pipeline, needed=EVERYTHING) == []
    problems = check_components(tmp_path, needed=EVERYTHING)
    assert len(problems) == 5
    names = ("video VAE", "audio VAE", "vocoder", "text connectors", "text encoder")
    assert all(name in problem for name, problem in zip(names, problems, strict=True))

    monolith = reference / "ltx-2.3-tiny-monolith.safetensors"
    assert check_components(monolith, needed=("connectors",)) == []
    assert len(check_components(monolith, needed=EVERYTHING)) == 4
    assert len(check_components(monolith, needed=("connectors", "text_encoder"), text_encoder_path=tiny_pipeline)) == 0
    (problem,) = check_components(reference / "ltx-2.3-tiny.safetensors", needed=("connectors",))
    assert "no text side in this file" in problem


def test_a_half_downloaded_component_is_named_with_its_missing_files(tiny_pipeline: Path, tmp_path: Path):
    for name in ("vae", "vocoder"):
        (tmp_path / name).mkdir()
        shutil.copy(tiny_pipeline / name / "config.json", tmp_path / name)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "vae" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "vae" / "model-00001-of-00002.safetensors").write_bytes(b"")
    vae, vocoder = check_components(tmp_path, needed=("vae", "vocoder"))
    assert "vae: model-00002-of-00002.safetensors is missing" in vae
    assert "vocoder: its .safetensors file is missing" in vocoder
