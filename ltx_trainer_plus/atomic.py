"""Files that appear whole or not at all: a reader, or a run that was killed, sees the old one or the whole new one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` (same suffix) for a new file or folder, which takes its place when the block
    ends well; otherwise nothing of it stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        # Before the renaming: a power cut could else leave the new name with nothing in it.
        flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> list[str]:
    """Remove files that killed `replacing` blocks left in a folder and below it; nothing may be writing there.

    Returns:
        The names of what was removed.
    """
    leftovers = [path for path in folder.rglob(".*.[0-9]*.tmp*") if path.is_file()]
    for path in leftovers:
        path.unlink()
    return [path.name for path in leftovers]


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
