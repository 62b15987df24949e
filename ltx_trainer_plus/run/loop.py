"""The training loop: steps, and what happens between them at their intervals."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.batch import Batch
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.run.interrupt import StopRequest
from ltx_trainer_plus.step.bad_steps import BadSteps, StepTrace
from ltx_trainer_plus.step.sums import MetricWindow, PendingMetrics
from ltx_trainer_plus.step.trained import Trained
from ltx_trainer_plus.tracking.tracker import Tracker
from ltx_trainer_plus.validation.held_out import HeldOutLoss
from ltx_trainer_plus.validation.runner import SamplerFault, SamplesError, ValidationRunner

logger = logging.getLogger(__name__)


class Step(Protocol):
    """One optimizer step (`TrainStep`). `trace` is what the last one trained on."""

    @property
    def trace(self) -> StepTrace: ...

    def __call__(self, batches: Iterator[Batch], /) -> MetricWindow: ...


class Saver(Protocol):
    """Writes checkpoints (`CheckpointWriter`)."""

    @property
    def has_failed(self) -> bool: ...

    def save(self, step: int) -> None: ...

    def flush(self) -> Path | None: ...

    def best_loss(self) -> float | None: ...

    def set_best(self, step: int, loss: float) -> bool: ...


@dataclass(frozen=True)
class TrainingResult:
    """What a run left behind.

    Attributes:
        step: optimizer steps done in all.
        weights: the last weights file; None where none could be written.
        interrupted: the run was asked to stop before its last step.
    """

    step: int
    weights: Path | None
    interrupted: bool


@dataclass(frozen=True)
class _Unreported:
    """A step whose metrics are on their way to the host."""

    step: int
    metrics: PendingMetrics
    learning_rate: float
    trace: StepTrace


class TrainingLoop:
    """Trains, validates, saves, and stops when asked.

    Args:
        validation: None where the run makes no samples.
        held_out: scores the model on samples apart; None where the run has none.
        stop: tells whether this process was asked to stop; ranks agree on the step after which they do.
    """

    def __init__(
        self,
        config: TrainerConfig,
        topology: Topology,
        trained: Trained,
        *,
        step: Step,
        saver: Saver,
        validation: ValidationRunner | None,
        tracker: Tracker,
        stop: StopRequest,
        held_out: HeldOutLoss | None = None,
    ) -> None:
        self._config = config
        self._topology = topology
        self._trained = trained
        self._step = step
        self._saver = saver
        self._validation = validation
        self._tracker = tracker
        self._stop = stop
        self._unreported: _Unreported | None = None
        self._saved: int | None = None
        self._save_is_overdue = False
        self._bad_steps = BadSteps(config.optimization.max_bad_steps, topology)
        self._held_out = held_out

    def run(self, batches: Iterator[Batch], *, start: int) -> TrainingResult:
        """Train from step `start` (0 for a fresh run) to the last one."""
        steps = self._config.optimization.steps
        if start == 0 and not self._config.validation.skip_initial_validation:
            self._validate(0)
            self._score(0)
        self._tracker.restart_clock()
        step, interrupted = start, False
        while step < steps and not interrupted:
            step += 1
            interrupted = self._train(step, batches)
            if step < steps and not interrupted:
                interrupted = self._between(step)
        self._report(is_last=True)
        self._save(step)
        if not interrupted and step > start:
            self._validate(step)
            self._score(step)
        return TrainingResult(step, self._saver.flush(), interrupted)

    def _train(self, step: int, batches: Iterator[Batch]) -> bool:
        """One step; returns whether the run has to stop now."""
        learning_rate = self._trained.learning_rate
        window = self._step(batches)
        # A checkpoint that could not be written ends the run too; `_save` then raises why.
        wants_stop = self._stop.received or self._saver.has_failed
        if wants_stop:
            window.request_stop()
        # The step before is reported while this one still computes: nothing here waits for the device.
        pending = window.reduce_async(counts_samples=self._topology.leads_data_rank)
        unreported = _Unreported(step, pending, learning_rate, self._step.trace)
        stop = self._report()
        self._unreported = unreported
        # Alone there is nobody to agree with.
        return stop or (wants_stop and self._topology.world_size == 1)

    def _between(self, step: int) -> bool:
        """What is due after a step; returns whether the run has to stop instead of validating."""
        saves = _is_due(step, self._config.checkpoints.interval) or self._save_is_overdue
        validates = self._validation is not None and _is_due(step, self._config.validation.interval)
        scores = self._held_out is not None and _is_due(step, self._config.validation.loss_interval)
        if not (saves or validates or scores):
            return False
        # A launcher that has asked to stop soon kills: the samples would cost the checkpoint.
        if self._report():
            return True
        if saves:
            # What is skipped now may be the beginning of a divergence: retention would give up the last good one.
            self._save_is_overdue = self._bad_steps.in_a_row > 0
            if not self._save_is_overdue:
                self._save(step)
        if scores:
            self._score(step)
        if validates:
            self._validate(step)
        self._tracker.restart_clock()
        return False

    def _report(self, *, is_last: bool = False) -> bool:
        """Hand on the metrics of the last finished step; returns whether some rank was asked to stop in it.

        `is_last`: log it whatever `tracking.log_every` says.
        """
        if self._unreported is None:
            return False
        unreported, self._unreported = self._unreported, None
        metrics = unreported.metrics.read()
        self._bad_steps.observe(unreported.step, unreported.trace, skipped=metrics.skipped)
        self._tracker.step(
            unreported.step,
            metrics,
            unreported.learning_rate,
            finished_at=unreported.metrics.finished_at,
            is_last=is_last,
        )
        return metrics.stop_requested

    def _save(self, step: int) -> None:
        if self._saved != step:
            self._saver.save(step)
            self._saved = step

    def _validate(self, step: int) -> None:
        if self._validation is None:
            return
        try:
            with self._trained.averaged():
                samples = self._validation.run(self._trained.handle, step)
        except (SamplesError, SamplerFault) as error:
            if self._config.validation.on_error == "raise":
                error.add_note("  Samples that cannot be made are left out with validation.on_error=warn.")
                raise
            if self._topology.is_main:
                logger.warning("%s\n  Training goes on without them (validation.on_error: warn).", error)
            return
        self._tracker.samples(samples, step)

    def _score(self, step: int) -> None:
        if self._held_out is None:
            return
        with self._trained.averaged():
            score = self._held_out.score(self._trained.handle)
        is_best = False
        # After a bad step nothing is saved.
        if self._config.checkpoints.keep_best and step > 0 and not self._bad_steps.in_a_row:
            best = self._saver.best_loss()
            if best is None or score.total < best:
                self._save(step)
                is_best = self._saver.set_best(step, score.total)
        self._tracker.held_out(score.as_metrics(), step, is_best=is_best)


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
