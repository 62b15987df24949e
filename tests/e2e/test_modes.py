"""Every training mode trains on official prepared data, as its run file says."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.modes import MODES, mode_run
from tests.runs import losses, metrics, train


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_on_official_data(mode: str, reference: Path, tmp_path: Path) -> None:
    body = MODES[mode]
    result = train(mode_run(reference, tmp_path / "run", {"name": "flexible", **body}))
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2
    trained = {f"loss/{stream}" for stream in body if body[stream].get("is_generated", True)}
    for line in lines:
        assert {key for key in line if key in ("loss/video", "loss/audio")} == trained
        assert all(0 < line[key] < 100 for key in trained)
        assert line["grad_norm"] > 0
        assert not line.get("skipped")
    # Adapters exist only where a gradient comes, and each has moved: lora_B starts at 0.
    weights = load_file(result.weights)
    assert weights
    assert all(tensor.abs().max() > 0 for tensor in weights.values())


def test_a_weights_file_names_the_scale_of_its_references(reference: Path, tmp_path: Path) -> None:
    result = train(mode_run(reference, tmp_path / "run", {"name": "flexible", **MODES["v2v_ic"]}))
    with safe_open(result.weights, "pt") as file:
        header = file.metadata()
    assert {key: value for key, value in header.items() if key.startswith("reference")} == {
        "reference_downscale_factor": "2",
        "reference_spatial_scale_factor": "2",
    }


@pytest.mark.parametrize("shape_group", [1, 2])
def test_conditions_do_not_depend_on_how_the_batch_is_spread(shape_group: int, reference: Path, tmp_path: Path) -> None:
    curves = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)) if shape_group == 1 else ((4, 1), (2, 2)):
        run = mode_run(reference, tmp_path / f"{batch}x{accumulation}", {"name": "flexible", **MODES["composition"]})
        run["optimization"] |= {"steps": 3, "batch_size": batch, "gradient_accumulation_steps": accumulation}
        run["data"]["shape_group"] = shape_group
        train(run)
        curves.append(losses(Path(run["output_dir"])))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=3e-6)
    assert len(set(curves[0])) == 3


@pytest.mark.parametrize("name", ["text_to_video", "video_to_video"])
def test_an_older_strategy_trains_like_the_flexible_one_that_it_means(
    name: str, reference: Path, tmp_path: Path
) -> None:
    first_frame = {"type": "first_frame", "probability": 0.5}
    reference_condition = {"type": "reference", "latents_dir": "reference_latents"}
    if name == "text_to_video":
        old = {"with_audio": True}
        new = {"video": {"conditions": [first_frame]}, "audio": {}}
    else:
        old = {}
        new = {"video": {"conditions": [reference_condition, first_frame]}}
    train(mode_run(reference, tmp_path / "old", {"name": name, "first_frame_conditioning_p": 0.5, **old}))
    train(mode_run(reference, tmp_path / "new", {"name": "flexible", **new}))
    assert losses(tmp_path / "old") == losses(tmp_path / "new")


def test_the_older_data_folder_trains_with_the_older_strategy(reference: Path, tmp_path: Path) -> None:
    run = mode_run(reference, tmp_path / "run", {"name": "text_to_video"})
    run["model"]["model_path"] = str(reference / "ltx-2-tiny-monolith.safetensors")
    run["data"]["preprocessed_data_root"] = str(reference / "official-precomputed-legacy")
    train(run)
    assert all(torch.isfinite(torch.tensor(losses(tmp_path / "run"))))


def test_a_run_resumed_with_another_batch_size_draws_the_same_references(reference: Path, tmp_path: Path) -> None:
    """References are drawn by groups, and a resumed run keeps the groups of the one that it continues."""

    def run(name: str, batch: int, accumulation: int) -> dict[str, Any]:
        made = mode_run(reference, tmp_path / name, {"name": "flexible", **MODES["composition"]})
        made["optimization"] |= {"steps": 4, "scheduler_type": "constant"}
        made["optimization"] |= {"batch_size": batch, "gradient_accumulation_steps": accumulation}
        made["checkpoints"] = {"precision": "float32", "interval": 2, "keep_last_n": -1}
        return made

    train(run("whole", 4, 1))
    train(run("resumed", 4, 1), "optimization.steps=2")
    train(run("resumed", 2, 2), "model.load_checkpoint=latest")
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole"), rel=3e-6)


def test_files_of_every_kind_and_shape_train_together(reference: Path, tmp_path: Path) -> None:
    """Latents, masks, references and captions, each old, new or ours from sample to sample, of two sizes."""
    data = Path(shutil.copytree(reference / "official-precomputed", tmp_path / "data"))

    def rewrite(kind: str, index: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        path = data / f"{kind}/clips/clip_0{index}.pt"
        torch.save(change(torch.load(path, weights_only=True)), path)

    def as_tokens(entries: dict[str, Any]) -> dict[str, Any]:
        sizes = dict(zip(("num_frames", "height", "width"), entries["latents"].shape[1:], strict=True))
        return {**entries, **sizes, "latents": entries["latents"].flatten(1).T.contiguous()}

    for kind in ("latents", "reference_latents"):  # as old files hold them
        rewrite(kind, 0, as_tokens)
    for kind, key in (("latents", "latents"), ("reference_latents", "latents"), ("video_masks", "mask")):  # as ours
        path = data / f"{kind}/clips/clip_01.pt"
        save_file({key: torch.load(path, weights_only=True)[key]}, path.with_suffix(".safetensors"), {"fps": "24.0"})
        path.unlink()
    caption = data / "conditions/clips/clip_01.pt"
    caption.unlink()
    contexts = {"video_context": torch.randn(128, 32), "audio_context": torch.randn(128, 16)}
    save_file(contexts, caption.with_suffix(".safetensors"))
    for index in (2, 3):  # of half the width
        rewrite("latents", index, lambda entries: {**entries, "latents": entries["latents"][..., :2].clone()})
        rewrite("reference_latents", index, lambda entries: {**entries, "latents": entries["latents"][..., :1].clone()})
        rewrite("video_masks", index, lambda entries: {"mask": entries["mask"][..., :2].clone()})
    strategy = {"name": "flexible", **MODES["composition"]}
    for batch_size in (1, 2):
        run = mode_run(reference, tmp_path / str(batch_size), strategy)
        run["data"]["preprocessed_data_root"] = str(data)
        run["optimization"] |= {"batch_size": batch_size, "steps": 8}  # the first: more than an epoch
        train(run)
        assert len(losses(tmp_path / str(batch_size))) == 8
        assert all(line["grad_norm"] > 0 for line in metrics(tmp_path / str(batch_size)))
