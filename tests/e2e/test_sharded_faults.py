"""Faults while a sharded training state is saved, and in what was saved, in real processes."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.checkpoints.store import CheckpointStore
from tests.damage import flip_a_bit, replace_by_a_foreign_file, truncate
from tests.launch import Running, run, torchrun_command
from tests.runs import joint_run, losses, train, write_prepared_data, write_run_file

Settings = dict[str, Any]
SCRIPT = Path(__file__).with_name("sharded_fault_script.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_data(tmp_path_factory.mktemp("data"), samples=5)


def settings_of(model: Path, data: Path, output: Path, *, ranks: int, steps: int = 4) -> Settings:
    settings = joint_run(model, data, output)
    settings["optimization"] |= {"batch_size": 2 // ranks, "steps": steps, "scheduler_type": "constant", "eps": 1e-5}
    settings["data"] |= {"shape_group": 1}
    settings["acceleration"] |= {"parallel": "auto" if ranks == 1 else "fsdp2"}
    settings["checkpoints"] = {"interval": 1, "keep_last_n": -1}
    return settings


@pytest.fixture(scope="module")
def expected(tiny_pipeline: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on one process, in one go."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train(settings_of(tiny_pipeline, data, output, ranks=1))
    return losses(output)


@pytest.mark.parametrize(
    ("point", "rank", "whole"),
    [
        ("while", 1, {1}),
        pytest.param("before", 1, {1}, marks=pytest.mark.slow),
        # The main process has all it needs; whether it is still allowed to finish is the launcher's choice.
        pytest.param("after", 1, {1, 2}, marks=pytest.mark.slow),
        pytest.param("before", 0, {1}, marks=pytest.mark.slow),
        pytest.param("marker", 0, {1}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_while_it_saves_costs_nothing_that_was_whole(
    tiny_pipeline: Path, data: Path, tmp_path: Path, expected: list[float], point: str, rank: int, whole: set[int]
) -> None:
    output = tmp_path / "run"
    run_file = write_run_file(tmp_path / "run.yaml", settings_of(tiny_pipeline, data, output, ranks=2, steps=1_000_000))
    running = Running(torchrun_command(2, SCRIPT, point, str(rank), str(run_file)), output)
    store = CheckpointStore(output / "checkpoints")
    try:
        running.wait_until(lambda: store.latest() is not None, "the first checkpoint")
        assert running.wait_for_end(60) != 0
    finally:
        running.kill()
    assert "Signal 9 (SIGKILL)" in running.text
    latest = store.latest()
    assert latest is not None
    assert latest.step in whole
    # What the others have left is nothing to the next part of the run, whatever its layout.
    train(settings_of(tiny_pipeline, data, output, ranks=1), "model.load_checkpoint=latest")
    assert losses(output) == pytest.approx(expected, rel=2e-6)
    assert [checkpoint.step for checkpoint in store.whole()] == [1, 2, 3, 4]
    assert store.broken() == []
    assert not list(output.rglob("*.saving"))


@pytest.fixture(scope="module")
def sharded(tiny_pipeline: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and text of a whole run of two ranks under FSDP2, the second of which is slow to write step 2."""
    output = tmp_path_factory.mktemp("sharded") / "run"
    run_file = write_run_file(output.with_name("run.yaml"), settings_of(tiny_pipeline, data, output, ranks=2))
    return output, run(torchrun_command(2, SCRIPT, "held", "1", str(run_file)), timeout=300).output


@pytest.mark.slow
def test_the_ranks_train_on_while_a_part_is_still_being_written(sharded: tuple[Path, str]) -> None:
    output, text = sharded
    assert text.count("The part of step 2 is written after step 3.") == 1
    # Each rank copies out what it holds.
    counts = re.findall(r"(\d+) collectives for (\d+) tensors", text)
    assert len(counts) == 4
    assert all(collectives == "0" and int(tensors) > 0 for collectives, tensors in counts)
    assert [checkpoint.step for checkpoint in CheckpointStore(output / "checkpoints").whole()] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, replace_by_a_foreign_file, Path.unlink])
@pytest.mark.parametrize("part", [1, 2])
def test_latest_passes_over_a_damaged_part_by_name_and_continues_on_one_process(
    tiny_pipeline: Path,
    data: Path,
    tmp_path: Path,
    sharded: tuple[Path, str],
    expected: list[float],
    damage: Callable[[Path], None],
    part: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = tmp_path / "run"
    shutil.copytree(sharded[0], output)
    name = f"training_state_step_00004/shard_0000{part}_of_00002.safetensors"
    damage(output / "checkpoints" / name)
    # Not looked at: it belongs to no checkpoint.
    foreign = output / "checkpoints" / "training_state_step_00003" / "notes.safetensors"
    foreign.write_text("not a tensor")
    train(settings_of(tiny_pipeline, data, output, ranks=1), "model.load_checkpoint=latest")
    assert f"Passed over: {name}" in caplog.text
    assert losses(output) == pytest.approx(expected, rel=2e-6)
    assert foreign.exists()
