"""Whole runs whose validation has conditions, older names or a signal in the middle."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.config import ConfigError
from ltx_trainer_plus.media.video import read_video
from ltx_trainer_plus.validation import runner
from scripts import train as train_script
from tests.runs import VALIDATION, joint_run, metrics, train, write_prepared_data, write_run_file
from tests.unit.media_files import make_video


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    write_prepared_data(folder / "data")
    make_video(folder / "clip.mp4", 17)
    return folder


def settings(tiny_pipeline: Path, folder: Path, name: str, **validation: Any) -> dict[str, Any]:
    run = joint_run(tiny_pipeline, folder / "data", folder / name)
    run["optimization"]["steps"] = 2
    fields = {key: value for key, value in VALIDATION.items() if key != "samples"}
    run["validation"] = {**fields, "skip_initial_validation": True, **validation}
    return run


def test_older_names_still_make_the_samples_that_they_ask_for(tiny_pipeline: Path, folder: Path) -> None:
    old = {
        "prompts": ["a ball"],
        "reference_videos": [str(folder / "clip.mp4")],
        "reference_downscale_factor": 2,
        "include_reference_in_output": True,
        "guidance_scale": 2.0,
        "stg_scale": 1.0,
        "stg_mode": "stg_v",
    }
    train(settings(tiny_pipeline, folder, "old", **old))
    (made,) = (folder / "old" / "samples").iterdir()
    assert read_video(made).frames.shape == (9, 64, 128, 3)  # the reference beside the result


def test_a_dry_run_reads_the_files_of_conditions_and_warns_of_older_names_once(
    tiny_pipeline: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = {"type": "video_to_audio", "video": str(folder / "clip.mp4")}
    samples = [{"prompt": "a ball", "conditions": [condition]}, {"prompt": "a bell"}]
    broken = settings(tiny_pipeline, folder, "dry", samples=samples, video_dims=[64, 64, 33], guidance_scale=3.0)
    run_file = write_run_file(folder / "dry.yaml", broken)
    monkeypatch.setenv("COLUMNS", "200")

    def dry_run(*overrides: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["train.py", str(run_file), *overrides, "--dry-run"])
        status = train_script.main()
        return status, *capsys.readouterr()

    status, _, errors = dry_run()
    assert status == 2
    assert "validation.samples.0.conditions.0.video" in errors
    assert "it has 17 frames at 24 frames per second, and 33 are needed" in errors
    status, plan, errors = dry_run("validation.video_dims=[64,64,17]")
    assert status == 0, errors
    assert errors.count("validation.guidance_scale is an older name") == 1
    assert "2 samples x 8 forwards" in plan


def test_a_run_refuses_files_that_it_cannot_use_before_it_starts(tiny_pipeline: Path, folder: Path) -> None:
    samples = [{"prompt": "a", "conditions": [{"type": "suffix", "video": str(folder / "clip.mp4"), "num_frames": 24}]}]
    with pytest.raises(ConfigError, match="it has 17 frames"):
        train(settings(tiny_pipeline, folder, "refused", samples=samples, video_dims=[64, 64, 33]))
    assert not (folder / "refused").exists()


def test_a_signal_during_a_long_validation_ends_it_soon_and_the_run_saves(
    tiny_pipeline: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    agree = runner.any_process

    def signalled(value: bool, topology: Any) -> bool:
        asked.append(value)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return agree(value, topology)

    monkeypatch.setattr(runner, "any_process", signalled)
    long = settings(tiny_pipeline, folder, "long", samples=VALIDATION["samples"], inference_steps=10_000)
    long["validation"]["skip_initial_validation"] = False
    result = train(long)
    assert asked == [False, False, True]
    assert result.interrupted
    assert result.weights.is_file()
    assert not (folder / "long" / "samples").exists()
    assert [line["step"] for line in metrics(folder / "long")] == [1]
