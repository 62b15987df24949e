"""The run's own folder: one run at a time may be in it, and a fresh one never starts on top of another."""

import errno
import fcntl
import logging
import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ltx_trainer_plus.checkpoints.store import state_of, weights_steps
from ltx_trainer_plus.errors import UserError

logger = logging.getLogger(__name__)


class RunFolderError(UserError, RuntimeError):
    """The run folder cannot be used; the message says what to do."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it makes; no other module knows these names. The main process `open`s it."""

    path: Path
    _lock: IO[str] | None = field(default=None, compare=False, repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def sample(self, step: int, number: int) -> Path:
        """The file of a validation sample, without its suffix. number: in the run file, from 1."""
        return self.samples / f"step_{step:06d}_{number}"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "training_config.yaml"

    @property
    def starts(self) -> Path:
        """When and with which configuration the run was started and resumed, a JSON object for each."""
        return self.path / "starts.jsonl"

    @property
    def report(self) -> Path:
        """The page that `ltx-trainer-plus report` makes of the run."""
        return self.path / "report.html"

    @classmethod
    def open(cls, output_dir: Path | str, *, resuming: bool) -> "RunFolder":
        """Create the folder where it is missing, and hold it until `close` or the end of the process.

        Args:
            resuming: the run continues one that this folder holds (`Found.continues`).

        Raises:
            RunFolderError: the folder cannot be written, another process is training in it, or it holds a run and
                this one would start afresh.
        """
        path = Path(output_dir).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Asking for permissions would not show a read-only mount or a full disk.
            with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-") as probe:
                probe.write(b"x")
        except OSError as error:
            raise RunFolderError(
                f"output_dir: {path} cannot be written: {error.strerror or error}.\n"
                "  Set output_dir to a folder on a disk with space that this user may write to."
            ) from error
        folder = cls(path, _locked(path))
        if not resuming and (held := folder._held_run()):
            folder.close()
            what, remedy = held
            raise RunFolderError(
                f"output_dir: {path} already holds a run ({what}), which a fresh start would overwrite.\n  {remedy}"
            )
        return folder

    def close(self) -> None:
        """Let another process use the folder."""
        if self._lock is not None:
            self._lock.close()

    def _held_run(self) -> tuple[str, str] | None:
        """What a fresh start would overwrite, and what to do. A run that ended before its first step left nothing."""
        elsewhere = "set output_dir to another folder"
        if steps := weights_steps(self.checkpoints):
            what = f"checkpoints up to step {steps[-1]}"
            if any(state_of(self.checkpoints, step) for step in steps):
                return what, (
                    "Continue that run with model.load_checkpoint: latest (and checkpoints.no_resume: false), "
                    f"or {elsewhere}."
                )
            return what, (
                f"It cannot be continued, because no training state was saved. To start anew from its weights, "
                f"{elsewhere} and model.load_checkpoint to {self.path}."
            )
        if self.metrics.exists() and self.metrics.stat().st_size > 0:
            return f"metrics in {self.metrics.name}", (
                f"It ended before its first checkpoint, so it cannot be continued: delete the folder, or {elsewhere}."
            )
        return None


def _locked(path: Path) -> IO[str]:
    # flock belongs to the open file: however the process ends, the kernel lets go, and nothing stale stays behind.
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise RunFolderError(
            f"output_dir: {path} is in use by a run that is still going ({holder}).\n"
            "  Wait for it or stop it, or set output_dir to another folder."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        logger.warning("%s is on a file system without locks: nothing keeps a second run out of it.", path)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
