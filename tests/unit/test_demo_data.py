"""The demo's clips are real clips whose sound follows the picture, and its run file fits what is made."""

import json
import shutil
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.data.precomputed import PrecomputedDataset
from ltx_trainer_plus.demo import data as make_demo_data
from ltx_trainer_plus.media.audio import read_audio
from ltx_trainer_plus.media.video import read_video, write_video
from ltx_trainer_plus.models.components import read_vae_factors
from ltx_trainer_plus.models.tiny import BLOCKS
from ltx_trainer_plus.validation.checks import check_validation
from scripts.make_demo_data import main

DEMO_YAML = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "clips"
    make_demo_data.make_clips(folder, seed=0)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["make_demo_data.py", *map(str, arguments)])
    return main()


def test_there_are_at_least_eight_h264_and_aac_clips_with_captions_of_their_own(clips: Path):
    items = json.loads((clips / "dataset.json").read_text())
    assert len(items) >= 8
    assert len({item["caption"] for item in items}) == len(items)
    assert {item["video"] for item in items} == {path.name for path in clips.glob("*.mp4")}
    for item in items:
        with av.open(str(clips / item["video"])) as container:
            video, audio = container.streams.video[0], container.streams.audio[0]
            assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
            assert (video.width, video.height, video.frames) == (96, 64, 25)
            assert video.average_rate == 24


def test_the_tone_comes_from_where_the_shape_is_and_rises_with_it(clips: Path):
    def heard(name: str) -> tuple[np.ndarray, np.ndarray]:
        """Share of the right channel, and zero crossings, of five fifths of the clip."""
        waveform = read_audio(clips / f"{name}.mp4")
        assert waveform is not None
        parts = np.array_split(waveform.samples.numpy()[:, : waveform.rate], 5, axis=1)
        power = np.stack([(part**2).mean(axis=1) for part in parts])
        crossings = np.array([(np.diff(np.sign(part.sum(axis=0))) != 0).sum() for part in parts])
        return power[:, 1] / power.sum(axis=1), crossings

    def seen(name: str) -> tuple[np.ndarray, np.ndarray]:
        """Centre of the shape, from the left and from the bottom, in every frame."""
        frames = read_video(clips / f"{name}.mp4").frames.astype(float).max(axis=-1)
        bright = frames > 120
        rows, columns = np.arange(frames.shape[1])[:, None], np.arange(frames.shape[2])
        count = bright.sum(axis=(1, 2))
        return (bright * columns).sum(axis=(1, 2)) / count, 64 - (bright * rows).sum(axis=(1, 2)) / count

    right, _ = heard("red_ball_slides")
    across, _ = seen("red_ball_slides")
    assert (np.diff(right) > 0).all()
    assert (np.diff(across) > 0).all()
    right, _ = heard("blue_square_slides_back")
    across, _ = seen("blue_square_slides_back")
    assert (np.diff(right) < 0).all()
    assert (np.diff(across) < 0).all()
    _, pitch = heard("white_ring_rises")
    _, height = seen("white_ring_rises")
    assert (np.diff(pitch) > 0).all()
    assert (np.diff(height) > 0).all()


def test_one_seed_makes_the_same_clips_and_they_are_made_once(clips: Path):
    scenes, other = make_demo_data.scenes(0), make_demo_data.scenes(1)
    assert all(
        np.array_equal(make_demo_data.draw(a), make_demo_data.draw(b)) for a, b in zip(scenes, scenes, strict=True)
    )
    assert any(
        not np.array_equal(make_demo_data.draw(a), make_demo_data.draw(b)) for a, b in zip(scenes, other, strict=True)
    )
    before = {path: path.stat().st_mtime_ns for path in clips.iterdir()}
    make_demo_data.make_clips(clips, seed=0)
    assert {path: path.stat().st_mtime_ns for path in clips.iterdir()} == before


def test_the_demo_folder_is_complete_and_making_it_again_changes_nothing(tmp_path: Path, monkeypatch):
    assert run(monkeypatch, "--output", tmp_path) == 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert run(monkeypatch, "--output", tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == files

    dataset = PrecomputedDataset(tmp_path, video_dir="latents", audio_dir="audio_latents")
    assert len(dataset) == 10
    assert not dataset.skipped
    sample = dataset[0]
    assert sample.video_latent is not None
    assert sample.audio_latent is not None
    assert sample.video_latent.shape == (128, 4, 2, 3)
    assert sample.audio_latent.shape == (8, 27, 16)
    assert sample.text.kind == "context"
    assert sample.text.video.shape == (1024, 64)
    texts = torch.stack([dataset[index].text.video.float() for index in range(10)])
    assert torch.pdist(texts.flatten(1)).min() > 0.1, "the captions must differ for the model too"


def test_own_clips_get_a_size_that_fits_them_and_a_folder_of_their_own(
    tmp_path: Path, monkeypatch, clips: Path, capsys
):
    own = tmp_path / "my clips"
    own.mkdir()
    tone = np.sin(np.arange(2 * 48000) / 20)[None].astype(np.float32)
    for index in range(2):
        frames = np.random.default_rng(index).integers(0, 255, (48, 120, 68, 3), dtype=np.uint8)
        write_video(own / f"{index}.mp4", frames, 24, tone, 48000)
        (own / f"{index}.txt").write_text(f"noise number {index}")
    (own / "broken.mp4").write_bytes(b"no video")
    (own / "broken.txt").write_text("a broken one")
    assert make_demo_data.fitting_bucket(own) == "64x96x41"
    # A short clip among longer ones is left out; it does not make single frames of the others.
    write_video(own / "short.mp4", frames[:5], 24, tone[:, :10000], 48000)
    (own / "short.txt").write_text("a short one")
    assert make_demo_data.fitting_bucket(own) == "64x96x41"
    (own / "short.mp4").unlink()
    (own / "short.txt").unlink()

    assert run(monkeypatch, "--output", tmp_path / "demo", "--clips", own) == 0
    assert "broken.mp4" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "demo/own/.precomputed/latents").iterdir())
    assert names == ["0.safetensors", "1.safetensors"]
    assert not (tmp_path / "demo/.precomputed").exists()

    # Another folder of clips: what was prepared from the first one would be trained on as well.
    shutil.copytree(clips, tmp_path / "others")
    assert run(monkeypatch, "--output", tmp_path / "demo", "--clips", tmp_path / "others") == 0
    assert len(list((tmp_path / "demo/own/.precomputed/latents").iterdir())) == 10

    (tmp_path / "empty").mkdir()
    assert run(monkeypatch, "--output", tmp_path / "demo", "--clips", tmp_path / "empty") == 2
    assert "no clips" in capsys.readouterr().err


def test_the_run_file_fits_the_demo_model_and_validates_with_full_guidance(tiny_pipeline: Path, tmp_path: Path):
    config = load_config(
        DEMO_YAML,
        [f"model.model_path={tiny_pipeline}", f"data.preprocessed_data_root={tmp_path}", f"output_dir={tmp_path}"],
    )
    assert config.optimization.steps >= 60
    assert config.training_strategy.video_role == config.training_strategy.audio_role == "generated"
    validation = config.validation
    assert validation.interval is not None
    assert config.optimization.steps // validation.interval >= 2
    assert validation.samples
    assert min(validation.video_cfg_scale, validation.video_modality_guidance_scale) > 1
    assert min(validation.audio_cfg_scale, validation.audio_modality_guidance_scale) > 1
    assert min(validation.video_stg_scale, validation.audio_stg_scale) > 0
    assert check_validation(validation, read_vae_factors(tiny_pipeline), BLOCKS) == []
    prompts = {scene.caption for scene in make_demo_data.scenes(0)}
    assert {sample.prompt for sample in validation.samples} <= prompts
