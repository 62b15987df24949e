"""One of two ranks fails in validation: the other neither waits for ever nor goes on alone."""

from pathlib import Path

import pytest

from tests.launch import run, torchrun_command
from tests.runs import VALIDATION, joint_run, losses, write_prepared_data, write_run_file

SCRIPT = Path(__file__).with_name("failing_samples_script.py")


@pytest.mark.slow
def test_a_rank_that_fails_in_a_forward_or_while_decoding_costs_the_samples_of_that_time_alone(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    settings = joint_run(tiny_pipeline, write_prepared_data(tmp_path / "data"), tmp_path / "unused")
    settings["optimization"]["batch_size"] = 1
    settings["validation"] = {**VALIDATION, "on_error": "warn", "interval": 10}  # at the start and at the end
    run_file = write_run_file(tmp_path / "run.yaml", settings)
    finished = run(torchrun_command(2, SCRIPT, str(run_file), str(tmp_path)), timeout=400)
    for where in ("denoise", "decode"):
        assert f"process 1: RuntimeError: no memory to {where}" in finished.output
        assert len(losses(tmp_path / where)) == 4
        last = [path.name for path in sorted((tmp_path / where / "samples").iterdir()) if "000004" in path.name]
        assert last == ["step_000004_1.mp4", "step_000004_2.mp4"]
