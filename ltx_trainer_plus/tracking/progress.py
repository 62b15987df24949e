"""What the user sees of a run in the terminal."""

import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

# Plain output goes to log files: often enough to see life, seldom enough to read.
_SECONDS_BETWEEN_LINES = 5.0
_STEPS_FOR_SPEED = 20


class TrainingProgress:
    """Progress of training and validation; this class itself shows nothing (every process but the main one)."""

    def __enter__(self) -> "TrainingProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def step(self, step: int, *, step_time: float, loss: float | None = None) -> None:
        """Step `step` is done. step_time: seconds; loss: the latest one known, None before the first."""

    def validation(self, sample: int, samples: int, denoising_step: int, denoising_steps: int) -> None:
        """Sample `sample` of `samples` is at `denoising_step` of `denoising_steps` (all from 1)."""

    def validation_done(self) -> None:
        """Validation is over, training goes on."""

    def say(self, text: str) -> None:
        """A line for the user."""


class _Speed:
    """Time left, by the last training steps: validation and saving are not in it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._times: deque[float] = deque(maxlen=_STEPS_FOR_SPEED)

    def describe(self, step: int, step_time: float, loss: float | None) -> str:
        self._times.append(step_time)
        mean = sum(self._times) / len(self._times)
        shown = "" if loss is None else f"loss {loss:.4f}  "
        return f"{shown}{mean:.2f} s/step  {_clock(mean * (self._total - step))} left"


class _Lines(TrainingProgress):
    """Plain lines, for output that is not a terminal."""

    def __init__(self, total: int, start: int, file: TextIO) -> None:
        self._total, self._first, self._file = total, start + 1, file
        self._speed = _Speed(total)
        self._printed = 0.0

    def step(self, step: int, *, step_time: float, loss: float | None = None) -> None:
        description = self._speed.describe(step, step_time, loss)
        if step in (self._first, self._total) or self._is_due():
            self.say(f"step {step}/{self._total}  {description}")

    def validation(self, sample: int, samples: int, denoising_step: int, denoising_steps: int) -> None:
        if denoising_step == 1 or self._is_due():
            self.say(f"validation: sample {sample}/{samples}, denoising step {denoising_step}/{denoising_steps}")

    def say(self, text: str) -> None:
        self._printed = time.monotonic()
        print(text, file=self._file, flush=True)

    def _is_due(self) -> bool:
        return time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES


class _Bar(TrainingProgress):
    """A live bar; what others print appears above it."""

    def __init__(self, total: int, start: int, console: Console) -> None:
        self._speed = _Speed(total)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._training = self._progress.add_task("training", total=total, completed=start, text="")
        self._validation = self._progress.add_task("validation", visible=False, text="")

    def __enter__(self) -> "TrainingProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, step: int, *, step_time: float, loss: float | None = None) -> None:
        self._progress.update(self._training, completed=step, text=self._speed.describe(step, step_time, loss))

    def validation(self, sample: int, samples: int, denoising_step: int, denoising_steps: int) -> None:
        self._progress.update(
            self._validation,
            visible=True,
            completed=denoising_step,
            total=denoising_steps,
            text=f"denoising sample {sample} of {samples}",
        )

    def validation_done(self) -> None:
        self._progress.update(self._validation, visible=False)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def create_progress(
    total: int, *, start: int = 0, is_main: bool = True, console: Console | None = None
) -> TrainingProgress:
    """A bar on a terminal, lines elsewhere, nothing in other processes than the main one.

    Args:
        total: steps of the whole run; start: those done before (by the run that is resumed).
    """
    console = console or Console()
    if not is_main:
        return TrainingProgress()
    return _Bar(total, start, console) if console.is_terminal else _Lines(total, start, console.file)  # type: ignore[arg-type]


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
