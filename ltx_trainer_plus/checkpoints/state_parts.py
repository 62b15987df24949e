"""Saving a training state in several files: every process writes its own part, the main one waits for all of them.

Nothing is communicated: this runs in background threads, beside the collectives of the training. Every process leaves
word in the folder that they share, in a file of its own: that its part is on the disk, or why it is not.
"""

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from threading import Event

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.checkpoints.files import Sums, check_finite, write_tensors
from ltx_trainer_plus.checkpoints.state import TrainingState, part_name

logger = logging.getLogger(__name__)

_DONE = ".done"
_FAILED = ".failed"
_NO_REASON = "it could not be written, and neither could the reason: the disk is probably full"
_POLL_SECONDS = 0.05
# A run that fails in one process alone leaves the others writing, and their parts are worth a while. But a launcher
# that ends the run kills after 30 s, and the cause has to be said before.
_GRACE_SECONDS = 5.0


class PartsError(RuntimeError):
    """A part was not written; the message says which and why."""


def write_part(folder: Path, state: TrainingState) -> None:
    """Write this process's part of `state` into `folder`, and leave word of it there. Raises nothing."""
    part = state.part
    assert part is not None
    path = folder / part.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_finite(path.name, state.tensors)
        word = json.dumps(write_tensors(path, state.tensors, state.metadata()))
        with replacing(folder / f"{path.name}{_DONE}") as unfinished:
            unfinished.write_text(word)
    except Exception as error:
        _say_failed(path, f"{type(error).__name__}: {error}")


def await_parts(folder: Path, count: int, *, timeout: float, given_up: Event) -> dict[str, Sums]:
    """Wait until each of `count` processes has left word; take the words away.

    Args:
        timeout: seconds after which a silent process is an error.
        given_up: set when the run has failed: from then on the wait is short.

    Returns:
        The files of the parts and their sums.

    Raises:
        PartsError: a part could not be written, or there is no word of it.
    """
    names = [part_name(index, count) for index in range(count)]
    deadline = time.monotonic() + timeout
    silent = names
    while silent := [name for name in silent if not _has_word(folder / name)]:
        if given_up.is_set():
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            raise PartsError(
                f"no word of {', '.join(silent)}. The processes that write them have ended or hang, or this one does "
                "not see their files: all processes must share the run folder"
            )
        time.sleep(_POLL_SECONDS)
    failures = [name for name in names if not (folder / f"{name}{_DONE}").exists()]
    if failures:
        reasons = [(folder / f"{name}{_FAILED}").read_text() or _NO_REASON for name in failures]
        raise PartsError("; ".join(f"{name}: {reason}" for name, reason in zip(failures, reasons, strict=True)))
    sums = {}
    for name in names:
        word = folder / f"{name}{_DONE}"
        sums[name] = json.loads(word.read_text())
        word.unlink()
    return sums


def _has_word(path: Path) -> bool:
    return any(path.with_name(f"{path.name}{end}").exists() for end in (_DONE, _FAILED))


def _say_failed(path: Path, reason: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        # On a full disk this makes the room that the word needs.
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text("")
        with suppress(OSError):
            unfinished.write_text(reason)
        # Not `replacing`: what waits for the disk fails where it is full, and the word must come through.
        os.replace(unfinished, path.with_name(f"{path.name}{_FAILED}"))
    except OSError as error:
        logger.error("%s could not be written (%s), and the main process could not be told (%s).", path, reason, error)
