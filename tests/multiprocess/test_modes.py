"""Training modes in every parallel layout: the losses are those of one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import accelerate_command, run
from tests.modes import MODES, mode_run
from tests.runs import losses, train

SCRIPT = Path(__file__).with_name("modes_script.py")
# Every kind of condition, drawn and certain; a frozen stream of either kind.
MIXED = ("composition", "inpaint", "v2v_ic", "a2v", "v2a")


def runs(reference: Path, output: Path, modes: tuple[str, ...], batch_size: int) -> list[dict[str, Any]]:
    made = []
    for mode in modes:
        settings = mode_run(reference, output / mode, {"name": "flexible", **MODES[mode]})
        settings["optimization"] |= {"steps": 3, "batch_size": batch_size}
        settings["data"]["shape_group"] = 1
        made.append(settings)
    return made


@pytest.mark.parametrize(
    ("layout", "processes", "modes"),
    [
        ("cpu_ddp", 2, MIXED),
        ("cpu_fsdp2", 2, MIXED),
        pytest.param("cpu_ddp", 2, tuple(MODES), marks=pytest.mark.slow),
        pytest.param("cpu_fsdp2", 2, tuple(MODES), marks=pytest.mark.slow),
        pytest.param("cpu_hsdp", 4, tuple(MODES), marks=pytest.mark.slow),
        pytest.param("cpu_ddp_compile", 2, MIXED, marks=pytest.mark.slow),
        pytest.param("cpu_fsdp2_compile", 2, MIXED, marks=pytest.mark.slow),
    ],
)
def test_every_mode_has_the_losses_of_one_process(
    layout: str, processes: int, modes: tuple[str, ...], reference: Path, tmp_path: Path
) -> None:
    for settings in runs(reference, tmp_path / "single", modes, batch_size=processes):
        train(settings)
    job = tmp_path / "job.json"
    job.write_text(json.dumps(runs(reference, tmp_path / layout, modes, batch_size=1)))
    run(accelerate_command(layout, SCRIPT, str(job)), timeout=1500)
    for mode in modes:
        single = losses(tmp_path / "single" / mode)
        assert len(single) == 3
        # Sums in another order; compiled kernels fuse, which rounds differently too.
        tolerance = 2e-5 if "compile" in layout else 3e-6
        assert losses(tmp_path / layout / mode) == pytest.approx(single, rel=tolerance), mode
