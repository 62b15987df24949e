"""scripts/plan.py: costs of a run from metadata alone."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/plan.py"


def test_the_real_model_on_four_gpus_needs_neither_weights_nor_data(tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    run_file = tmp_path / "rank=32" / "run.yaml"  # a path may hold what separates an override's key and value
    run_file.parent.mkdir()
    run_file.write_text((ROOT / "configs/ltx2.3_lora.yaml").read_text())
    arguments = (
        "ltx-2.3",
        str(run_file),
        "--gpus",
        "4",
        "--video",
        "960x544x49",
        "--json",
        str(report),
        "lora.rank=32",
    )
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
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
        (("no/such/model",), "There is no model at no/such/model"),
        (("ltx-2.3", "lora.target_modules=[to_q_typo]"), "to_q_typo"),
    ],
)
def test_what_cannot_be_planned_is_said_without_a_traceback(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, which has imported everything already.
    assert runpy.run_path(str(SCRIPT))["main"]([*arguments, str(ROOT / "configs/ltx2.3_lora.yaml")]) == 2
    assert message in capsys.readouterr().err
