"""A test that leaves something behind fails, and is told what."""

import os
import sys

import pytest

from tests.launch import ROOT

GUARDED = """
import sys
from pathlib import Path
from tests import guards
from tests.conftest import module_leaves_nothing_behind, temporary_directory, test_leaves_nothing_behind

guards.ROOT = Path(__file__).parent / "repository"
guards._PATIENCE = 0.3
(guards.ROOT / "inside").mkdir(parents=True)
STARTED = []

def pytest_sessionfinish():
    for process in STARTED:
        process.kill()
        process.wait()
"""
LEAKS = {
    "variable": (
        "os.environ['LEFT'] = '1'",
        "environment variable LEFT: None before, '1' now (use monkeypatch.setenv)",
    ),
    "variable_lost": (
        "del os.environ['GIVEN']",
        "environment variable GIVEN: 'yes' before, None now (use monkeypatch.setenv)",
    ),
    "process": (
        "STARTED.append(subprocess.Popen(['sleep', '30']))",
        "process *: sleep 30 (end it, and wait for its end)",
    ),
    # Its parent has died: it is nobody's child any more.
    "orphan": (
        "subprocess.run('sleep 20 & disown', shell=True, executable='/bin/bash')",
        "process *: sleep 20 (end it, and wait for its end)",
    ),
    "thread": (
        "threading.Thread(target=time.sleep, args=(3,), name='left over', daemon=True).start()",
        "thread 'left over' (end it, and join it)",
    ),
    "process_group": (
        "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
        "process group (call torch.distributed.destroy_process_group)",
    ),
    "file_in_the_working_directory": ("Path('left.txt').write_text('')", "file */left.txt (write under tmp_path)"),
    "temporary_file": ("tempfile.mkdtemp(prefix='left')", "file */left* (write under tmp_path)"),
    "file_in_the_repository": (
        "(guards.ROOT / 'inside/new').mkdir(); (guards.ROOT / 'inside/new/left').touch()",
        "file */repository/inside/new (write under tmp_path)",
    ),
}
TIDY = """
def test_tidy(tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT", "2")
    (tmp_path / "file").touch()
    (guards.ROOT / "inside/file").touch()
    (guards.ROOT / "inside/file").unlink()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").touch()
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.1,))
    thread.start()
    STARTED.append(subprocess.Popen(["sleep", "30"]))
    STARTED[-1].terminate()  # its end comes a little later
"""
IMPORTS = """
import os, subprocess, tempfile, threading, time
from pathlib import Path
import pytest
from conftest import STARTED
from tests import guards

@pytest.fixture(scope="module")
def leaking():
    os.environ["FIXTURE"] = "1"
"""


@pytest.fixture
def guarded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for test files that the guards watch over."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("GIVEN", "yes")
    pytester.makeconftest(GUARDED)
    return pytester


def run(guarded: pytest.Pytester, tests: str) -> pytest.RunResult:
    guarded.makepyfile(test_it=IMPORTS + tests)
    return guarded.run(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "test_it.py")


def test_every_kind_of_thing_that_a_test_leaves_fails_it(guarded: pytest.Pytester) -> None:
    tests = (f"def test_{name}():\n    {action}\n\n" for name, (action, _) in LEAKS.items())
    # The last one is for the guard over the module, which sees all of it once more.
    result = run(guarded, "\n" + "".join(tests) + "def test_last():\n    pass\n")
    result.assert_outcomes(passed=len(LEAKS) + 1, errors=len(LEAKS) + 1)
    for name, (_, line) in LEAKS.items():
        result.stdout.fnmatch_lines([f"*ERROR at teardown of test_{name} *", "Left behind:", f"  {line}"])


def test_what_a_fixture_of_the_module_leaves_fails_too(guarded: pytest.Pytester) -> None:
    result = run(guarded, "def test_module(leaking):\n    pass\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["Left behind:", "  environment variable FIXTURE: None before, '1' now *"])


def test_a_tidy_test_passes(guarded: pytest.Pytester) -> None:
    run(guarded, TIDY).assert_outcomes(passed=1)
