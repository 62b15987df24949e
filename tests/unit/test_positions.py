"""Token positions and the way from latents to tokens and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_trainer_plus.flow.positions import (
    LatentGeometry,
    audio_positions,
    patchify_audio,
    patchify_video,
    unpatchify_audio,
    unpatchify_video,
    video_positions,
)

TINY_MODELS = ["ltx-2-tiny", "ltx-2.3-tiny", "ltx-2.5-tiny"]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_video_positions_equal_the_official_ones(name: str, reference: Path) -> None:
    official = load_file(reference / f"{name}-io.safetensors")["video_positions"]
    ours = video_positions(2, 2, 3, torch.tensor([24.0, 24.0]), LatentGeometry())
    torch.testing.assert_close(ours, official, rtol=0, atol=0)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_audio_positions_equal_the_official_ones(name: str, reference: Path) -> None:
    official = load_file(reference / f"{name}-io.safetensors")["audio_positions"]
    ours = audio_positions(5, LatentGeometry())
    torch.testing.assert_close(ours.expand_as(official), official, rtol=0, atol=1e-8)


def test_every_sample_has_its_own_frame_rate() -> None:
    positions = video_positions(3, 1, 1, torch.tensor([24.0, 12.0]), LatentGeometry())
    torch.testing.assert_close(positions[1, 0], 2 * positions[0, 0])
    torch.testing.assert_close(positions[1, 1:], positions[0, 1:])
    assert positions[0, 0, -1, 1].item() == pytest.approx(17 / 24)  # 3 latent frames are 17 pixel frames


def test_the_geometry_is_read_from_the_transformer_config() -> None:
    config = {"vae_scale_factors": (4, 16, 16), "audio_scale_factor": 2, "audio_hop_length": 256}
    geometry = LatentGeometry.of(config)
    assert geometry == LatentGeometry(temporal=4, spatial=16, audio_scale=2, audio_hop=256)
    assert LatentGeometry.of({}) == LatentGeometry()


@pytest.mark.parametrize("frames", [1, 2, 9, 16, 17, 89])
def test_sizes_of_latents_and_of_pixels_agree(frames: int) -> None:
    geometry = LatentGeometry(temporal=8, spatial=16)
    latent, rows, columns = geometry.video_size(frames, 64, 96)
    assert (rows, columns) == (4, 6)
    # Whole latent frames, and as many of them as fit.
    assert geometry.pixel_frames(latent) <= frames < geometry.pixel_frames(latent + 1)
    assert geometry.latent_frames(geometry.pixel_frames(latent)) == latent


def test_a_second_of_sound_is_25_steps_and_none_is_one() -> None:
    assert LatentGeometry().audio_steps(1.0) == 25
    assert LatentGeometry().audio_steps(0.001) == 1


def test_unequal_spatial_factors_are_refused() -> None:
    with pytest.raises(ValueError, match="16 for height and 32 for width"):
        LatentGeometry.of({"vae_scale_factors": (8, 16, 32)})


def test_tokens_become_the_same_latent_again() -> None:
    video, audio = torch.randn(2, 128, 3, 2, 4), torch.randn(2, 8, 9, 16)
    assert torch.equal(unpatchify_video(patchify_video(video), 3, 2, 4), video)
    assert torch.equal(unpatchify_audio(patchify_audio(audio)), audio)
    assert torch.equal(patchify_video(video)[0, 2 * 4 + 4 + 3], video[0, :, 1, 1, 3])
    assert torch.equal(patchify_audio(audio)[0, 5, 16 + 7], audio[0, 1, 5, 7])
