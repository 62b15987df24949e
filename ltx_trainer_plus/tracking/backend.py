"""What a place that records runs must offer, and how the ones that a configuration names are opened and called.

A backend is a module with a `TITLE` and a `start(run: RecordedRun) -> Backend`: one in `tracking/backends/`, named in
`tracking.backends` by its file, or any other that can be imported, by its dotted path.
"""

import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from ltx_trainer_plus.config import Problem, TrainerConfig
from ltx_trainer_plus.tracking import backends

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Media:
    """A file to show. `key` is a series of them over the steps, such as `samples/1`."""

    key: str
    path: Path
    caption: str

    @property
    def kind(self) -> Literal["video", "image", "audio"]:
        suffix = self.path.suffix.lower()
        return "audio" if suffix == ".wav" else "image" if suffix == ".png" else "video"


@dataclass(frozen=True)
class RecordedRun:
    """The run that a backend records.

    Attributes:
        folder: the run folder.
        step: optimizer steps done before: 0 for a fresh run. What was recorded of later steps is written anew.
        resume_id: `Backend.id` of the run that is continued; None for a fresh one.
    """

    config: TrainerConfig
    folder: Path
    step: int = 0
    resume_id: str | None = None


class Backend(Protocol):
    """A run that is being recorded. Whatever a method raises is reported, and the training goes on."""

    @property
    def id(self) -> str | None:
        """What a resumed run needs to go on with this one; None where the run folder is enough."""

    @property
    def location(self) -> str | None:
        """Where the user finds it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers (some may not be finite) of a training step. Steps may come in any order."""

    def log_media(self, media: Sequence[Media], step: int) -> None:
        """Record files, which stay where they are."""

    def finish(self, exit_code: int) -> None:
        """Write out what is left. exit_code: 0 for a run that ended well."""


class Recorder:
    """Calls a backend such that it never costs the training: a failure is reported once, as a warning."""

    def __init__(self, name: str, run: RecordedRun) -> None:
        module = _module(name)
        self.name = name
        self.title: str = module.TITLE
        self._backend: Backend | None = None
        self._warned = False
        try:
            self._backend = module.start(run)
        except Exception as error:
            self._warn(error)

    @property
    def id(self) -> str | None:
        return self._ask(lambda backend: backend.id)

    @property
    def location(self) -> str | None:
        return self._ask(lambda backend: backend.location)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._ask(lambda backend: backend.log(values, step))

    def log_media(self, media: Sequence[Media], step: int) -> None:
        self._ask(lambda backend: backend.log_media(media, step))

    def finish(self, exit_code: int = 0) -> None:
        self._ask(lambda backend: backend.finish(exit_code))
        self._backend = None

    def _ask(self, action: Callable[[Backend], Any]) -> Any:
        if self._backend is None:
            return None
        try:
            return action(self._backend)
        except Exception as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            logger.warning(
                "%s failed (%s: %s). Training goes on; metrics.jsonl is complete.",
                self.title,
                type(error).__name__,
                error,
            )
        self._warned = True


def backend_problems(config: TrainerConfig) -> Iterator[Problem]:
    """The backends of a run that do not exist, or whose library is not installed."""
    for name in config.trackers:
        is_listed = name in config.tracking.backends
        path, given = ("tracking.backends", name) if is_listed else ("wandb.enabled", True)
        without = f"take {name} out of tracking.backends" if is_listed else "set wandb.enabled: false"
        try:
            module = _module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if f"{_path(name)}.".startswith(f"{missing}."):
                known = ", ".join(module.name for module in pkgutil.iter_modules(backends.__path__))
                remedy = f"Choose among {known}, or give the dotted path of a module that can be imported"
                yield Problem(path, "there is no such backend", given, remedy)
            else:
                package = missing.partition(".")[0]
                remedy = f"Install it (pip install {package}), or {without}"
                yield Problem(path, f"{name} needs the package {package}, which is not installed", given, remedy)
        except Exception as error:
            message = f"{name} cannot be loaded ({type(error).__name__}: {error})"
            yield Problem(path, message, given, f"Install its library anew, or {without}")
        else:
            if lacking := [part for part in ("TITLE", "start") if part not in vars(module)]:
                message = f"{name} is no backend: the module has no {' and no '.join(lacking)}"
                yield Problem(path, message, given, "Give the dotted path of a module that has both")


def _path(name: str) -> str:
    return name if "." in name else f"{backends.__name__}.{name}"


def _module(name: str) -> ModuleType:
    return import_module(_path(name))
