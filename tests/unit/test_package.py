"""The package's public face: its names, its version, and a command that answers before torch is loaded."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import ltx_trainer_plus
from ltx_trainer_plus.commands.main import COMMANDS, CONFIGS

ROOT = Path(__file__).parents[2]

HELPS = """
import contextlib, io, json, sys
from ltx_trainer_plus.commands.main import COMMANDS, main
found = {}
for arguments in ([], *([name] for name in COMMANDS)):
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        main([*arguments, "--help"])
    found[" ".join(arguments)] = text.getvalue()
assert "torch" not in sys.modules, "the help waits for torch"
json.dump(found, sys.stdout)
"""


def test_every_command_says_what_it_does_on_two_screens_without_loading_torch() -> None:
    finished = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    for name in COMMANDS:
        assert f"\n    {name}" in found[""]
        assert found[name].startswith(f"usage: ltx-trainer-plus {name} ")
    assert all(0 < text.count("\n") <= 80 for text in found.values())


def test_the_public_names_are_listed_and_there() -> None:
    assert set(ltx_trainer_plus.__all__) | {"__version__"} <= set(dir(ltx_trainer_plus))
    for name in ltx_trainer_plus.__all__:
        assert getattr(ltx_trainer_plus, name).__module__.startswith("ltx_trainer_plus.")


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ltx_trainer_plus.__version__"}
    assert ltx_trainer_plus.__version__.count(".") == 2


def test_the_example_files_are_one_copy() -> None:
    assert CONFIGS.resolve() == ROOT / "configs"
    assert (CONFIGS / "accelerate" / "ddp.yaml").is_file()
