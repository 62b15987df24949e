"""What happens between steps: when a run stops, saves and validates, and how long a step is said to take."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.run.loop import TrainingLoop
from ltx_trainer_plus.step.bad_steps import StepTrace
from ltx_trainer_plus.step.sums import MetricWindow


class Recorder:
    """Step, saver, validation, tracker and stop request of one loop; notes what is asked of them."""

    received = False
    has_failed = False
    trace = StepTrace()

    def __init__(self, *, stop_in_step: int | None = None, seconds: float = 0.0) -> None:
        self.log: list[Any] = []
        self.step_times: dict[int, float] = {}
        self.last: list[int] = []
        self._stop_in_step, self._seconds = stop_in_step, seconds
        self._since = 0.0
        self._steps = 0

    def __call__(self, _batches: Any) -> MetricWindow:
        self._steps += 1
        time.sleep(self._seconds)
        window = MetricWindow("cpu")
        window.set_step(grad_norm=1.0)
        if self._steps == self._stop_in_step:  # as if another rank had asked
            window.request_stop()
        return window

    def save(self, step: int) -> None:
        self.log.append(("save", step))

    def flush(self) -> Path:
        return Path("weights")

    def run(self, _handle: Any, step: int) -> list[Any]:
        self.log.append(("validate", step))
        return []

    def restart_clock(self) -> None:
        self._since = time.perf_counter()

    def samples(self, *_: Any) -> None:
        pass

    def report(self, step: int, *_: Any, finished_at: float, is_last: bool) -> None:
        self.step_times[step], self._since = finished_at - self._since, finished_at
        if is_last:
            self.last.append(step)


def loop_over(recorder: Recorder, *, steps: int, interval: int | None, world_size: int) -> TrainingLoop:
    config = SimpleNamespace(
        optimization=SimpleNamespace(steps=steps, max_bad_steps=None),
        validation=SimpleNamespace(skip_initial_validation=True, interval=interval),
        checkpoints=SimpleNamespace(interval=interval),
    )
    tracker = SimpleNamespace(step=recorder.report, samples=recorder.samples, restart_clock=recorder.restart_clock)
    return TrainingLoop(
        config,  # type: ignore[arg-type]
        Topology(rank=0, local_rank=0, world_size=world_size, device=torch.device("cpu")),
        SimpleNamespace(handle=None, learning_rate=1.0, averaged=nullcontext),  # type: ignore[arg-type]
        step=recorder,
        saver=recorder,
        validation=recorder,  # type: ignore[arg-type]
        tracker=tracker,  # type: ignore[arg-type]
        stop=recorder,  # type: ignore[arg-type]
    )


def test_a_stop_that_is_known_before_a_validation_saves_and_does_not_validate() -> None:
    recorder = Recorder(stop_in_step=2)
    result = loop_over(recorder, steps=6, interval=2, world_size=2).run(iter(()), start=0)
    assert (result.step, result.interrupted) == (2, True)
    assert recorder.log == [("save", 2)]


def test_the_last_step_before_a_stop_is_logged_whatever_log_every_says() -> None:
    recorder = Recorder(stop_in_step=2)
    result = loop_over(recorder, steps=6, interval=None, world_size=2).run(iter(()), start=0)
    assert result.step == 3  # the ranks learn of it one step late
    assert recorder.last == [3]


@pytest.mark.parametrize("interval", [None, 2])
def test_every_step_is_said_to_take_its_own_time_the_first_and_the_last_too(interval: int | None) -> None:
    recorder = Recorder(seconds=0.05)
    loop_over(recorder, steps=4, interval=interval, world_size=1).run(iter(()), start=0)
    assert sorted(recorder.step_times) == [1, 2, 3, 4]
    assert min(recorder.step_times.values()) >= 0.05
