"""Two-process DDP runs started as a user starts them: the same numbers as one process, one run folder, clean stops."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ltx_trainer_plus.checkpoints.saved_state import read_state_header
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from tests.launch import ROOT, accelerate_command, launch_environment, run, torchrun_command
from tests.runs import VALIDATION, joint_run, losses, metrics, train, write_prepared_data, write_run_file

SCRIPT = ROOT / "scripts/train.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_data(tmp_path_factory.mktemp("data"), samples=6)


@pytest.fixture
def settings(tiny_pipeline: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    settings = joint_run(tiny_pipeline, data, tmp_path / "ddp")
    settings["data"] |= {"shape_group": 1}
    settings["wandb"] = {"enabled": True}
    return settings


def test_two_processes_compute_what_one_does_and_continue_after_a_resume(settings: dict[str, Any], tmp_path: Path):
    # Global batch 4: one process with batch 4; two with batch 1 and two micro-steps.
    settings["validation"] = {**VALIDATION, "interval": 3}
    settings["checkpoints"] = {"interval": 3, "keep_last_n": -1, "precision": "float32"}
    settings["optimization"] |= {"steps": 6}
    single = {**settings, "output_dir": str(tmp_path / "single")}
    single["optimization"] = {**settings["optimization"], "batch_size": 4}
    train(single)

    ddp = {**settings, "optimization": {**settings["optimization"], "batch_size": 1, "gradient_accumulation_steps": 2}}
    run_file = write_run_file(tmp_path / "ddp.yaml", ddp)
    finished = run(accelerate_command("cpu_ddp", SCRIPT, str(run_file)), timeout=400)

    output = tmp_path / "ddp"
    state = output / "checkpoints/training_state_step_00006.safetensors"
    assert read_state_header(state).info["data"]["world_size"] == 2, finished.output
    assert losses(output) == pytest.approx(losses(tmp_path / "single"), rel=2e-6)
    assert [m["learning_rate"] for m in metrics(output)] == [m["learning_rate"] for m in metrics(tmp_path / "single")]
    assert [m["grad_norm"] for m in metrics(output)] == pytest.approx(
        [m["grad_norm"] for m in metrics(tmp_path / "single")], rel=1e-5
    )
    weights = "checkpoints/lora_weights_step_00006.safetensors"
    ours, expected = load_file(output / weights), load_file(tmp_path / "single" / weights)
    assert ours.keys() == expected.keys()
    # AdamW divides by the gradient's size, so where a gradient is almost nothing a rounding becomes a part of a step;
    # six steps of 1e-3 leave at most 1e-5 of that.
    assert all(torch.allclose(ours[name], expected[name], rtol=1e-5, atol=5e-5) for name in expected)
    names = [f"step_{step:06d}_{index}.mp4" for step in (0, 3, 6) for index in (1, 2)]
    assert sorted(path.name for path in (output / "samples").iterdir()) == names
    assert len(list(output.glob("wandb/offline-run-*"))) == 1, "every rank talked to W&B"

    # Stopped after step 3, in effect: the later checkpoint is gone.
    for path in output.glob("checkpoints/*_step_00006*"):
        path.unlink()
    whole_curve = losses(output)
    run(accelerate_command("cpu_ddp", SCRIPT, str(run_file), "model.load_checkpoint=latest"), timeout=400)
    assert losses(output) == whole_curve
    again = load_file(output / weights)
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_one_clip_trains_again_and_again_on_two_processes_and_the_log_says_so_once(settings, tiny_pipeline, tmp_path):
    data = write_prepared_data(tmp_path / "one", samples=1)
    settings["data"] |= {"preprocessed_data_root": str(data)}
    settings["optimization"] |= {"batch_size": 2, "steps": 3}
    run_file = write_run_file(tmp_path / "one.yaml", settings)
    finished = run(accelerate_command("cpu_ddp", SCRIPT, str(run_file)), timeout=300)
    assert len(losses(tmp_path / "ddp")) == 3
    assert finished.output.count("samples come round again") == 1


@pytest.mark.parametrize(
    ("layout", "number", "whole_group"),
    [
        ("cpu_ddp", signal.SIGTERM, False),  # the agent passes it on
        ("cpu_ddp", signal.SIGINT, True),  # Ctrl-C reaches everyone, and the agent passes it on once more
        ("cpu_single", signal.SIGTERM, False),  # the launcher dies without telling its child
    ],
)
def test_a_signal_to_the_launcher_finishes_the_step_saves_and_says_so(settings, tmp_path, layout, number, whole_group):
    settings["optimization"] |= {"steps": 100_000}
    settings["wandb"] = {"enabled": False}
    run_file = write_run_file(tmp_path / "long.yaml", settings)
    process = subprocess.Popen(
        accelerate_command(layout, SCRIPT, str(run_file)),
        env=launch_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_steps(tmp_path / "ddp", process, 3)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        # Ends with the last process that holds the pipe: a child left behind would keep it open.
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert f"Stopped by {number.name}" in output, output
    latest = CheckpointStore(tmp_path / "ddp/checkpoints").latest()
    assert latest is not None, output
    assert latest.step == metrics(tmp_path / "ddp")[-1]["step"]


def wait_for_steps(output: Path, process: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 180
    while not (output / "metrics.jsonl").exists() or len(metrics(output)) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get under way"
        time.sleep(0.2)


def test_a_dry_run_under_torchrun_tells_the_plan_of_both_processes_and_trains_nothing(settings, tmp_path):
    settings["wandb"] = {"enabled": False}
    run_file = write_run_file(tmp_path / "torchrun.yaml", settings)
    finished = run(torchrun_command(2, SCRIPT, str(run_file), "--dry-run"), timeout=200)
    assert "2 processes on cpu" in finished.output
    assert "4 = 2 per process x 1 micro-batches x 2 processes" in finished.output
    assert not (tmp_path / "ddp").exists()
