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


def runs(
    reference: Path, output: Path, modes: tuple[str, ...], batch_size: int, backend: str | None = None
) -> list[dict[str, Any]]:
    made = []
    for mode in modes:
        settings = mode_run(reference, output / mode, {"name": "flexible", **MODES[mode]})
        settings["optimization"] |= {"steps": 3, "batch_size": batch_size}
        settings["data"]["shape_group"] = 1
        if backend is not None:
            settings["acceleration"]["compile"] = {"backend": backend}
        made.append(settings)
    return made


@pytest.mark.parametrize(
    ("layout", "processes", "modes", "backend"),
    [
        ("cpu_ddp", 2, MIXED, None),
        ("cpu_fsdp2", 2, MIXED, None),
        pytest.param("cpu_ddp", 2, tuple(MODES), None, marks=pytest.mark.slow),
        pytest.param("cpu_fsdp2", 2, tuple(MODES), None, marks=pytest.mark.slow),
        pytest.param("cpu_hsdp", 4, tuple(MODES), None, marks=pytest.mark.slow),
        # Traced as for inductor, which takes many minutes here; few modes, because each is traced anew.
        pytest.param("cpu_ddp", 2, ("composition", "v2v_ic"), "aot_eager", marks=pytest.mark.slow),
        pytest.param("cpu_fsdp2", 2, ("composition", "v2v_ic"), "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_every_mode_has_the_losses_of_one_process(
    layout: str, processes: int, modes: tuple[str, ...], backend: str | None, reference: Path, tmp_path: Path
) -> None:
    for settings in runs(reference, tmp_path / "single", modes, batch_size=processes):
        train(settings)
    job = tmp_path / "job.json"
    job.write_text(json.dumps(runs(reference, tmp_path / layout, modes, 1, backend)))
    run(accelerate_command(layout, SCRIPT, str(job)), timeout=1500)
    for mode in modes:
        single = losses(tmp_path / "single" / mode)
        assert len(single) == 3
        # Sums in another order; what is decomposed for compiling rounds differently too.
        tolerance = 3e-6 if backend is None else 2e-5
        assert losses(tmp_path / layout / mode) == pytest.approx(single, rel=tolerance), mode
