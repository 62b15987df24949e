"""Data set files and folders of clips: which media file goes with which caption, under which name."""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.media.image import IMAGE_SUFFIXES

VIDEO_SUFFIXES = frozenset(
    {".3gp", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv"}
    | {".ts", ".webm", ".wmv"}
)
# In this order: the official column first.
_VIDEO_COLUMNS = ("media_path", "video")
_LISTS = ("dataset.json", "dataset.jsonl", "dataset.csv")

Reason = Literal["too short", "unreadable", "silent", "no caption", "collision", "no path"]


class DatasetError(UserError, ValueError):
    """A data set or a setting that preparation cannot start with; the message says what to change."""


@dataclass(frozen=True)
class Clip:
    """One item of the data set.

    Attributes:
        name: what its prepared files are called: the media path relative to the data set's folder, without suffix.
        item: the media path as the data set gives it.
        path: the media file.
        caption: never empty.
    """

    name: str
    item: str
    path: Path
    caption: str


@dataclass(frozen=True)
class Skipped:
    """An item that is not prepared, and why.

    Attributes:
        item: the media file as the data set gives it.
        reason: the kind of reason.
        detail: what exactly, and what to do.
        name: of its prepared files, where they may exist from an earlier run.
    """

    item: str
    reason: Reason
    detail: str
    name: str | None = None


def dataset_folder(dataset: Path) -> Path:
    """The folder that names and the default output are relative to."""
    return Path(os.path.abspath(dataset if dataset.is_dir() else dataset.parent))


def read_clips(
    dataset: Path, *, video_column: str | None = None, caption_column: str = "caption"
) -> tuple[list[Clip], list[Skipped]]:
    """List a data set, in its own order.

    Args:
        dataset: a `.json` (list of objects), `.jsonl` or `.csv` file; or a folder that holds one of them named
            `dataset.*`; or a folder of media files, each with its caption in a `.txt` file of the same name.
        video_column: column with the media path, relative to the file; None = `media_path` or `video`.
        caption_column: column with the caption.

    Returns:
        The clips, and the items that can be skipped without opening them: no path, no caption, or a name that an
        earlier item has already (`a.mp4` and `a.mov`, or one file listed twice).

    Raises:
        DatasetError: there is no such data set, it cannot be parsed, it lacks the column, or it is empty.
    """
    base = dataset_folder(dataset)
    listing = _listing(dataset)
    if listing is None:
        items: Iterable[tuple[str, str | None, str]] = _folder_items(base)
    else:
        items = _listed_items(listing, video_column, caption_column)

    clips: dict[str, Clip] = {}
    skipped = []
    for media, caption, missing in items:
        if not media:
            skipped.append(Skipped(missing, "no path", "the item has no media path"))
            continue
        path = Path(os.path.normpath(base / media))
        name = _name(path, base)
        if not caption or not caption.strip():
            skipped.append(Skipped(media, "no caption", missing, name))
        elif name in clips:
            skipped.append(Skipped(media, "collision", _collision(clips[name], path, base)))
        else:
            clips[name] = Clip(name, media, path, caption.strip())
    if not clips and not skipped:
        raise DatasetError(
            f"{dataset}: there are no clips in it.\n"
            "  Give a folder with videos (each with a .txt caption of the same name), or a .json, .jsonl or .csv file."
        )
    return list(clips.values()), skipped


def _collision(first: Clip, path: Path, base: Path) -> str:
    if first.path == path:
        return "the data set lists it twice; the first caption is used"
    return f"its prepared files would overwrite those of {os.path.relpath(first.path, base)}; rename one of them"


def _name(path: Path, base: Path) -> str:
    # A file elsewhere keeps its whole path: shorter names could meet, and `..` would leave the output folder.
    relative = path.relative_to(base) if path.is_relative_to(base) else path.relative_to(path.anchor)
    return relative.with_suffix("").as_posix()


def _listing(dataset: Path) -> Path | None:
    """The file that lists the items, or None for a folder of media files."""
    if dataset.is_dir():
        present = [dataset / name for name in _LISTS if (dataset / name).is_file()]
        if len(present) > 1:
            names = " and ".join(path.name for path in present)
            raise DatasetError(f"{dataset} holds {names}.\n  Name the one that is meant: {present[0]}")
        return present[0] if present else None
    if not dataset.is_file():
        raise DatasetError(f"{dataset}: there is no such file or folder. Give a data set file or a folder of clips.")
    if dataset.suffix.lower() not in (".json", ".jsonl", ".csv"):
        raise DatasetError(
            f"{dataset}: a data set file ends in .json, .jsonl or .csv; this ends in {dataset.suffix or 'nothing'}.\n"
            "  To prepare a few clips, give the folder they are in."
        )
    return dataset


def _folder_items(base: Path) -> Iterator[tuple[str, str | None, str]]:
    """(path relative to the folder, caption, what to say when it is missing) of every media file below."""
    for folder, folders, files in os.walk(base):
        # Hidden folders are prepared data and caches. Sorted, so that every process sees one order.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            path = Path(folder) / file
            if file.startswith(".") or path.suffix.lower() not in VIDEO_SUFFIXES | IMAGE_SUFFIXES:
                continue
            text = path.with_suffix(".txt")
            caption = text.read_text(encoding="utf-8-sig", errors="replace") if text.is_file() else None
            problem = f"{text.name} is empty" if text.is_file() else f"there is no {text.name} beside it"
            yield path.relative_to(base).as_posix(), caption, problem


def _listed_items(
    listing: Path, video_column: str | None, caption_column: str
) -> Iterator[tuple[str, str | None, str]]:
    """The same from a file; where the path is missing, the third entry is the row's place."""
    try:
        rows = _rows(listing)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{listing}: it cannot be read ({error}). Save it as UTF-8 text.") from error
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    candidates = (video_column,) if video_column else _VIDEO_COLUMNS
    found = next((name for name in candidates if name in columns), None)
    if rows and found is None:
        raise DatasetError(
            f"{listing}: there is no column {' or '.join(candidates)} "
            f"(it has: {', '.join(map(str, columns))}).\n  Name the column of media paths with --video-column."
        )
    if rows and caption_column not in columns:
        raise DatasetError(
            f"{listing}: there is no column {caption_column} (it has: {', '.join(map(str, columns))}).\n"
            "  Name the column of captions with --caption-column."
        )
    for place, row in rows:
        media, caption = row.get(found), row.get(caption_column)
        if not isinstance(media, str) or not media.strip():
            yield "", None, place
        elif caption is None or isinstance(caption, str):
            yield media.strip(), caption, f"{place}: {caption_column} is empty"
        else:
            yield media.strip(), None, f"{place}: {caption_column} is no text but {json.dumps(caption)[:40]}"


def _rows(listing: Path) -> list[tuple[str, Mapping[Any, Any]]]:
    """(place, row) of every row. Excel's byte-order mark is no part of the first column's name."""
    suffix = listing.suffix.lower()
    if suffix == ".csv":
        with listing.open(encoding="utf-8-sig", newline="") as file:
            return [(f"row {number}", row) for number, row in enumerate(csv.DictReader(file), start=1)]
    text = listing.read_text(encoding="utf-8-sig")
    if suffix == ".json":
        items = _json(text, listing, "")
        if not isinstance(items, list):
            raise DatasetError(
                f"{listing}: a .json data set is a list of objects; this holds {type(items).__name__}.\n"
                '  Write it as [{"video": "a.mp4", "caption": "..."}, ...].'
            )
        placed = [(f"item {number}", item) for number, item in enumerate(items, start=1)]
    else:
        lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        placed = [(place, _json(line, listing, f", {place}")) for place, line in lines]
    for place, item in placed:
        if not isinstance(item, dict):
            raise DatasetError(f'{listing}, {place}: expected an object like {{"video": "a.mp4", "caption": "..."}}.')
    return placed


def _json(text: str, listing: Path, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{listing}{place}: this is not JSON ({error}).") from error
