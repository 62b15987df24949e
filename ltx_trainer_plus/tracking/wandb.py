"""The run's page in Weights & Biases: metrics and validation samples, never at the cost of the training."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import wandb

from ltx_trainer_plus.config import TrainerConfig, config_as_dict

logger = logging.getLogger(__name__)


class Sample(Protocol):
    """A validation file: what `log_samples` must know of it. `index` counts from 1."""

    @property
    def path(self) -> Path: ...

    @property
    def prompt(self) -> str: ...

    @property
    def index(self) -> int: ...


class WandbRun:
    """One W&B run, or nothing at all where it is switched off. Only the main process makes one with a configuration.

    A failure is reported once as a warning; training goes on.
    """

    def __init__(
        self, config: TrainerConfig | None, run_folder: Path | str = ".", resume_id: str | None = None
    ) -> None:
        """Start the run, or go on with run `resume_id`; `WANDB_MODE=offline` works as with the library itself.

        Where the server cannot be reached or refuses, the run is recorded offline in the run folder instead.
        """
        self._run: Any = None
        self._warned = False
        self._logs_samples = config is not None and config.wandb.log_validation_videos
        if config is not None and config.wandb.enabled:
            self._start(config, Path(run_folder), resume_id)

    @property
    def id(self) -> str | None:
        """What a resumed run hands in as `resume_id`."""
        return self._run.id if self._run is not None else None

    @property
    def location(self) -> str | None:
        """Where to find the run: its page, or its folder where it is offline."""
        if self._run is None:
            return None
        return str(Path(self._run.dir).parent) if self._run.offline else self._run.url

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log numbers at a training step. Steps may come in any order."""
        # W&B's own step may only grow, and drops what comes late; ours is a value like the others (define_metric).
        self._try(lambda: self._run.log({**metrics, "step": step}))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log validation files as they are (a video keeps its frame rate and sound), captioned with their prompts."""
        if samples and self._logs_samples:
            self._try(lambda: self._run.log({"step": step, **{f"samples/{s.index}": _media(s) for s in samples}}))

    def finish(self, exit_code: int = 0) -> None:
        """Write out what is left. exit_code: 0 marks the run as finished, anything else as failed."""
        self._try(lambda: self._run.finish(exit_code=exit_code))
        self._run = None

    def _start(self, config: TrainerConfig, run_folder: Path, resume_id: str | None) -> None:
        def start(mode: Literal["offline"] | None) -> Any:
            return wandb.init(
                project=config.wandb.project,
                entity=config.wandb.entity,
                tags=list(config.wandb.tags),
                config=config_as_dict(config),
                dir=run_folder,
                id=resume_id,
                resume="allow" if resume_id else None,
                mode=mode,
                # Captured terminal output would be thousands of redrawn progress bars.
                settings=wandb.Settings(console="off"),
            )

        try:
            try:
                self._run = start(None)
            except Exception as error:
                logger.warning(
                    "W&B %s (%s).\n  The run is recorded offline in %s; upload it later with `wandb sync`. "
                    "To go without, set wandb.enabled: false.",
                    f"could not continue run {resume_id}" if resume_id else "did not start",
                    error,
                    run_folder / "wandb",
                )
                self._run = start("offline")
        except Exception as error:
            self._warn(error)
            return
        if resume_id and (self._run.id != resume_id or not (self._run.resumed or self._run.offline)):
            logger.warning("W&B could not continue run %s; this is run %s.", resume_id, self._run.id)
        self._try(lambda: self._run.define_metric("step"))
        self._try(lambda: self._run.define_metric("*", step_metric="step"))

    def _try(self, action: Callable[[], Any]) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            logger.warning(
                "W&B failed (%s: %s). Training goes on; metrics.jsonl is complete.", type(error).__name__, error
            )
        self._warned = True


def _media(sample: Sample) -> Any:
    path = str(sample.path)
    if sample.path.suffix == ".wav":
        return wandb.Audio(path, caption=sample.prompt)
    if sample.path.suffix == ".png":
        return wandb.Image(path, caption=sample.prompt)
    return wandb.Video(path, caption=sample.prompt)
