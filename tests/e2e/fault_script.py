"""Run trainings in processes of their own, forked one after another so that imports are paid once: PLAN.json.

The plan is a list of {"arguments": [...] for scripts/train.py, "output": file for what it prints, "kill_at": where the
process kills itself while it saves, or null, "decodes": whether samples can be decoded}. Prints a JSON list of exit
statuses (negative: the signal).
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ltx_trainer_plus.checkpoints import files
from ltx_trainer_plus.trainer import Trainer
from ltx_trainer_plus.validation.decode import SampleDecoder
from scripts import train

assert Trainer  # imported before the forks


def kill_at(point: str) -> None:
    """Have this process killed in its second save: at the n-th rename, or with half of the data written."""
    save, replace = files.save_file, os.replace
    saves, renames = [0], [0]

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        saves[0] += 1
        second = saves[0] > 2  # each save writes two files
        if second and point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        save(tensors, path, metadata)
        if second and point == "while":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    def rename(source: Any, target: Any) -> None:
        if str(source).endswith(".saving") and saves[0] > 2:
            if point == f"rename {renames[0]}":
                os.kill(os.getpid(), signal.SIGKILL)
            renames[0] += 1
        replace(source, target)
        if str(target).endswith(".removing") and point == "retiring":
            os.kill(os.getpid(), signal.SIGKILL)

    files.save_file = save_file  # type: ignore[assignment]
    os.replace = rename


def no_memory(*_: Any) -> Any:
    raise RuntimeError("no memory to decode")


def child(run: dict[str, Any]) -> None:
    output = os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if run["kill_at"] is not None:
        kill_at(run["kill_at"])
    if not run["decodes"]:
        SampleDecoder.decode = no_memory  # type: ignore[method-assign]
    sys.argv = ["train.py", *run["arguments"]]
    status = 1
    try:
        status = train.main()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        os._exit(status)


statuses = []
for run in json.loads(Path(sys.argv[1]).read_text()):
    process = os.fork()
    if process == 0:
        child(run)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print(json.dumps(statuses))
