"""The example run files, as they stand: each passes a dry run on a tiny model, with data of the size that it is for."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ltx_trainer_plus.media.audio import write_wav
from ltx_trainer_plus.media.video import write_video
from scripts import train

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name != "demo.yaml")
FRAMES, HEIGHT, WIDTH = 49, 576, 960
LATENT = (7, 18, 30)
AUDIO_STEPS = 52


@pytest.fixture(scope="module")
def workspace(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has beside the examples: a model, prepared clips, and files to validate with."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "models").mkdir()
    (folder / "models/LTX-2.3").symlink_to(tiny_pipeline)
    video = {"latents": torch.zeros(128, *LATENT, dtype=torch.bfloat16), "fps": 24.0}
    reference = {"latents": torch.zeros(128, 7, 9, 15, dtype=torch.bfloat16), "fps": 24.0}
    audio = {"latents": torch.zeros(8, AUDIO_STEPS, 16, dtype=torch.bfloat16)}
    text = {
        "video_prompt_embeds": torch.zeros(128, 64),
        "audio_prompt_embeds": torch.zeros(128, 32),
        "prompt_attention_mask": torch.ones(128, dtype=torch.bool),
    }
    contents = {
        "latents": video,
        "audio_latents": audio,
        "conditions": text,
        "reference_latents": reference,
        "reference_audio_latents": audio,
        "video_masks": {"mask": torch.ones(LATENT)},
        "audio_masks": {"mask": torch.ones(AUDIO_STEPS)},
    }
    for kind, entries in contents.items():
        for name in ("a", "b"):
            path = folder / f"clips/.precomputed/{kind}/{name}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(entries, path)
    examples = folder / "examples"
    examples.mkdir()
    Image.new("RGB", (WIDTH, HEIGHT)).save(examples / "first_frame.png")
    Image.new("L", (WIDTH, HEIGHT), 255).save(examples / "mask.png")
    for name in ("clip", "reference"):
        write_video(examples / f"{name}.mp4", np.zeros((FRAMES, HEIGHT, WIDTH, 3), np.uint8), 24, None, None)
    for name in ("sound", "audio_mask"):
        write_wav(examples / f"{name}.wav", torch.zeros(2, 16000 * 3), 16000)
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_a_dry_run_as_it_stands(
    name: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    # The tiny model has fewer blocks than the real one.
    overrides = ["validation.stg_blocks=[1]", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", str(CONFIGS / name), *overrides, "--dry-run"])
    assert train.main() == 0, capsys.readouterr().err
    plan = " ".join(capsys.readouterr().out.replace("│", " ").split())  # without the table's lines and line breaks
    assert "2 of 1 shape" in plan
    assert "models/LTX-2.3" in plan
    assert not (workspace / "outputs").exists()
    if name == "video_to_video_ic_lora.yaml":
        assert "video: reference (latents_dir reference_latents)" in plan
        assert "video: first_frame, in 20% of the samples" in plan
        assert "video references are smaller by 2 in size and by 1 in frame rate" in plan


def test_the_index_lists_every_example_and_no_other() -> None:
    index = (CONFIGS / "README.md").read_text(encoding="utf-8")
    listed = {part.partition(")")[0] for part in index.split("](")[1:]}
    assert listed == {*EXAMPLES, "demo.yaml", "accelerate"}
