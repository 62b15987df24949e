"""What is logged of a run: one line of means for every few steps, kept in `metrics.jsonl`."""

import json
import logging
import math
import resource
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.step.sums import StepMetrics, ratio

logger = logging.getLogger(__name__)

SMOOTHING = 10
"""Logged steps in the smoothed loss."""


class MetricLog:
    """Turns the metrics of steps into logged lines: one for every `log_every` steps, meant over them."""

    def __init__(self, log_every: int = 1, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        """Args: earlier: the last logged lines of the run that is resumed (`JsonlWriter.earlier`)."""
        self._log_every = log_every
        self._recent: deque[float] = deque(maxlen=SMOOTHING)
        self._skipped = 0
        self._replaced = 0
        self._sums: StepMetrics | None = None
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        for line in earlier:
            self._remember(line.get("loss"))
            # A line of a held-out loss has neither.
            self._skipped = line.get("skipped_steps") or self._skipped
            self._replaced = line.get("replaced_samples") or self._replaced

    @property
    def smoothed_loss(self) -> float:
        """Mean of the last ten logged losses; NaN before the first."""
        return ratio(sum(self._recent), len(self._recent))

    def record(
        self,
        step: int,
        metrics: StepMetrics,
        *,
        learning_rate: float,
        step_time: float,
        memory_gib: float,
        is_last: bool = False,
    ) -> dict[str, float] | None:
        """Take in one step.

        Args:
            step: the number of the step, from 1.
            learning_rate: the one that this step used.
            step_time: seconds, of the main rank.
            is_last: log now, whatever `log_every` says.

        Returns:
            The line to log, `step` first, or None where this step is not logged. A value that is not finite (all steps
            since the last line were skipped) stays in it.
        """
        self._skipped += metrics.skipped
        self._replaced += metrics.replaced
        self._tokens += metrics.tokens
        self._seconds += step_time
        self._steps += 1
        # A step that went wrong would hide the good ones of its line.
        if metrics.is_finite:
            self._sums = metrics if self._sums is None else self._sums + metrics
        if not is_last and step % self._log_every:
            return None
        sums = self._sums or metrics
        self._remember(sums.loss)
        line = {
            "step": step,
            **sums.losses(),
            "loss/smoothed": self.smoothed_loss,
            "learning_rate": learning_rate,
            "grad_norm": sums.grad_norm,
            "step_time": self._seconds / self._steps,
            "tokens_per_second": ratio(self._tokens, self._seconds),
            "memory_gib": memory_gib,
            "skipped_steps": self._skipped,
            "replaced_samples": self._replaced,
        }
        self._sums = None
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        return line

    def _remember(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self._recent.append(loss)


class JsonlWriter:
    """`metrics.jsonl`: one JSON object for each logged step, in full precision, on disk as soon as it is logged."""

    def __init__(self, path: Path | str, resumed_step: int | None = None) -> None:
        """Args: resumed_step: lines after this step are dropped, since the run will write them anew."""
        self.path = Path(path)
        self.earlier: list[dict[str, Any]] = []
        """The last lines that were kept, at most ten."""
        self._failed = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None and self.path.exists():
            self._keep_up_to(resumed_step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, float]) -> None:
        """Append one line. What JSON cannot say (NaN, infinity) becomes null. A full disk is warned of once."""
        finite = {key: value if math.isfinite(value) else None for key, value in line.items()}
        try:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._failed:
                logger.warning("%s cannot be written (%s): training goes on without it.", self.path, error)
            self._failed = True

    def close(self) -> None:
        self._file.close()

    def _keep_up_to(self, step: int) -> None:
        kept = []
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                # The line that a kill cut short.
                continue
            if line["step"] <= step:
                kept.append(text)
                self.earlier = [*self.earlier[-(SMOOTHING - 1) :], line]
        with replacing(self.path) as shortened:
            shortened.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")


def memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: what the device has allocated, or on a CPU what the process has occupied."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
