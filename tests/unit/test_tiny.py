"""The tiny pipeline folder is a real LTX-2.3-style pipeline."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ltx_trainer_plus.models.tiny import create_tiny_pipeline


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_one_seed_gives_the_same_bytes_and_another_seed_other_weights(tiny_pipeline: Path, tmp_path: Path):
    torch.manual_seed(99)  # the caller's random state must not matter, nor change
    state = torch.get_rng_state()
    again = digests(create_tiny_pipeline(tmp_path / "again", seed=0))
    assert torch.equal(torch.get_rng_state(), state)
    other = digests(create_tiny_pipeline(tmp_path / "other", seed=1))
    assert again == digests(tiny_pipeline)
    weights = {name for name in again if name.endswith(".safetensors")}
    assert len(weights) == 6
    assert all(again[name] != other[name] for name in weights)
    assert all(again[name] == other[name] for name in again.keys() - weights)


def test_an_existing_pipeline_is_kept_and_a_foreign_folder_is_refused(tiny_pipeline: Path, tmp_path: Path):
    before = {path: path.stat().st_mtime_ns for path in tiny_pipeline.rglob("*")}
    assert create_tiny_pipeline(tiny_pipeline) == tiny_pipeline
    assert {path: path.stat().st_mtime_ns for path in tiny_pipeline.rglob("*")} == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"no pipeline folder"):
        create_tiny_pipeline(tmp_path)


def test_the_tokenizer_is_gemmas_in_small(tiny_pipeline: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_pipeline / "tokenizer")
    assert tokenizer.model_max_length == 1024
    assert tokenizer.padding_side == "left"
    assert tokenizer("").input_ids == [tokenizer.bos_token_id]
    text = 'a "red" ball, häufig 漢'
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_diffusers_pipeline_generates_video_and_sound_from_it(tiny_pipeline: Path):
    from diffusers import LTX2Pipeline

    pipeline = LTX2Pipeline.from_pretrained(tiny_pipeline)
    pipeline.set_progress_bar_config(disable=True)
    result = pipeline(
        prompt="a red ball",
        width=64,
        height=32,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=1.0,
        stg_scale=0.0,
        output_type="np",
        generator=torch.Generator().manual_seed(0),
    )
    assert result.frames.shape == (1, 9, 32, 64, 3)
    assert result.frames.std() > 0.01
    # 9 frames at 24 fps are 9 audio latents, 33 mel frames, 160 samples each at 16 kHz, three times that at 48 kHz.
    assert result.audio.shape == (1, 2, 33 * 160 * 3)
    assert result.audio.std() > 0.01
