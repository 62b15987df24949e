"""A rank that fails in the middle of a sharded run: every rank ends, and the user reads that rank's error."""

import json
import time
from pathlib import Path

from tests.launch import accelerate_command, run
from tests.runs import VALIDATION, joint_run, write_prepared_data

SCRIPT = """
import json, sys, time
from pathlib import Path

import ltx_trainer_plus.validation.runner as runner
from ltx_trainer_plus.parallel.ending import run_and_exit
from tests.runs import train

settings = json.loads(Path(sys.argv[1]).read_text())
real = runner.denoise


def denoise(*args, **kwargs):
    from torch import distributed
    if distributed.get_rank() == 1:
        Path(sys.argv[2]).write_text(str(time.time()))
        raise RuntimeError("this sample cannot be made")
    return real(*args, **kwargs)


runner.denoise = denoise
run_and_exit(lambda: train(settings))
"""


def test_one_failing_rank_ends_a_sharded_validation_within_a_minute_with_its_error(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    script, job, failed_at = tmp_path / "script.py", tmp_path / "job.json", tmp_path / "failed_at"
    script.write_text(SCRIPT)
    settings = joint_run(tiny_pipeline, write_prepared_data(tmp_path / "data"), tmp_path / "run")
    job.write_text(json.dumps({**settings, "validation": VALIDATION}))
    finished = run(accelerate_command("cpu_fsdp2", script, str(job), str(failed_at)), check=False, timeout=300)
    assert time.time() - float(failed_at.read_text()) < 60
    assert finished.returncode != 0
    assert "this sample cannot be made" in finished.output
