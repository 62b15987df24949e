"""`starts.jsonl`: when a run was started and resumed, with which configuration, and what had changed by then."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ltx_trainer_plus.checkpoints.continuation import Change


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        time: seconds since 1970.
        step: optimizer steps done before.
        config: the resolved configuration, as `config_as_dict` gives it.
        weights: the file that it started from; None where it was the base model.
        changes: against the configuration that the checkpoint was saved with.
    """

    time: float
    step: int
    config: Mapping[str, Any]
    weights: str | None = None
    changes: tuple[Change, ...] = ()


def record_start(
    path: Path, config: Mapping[str, Any], step: int, weights: Path | None, changes: Iterable[Change]
) -> None:
    """Append a start, now."""
    line = {
        "time": datetime.now(UTC).timestamp(),
        "step": step,
        "weights": None if weights is None else str(weights),
        "changes": [asdict(change) for change in changes],
        "config": config,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")


def read_starts(path: Path) -> list[Start]:
    """The starts in their order; none where the file is missing (runs of older releases). Broken lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    starts = []
    for line in lines:
        try:
            found = json.loads(line)
            changes = tuple(Change(**change) for change in found["changes"])
            starts.append(Start(found["time"], found["step"], found["config"], found["weights"], changes))
        except (ValueError, KeyError, TypeError):
            # A kill or a full disk cut it short.
            continue
    return starts
