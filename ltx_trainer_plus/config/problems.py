"""What can be wrong with a configuration, as values: one `Problem` each, and the `ConfigError` that lists them all."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ltx_trainer_plus.errors import UserError


class _NotGiven:
    def __reduce__(self) -> str:
        return "NOT_GIVEN"  # the one object, also where one process sends a problem to the others


NOT_GIVEN: Any = _NotGiven()  # None would be a value: YAML's null
_LONGEST_SHOWN = 200  # a path should be whole


@dataclass(frozen=True)
class Problem:
    """One thing to change.

    `path` is dotted, list items by index, as overrides address them. `involves` names the other fields that a
    contradiction is about: it is not reported when one of them is faulty by itself.
    """

    path: str
    message: str
    given: Any = NOT_GIVEN
    remedy: str = ""
    involves: tuple[str, ...] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        given = "" if self.given is NOT_GIVEN else f" (given: {_shown(self.given)})"
        sentences = [self.message + given, self.remedy]
        return f"{self.path}: " + " ".join(text if text[-1] in ".?" else f"{text}." for text in sentences if text)

    def is_about(self, paths: Iterable[str]) -> bool:
        """Whether one of the paths is this problem's, or lies above or below it."""
        mine = (self.path, *self.involves)
        return any(_same_branch(one, other) for one in mine for other in paths)


class ConfigError(UserError, ValueError):
    """Everything that is wrong with a configuration, in one readable text."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"The configuration has {count}:", *map(str, self.problems)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.problems,)


def _same_branch(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _shown(value: Any) -> str:
    """As one would write it in YAML, on one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
