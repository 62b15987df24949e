"""Checkpoint folder: atomic saves, detection of damage, retention."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.checkpoints.state import CheckpointError, TrainingState
from ltx_trainer_plus.checkpoints.store import Checkpoint, CheckpointStore
from tests.kills import after, killed_in
from tests.states import read_state


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"diffusion_model.a.lora_A.weight": torch.full((2, 3), value)}


def save(store: CheckpointStore, step: int) -> Path:
    state = TrainingState(step, {"parameter.a": torch.full((2, 3), float(step))}, {"seed": 42})
    return store.save(step, "lora", weights(step), {"origin": "test"}, state)


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.whole()]


def test_a_saved_checkpoint_has_the_fixed_names_and_reads_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    path = save(store, 250)
    assert path == tmp_path / "checkpoints" / "lora_weights_step_00250.safetensors"
    assert torch.equal(
        load_file(path)["diffusion_model.a.lora_A.weight"], weights(250)["diffusion_model.a.lora_A.weight"]
    )
    latest = store.latest()
    assert latest == Checkpoint(250, path, path.with_name("training_state_step_00250.safetensors"))
    assert latest.state is not None
    state = read_state(latest.state)
    assert (state.step, state.info) == (250, {"seed": 42})
    assert torch.equal(state.tensors["parameter.a"], torch.full((2, 3), 250.0))
    assert store.save(300, "full", weights(1)).name == "model_weights_step_00300.safetensors"
    assert store.broken() == []


def test_retention_is_numeric_and_minus_one_keeps_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "one", keep_last_n=1)
    for step in (9000, 10000, 99000, 100000):
        save(store, step)
        assert steps(store) == [step]
    assert len(list((tmp_path / "one").iterdir())) == 3

    store = CheckpointStore(tmp_path / "all", keep_last_n=-1)
    for step in (9000, 10000, 99000, 100000):
        save(store, step)
    assert steps(store) == [9000, 10000, 99000, 100000]


def test_retention_counts_what_an_earlier_process_left_and_never_the_broken_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path), step)
    (tmp_path / "lora_weights_step_00003.safetensors").write_bytes(b"cut off")
    store = CheckpointStore(tmp_path, keep_last_n=2)
    save(store, 4)
    assert steps(store) == [2, 4]


def test_a_later_save_leaves_the_earlier_checkpoint_byte_for_byte(tmp_path: Path) -> None:
    first = save(CheckpointStore(tmp_path), 5)
    before = first.read_bytes()
    assert save(CheckpointStore(tmp_path), 10) != first
    assert first.read_bytes() == before


def test_a_whole_checkpoint_is_not_written_twice(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    before = save(store, 5).read_bytes()
    assert store.save(5, "lora", weights(99)).read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "cut off"),
        (lambda p: p.write_bytes(b""), "0 bytes"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\xff"), "checksum"),
        (lambda p: p.unlink(), "missing"),
    ],
    ids=["truncated", "empty", "bit-flipped", "deleted"],
)
@pytest.mark.parametrize("kind", ["lora_weights", "training_state"])
def test_damage_is_detected_and_named_and_the_newest_whole_one_is_used(
    tmp_path: Path, kind: str, damage, reason: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    save(store, 10)
    name = f"{kind}_step_00010.safetensors"
    damage(tmp_path / name)
    assert steps(store) == [5]
    assert store.latest() == store.whole()[0]
    (line,) = store.broken()
    assert name in line
    assert reason in line


@pytest.mark.parametrize("survived_renames", [0, 1, 2])
def test_a_kill_at_any_point_of_a_save_leaves_the_earlier_checkpoint_and_the_next_start_recovers(
    tmp_path: Path, survived_renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last_n=1)
    save(store, 5)
    with killed_in(monkeypatch, os, "replace", after(survived_renames)):
        save(store, 10)

    store = CheckpointStore(tmp_path, keep_last_n=1)
    store.clean()
    assert not list(tmp_path.glob("*.saving"))
    assert steps(store) == [5]
    assert store.broken() == ([] if survived_renames == 0 else [store.broken()[0]])
    save(store, 10)
    assert steps(store) == [10]
    assert store.broken() == []


def test_a_kill_during_a_removal_is_finished_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last_n=1)
    save(store, 5)
    with killed_in(monkeypatch, Path, "unlink"):
        save(store, 10)
    store = CheckpointStore(tmp_path, keep_last_n=1)
    assert "lora_weights_step_00005.safetensors" in store.clean()
    assert steps(store) == [10]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failing_disk_is_an_error_that_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step 10 .*No space left") as caught:
            save(store, 10)
    assert str(tmp_path) in str(caught.value)
    assert steps(store) == [5]
    assert not list(tmp_path.glob("*.saving"))


def test_files_without_a_marker_are_named_not_used(tmp_path: Path) -> None:
    save_file(weights(1), tmp_path / "lora_weights_step_00007.safetensors")
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    assert "lora_weights_step_00007" in store.broken()[0]


def test_going_on_from_an_earlier_step_sets_the_later_checkpoints_aside_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last_n=1)
    for step in (5, 10):
        save(CheckpointStore(tmp_path), step)
    aside = store.set_aside_after(5)
    assert aside is not None
    assert steps(CheckpointStore(aside)) == [10]
    assert steps(store) == [5]
    assert store.set_aside_after(5) is None
    save(store, 8)
    assert steps(store) == [8]
    assert steps(CheckpointStore(aside)) == [10]


def test_the_store_of_a_folder_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "nothing")
    assert store.latest() is None
    assert [store.whole(), store.broken(), store.clean()] == [[], [], []]
