"""A training state of several parts: written by several processes, whole or not there, read in any division."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ltx_trainer_plus.checkpoints import files, saved_state, state_parts
from ltx_trainer_plus.checkpoints.resume import find_checkpoint
from ltx_trainer_plus.checkpoints.run_folder import RunFolder, RunFolderError
from ltx_trainer_plus.checkpoints.state import CheckpointError, StatePart, TrainingState
from ltx_trainer_plus.checkpoints.state_parts import write_part
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from tests.kills import after, killed_in
from tests.states import read_state

WEIGHTS = {"diffusion_model.a.lora_A.weight": torch.ones(2, 3)}
NAME = "training_state_step_00010"
SECOND = "shard_00002_of_00002.safetensors"


def whole(step: int) -> torch.Tensor:
    return torch.arange(15.0).reshape(5, 3) + step


def parts(step: int) -> list[TrainingState]:
    """What two processes hold: three and two rows of a tensor; the first a count too, the second all of a small one."""
    first = {"parameter.a": whole(step)[:3].clone(), "optimizer.step.a": torch.tensor(float(step))}
    second = {"parameter.a": whole(step)[3:].clone(), "parameter.b": torch.ones(1, 2)}
    return [
        TrainingState(step, first, {"seed": 1}, StatePart(0, 2, {"parameter.a": (0, 0), "optimizer.step.a": ()})),
        TrainingState(step, second, {"seed": 1}, StatePart(1, 2, {"parameter.a": (3, 0), "parameter.b": (0, 0)})),
    ]


def save(store: CheckpointStore, step: int) -> Path:
    first, second = parts(step)
    store.save_part(second)
    return store.save(step, "lora", WEIGHTS, {}, first)


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.whole()]


def test_the_parts_make_one_checkpoint_with_a_sum_for_each(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    weights = save(store, 10)
    latest = store.latest()
    assert latest is not None
    assert (latest.weights, latest.state) == (weights, tmp_path / NAME)
    assert store.broken() == []
    assert sorted(path.name for path in (tmp_path / NAME).iterdir()) == ["shard_00001_of_00002.safetensors", SECOND]
    assert len(list(tmp_path.iterdir())) == 3
    marker = (tmp_path / "checkpoint_step_00010.json").read_text()
    assert f"{NAME}/{SECOND}" in marker
    state = read_state(tmp_path / NAME)
    assert (state.step, state.info) == (10, {"seed": 1})
    assert torch.equal(state.tensors["parameter.a"], whole(10))
    assert torch.equal(state.tensors["parameter.b"], torch.ones(1, 2))
    assert state.tensors["optimizer.step.a"].item() == 10


def test_a_slice_is_put_together_from_the_parts_that_it_touches_and_no_others_are_read(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 10)
    saved = saved_state.read_state(tmp_path / NAME).tensors["parameter.a"]
    assert saved.shape == (5, 3)
    for start in range(6):
        for stop in range(start, 6):
            assert torch.equal(saved[slice(start, stop), slice(0, 3)], whole(10)[start:stop])
    assert torch.equal(saved[slice(2, 4), slice(1, 2)], whole(10)[2:4, 1:2])

    class Untouchable:
        def __getitem__(self, _: object) -> torch.Tensor:
            raise AssertionError("read")

    first, second = saved._pieces
    split = saved_state.SavedTensor("a", [first, saved_state._Piece(Untouchable(), second.offset, second.shape)])
    assert torch.equal(split[slice(1, 3), slice(0, 3)], whole(10)[1:3])
    with pytest.raises(AssertionError, match="read"):
        split[slice(1, 4), slice(0, 3)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_takes_the_folder(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 10)
    tensors = {"parameter.a": torch.zeros(5, 3), "parameter.b": torch.zeros(1, 2), "optimizer.step.a": torch.zeros(())}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / NAME)), no_dist=True)
    expected = read_state(tmp_path / NAME).tensors
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "cut off"),
        (lambda p: p.write_bytes(b""), "0 bytes"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\xff"), "checksum"),
        (lambda p: p.unlink(), "missing"),
        (lambda p: shutil.rmtree(p.parent), "missing"),
    ],
    ids=["truncated", "empty", "bit-flipped", "deleted", "no folder"],
)
def test_a_damaged_part_is_named_and_the_newest_whole_checkpoint_is_used(tmp_path: Path, damage, reason: str) -> None:
    tmp_path = tmp_path / "checkpoints"
    store = CheckpointStore(tmp_path)
    save(store, 5)
    save(store, 10)
    damage(tmp_path / NAME / SECOND)
    assert steps(store) == [5]
    assert store.latest() == store.whole()[0]
    (line,) = store.broken()
    assert NAME in line
    assert reason in line
    found = find_checkpoint("latest", RunFolder(tmp_path.parent))
    assert (found.step, found.notes) == (5, (f"Passed over: {line}",))


def test_a_foreign_file_beside_the_parts_is_neither_read_nor_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last_n=1)
    save(store, 5)
    save_file({"parameter.a": torch.zeros(5, 3)}, tmp_path / "training_state_step_00005" / "a.safetensors")
    foreign = tmp_path / "training_state_step_00005" / "shard_00001.pt"
    foreign.write_bytes(b"\x80\x04a pickle")
    assert steps(store) == [5]
    assert torch.equal(read_state(tmp_path / "training_state_step_00005").tensors["parameter.a"], whole(5))
    save(store, 10)
    assert steps(store) == [10]
    assert foreign.exists()
    assert not (tmp_path / "training_state_step_00005" / SECOND).exists()
    save(store, 15)
    assert not (tmp_path / NAME).exists()


def test_a_marker_that_names_files_elsewhere_is_not_believed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 10)
    marker = tmp_path / "checkpoints" / "checkpoint_step_00010.json"
    text = marker.read_text()
    for place in ("../outside.safetensors", f"/{NAME}/{SECOND}", f"{NAME}/../{SECOND}", f"other/{SECOND}"):
        marker.write_text(text.replace(f"{NAME}/{SECOND}", place))
        assert "it names a file that belongs to no checkpoint" in store.broken()[0]


@pytest.mark.parametrize("survived_renames", range(5))
def test_a_kill_at_any_point_leaves_the_earlier_checkpoint_and_the_next_start_recovers(
    tmp_path: Path, survived_renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renames: word of each part, the weights, the folder of the state, the marker."""
    store = CheckpointStore(tmp_path, keep_last_n=1)
    save(store, 5)
    with killed_in(monkeypatch, os, "replace", after(survived_renames)):
        save(store, 10)

    store = CheckpointStore(tmp_path, keep_last_n=1)
    assert store.clean()
    assert not list(tmp_path.rglob("*.saving"))
    assert steps(store) == [5]
    save(store, 10)
    assert steps(store) == [10]
    assert store.broken() == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_kill_during_a_removal_is_finished_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last_n=1)
    save(store, 5)
    with killed_in(monkeypatch, Path, "unlink", lambda path, *_, **__: path.name == SECOND):
        save(store, 10)
    store = CheckpointStore(tmp_path, keep_last_n=1)
    assert f"training_state_step_00005/{SECOND}" in store.clean()
    assert steps(store) == [10]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("index", [0, 1])
def test_a_disk_that_is_full_for_one_part_is_the_error_of_the_save(
    tmp_path: Path, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    flush = files.flush_to_disk

    def full(path: Path) -> None:
        if path.name == f"shard_{index + 1:05d}_of_00002.safetensors":
            raise OSError(28, "No space left on device")
        flush(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "flush_to_disk", full)
        with pytest.raises(CheckpointError, match=rf"step 10 .*shard_0000{index + 1}_of_00002.*No space left"):
            save(store, 10)
    assert steps(store) == [5]
    assert store.broken() == []
    assert not list(tmp_path.rglob("*.saving"))


def test_the_reason_may_be_lost_on_a_full_disk_but_not_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        path.touch()
        if text:
            raise OSError(28, "No space left on device")
        return 0

    store = CheckpointStore(tmp_path)
    first, second = parts(10)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        store.save_part(second)
    with pytest.raises(CheckpointError, match=f"{SECOND}: it could not be written.* probably full"):
        store.save(10, "lora", WEIGHTS, {}, first)
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite_in_one_part_are_not_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first, second = parts(10)
    second.tensors["parameter.b"][0, 0] = float("nan")
    store.save_part(second)
    with pytest.raises(CheckpointError, match=rf"{SECOND}.*parameter\.b .* not finite"):
        store.save(10, "lora", WEIGHTS, {}, first)
    assert steps(store) == []
    assert not list(tmp_path.iterdir())


def test_the_main_process_waits_for_a_slow_part(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first, second = parts(10)
    thread = threading.Thread(target=store.save, args=(10, "lora", WEIGHTS, {}, first))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert steps(store) == []
    store.save_part(second)
    thread.join(30)
    assert steps(store) == [10]


def test_a_part_that_never_comes_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, parts_timeout=0.1)
    with pytest.raises(CheckpointError, match=rf"(?s)no word of {SECOND}.*share the run folder"):
        store.save(10, "lora", WEIGHTS, {}, parts(10)[0])
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_failed_waits_for_the_parts_no_longer_than_a_launcher_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_parts, "_GRACE_SECONDS", 0.1)
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(CheckpointError, match="no word of"):
        CheckpointStore(tmp_path).save(10, "lora", WEIGHTS, {}, parts(10)[0], None, given_up)


def test_later_checkpoints_are_set_aside_with_their_folders(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 5)
    save(store, 10)
    (tmp_path / "training_state_step_00015").mkdir()  # a killed save's
    aside = store.set_aside_after(5)
    assert aside is not None
    assert steps(store) == [5]
    assert steps(CheckpointStore(aside)) == [10]
    assert not (tmp_path / "training_state_step_00015").exists()


def test_a_folder_that_was_copied_without_all_parts_is_refused(tmp_path: Path) -> None:
    for state in parts(10):
        write_part(tmp_path / NAME, state)
    (tmp_path / NAME / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"{SECOND} of 2 parts is missing"):
        saved_state.read_state(tmp_path / NAME)
    write_part(tmp_path / NAME, parts(11)[1])
    with pytest.raises(CheckpointError, match=rf"{SECOND} is of step 11, .* of step 10"):
        saved_state.read_state(tmp_path / NAME)
    (tmp_path / NAME / "shard_00001_of_00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="it holds no first part"):
        saved_state.read_state_header(tmp_path / NAME)


def test_parts_that_do_not_make_a_whole_are_noticed(tmp_path: Path) -> None:
    first, second = parts(10)
    assert second.part is not None
    second.part.offsets["parameter.a"] = (4, 0)
    for state in (first, second):
        write_part(tmp_path / NAME, state)
    saved = saved_state.read_state(tmp_path / NAME).tensors["parameter.a"]
    with pytest.raises(CheckpointError, match=r"parameter\.a: parts of it are missing"):
        saved[...]


def test_a_checkpoint_that_was_copied_without_its_marker_brings_its_folder(tmp_path: Path) -> None:
    weights = save(CheckpointStore(tmp_path / "checkpoints"), 10)
    (tmp_path / "checkpoints" / "checkpoint_step_00010.json").unlink()
    found = find_checkpoint(weights, RunFolder(tmp_path))
    assert (found.state, found.step) == (weights.with_name(NAME), 10)
    assert found.continues(RunFolder(tmp_path))
    with pytest.raises(CheckpointError, match=rf"(?s){NAME} is a training state.*Give the weights file beside it"):
        find_checkpoint(weights.with_name(NAME), RunFolder(tmp_path))


def test_a_run_with_a_sharded_state_is_said_to_be_continuable(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "checkpoints"), 10)
    with pytest.raises(RunFolderError, match=r"(?s)checkpoints up to step 10.*load_checkpoint: latest"):
        RunFolder.open(tmp_path, resuming=False)


def test_a_failure_of_which_no_word_can_be_left_is_in_the_log_of_that_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{NAME}.saving").write_text("a file where the folder should be")
    CheckpointStore(tmp_path).save_part(parts(10)[1])
    assert f"{SECOND} could not be written (FileExistsError" in caplog.text
    assert "the main process could not be told" in caplog.text
