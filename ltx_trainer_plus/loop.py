"""The training loop: steps, and what happens between them at their intervals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.batch import Batch
from ltx_trainer_plus.interrupt import StopRequest
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.tracking.metrics import MetricWindow, PendingMetrics
from ltx_trainer_plus.tracking.tracker import Tracker
from ltx_trainer_plus.validation.runner import ValidationRunner


class Step(Protocol):
    """One optimizer step (`TrainStep`)."""

    def __call__(self, batches: Iterator[Batch], /) -> MetricWindow: ...


class Saver(Protocol):
    """Writes checkpoints (`CheckpointWriter`)."""

    def save(self, step: int) -> Path: ...


@dataclass(frozen=True)
class TrainingResult:
    """What a run left behind.

    Attributes:
        step: optimizer steps done in all.
        weights: the last weights file.
        interrupted: the run was asked to stop before its last step.
    """

    step: int
    weights: Path
    interrupted: bool


@dataclass(frozen=True)
class _Unreported:
    """A step whose metrics are on their way to the host."""

    step: int
    metrics: PendingMetrics
    learning_rate: float


class TrainingLoop:
    """Trains, validates, saves, and stops when asked.

    Args:
        learning_rate: the rate that the next step will use.
        validation: None where the run makes no samples.
        stop: tells whether this process was asked to stop; ranks agree on the step after which they do.
    """

    def __init__(
        self,
        config: TrainerConfig,
        topology: Topology,
        handle: ModelHandle,
        *,
        step: Step,
        learning_rate: Callable[[], float],
        saver: Saver,
        validation: ValidationRunner | None,
        tracker: Tracker,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._topology = topology
        self._handle = handle
        self._step = step
        self._learning_rate = learning_rate
        self._saver = saver
        self._validation = validation
        self._tracker = tracker
        self._stop = stop
        self._unreported: _Unreported | None = None
        self._saved: tuple[int, Path] | None = None

    def run(self, batches: Iterator[Batch], *, start: int) -> TrainingResult:
        """Train from step `start` (0 for a fresh run) to the last one."""
        steps = self._config.optimization.steps
        if start == 0 and not self._config.validation.skip_initial_validation:
            self._validate(0)
        self._tracker.restart_clock()
        step, interrupted = start, False
        while step < steps and not interrupted:
            step += 1
            interrupted = self._train(step, batches)
            if step < steps and not interrupted:
                interrupted = self._between(step)
        self._report(is_last=True)
        weights = self._save(step)
        if not interrupted and step > start:
            self._validate(step)
        return TrainingResult(step, weights, interrupted)

    def _train(self, step: int, batches: Iterator[Batch]) -> bool:
        """One step; returns whether the run has to stop now."""
        learning_rate = self._learning_rate()
        window = self._step(batches)
        if self._stop.received:
            window.request_stop()
        # The step before is reported while this one still computes: nothing here waits for the device.
        unreported = _Unreported(step, window.reduce_async(), learning_rate)
        stop = self._report()
        self._unreported = unreported
        # Alone there is nobody to agree with.
        return stop or (self._stop.received and self._topology.world_size == 1)

    def _between(self, step: int) -> bool:
        """What is due after a step; returns whether the run has to stop instead of validating."""
        saves = _is_due(step, self._config.checkpoints.interval)
        validates = self._validation is not None and _is_due(step, self._config.validation.interval)
        if not (saves or validates):
            return False
        # A launcher that has asked to stop soon kills: the samples would cost the checkpoint.
        if self._report():
            return True
        if saves:
            self._save(step)
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
        self._tracker.step(
            unreported.step,
            metrics,
            unreported.learning_rate,
            finished_at=unreported.metrics.finished_at,
            is_last=is_last,
        )
        return metrics.stop_requested

    def _save(self, step: int) -> Path:
        if self._saved is None or self._saved[0] != step:
            self._saved = (step, self._saver.save(step))
        return self._saved[1]

    def _validate(self, step: int) -> None:
        if self._validation is not None:
            self._tracker.samples(self._validation.run(self._handle, step), step)


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
