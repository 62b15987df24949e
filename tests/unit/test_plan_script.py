"""scripts/plan.py: costs of a run from metadata alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def plan(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/plan.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_real_model_on_four_gpus_needs_neither_weights_nor_data(tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    run_file = ROOT / "configs/ltx2.3_lora.yaml"
    finished = plan("ltx-2.3", run_file, "--gpus", 4, "--video", "960x544x49", "--json", report)
    assert finished.returncode == 0, finished.stderr
    assert "3,570 video" in finished.stdout
    found = json.loads(report.read_text())
    ddp, fsdp, hsdp = found["layouts"]
    assert [ddp["layout"], fsdp["layout"], hsdp["layout"]] == ["ddp", "fsdp2", "hsdp"]
    assert ddp["weights"] == 4 * fsdp["weights"] == 2 * hsdp["weights"]
    assert 28e9 < fsdp["received_forward"] < 29e9
    assert fsdp["step"] < 1.2 * ddp["step"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/model", "configs/ltx2.3_lora.yaml"), "There is no model at no/such/model"),
        (("ltx-2.3", "configs/ltx2.3_lora.yaml", "lora.target_modules=[to_q_typo]"), "to_q_typo"),
    ],
)
def test_what_cannot_be_planned_is_said_without_a_traceback(arguments: tuple[str, ...], message: str) -> None:
    finished = plan(*arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
