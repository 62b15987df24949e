"""What a test must not leave behind: found by comparing what is there before it and after it."""

import dataclasses
import gc
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Caches of tools; what git keeps for itself; packages.
_UNWATCHED = {".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
# pytest's own.
_VARIABLES = {"PYTEST_CURRENT_TEST"}
# Libraries keep these for the rest of the process.
_THREADS = ("tqdm_monitor", "ThreadPoolExecutor-compile")
_PROCESSES = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
# torchrun leaves the folder for its logs; multiprocessing and W&B have one for the process, removed at its end.
_FILES = re.compile(r"pymp-\w+|torchelastic_\w+|tmp\w+wandb-(artifacts|media|media-.*)")
# What ends in the background, as a killed process does, has this long, in seconds.
_PATIENCE = 5.0
# In the environment of every process that the tests start, so that one whose parent has died is found too.
_MARK = "LTX_TESTS_PROCESS"
# What need not be looked at again: processes of others, and the folders of the repository with their times.
_foreign: set[int] = set()
_repository: dict[str, tuple[int, list[str], list[str]]] = {}


@dataclasses.dataclass(frozen=True)
class Traces:
    """What can be left behind.

    Attributes:
        environment: all variables.
        processes: number and command line of each that this process has started, or one of these.
        threads: of Python, of this process.
        groups: whether torch.distributed is initialised.
        files: in the repository, the working directory and the directory for temporary files.
    """

    environment: dict[str, str]
    processes: dict[int, str]
    threads: frozenset[threading.Thread]
    groups: bool
    files: frozenset[str]

    @classmethod
    def now(cls) -> "Traces":
        distributed = sys.modules.get("torch.distributed")
        return cls(
            environment={name: value for name, value in os.environ.items() if name not in _VARIABLES},
            processes=_processes(),
            threads=frozenset(t for t in threading.enumerate() if not t.name.startswith(_THREADS)),
            groups=distributed is not None and distributed.is_available() and distributed.is_initialized(),
            files=frozenset(_files()),
        )

    def left_since(self, before: "Traces") -> list[str]:
        """Every thing that is there and was not before, as a line that names it."""
        left = []
        for name in sorted(self.environment.keys() | before.environment.keys()):
            was, value = before.environment.get(name), self.environment.get(name)
            if was != value:
                left.append(f"environment variable {name}: {was!r} before, {value!r} now (use monkeypatch.setenv)")
        for number in sorted(self.processes.keys() - before.processes.keys()):
            left.append(f"process {number}: {self.processes[number]} (end it, and wait for its end)")
        for thread in sorted(self.threads - before.threads, key=lambda thread: thread.name):
            left.append(f"thread {thread.name!r} (end it, and join it)")
        if self.groups and not before.groups:
            left.append("process group (call torch.distributed.destroy_process_group)")
        files = self.files - before.files
        left += [f"file {path} (write under tmp_path)" for path in sorted(files) if os.path.dirname(path) not in files]
        return left


def mark_processes() -> None:
    """Let every process that is started from now on be known as one of ours. Once, before anything is started."""
    os.environ[_MARK] = str(os.getpid())


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Context that fails the test in which something is left behind."""
    before = Traces.now()
    yield
    if "WANDB_SERVICE" in os.environ:
        # W&B's service is meant to live as long as the process.
        import wandb

        wandb.teardown()
    deadline = time.monotonic() + _PATIENCE
    while left := Traces.now().left_since(before):
        is_ending = any(line.startswith(("process ", "thread ")) for line in left)
        if not is_ending or time.monotonic() > deadline:
            pytest.fail("Left behind:\n  " + "\n  ".join(left), pytrace=False)
        gc.collect()  # an error that was caught holds what its frames held until then
        time.sleep(0.02)


@contextmanager
def own_temporary_directory() -> Iterator[Path]:
    """Context in which temporary files of this process, and of those that it starts, have an empty directory."""
    # Not under pytest's own: the names of sockets in it may have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="t") as directory, pytest.MonkeyPatch.context() as patch:
        # Compiled kernels are kept from session to session.
        kernels = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER', os.getuid())}"
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(kernels)))
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def _processes() -> dict[int, str]:
    found = {}
    numbers = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    _foreign.intersection_update(numbers)
    mark, here = f"{_MARK}={os.getpid()}".encode(), os.getpid()
    for number in numbers - _foreign - {here}:
        path = Path("/proc") / str(number)
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            is_ours = int(parent) == here or mark in (path / "environ").read_bytes().split(b"\0")
            command = (path / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:  # it has ended, or is somebody else's
            continue
        if not is_ours:
            _foreign.add(number)
        elif state not in ("Z", "X") and not any(name in command for name in _PROCESSES):
            found[number] = command
    return found


def _files() -> set[str]:
    # The repository hardly changes: only those of its folders are read in which something has come or gone.
    seen: set[str] = set()
    for folder in {Path.cwd(), Path(tempfile.gettempdir())} - {ROOT}:
        seen |= set(_files_in(str(folder), {}))
    return seen | set(_files_in(str(ROOT), _repository))


def _files_in(folder: str, known: dict[str, tuple[int, list[str], list[str]]]) -> Iterator[str]:
    try:
        changed = os.stat(folder).st_mtime_ns
        if folder not in known or known[folder][0] != changed:
            entries = [
                entry
                for entry in os.scandir(folder)
                if entry.name not in _UNWATCHED and not _FILES.fullmatch(entry.name)
            ]
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            known[folder] = changed, [entry.path for entry in entries], folders
    except FileNotFoundError:  # removed meanwhile
        return
    _, files, folders = known[folder]
    yield from files
    for name in folders:
        yield from _files_in(name, known)
