"""How a process ends: the status, what it says, and that nothing registered for the exit is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Every case is a fork of one process, so that torch is imported once.
SCRIPT = """
import atexit, json, os, sys, tempfile
import torch.distributed as dist
from ltx_trainer_plus.parallel.ending import run_and_exit

def fail():
    raise ValueError("no such luck")

CASES = {
    "nothing": lambda: None,
    "number": lambda: 3,
    "exit": lambda: sys.exit(4),
    "words": lambda: sys.exit("the reason"),
    "error": fail,
}
found = {}
for joined in (False, True):
    for name, case in CASES.items():
        folder = tempfile.mkdtemp()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY), 1)
            os.dup2(1, 2)
            if joined:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            atexit.register(print, "goodbye")
            run_and_exit(case)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found[f"{name} {joined}"] = [status, open(f"{folder}/output").read()]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Of each case, outside and inside a process group: the exit status and the output."""
    script = tmp_path_factory.mktemp("ending") / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, str(script)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=root, env={"PYTHONPATH": str(root)}
    )
    return json.loads(finished.stdout)


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "in a group"])
@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("nothing", 0, ""),
        ("number", 3, ""),
        ("exit", 4, ""),
        ("words", 1, "the reason"),
        ("error", 1, "ValueError: no such luck"),
    ],
)
def test_a_process_ends_with_its_status_and_its_exit_handlers_run(
    endings: dict[str, tuple[int, str]], case: str, status: int, said: str, joined: bool
) -> None:
    found, output = endings[f"{case} {joined}"]
    assert found == status
    assert said in output
    assert output.count("goodbye") == 1
