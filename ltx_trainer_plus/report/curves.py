"""`metrics.jsonl` as curves: read while it is being written, and thinned such that no peak is lost."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# 160,000 points are 3 MB of numbers.
_POINTS_OF_ALL_CURVES = 160_000
_POINTS_OF_A_CURVE = 4_000

Curve = list[tuple[int, float | None]]
"""Steps and values; None where a value was not finite."""

_SIGMA = re.compile(r"loss/(.+)/(sigma_.+)")
_TITLES = {
    "loss": "Loss",
    "held_out": "Held-out loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm (before clipping)",
    "step_time": "Step time (s)",
    "tokens_per_second": "Tokens per second",
    "memory_gib": "Peak memory (GiB)",
    "counts": "Skipped steps and replaced samples, since the start",
}
_COUNTS = ("skipped_steps", "replaced_samples")


@dataclass(frozen=True)
class Chart:
    """Curves that belong together, by their labels."""

    title: str
    curves: Mapping[str, Curve]


def read_curves(path: Path) -> dict[str, Curve]:
    """Every number that was logged, by its name, in the order of the file. Lines that are cut short are left out."""
    curves: dict[str, Curve] = {}
    for line in _lines(path):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        for key, value in line.items():
            if key != "step" and (value is None or isinstance(value, int | float)):
                is_finite = value is not None and math.isfinite(value)
                curves.setdefault(key, []).append((step, value if is_finite else None))
    return curves


def charts(curves: Mapping[str, Curve]) -> list[Chart]:
    """The curves in groups, the known ones first, each thinned to what a page can hold."""
    limit = min(_POINTS_OF_A_CURVE, max(2, _POINTS_OF_ALL_CURVES // max(1, len(curves))))
    groups: dict[str, dict[str, Curve]] = {title: {} for title in _TITLES.values()}
    for key, curve in curves.items():
        title, label = _place(key)
        groups.setdefault(title, {})[label] = thinned(curve, limit)
    by_sigma = [title for title in groups if title.endswith(_BY_SIGMA)]
    order = [_TITLES["loss"], _TITLES["held_out"], *sorted(by_sigma, reverse=True)]
    order += [title for title in groups if title not in order]
    return [
        Chart(title, dict(sorted(groups[title].items())) if title in by_sigma else groups[title])
        for title in order
        if groups[title]
    ]


def thinned(curve: Sequence[tuple[int, float | None]], limit: int) -> Curve:
    """At most about `limit` points, with the first, the last, and every stretch's lowest, highest and missing value."""
    if len(curve) <= limit:
        return list(curve)
    # Three points of a stretch may stay.
    size = -(-len(curve) // max(1, limit // 3))
    kept = {0, len(curve) - 1}
    for start in range(0, len(curve), size):
        stretch = range(start, min(start + size, len(curve)))
        finite = [index for index in stretch if curve[index][1] is not None]
        if finite:
            kept.add(min(finite, key=lambda index: curve[index][1] or 0.0))
            kept.add(max(finite, key=lambda index: curve[index][1] or 0.0))
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if curve[index][1] is None))
    return [curve[index] for index in sorted(kept)]


_BY_SIGMA = " by noise level (sigma)"


def _place(key: str) -> tuple[str, str]:
    """The title of a curve's chart, and its label there."""
    if match := _SIGMA.fullmatch(key):
        return f"{match[1].capitalize()} loss{_BY_SIGMA}", match[2].removeprefix("sigma_").replace("-", " to ")
    if key in _COUNTS:
        return _TITLES["counts"], key.replace("_", " ")
    group, _, rest = key.partition("/")
    if group in ("loss", "held_out"):
        return _TITLES[group], rest or "total"
    return _TITLES.get(key, key), key.replace("_", " ")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                # The run is writing it just now, or a kill cut it short.
                continue
            if isinstance(line, dict):
                yield line
