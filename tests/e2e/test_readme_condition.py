"""The README's way to add a condition, carried out as it stands there, in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the run of the changed package has to show. It holds, and with a probability only sometimes: the same draws give
# another loss.
PROGRAM = """
import sys
from pathlib import Path
import pytest
import ltx_trainer_plus
from ltx_trainer_plus.config import ConfigError
from tests.modes import mode_run
from tests.runs import losses, train

copy, reference, folder, example = *map(Path, sys.argv[1:4]), sys.argv[4]
assert Path(ltx_trainer_plus.__file__).is_relative_to(copy)
condition = {"type": example, "every": 2}


def run(name, stream="video", **changes):
    strategy = {"name": "flexible", stream: {"conditions": [condition | changes]}}
    return train(mode_run(reference, folder / name, strategy))


assert run("run").step == 2
run("never", probability=0.0)
assert all(0 < loss < 10 for loss in losses(folder / "run"))
assert losses(folder / "never")[0] != losses(folder / "run")[0]
assert f"type: {example}" in (folder / "run/training_config.yaml").read_text()
with pytest.raises(ConfigError, match=r"training_strategy\\.video\\.conditions\\.0\\.every: must be at least 2"):
    run("wrong", every=1)
with pytest.raises(ConfigError, match=f"A condition of type {example} is for video only"):
    run("audio", stream="audio")
"""


def section() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("### Adding a condition\n")[2].partition("\n### ")[0]


def replace_once(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file.name} has {text.count(old)} times {old!r}"
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def carried_out(tmp_path: Path) -> Path:
    """A copy of the package with both blocks at the places that the text names."""
    package = tmp_path / "copy/ltx_trainer_plus"
    shutil.copytree(ROOT / "ltx_trainer_plus", package, ignore=shutil.ignore_patterns("__pycache__"))
    entry, case = re.findall(r"```python\n(.*?)```", section(), flags=re.DOTALL)
    ((file, union),) = re.findall(r"class in `(\S+)`, named in the union `(\w+)`", section())
    (name,) = re.findall(r"class (\w+)", entry)
    replace_once(package / file, f"{union} = (\n", f"{entry}\n\n{union} = (\n    {name} |")
    ((function, rules),) = re.findall(r"case in `(\w+)` of `(\S+)`", section())
    head = re.findall(rf"def {function}\(.*?    match condition:\n", (package / rules).read_text(), flags=re.DOTALL)
    replace_once(package / rules, head[0], f"from {package.name}.config.conditions import {name}\n\n\n{head[0]}{case}")
    return package.parent


def test_the_section_is_short() -> None:
    assert 10 < len(section().strip().splitlines()) < 25


def test_a_condition_is_added_in_the_way_of_the_readme(carried_out: Path, reference: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"`conditions: \[\{type: (\w+), every: 2, probability: 0\.5\}\]`", section())
    path = os.pathsep.join(map(str, (carried_out, ROOT)))
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(carried_out), str(reference), str(tmp_path), example],
        cwd=carried_out,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
