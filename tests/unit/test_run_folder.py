"""Run folder: one run at a time, no fresh start on top of another."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltx_trainer_plus.checkpoints.run_folder import RunFolder, RunFolderError
from ltx_trainer_plus.checkpoints.state import TrainingState
from ltx_trainer_plus.checkpoints.store import CheckpointStore


def test_a_new_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "a" / "b", resuming=False)
    assert folder.path == tmp_path / "a" / "b"
    assert folder.path.is_dir()
    folder.close()


def test_a_fresh_start_in_a_folder_with_checkpoints_is_refused_with_the_remedy(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "checkpoints").save(250, "lora", {"a": torch.ones(1)}, state=TrainingState(250))
    with pytest.raises(RunFolderError, match="checkpoints up to step 250") as caught:
        RunFolder.open(tmp_path, resuming=False)
    assert "model.load_checkpoint: latest" in str(caught.value)
    RunFolder.open(tmp_path, resuming=True).close()


def test_a_fresh_start_in_a_folder_with_logged_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl") as caught:
        RunFolder.open(tmp_path, resuming=False)
    assert "delete the folder" in str(caught.value)
    assert "latest" not in str(caught.value)  # there is nothing to continue


def test_a_run_without_a_training_state_is_not_said_to_be_continuable(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "checkpoints").save(250, "lora", {"a": torch.ones(1)})
    with pytest.raises(RunFolderError, match=f"model.load_checkpoint to {tmp_path}") as caught:
        RunFolder.open(tmp_path, resuming=False)
    assert "latest" not in str(caught.value)


def test_a_run_that_ended_before_its_first_step_is_no_obstacle(tmp_path: Path) -> None:
    first = RunFolder.open(tmp_path, resuming=False)
    first.config.write_text("seed: 1")
    first.metrics.touch()
    first.close()
    RunFolder.open(tmp_path, resuming=False).close()


@pytest.mark.parametrize("resuming", [False, True])
def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_gone(tmp_path: Path, resuming: bool) -> None:
    script = (
        "import sys, time\n"
        "from ltx_trainer_plus.checkpoints.run_folder import RunFolder\n"
        "folder = RunFolder.open(sys.argv[1], resuming=False)\n"
        "print('open', flush=True)\n"
        "time.sleep(60)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "open"
        with pytest.raises(RunFolderError, match=f"in use by a run that is still going .process {first.pid} on"):
            RunFolder.open(tmp_path, resuming=resuming)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    RunFolder.open(tmp_path, resuming=resuming).close()


def test_a_folder_that_cannot_be_created_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunFolderError, match=r"output_dir: .*/file/run cannot be written: Not a directory"):
        RunFolder.open(tmp_path / "file" / "run", resuming=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunFolderError, match="Permission denied"):
        RunFolder.open(tmp_path, resuming=False)


def test_a_read_only_file_system_is_refused_at_the_start() -> None:
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder.open("/proc/self", resuming=False)
