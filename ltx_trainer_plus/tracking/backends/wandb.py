"""Weights & Biases."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from ltx_trainer_plus.config import config_as_dict
from ltx_trainer_plus.tracking.backend import Media, RecordedRun

logger = logging.getLogger(__name__)

TITLE = "W&B"

_MEDIA = {"video": wandb.Video, "audio": wandb.Audio, "image": wandb.Image}


def start(run: RecordedRun) -> "WandbBackend":
    """Start a run, or go on with `run.resume_id`; `WANDB_MODE=offline` works as with the library itself.

    Where the server cannot be reached or refuses, the run is recorded offline in the run folder instead.
    """
    settings, resume_id = run.config.wandb, run.resume_id

    def begin(mode: Literal["offline"] | None) -> Any:
        return wandb.init(
            project=settings.project,
            entity=settings.entity,
            tags=list(settings.tags),
            config=config_as_dict(run.config),
            dir=run.folder,
            id=resume_id,
            resume="allow" if resume_id else None,
            mode=mode,
            # Captured terminal output would be thousands of redrawn progress bars.
            settings=wandb.Settings(console="off"),
        )

    try:
        begun = begin(None)
    except Exception as error:
        logger.warning(
            "W&B %s (%s).\n  The run is recorded offline in %s; upload it later with `wandb sync`. "
            "To go without, set wandb.enabled: false and leave wandb out of tracking.backends.",
            f"could not continue run {resume_id}" if resume_id else "did not start",
            error,
            run.folder / "wandb",
        )
        begun = begin("offline")
    if resume_id and (begun.id != resume_id or not (begun.resumed or begun.offline)):
        logger.warning("W&B could not continue run %s; this is run %s.", resume_id, begun.id)
    # W&B's own step may only grow, and drops what comes late; ours is a value like the others.
    begun.define_metric("step")
    begun.define_metric("*", step_metric="step")
    return WandbBackend(begun, logs_media=settings.log_validation_videos)


class WandbBackend:
    """One W&B run. Media are logged as they are: a video keeps its frame rate and sound."""

    def __init__(self, run: Any, *, logs_media: bool) -> None:
        self._run = run
        self._logs_media = logs_media

    @property
    def id(self) -> str | None:
        return self._run.id

    @property
    def location(self) -> str | None:
        """The run's page, or its folder where it is offline."""
        return str(Path(self._run.dir).parent) if self._run.offline else self._run.url

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def log_media(self, media: Sequence[Media], step: int) -> None:
        if media and self._logs_media:
            shown = {item.key: _MEDIA[item.kind](str(item.path), caption=item.caption) for item in media}
            self._run.log({**shown, "step": step})

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
