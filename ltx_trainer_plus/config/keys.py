"""Which keys the configuration has, and which of them was meant by one that it has not."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args

from ltx_trainer_plus.config.base import Section
from ltx_trainer_plus.config.strategy import STRATEGIES


def without_form_names(loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """pydantic puts the chosen form of a discriminated union into the location; the file has no such level."""
    if len(loc) > 1 and loc[0] == "training_strategy" and loc[1] in STRATEGIES:
        loc = (loc[0], *loc[2:])
    return tuple(part for index, part in enumerate(loc) if not _names_condition(loc, index))


def _names_condition(loc: Sequence[str | int], index: int) -> bool:
    """Whether the part is the type of a condition: it comes after `conditions` and an index."""
    return index > 1 and loc[index - 2] == "conditions" and isinstance(loc[index - 1], int)


def section_holding(loc: Sequence[str | int], model: type[Section]) -> type[Section]:
    """The section that a location's last key is looked up in (`loc` as pydantic gives it)."""
    forms: dict[str, type[Section]] = {}
    for index, part in enumerate(loc[:-1]):
        if part in STRATEGIES:
            model = STRATEGIES[str(part)]
        elif _names_condition(loc, index):
            model = forms.get(str(part), model)
        elif part in model.model_fields:
            inner = _sections_in(model.model_fields[str(part)].annotation)
            forms = {
                section.model_fields["type"].default: section for section in inner if "type" in section.model_fields
            }
            model = inner[0] if inner else model
    return model


def condition_types(loc: Sequence[str | int], model: type[Section]) -> dict[str, type[Section]]:
    """The conditions that the list at `loc` may hold, by type; empty where that is no list of conditions."""
    if not loc or loc[-1] != "conditions":
        return {}
    forms = _sections_in(section_holding(loc, model).model_fields["conditions"].annotation)
    return {form.model_fields["type"].default: form for form in forms}


def may_be_null(loc: Sequence[str | int], model: type[Section]) -> bool:
    """Whether the field at this location takes null."""
    field = section_holding(loc, model).model_fields.get(str(loc[-1])) if loc else None
    return field is not None and NoneType in get_args(field.annotation)


def all_paths(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted paths of every field; the items of a list of sections stand under `.0`, as an override would write it."""
    for name, field in model.model_fields.items():
        path = prefix + name
        yield path
        is_list = "tuple" in str(field.annotation)
        for section in _sections_in(field.annotation):
            yield from all_paths(section, f"{path}.0." if is_list else f"{path}.")


def meant(path: str, beside: Sequence[str], paths: Sequence[str]) -> str:
    """A sentence that leads from an unknown key to a real one.

    Args:
        path: the unknown key.
        beside: the keys that its section has.
        paths: every path of the configuration.
    """
    section, _, key = path.rpartition(".")
    word = key.lower().replace("-", "_")
    here = f"{section}." if section else ""
    if here + word in paths:
        return f"Did you mean {here + word}?"
    # The right key in the wrong section comes before a similar one in this section.
    elsewhere = [other for other in dict.fromkeys(paths) if other.rpartition(".")[2] == word]
    close = [here + other for other in get_close_matches(word, beside, n=1)]
    leaves = sorted({other.rpartition(".")[2] for other in paths})
    far = [
        other
        for leaf in get_close_matches(word, leaves, n=1, cutoff=0.75)
        for other in dict.fromkeys(paths)
        if other.rpartition(".")[2] == leaf
    ]
    for guesses in (elsewhere, close, far):
        if guesses:
            return f"Did you mean {' or '.join(guesses[:3])}?"
    if not beside:
        return "It takes no keys. Remove it"
    return f"The keys here are {', '.join(beside)}"


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]
