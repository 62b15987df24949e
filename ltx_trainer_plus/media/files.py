"""Media files on disk: opening them with errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
from av.container import InputContainer

from ltx_trainer_plus.errors import UserError


class MediaError(UserError, RuntimeError):
    """A media file that cannot be used. The message is the reason alone; `path` says which file."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        return MediaError, (self.path, self.reason)


@contextmanager
def open_media(path: str | Path) -> Iterator[InputContainer]:
    """Open a file with ffmpeg's demuxers; whatever goes wrong inside the block becomes a `MediaError`."""
    path = Path(path)
    if not path.is_file():
        raise MediaError(path, "there is no such file")
    if path.stat().st_size == 0:
        raise MediaError(path, "the file is empty (0 bytes)")
    try:
        # Only local files: a playlist disguised as a video must not make ffmpeg fetch what it lists.
        with av.open(
            str(path), mode="r", metadata_errors="ignore", options={"protocol_whitelist": "file"}
        ) as container:
            yield container
    except (av.error.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MediaError(path, f"ffmpeg cannot read it ({reason})") from error
