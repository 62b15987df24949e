"""What a run folder holds for its report; any part of it may be missing or still growing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.config.yaml_text import read_yaml, write_yaml
from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.report.curves import Curve, read_curves
from ltx_trainer_plus.run.starts import Start, read_starts

_SAMPLE = re.compile(r"step_(\d+)_(\d+)(_reference)?\.(mp4|wav|png)")
_KINDS: dict[str, Literal["video", "audio", "image"]] = {"mp4": "video", "wav": "audio", "png": "image"}


@dataclass(frozen=True)
class SampleFile:
    """A validation sample.

    Attributes:
        number: in the run file, from 1.
        prompt: empty where the configuration that it was made with is not known.
        is_reference: it was given to the sample.
        is_older: it was made before the run was resumed at an earlier step, so not by these weights.
    """

    path: Path
    step: int
    number: int
    kind: Literal["video", "audio", "image"]
    prompt: str
    is_reference: bool
    is_older: bool


@dataclass(frozen=True)
class RunFiles:
    """A run as its folder shows it now.

    Attributes:
        config: the resolved configuration, as YAML; empty where there is none.
        steps: the number that the configuration asks for; None where that is not known.
        step: the last one that was logged; 0 before the first.
    """

    name: str
    curves: dict[str, Curve]
    samples: tuple[SampleFile, ...]
    starts: tuple[Start, ...]
    config: str
    steps: int | None
    step: int


class NoRunError(UserError):
    """The folder holds no run; the message says what to give."""


def read_run(path: Path) -> RunFiles:
    """Read what is there.

    Raises:
        NoRunError: it is no run folder.
    """
    folder = RunFolder(path)
    if not folder.config.is_file() and not folder.metrics.is_file():
        raise NoRunError(
            f"{path} {'holds no run' if path.is_dir() else 'is no folder'}: neither {folder.config.name} nor "
            f"{folder.metrics.name} is in it. Give the output_dir of a run."
        )
    starts = read_starts(folder.starts)
    text, written = _written_config(folder.config)
    config = starts[-1].config if starts else written
    curves = read_curves(folder.metrics)
    steps = _item(config, "optimization", "steps")
    return RunFiles(
        name=path.resolve().name,
        curves=curves,
        samples=tuple(_samples(folder.samples, starts or [Start(0.0, 0, config)])),
        starts=tuple(starts),
        config=text or (write_yaml(dict(config)) if config else ""),
        steps=steps if isinstance(steps, int) else None,
        step=max((curve[-1][0] for curve in curves.values()), default=0),
    )


def _written_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", {}
    try:
        return text, read_yaml(path)
    except ValueError:
        # Its faults are no reason to show nothing of the run.
        return text, {}


def _samples(folder: Path, starts: Sequence[Start]) -> list[SampleFile]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _SAMPLE.fullmatch(path.name)
        if match is None:
            continue
        step, number = int(match[1]), int(match[2])
        try:
            made = path.stat().st_mtime
        except OSError:
            continue
        # The start that made it: the last one before it that began at an earlier step (or made the first samples).
        makers = [start for start in starts if start.time <= made and start.step <= step]
        prompt = _item((makers or starts)[-1 if makers else 0].config, "validation", "samples", number - 1, "prompt")
        found.append(
            SampleFile(
                path,
                step,
                number,
                _KINDS[match[4]],
                prompt if isinstance(prompt, str) else "",
                is_reference=match[3] is not None,
                is_older=any(start.time > made and start.step < step for start in starts),
            )
        )
    return sorted(found, key=lambda sample: (sample.number, sample.step, sample.is_reference))


def _item(tree: Any, *keys: str | int) -> Any:
    """What stands at a path in a configuration; None where it has no such place."""
    for key in keys:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
