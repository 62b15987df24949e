"""What each launched process of test_data_axis.py runs: JOB.json, whose runs are trained one after the other.

All processes are one data rank. Each leaves `<run folder>.<rank>.json`: what it trained on and wrote, and how it ended.
The job: a list of {"settings": ..., "stopped_rank": the process that is asked to stop in the second step, or null}.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ltx_trainer_plus.validation.runner as runner_module
from ltx_trainer_plus.data.batch import Batch
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.run.interrupt import StopRequest
from ltx_trainer_plus.step.train_step import TrainStep
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy
from tests.runs import train

real_start, real_write, real_draw = Topology.start, runner_module.write_sample, FlexibleStrategy.draw
real_step = TrainStep.__call__


def of_one_data_rank(*args: Any) -> Topology:
    topology = real_start(*args)
    return replace(topology, processes_per_data_rank=topology.world_size)


def observed(settings: dict[str, Any], stopped_rank: int | None, patch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    written: list[str] = []
    steps: list[int] = []
    topology = of_one_data_rank("cpu")

    def draw(self: FlexibleStrategy, batch: Batch, seed: int) -> Any:
        draws = real_draw(self, batch, seed)
        assert draws.video is not None
        noise = draws.video.noise.double().sum((1, 2)).tolist()
        drawn.append([batch.names, batch.ordinals, draws.video.sigma.tolist(), noise])
        return draws

    def write_sample(path: Path, *args: Any) -> Path:
        written.append(path.name)
        return real_write(path, *args)

    def step(self: TrainStep, batches: Any) -> Any:
        steps.append(1)
        return real_step(self, batches)

    patch.setattr(FlexibleStrategy, "draw", draw)
    patch.setattr(runner_module, "write_sample", write_sample)
    patch.setattr(TrainStep, "__call__", step)
    if stopped_rank == topology.rank:
        patch.setattr(StopRequest, "received", property(lambda _: len(steps) >= 2))
    result = train(settings)
    seen = {"drawn": drawn, "written": written, "step": result.step, "interrupted": result.interrupted}
    Path(f"{settings['output_dir']}.{topology.rank}.json").write_text(json.dumps(seen))


def main() -> None:
    Topology.start = of_one_data_rank  # type: ignore[method-assign, assignment]
    for run in json.loads(Path(sys.argv[1]).read_text()):
        with pytest.MonkeyPatch.context() as patch:
            observed(run["settings"], run["stopped_rank"], patch)


if __name__ == "__main__":
    run_and_exit(main)
