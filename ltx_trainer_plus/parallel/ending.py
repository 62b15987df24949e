"""How a launched program ends: with its own status, whatever its communication threads are doing."""

import atexit
import hashlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and end this process with what it returns (None is 0), as `sys.exit(main())` would.

    A process that has joined a process group ends without the interpreter's finalization. A thread of torch's gloo
    group takes the GIL to drop the last tensors it has sent (`ProcessGroupGloo::runLoop`, torch 2.13). Finalization
    ends a thread that asks for the GIL, at which the C++ code aborts; and a group that is destroyed with its last
    reference waits, holding the GIL, for that thread. About one launch in ten was aborted or hung, its work done.
    """
    status: object = 1
    try:
        status = main()
    except SystemExit as exit_:
        status = exit_.code
    except BaseException:
        if not _has_joined_a_group():
            raise
        sys.excepthook(*sys.exc_info())
    if not _has_joined_a_group():
        sys.exit(status)  # type: ignore[arg-type]
    if isinstance(status, str):
        print(status, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def say_once(error: Exception) -> None:
    """Print an error's message, unless some process of this launch has said the same. Waits for no other process."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if _has_joined_a_group():
        store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
        try:
            if store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1) > 1:
                return
        except RuntimeError:
            pass  # the store ended with the process that kept it: better twice than never
    print(text, file=sys.stderr, flush=True)


def _has_joined_a_group() -> bool:
    # A program that has not loaded torch, such as one that was asked for its help, should not do it now.
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()
