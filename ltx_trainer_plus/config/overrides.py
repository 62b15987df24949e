"""Overrides of a run file: `key.path=value`, on the command line and in a call."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ltx_trainer_plus.config.yaml_text import read_value


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Run files and overrides, each in the order in which they were given.

    A path may hold "=" (`sweeps/lr=1e-4/run.yaml`), a key never holds a slash; `./lr=1e-4.yaml` is a path for certain.
    """
    overrides = [text for text in arguments if "=" in text and "/" not in text.partition("=")[0]]
    return [Path(text) for text in arguments if text not in overrides], overrides


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Write one override into `tree`, in place.

    Raises:
        ValueError: it is no `key.path=value`, or there is nothing at that path that could hold a value.
    """
    path, equals, text = override.partition("=")
    keys = re.sub(r"\[(\d+)\]", r".\1", path.strip()).split(".")
    if not equals or not all(keys):
        raise ValueError("is no override: write key.path=value, such as optimization.steps=100")
    value = read_value(text)
    node: Any = tree
    for key, next_key in zip(keys, [*keys[1:], None], strict=True):
        if isinstance(node, list):
            if not key.isdigit() or int(key) > len(node):
                size = len(node)
                raise ValueError(f"the list has no item {key}: it has {size}, counted from 0, and {size} would add one")
            if int(key) == len(node):
                node.append(None)
        elif not isinstance(node, dict):
            raise ValueError(f"there is no {key} to set: what should hold it is the value {node!r}")
        place: Any = int(key) if isinstance(node, list) else key
        if next_key is None:
            node[place] = value
            return
        below = node[place] if isinstance(node, list) else node.get(place)
        if below is None:
            below = [] if next_key.isdigit() else {}
            node[place] = below
        node = below
