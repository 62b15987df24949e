"""Finding the checkpoint that `model.load_checkpoint` means."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ltx_trainer_plus.checkpoints.resume import Found, find_checkpoint
from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.checkpoints.state import CheckpointError, TrainingState
from ltx_trainer_plus.checkpoints.store import CheckpointStore

WEIGHTS = {"diffusion_model.a.lora_A.weight": torch.ones(2, 3)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with whole checkpoints at 5 and 10."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (5, 10):
        store.save(step, "lora", WEIGHTS, state=TrainingState(step))
    return tmp_path / "run"


def weights(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"lora_weights_step_{step:05d}.safetensors"


def state(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"training_state_step_{step:05d}.safetensors"


def test_latest_a_run_folder_and_its_checkpoint_folder_mean_the_newest_checkpoint(run: Path) -> None:
    expected = Found(weights(run, 10), state(run, 10), 10)
    assert find_checkpoint("latest", RunFolder(run)) == expected
    assert find_checkpoint(run, RunFolder(Path("elsewhere"))) == expected
    assert find_checkpoint(run / "checkpoints", RunFolder(Path("elsewhere"))) == expected
    assert expected.continues(RunFolder(run))
    assert not expected.continues(RunFolder(run.parent / "another"))
    assert expected.continues(RunFolder(run / ".." / run.name))
    link = run.with_name("link")
    link.symlink_to(run)
    assert expected.continues(RunFolder(link))


def test_a_file_means_its_own_step(run: Path) -> None:
    assert find_checkpoint(weights(run, 5), RunFolder(run)) == Found(weights(run, 5), state(run, 5), 5)


def test_no_resume_takes_the_weights_alone(run: Path) -> None:
    found = find_checkpoint(run, RunFolder(run), weights_only=True)
    assert found == Found(weights(run, 10), None, 0)
    assert not found.continues(RunFolder(run))


def test_a_damaged_newest_checkpoint_is_named_and_the_newest_whole_one_used(run: Path) -> None:
    weights(run, 10).write_bytes(weights(run, 10).read_bytes()[:-1])
    found = find_checkpoint("latest", RunFolder(run))
    assert found.step == 5
    (note,) = found.notes
    assert "lora_weights_step_00010.safetensors" in note


def test_naming_a_damaged_checkpoint_is_an_error_that_offers_the_newest_whole_one(run: Path) -> None:
    state(run, 10).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"training_state_step_00010\.safetensors: it has 0 bytes") as caught:
        find_checkpoint(weights(run, 10), RunFolder(run))
    assert f"give {weights(run, 5)} (step 5)" in str(caught.value)


def test_when_no_checkpoint_is_whole_each_is_named(run: Path) -> None:
    for step in (5, 10):
        weights(run, step).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)weights_step_00005.*weights_step_00010"):
        find_checkpoint("latest", RunFolder(run))


def test_a_checkpoint_copied_without_its_marker_still_resumes(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (weights(run, 5), state(run, 5)):
        (copy / path.name).write_bytes(path.read_bytes())
    assert find_checkpoint(copy / weights(run, 5).name, RunFolder(run)).step == 5
    assert find_checkpoint(copy, RunFolder(run)).step == 5


def test_an_official_lora_gives_its_weights_and_step_0(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "my_lora.safetensors")
    assert find_checkpoint(tmp_path / "my_lora.safetensors", RunFolder(tmp_path)) == Found(
        tmp_path / "my_lora.safetensors", None, 0
    )


def test_an_official_checkpoint_folder_gives_its_highest_step_and_its_pickled_state_is_left_alone(
    tmp_path: Path,
) -> None:
    for step in (9000, 10000):
        save_file(WEIGHTS, tmp_path / f"lora_weights_step_{step:05d}.safetensors")
    (tmp_path / "training_state_step_10000.pt").write_bytes(b"a pickle")
    found = find_checkpoint(tmp_path, RunFolder(Path("elsewhere")))
    assert (found.weights.name, found.state, found.step) == ("lora_weights_step_10000.safetensors", None, 0)
    (note,) = found.notes
    assert "training_state_step_10000.pt" in note
    assert "run code" in note


def test_a_foreign_file_in_place_of_the_state_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "lora_weights_step_00005.safetensors")
    (tmp_path / "training_state_step_00005.safetensors").write_bytes(b"\x80\x04a pickle")
    with pytest.raises(CheckpointError, match=r"(?s)training_state_step_00005.*never unpickled.*no_resume: true"):
        find_checkpoint(tmp_path / "lora_weights_step_00005.safetensors", RunFolder(tmp_path))


@pytest.mark.parametrize("name", ["lora.pt", "lora.ckpt", "lora.bin"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"a pickle")
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file"):
        find_checkpoint(tmp_path / name, RunFolder(tmp_path))


def test_where_there_is_nothing_the_error_says_how_to_start_anew(tmp_path: Path) -> None:
    for given in ("latest", tmp_path):
        with pytest.raises(CheckpointError, match=r"(?s)no checkpoint in .*leave model\.load_checkpoint out"):
            find_checkpoint(given, RunFolder(tmp_path))
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere", RunFolder(tmp_path))


def test_a_training_state_is_not_taken_for_weights(run: Path) -> None:
    with pytest.raises(CheckpointError, match="Give the weights file beside it"):
        find_checkpoint(state(run, 5), RunFolder(run))
