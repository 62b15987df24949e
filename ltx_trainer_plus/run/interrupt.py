"""Being asked to stop: SIGINT and SIGTERM become a request that the loop honours after the current step."""

import ctypes
import os
import signal
import time
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
# One Ctrl-C reaches a worker twice: the terminal signals the whole process group, and torchrun's agent passes it on.
_ECHO_SECONDS = 2.0


class StopRequest:
    """Context manager that notes SIGINT and SIGTERM instead of dying of them.

    The first signal sets `received`; a second SIGINT that is not the echo of the first raises KeyboardInterrupt, so
    that an impatient user is obeyed at once.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> bool:
        """Whether this process was asked to stop."""
        return self._signal is not None

    @property
    def name(self) -> str:
        """The signal's name, for the message to the user."""
        return self._signal.name if self._signal is not None else "a signal to another process"

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._since = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._since > _ECHO_SECONDS:
            raise KeyboardInterrupt


def follow_parent_death() -> None:
    """Have the kernel send this process SIGTERM when its parent dies (Linux).

    For a parent that exits on SIGTERM without telling its child: the one-process `accelerate launch`.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the request was in place
        os.kill(os.getpid(), signal.SIGTERM)
