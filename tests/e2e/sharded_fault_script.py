"""A training whose rank kills itself while it saves the state after step 2: POINT RANK RUN_FILE.

Points: `before` its part is written, `while` half of it is, `after` it has left word of its part, `marker`: before the
main process writes the marker. With `held` nobody is killed: the part is not written before step 3 is done, and what is
communicated for the state is counted.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode

from ltx_trainer_plus.checkpoints import files
from ltx_trainer_plus.checkpoints.state import TrainingState
from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.step.train_step import TrainStep
from ltx_trainer_plus.step.trained import Trained
from ltx_trainer_plus.trainer import Trainer

UNFINISHED = "training_state_step_00002.saving"
MARKER = "checkpoint_step_00002.json"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(point: str) -> None:
    save, replace = files.save_file, os.replace

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        is_part = path.parent.name == UNFINISHED
        if is_part and point == "before":
            die()
        save(tensors, path, metadata)
        if is_part and point == "while":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            die()

    def rename(source: Any, target: Any) -> None:
        if point == "marker" and Path(target).name == MARKER:
            die()
        replace(source, target)
        if point == "after" and Path(target).parent.name == UNFINISHED:
            die()

    files.save_file = save_file  # type: ignore[assignment]
    os.replace = rename


def hold() -> None:
    save, train_step, collect = files.save_file, TrainStep.__call__, Trained.state
    steps = [0]
    third_is_done = threading.Event()

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        if path.parent.name == UNFINISHED:
            if not third_is_done.wait(60):
                raise OSError("the third step did not come")
            print("The part of step 2 is written after step 3.", flush=True)
        save(tensors, path, metadata)

    def counted_step(step: TrainStep, batches: Any) -> Any:
        window = train_step(step, batches)
        steps[0] += 1
        if steps[0] == 3:
            third_is_done.set()
        return window

    def counted_collect(trained: Trained, step: int, **options: Any) -> TrainingState:
        with CommDebugMode() as communication:
            state = collect(trained, step, **options)
        print(f"{communication.get_total_counts()} collectives for {len(state.tensors)} tensors.", flush=True)
        return state

    files.save_file = save_file  # type: ignore[assignment]
    Trained.state = counted_collect  # type: ignore[method-assign]
    TrainStep.__call__ = counted_step  # type: ignore[method-assign]


def main() -> None:
    point, rank, run_file = sys.argv[1:]
    config = load_config(run_file)
    trainer = Trainer(config)
    if trainer.topology.rank == int(rank):
        hold() if point == "held" else kill_at(point)
    trainer.train()


run_and_exit(main)
