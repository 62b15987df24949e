"""Two processes of one data rank: they deal, draw, count and write as one process does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.checkpoints.saved_state import read_state_header
from tests.launch import run, torchrun_command
from tests.runs import VALIDATION, joint_run, metrics, train, write_prepared_data

SCRIPT = Path(__file__).with_name("data_axis_script.py")
LAYOUTS = ("ddp", "fsdp2")


def write_data(root: Path) -> Path:
    """8 samples, of which one is beyond what a loss can hold."""
    data = write_prepared_data(root, samples=8)
    path = data / ".precomputed" / "latents" / "clip_02.safetensors"
    with safe_open(path, "pt") as file:
        metadata, latents = file.metadata(), file.get_tensor("latents")
    save_file({"latents": latents * 1e30}, path, metadata)
    return data


def damage(data: Path) -> None:
    """Make a sample unreadable that is not read again before a run has started."""
    path = data / ".precomputed" / "latents" / "clip_05.safetensors"
    with safe_open(path, "pt") as file:
        metadata, latents = file.metadata(), file.get_tensor("latents")
    save_file({"latents": torch.full_like(latents, float("nan"))}, path, metadata)


@pytest.fixture(scope="module")
def folder(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folders `<run>-<layout>` of two runs in one process and in two, and `stopped-ddp`."""
    folder = tmp_path_factory.mktemp("data_axis")
    good, bad = write_prepared_data(folder / "good", samples=8), write_data(folder / "bad")
    damage(bad)

    def settings(kind: str, layout: str) -> dict[str, Any]:
        common = {
            **joint_run(tiny_pipeline, bad if kind == "bad" else good, folder / f"{kind}-{layout}"),
            "acceleration": {"mixed_precision_mode": "no", "parallel": layout},
        }
        if kind == "bad":
            common["optimization"] = {"steps": 8, "batch_size": 1, "learning_rate": 1e-3}
            common["data"] |= {"on_error": "skip", "shape_group": 1}
        else:
            common["lora"] = {"rank": 4, "alpha": 4, "dropout": 0.25}
            common["optimization"] |= {"steps": 3, "gradient_accumulation_steps": 2}
            common["validation"] = {**VALIDATION, "loss": {"fraction": 0.2, "sigmas": 3, "interval": 1}}
            common["checkpoints"] = {"interval": 2, "keep_last_n": -1, "precision": "float32", "ema_decay": 0.9}
        return common

    job = [{"settings": settings("good", layout), "stopped_rank": None} for layout in LAYOUTS]
    job += [{"settings": settings("bad", "ddp"), "stopped_rank": None}]
    job += [{"settings": settings("stopped", "ddp"), "stopped_rank": 1}]
    (folder / "job.json").write_text(json.dumps(job))
    finished = run(torchrun_command(2, SCRIPT, str(folder / "job.json")), timeout=500)
    (folder / "output.txt").write_text(finished.output)
    for kind in ("good", "bad"):
        train(settings(kind, "auto"))
    return folder


def seen(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each of the two processes noted."""
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["good-ddp", "good-fsdp2", "bad-ddp"])
def test_both_processes_train_on_the_same_samples_with_the_same_draws(folder: Path, name: str) -> None:
    first, second = (process["drawn"] for process in seen(folder, name))
    assert len(first) >= 6
    assert first == second


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_run_has_the_numbers_of_one_process(folder: Path, layout: str) -> None:
    one, two = metrics(folder / "good-auto"), metrics(folder / f"good-{layout}")
    assert len(one) == 3 + 4  # steps, held-out losses
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for expected, line in zip(one, two, strict=True):
        assert line.keys() == expected.keys()
        for key, value in expected.items():
            if key not in ("step_time", "tokens_per_second", "memory_gib"):
                assert line[key] == pytest.approx(value, rel=1e-5), (line["step"], key)
        if "tokens_per_second" in expected:
            # 4 samples of 8 video and 4 audio tokens.
            assert line["tokens_per_second"] * line["step_time"] == pytest.approx(48)
            assert expected["tokens_per_second"] * expected["step_time"] == pytest.approx(48)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_run_leaves_the_files_of_one_process(folder: Path, layout: str) -> None:
    one, two = folder / "good-auto", folder / f"good-{layout}"
    samples = [f"step_{step:06d}_{index}.mp4" for step in (0, 2, 3) for index in (1, 2)]
    assert sorted(path.name for path in (two / "samples").iterdir()) == samples
    assert [len(process["written"]) for process in seen(folder, f"good-{layout}")] == [len(samples), 0]
    for name in ("lora_weights_step_00003.safetensors", "ema_lora_weights_step_00003.safetensors"):
        expected, weights = load_file(one / "checkpoints" / name), load_file(two / "checkpoints" / name)
        assert weights.keys() == expected.keys()
        assert all(torch.allclose(weights[key], expected[key], rtol=1e-4, atol=1e-6) for key in expected)
    if layout == "ddp":
        assert [name for name in files(two) if "wandb" not in name] == [
            name for name in files(one) if "wandb" not in name
        ]
        state = "checkpoints/training_state_step_00003.safetensors"
        assert read_state_header(two / state).info["data"] == read_state_header(one / state).info["data"]


def test_a_bad_sample_is_named_once_and_a_replaced_one_is_counted_once(folder: Path) -> None:
    one, two = metrics(folder / "bad-auto"), metrics(folder / "bad-ddp")
    assert one[-1]["skipped_steps"] == two[-1]["skipped_steps"] > 0
    assert one[-1]["replaced_samples"] == two[-1]["replaced_samples"] > 0
    output = (folder / "output.txt").read_text()
    assert output.count("clip_02 (video sigma") == two[-1]["skipped_steps"]


def test_a_process_that_counts_nothing_is_heard_when_it_has_to_stop(folder: Path) -> None:
    assert [(process["step"], process["interrupted"]) for process in seen(folder, "stopped-ddp")] == [(2, True)] * 2
