"""pydantic's findings in the words of the configuration."""

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import NoneType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ltx_trainer_plus.config.base import Section
from ltx_trainer_plus.config.keys import (
    all_paths,
    condition_types,
    may_be_null,
    meant,
    section_holding,
    without_form_names,
)
from ltx_trainer_plus.config.problems import NOT_GIVEN, Problem
from ltx_trainer_plus.config.strategy import STRATEGIES

_REGION = "It takes y1, x1, y2 and x2 in pixels, such as [0, 0, 256, 512]"
_TRAINING_CONDITION = "Each condition is a section, such as {type: prefix, temporal_boundary: 2}"
_VALIDATION_CONDITION = "Each condition is a section, such as {type: first_frame, image_or_video: cat.png}"
_REMEDIES = {
    "model.model_path": "Give the local folder of a diffusers pipeline, or an official single file",
    "data.preprocessed_data_root": "Give the folder that scripts/process_dataset.py wrote",
    "validation.interval": "Write null to never validate",
    "checkpoints.interval": "Write null to save at the end only",
    "checkpoints.keep_last_n": "Write -1 to keep every checkpoint",
    "optimization.max_grad_norm": "Write 0 to turn clipping off",
    "optimization.betas": "It takes two numbers, such as [0.9, 0.999]",
    "validation.video_dims": "It takes width, height and frames, such as [960, 544, 89]",
    "validation.samples.video_dims": "It takes width, height and frames, such as [960, 544, 89]",
    "training_strategy.video.conditions.spatial_region": _REGION,
    "validation.samples.conditions.spatial_region": _REGION,
    "training_strategy.video.conditions": _TRAINING_CONDITION,
    "training_strategy.audio.conditions": _TRAINING_CONDITION,
    "validation.samples.conditions": _VALIDATION_CONDITION,
    "validation.samples": 'Each sample is a section, such as {prompt: "a cat"}',
}
_SECTION = "must be a section (lines of key: value)"
_TYPES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "tuple_type": "must be a list",
    "dict_type": _SECTION,
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
}
_SIZES = {
    "too_few": "has too few items",
    "too_long": "has too many items",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}
_BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def explain(
    error: ValidationError, model: type[Section], *, under: str = "", everywhere: type[Section] | None = None
) -> list[Problem]:
    """Problems for everything that pydantic found.

    Args:
        error: what `model.model_validate` raised.
        model: the section that was validated.
        under: dotted path of that section, empty for the whole configuration.
        everywhere: where to look for a key that was put into the wrong section; `model` when not given.
    """
    known = list(all_paths(everywhere or model))
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        problem = _problem(item, under, model, known)
        found.setdefault(problem.path, problem)
    return list(found.values())


def _problem(item: ErrorDetails, under: str, model: type[Section], known: list[str]) -> Problem:
    kind, loc, given = item["type"], item["loc"], item["input"]
    if kind == "missing" and isinstance(loc[-1], int):  # pydantic's way to say that a list is too short
        kind, loc = "too_few", loc[:-1]
    path = ".".join(filter(None, [under, *map(str, without_form_names(loc))]))
    remedy = _REMEDIES.get(re.sub(r"\.\d+", "", path), "")
    or_null = " or null" if may_be_null(loc, model) else ""

    if kind in ("extra_forbidden", "invalid_key"):
        beside = list(section_holding(loc, model).model_fields)
        owners = [kind for kind, form in condition_types(loc[:-3], model).items() if loc[-1] in form.model_fields]
        belongs = f"It belongs to a condition of type {' or '.join(owners)}" if owners else ""
        remedy = belongs or _elsewhere(path, str(loc[-1]), known) or meant(path, beside, known)
        return Problem(path, "unknown key", given, remedy)
    if kind == "union_tag_not_found":
        types = condition_types(loc[:-1], model)
        remedy = f"It is one of {', '.join(types)}" if types else remedy
        return Problem(f"{path}.{item['ctx']['discriminator'][1:-1]}", "required, but not given", NOT_GIVEN, remedy)
    if kind == "missing":
        return Problem(path, "required, but not given", NOT_GIVEN, remedy)
    if kind == "literal_error":
        return _not_a_choice(path, item["ctx"]["expected"], or_null, given)
    if kind == "union_tag_invalid":
        name = item["ctx"]["discriminator"][1:-1]
        problem = _not_a_choice(f"{path}.{name}", item["ctx"]["expected_tags"], or_null, given[name])
        return replace(problem, remedy=_for_the_other_stream(loc, given[name], model) or problem.remedy)
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return Problem(path, f"{words} {item['ctx'][bound]:g}{or_null}", given, remedy)
    if kind in _TYPES:
        return Problem(path, _TYPES[kind] + or_null, given, remedy or _type_remedy(kind, given))
    return Problem(path, _SIZES.get(kind, item["msg"]), given, remedy)  # our own errors say it themselves


def _elsewhere(path: str, key: str, known: list[str]) -> str:
    """What to do with a key that exists, but not like this."""
    if path not in known:
        return ""
    if "." in key:
        section, _, name = key.rpartition(".")
        return f"Dots are for overrides: in a file write {name} inside the section {section}"
    owners = [name for name, form in STRATEGIES.items() if key in form.model_fields]
    return f"It belongs to training_strategy.name: {' or '.join(owners)}"


def _for_the_other_stream(loc: Sequence[str | int], kind: Any, model: type[Section]) -> str:
    """What to do with a condition that only the other stream takes."""
    for stream, other in (("video", "audio"), ("audio", "video")):
        if stream in loc and kind in condition_types([other if part == stream else part for part in loc[:-1]], model):
            return f"A condition of type {kind} is for {other} only"
    return ""


def _not_a_choice(path: str, expected: str, or_null: str, given: Any) -> Problem:
    words = re.findall(r"'([^']*)'", expected)
    close = get_close_matches(str(given).lower().replace("-", "_"), words, n=1)
    remedy = f"Did you mean {close[0]}?" if close else ""
    return Problem(path, f"must be one of {', '.join(words)}{or_null}", given, remedy)


def _type_remedy(kind: str, given: Any) -> str:
    if kind in ("int_type", "float_type", "bool_type") and isinstance(given, str):
        return "A value in quotes is a text: remove the quotes" if _reads_as_value(given) else ""
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return f"Write {int(given)}"
    if kind == "string_type" and not isinstance(given, dict | list | NoneType):
        return "Put it in quotes"
    return ""


def _reads_as_value(text: str) -> bool:
    return text.lower() in ("true", "false", "null") or text[:1].isdigit() or text[:1] in "+-."
