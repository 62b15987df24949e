"""Where a run's numbers and samples go: `metrics.jsonl`, W&B and the terminal, from the main process alone."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.step.sums import StepMetrics
from ltx_trainer_plus.tracking.log import JsonlWriter, MetricLog, memory_gib
from ltx_trainer_plus.tracking.progress import create_progress
from ltx_trainer_plus.tracking.wandb import Sample, WandbRun


class Tracker:
    """Reports a run. On every process but the main one it does nothing.

    Args:
        start_step: optimizer steps that the resumed run has done.
        resume_id: the W&B run to continue.
    """

    def __init__(
        self,
        config: TrainerConfig,
        folder: RunFolder,
        device: torch.device,
        *,
        start_step: int = 0,
        resume_id: str | None = None,
        is_main: bool = True,
    ) -> None:
        self._is_main = is_main
        self._device = device
        self.progress = create_progress(config.optimization.steps, start=start_step, is_main=is_main)
        self._wandb = WandbRun(config if is_main else None, folder.path, resume_id)
        self._jsonl: JsonlWriter | None = None
        if is_main:
            self._jsonl = JsonlWriter(folder.metrics, resumed_step=start_step or None)
            self._log = MetricLog(config.tracking.log_every, self._jsonl.earlier)
        self._since = time.perf_counter()

    @property
    def wandb_id(self) -> str | None:
        return self._wandb.id

    @property
    def wandb_location(self) -> str | None:
        return self._wandb.location

    def __enter__(self) -> "Tracker":
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, traceback)
        self._wandb.finish(exit_code=0 if error is None else 1)
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
            self._jsonl.write(line)
            self._wandb.log(line, step)

    def held_out(self, metrics: Mapping[str, float], step: int, *, is_best: bool) -> None:
        """Report a held-out loss: a line of its own."""
        if self._jsonl is None:
            return
        line = {"step": step, **metrics}
        self._jsonl.write(line)
        self._wandb.log(line, step)
        best = ", the best so far: its checkpoint is kept" if is_best else ""
        self.progress.say(f"held-out loss after step {step}: {metrics['held_out']:.6f}{best}")

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Report validation samples, which lie on disk."""
        if self._is_main:
            self._wandb.log_samples(samples, step)
            for sample in samples:
                self.progress.say(f"sample {sample.index}: {sample.path}")
