"""Where a run's numbers and samples go: `metrics.jsonl`, its backends and the terminal, from the main process alone."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.step.sums import StepMetrics
from ltx_trainer_plus.tracking.backend import Media, RecordedRun, Recorder
from ltx_trainer_plus.tracking.log import JsonlWriter, MetricLog, memory_gib
from ltx_trainer_plus.tracking.progress import create_progress


class GeneratedSample(Protocol):
    """A validation file: what is reported of it. `index` counts from 1."""

    @property
    def path(self) -> Path: ...

    @property
    def prompt(self) -> str: ...

    @property
    def index(self) -> int: ...


class Tracker:
    """Reports a run. On every process but the main one it does nothing.

    Args:
        start_step: optimizer steps that the resumed run has done.
        resume_ids: the runs to continue, by backend (`ids` of the run that is resumed).
    """

    def __init__(
        self,
        config: TrainerConfig,
        folder: RunFolder,
        device: torch.device,
        *,
        start_step: int = 0,
        resume_ids: Mapping[str, str] | None = None,
        is_main: bool = True,
    ) -> None:
        self._is_main = is_main
        self._device = device
        self.progress = create_progress(config.optimization.steps, start=start_step, is_main=is_main)
        self._jsonl: JsonlWriter | None = None
        if is_main:
            self._jsonl = JsonlWriter(folder.metrics, resumed_step=start_step or None)
            self._log = MetricLog(config.tracking.log_every, self._jsonl.earlier)
        ids = resume_ids or {}
        self._recorders = [
            Recorder(name, RecordedRun(config, folder.path, start_step, ids.get(name)))
            for name in (config.trackers if is_main else ())
        ]
        self._since = time.perf_counter()

    @property
    def ids(self) -> dict[str, str]:
        """What a resumed run needs to go on with the same runs, by backend."""
        return {recorder.name: recorder.id for recorder in self._recorders if recorder.id is not None}

    @property
    def locations(self) -> dict[str, str]:
        """Where the run is recorded, by the backend's title."""
        return {recorder.title: place for recorder in self._recorders if (place := recorder.location) is not None}

    def __enter__(self) -> "Tracker":
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, traceback)
        for recorder in self._recorders:
            recorder.finish(exit_code=0 if error is None else 1)
        if self._jsonl is not None:
            self._jsonl.close()

    def restart_clock(self) -> None:
        """Leave what happened since the last step (validation, saving) out of the next step's time."""
        self._since = time.perf_counter()

    def step(self, step: int, metrics: StepMetrics, learning_rate: float, *, finished_at: float, is_last: bool) -> None:
        """Report one training step.

        Args:
            learning_rate: what this step used.
            finished_at: when it was done (`PendingMetrics.finished_at`).
            is_last: log it whatever `tracking.log_every` says.
        """
        step_time, self._since = finished_at - self._since, finished_at
        if self._jsonl is None:
            return
        line = self._log.record(
            step,
            metrics,
            learning_rate=learning_rate,
            step_time=step_time,
            memory_gib=memory_gib(self._device),
            is_last=is_last,
        )
        self.progress.step(step, step_time=step_time, loss=metrics.loss)
        if line is not None:
            self._write(line)

    def held_out(self, metrics: Mapping[str, float], step: int, *, is_best: bool) -> None:
        """Report a held-out loss: a line of its own."""
        if self._jsonl is None:
            return
        self._write({"step": step, **metrics})
        best = ", the best so far: its checkpoint is kept" if is_best else ""
        self.progress.say(f"held-out loss after step {step}: {metrics['held_out']:.6f}{best}")

    def samples(self, samples: Sequence[GeneratedSample], step: int) -> None:
        """Report validation samples, which lie on disk."""
        if not self._is_main:
            return
        media = [Media(f"samples/{sample.index}", sample.path, sample.prompt) for sample in samples]
        for recorder in self._recorders:
            recorder.log_media(media, step)
        for sample in samples:
            self.progress.say(f"sample {sample.index}: {sample.path}")

    def _write(self, line: Mapping[str, float]) -> None:
        assert self._jsonl is not None
        self._jsonl.write(line)
        values = {key: value for key, value in line.items() if key != "step"}
        for recorder in self._recorders:
            recorder.log(values, int(line["step"]))
