"""What a preparation did: progress while it runs, and the summary that names every skipped clip."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ltx_trainer_plus.preparation.buckets import Bucket
from ltx_trainer_plus.preparation.clips import Skipped

T = TypeVar("T")
_LINE_EVERY_SECONDS = 30.0


@dataclass(frozen=True)
class PreparationReport:
    """The outcome for the whole data set, the same on every process.

    Attributes:
        output: the folder with the prepared files.
        prepared: names of all samples that are complete now.
        new: how many clips were encoded by this run, audio or video.
        captions: how many captions were.
        buckets: how many of the encoded clips went to each bucket.
        skipped: every item that is not prepared.
        strays: prepared samples in the folder that this data set does not name; they would be trained on too.
    """

    output: Path
    prepared: tuple[str, ...]
    new: int
    captions: int
    buckets: tuple[tuple[Bucket, int], ...]
    skipped: tuple[Skipped, ...]
    strays: tuple[str, ...]

    def print(self, console: Console) -> None:
        """The summary, for people."""
        ready, total = len(self.prepared), len(self.prepared) + len(self.skipped)
        console.print(
            f"Prepared: {ready} of {_clips(total)} ready in {self.output} "
            f"({self.new} encoded now, captions: {self.captions}).",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        for bucket, count in self.buckets:
            console.print(f"  {bucket}: {_clips(count)}", markup=False, highlight=False)
        if self.strays:
            console.print(
                f"[yellow]Not in this data set, but prepared in the same folder[/] ({len(self.strays)}): "
                f"{escape(', '.join(self.strays[:5]))}{' ...' if len(self.strays) > 5 else ''}. "
                "Training would use them; delete their files if it should not.",
                soft_wrap=True,
            )
        if self.skipped:
            counts = Counter(skip.reason for skip in self.skipped)
            kinds = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
            heading = f"[bold red]Skipped[/] {_clips(len(self.skipped))} ({kinds}):"
            console.print(heading, highlight=False, soft_wrap=True)
            for skip in self.skipped:
                console.print(
                    f"  {skip.item}: {skip.reason}: {skip.detail}", markup=False, highlight=False, soft_wrap=True
                )


def _clips(count: int) -> str:
    return f"{count} clip{'' if count == 1 else 's'}"


def with_progress(steps: Iterable[T], *, total: int, what: str, console: Console | None) -> Iterator[T]:
    """Pass the steps on and show how far they are: a bar in a terminal, a line now and then elsewhere.

    Args:
        steps: an integer in it counts that many, anything else one.
        total: of the counts.
        what: e.g. `Encoding clips`.
        console: None = show nothing.
    """
    if console is None or total == 0:
        yield from steps
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=total)
        done, next_line = 0, time.monotonic()
        for step in steps:
            count = step if isinstance(step, int) else 1
            done += count
            bar.advance(task, count)
            if not console.is_terminal and (time.monotonic() >= next_line or done == total):
                console.print(f"{what}: {done} of {total}", markup=False, highlight=False)
                next_line = time.monotonic() + _LINE_EVERY_SECONDS
            yield step
