"""A sample that spoils one rank's step: every rank skips it alike, and is told its name."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from ltx_trainer_plus.checkpoints.store import CheckpointStore
from tests.launch import run, torchrun_command
from tests.runs import joint_run, metrics, train, write_prepared_data, write_run_file

SCRIPT = Path(__file__).with_name("resume_script.py")


@pytest.mark.slow
def test_a_step_that_one_rank_spoils_is_skipped_by_all_as_in_one_process_and_its_sample_is_named(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    data = write_prepared_data(tmp_path / "data", samples=6)
    path = data / ".precomputed" / "latents" / "clip_02.safetensors"
    with safe_open(path, "pt") as file:
        metadata, latents = file.metadata(), file.get_tensor("latents")
    save_file({"latents": latents * 1e30}, path, metadata)

    def settings(name: str, batch_size: int) -> dict[str, Any]:
        return {
            **joint_run(tiny_pipeline, data, tmp_path / name),
            "optimization": {"steps": 6, "batch_size": batch_size, "learning_rate": 1e-3},
            "data": {"preprocessed_data_root": str(data), "num_dataloader_workers": 0, "shape_group": 1},
        }

    train(settings("single", 2))
    two = str(write_run_file(tmp_path / "two.yaml", settings("two", 1)))
    # The second run ends at its first bad step.
    strict = [two, f"output_dir={tmp_path / 'strict'}", "optimization.max_bad_steps=1", "checkpoints.interval=1"]
    finished = run(torchrun_command(2, SCRIPT, two, "--", *strict, "--"), timeout=300, check=False)
    assert finished.returncode != 0

    one, other = metrics(tmp_path / "single"), metrics(tmp_path / "two")
    bad = [line["step"] for line in one if line["loss"] is None]
    assert len(bad) == 2
    assert [line["step"] for line in other if line["loss"] is None] == bad
    assert other[-1]["skipped_steps"] == 2
    good = [line["step"] not in bad for line in one]
    assert [line["loss"] for line, is_good in zip(other, good, strict=True) if is_good] == pytest.approx(
        [line["loss"] for line, is_good in zip(one, good, strict=True) if is_good], rel=2e-6
    )
    # Told once, by the main process, on whichever rank the sample was.
    assert finished.output.count(f"Step {bad[0]} was skipped; the weights are as before.") >= 1
    assert "clip_02 (video sigma" in finished.output
    assert "clip_01 (video sigma" not in finished.output
    assert "1 steps in a row were not finite (optimization.max_bad_steps: 1)" in finished.output
    saved = [checkpoint.step for checkpoint in CheckpointStore(tmp_path / "strict" / "checkpoints").whole()]
    assert all(step < bad[0] for step in saved)
