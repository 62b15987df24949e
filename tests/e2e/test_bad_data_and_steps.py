"""Steps that are not finite and samples that cannot be read: skipped and counted, or the end of the run, by name."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.data.sample_files import DataError
from ltx_trainer_plus.step.bad_steps import BadStepsError
from tests.damage import scale_latents
from tests.runs import joint_run, losses, metrics, train, write_prepared_data

Settings = dict[str, Any]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prepared_data(tmp_path / "data", samples=4)


@pytest.fixture
def settings(tiny_pipeline: Path, data: Path, tmp_path: Path) -> Settings:
    settings = joint_run(tiny_pipeline, data, tmp_path / "run")
    settings["checkpoints"] = {"interval": 1, "keep_last_n": -1, "precision": "float32"}
    settings["optimization"] |= {"batch_size": 1, "steps": 8}
    return settings


def steps_of(settings: Settings) -> list[int]:
    store = CheckpointStore(Path(settings["output_dir"]) / "checkpoints")
    return [checkpoint.step for checkpoint in store.whole()]


def test_a_step_with_an_infinite_loss_changes_nothing_is_counted_and_names_its_sample_and_sigmas(
    settings: Settings, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scale_latents(data, "clip_02", 1e30)
    with caplog.at_level(logging.WARNING):
        result = train(settings)
    assert result.weights is not None
    folder = Path(settings["output_dir"])
    bad = [line["step"] for line in metrics(folder) if line["loss"] is None]
    assert len(bad) == 2  # two epochs of four samples
    assert metrics(folder)[-1]["skipped_steps"] == 2
    warnings = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    assert len(warnings) == 2
    for step, warning in zip(bad, warnings, strict=True):
        assert warning.startswith(f"Step {step} was skipped; the weights are as before. The loss was not finite:")
        assert "clip_02 (video sigma 0." in warning
        assert ", audio sigma 0." in warning
        assert "clip_01" not in warning
    # While the last step was bad nothing is saved; the save is made up for after the next good one.
    assert steps_of(settings) == [step for step in range(1, 9) if step not in bad or step == 8]
    for checkpoint in CheckpointStore(folder / "checkpoints").whole():
        assert all(tensor.isfinite().all() for tensor in load_file(checkpoint.weights).values())


def test_a_bad_step_leaves_the_weights_bit_for_bit(settings: Settings, data: Path) -> None:
    scale_latents(data, "clip_02", 1e30)
    settings["optimization"]["scheduler_type"] = "constant"
    train(settings)
    folder = Path(settings["output_dir"])
    bad = next(line["step"] for line in metrics(folder) if line["loss"] is None)
    if bad == 1:
        pytest.skip("no step before")
    # The run without that step ends at the same weights.
    train({**settings, "optimization": {**settings["optimization"], "steps": bad}, "output_dir": f"{folder}_short"})
    name = "checkpoints/lora_weights_step_{:05d}.safetensors"
    before = load_file(folder / name.format(bad - 1))
    after = load_file(Path(f"{folder}_short") / name.format(bad))
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_too_many_bad_steps_in_a_row_end_the_run_save_nothing_and_name_samples_and_sigmas(
    settings: Settings, data: Path
) -> None:
    for number in range(4):
        scale_latents(data, f"clip_{number:02d}", 1e30)
    with pytest.raises(BadStepsError) as error:
        train(settings, "optimization.max_bad_steps=3")
    message = str(error.value)
    assert "3 steps in a row were not finite (optimization.max_bad_steps: 3)" in message
    assert "Step 3 was skipped" in message
    assert "video sigma 0." in message
    assert "model.load_checkpoint=latest" in message
    assert steps_of(settings) == []
    assert len(metrics(Path(settings["output_dir"]))) == 2  # the third ended it


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_corrupt_sample_ends_the_run_by_name(settings: Settings, data: Path, workers: int) -> None:
    _spoil(data)
    with pytest.raises(DataError, match=r"clip_02\.safetensors: 1 of 1024 numbers are not finite"):
        train(settings, f"data.num_dataloader_workers={workers}")


@pytest.mark.parametrize("damage", ["file", pytest.param("numbers", marks=pytest.mark.slow)])
def test_a_corrupt_sample_is_replaced_by_its_neighbour_counted_and_moves_nothing(
    settings: Settings, data: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    train({**settings, "output_dir": f"{settings['output_dir']}_whole"})
    whole = losses(Path(f"{settings['output_dir']}_whole"))
    if damage == "numbers":
        _spoil(data)
    else:
        path = data / ".precomputed" / "latents" / "clip_02.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING):
        train(settings, "data.on_error=skip")
    assert "clip_02.safetensors" in caplog.text
    assert "clip_03 takes its place" in caplog.text
    lines = metrics(Path(settings["output_dir"]))
    assert lines[-1]["replaced_samples"] == 2  # once an epoch
    first = next(index for index, line in enumerate(lines) if line["replaced_samples"] == 1)
    # Up to there everything is as with the whole data set, and the order stays: only this sample is another.
    assert [line["loss"] for line in lines[:first]] == whole[:first]
    assert lines[first]["loss"] != whole[first]
    # Deterministic.
    train({**settings, "output_dir": f"{settings['output_dir']}_again"}, "data.on_error=skip")
    assert losses(Path(f"{settings['output_dir']}_again")) == [line["loss"] for line in lines]


def _spoil(data: Path) -> None:
    """One NaN among the numbers of clip_02: its header is whole."""
    path = data / ".precomputed" / "latents" / "clip_02.safetensors"
    with safe_open(path, "pt") as file:
        metadata, latents = file.metadata(), file.get_tensor("latents")
    latents[0, 0, 0, 0] = float("nan")
    save_file({"latents": latents}, path, metadata)
