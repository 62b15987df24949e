"""Older names, as official files still have them: each becomes what it is called today, with a warning."""

import warnings
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ltx_trainer_plus.config.base import FromList, LocalPath, Section
from ltx_trainer_plus.config.explain import explain
from ltx_trainer_plus.config.problems import NOT_GIVEN, Problem

_Paths = Annotated[tuple[LocalPath | None, ...], FromList]


class OldNameWarning(FutureWarning):
    """An older name was read; the text says what to write instead."""


class _OldNames(Section):
    """Types and bounds of the older fields; null and the neutral values mean nothing."""

    prompts: Annotated[tuple[str, ...], FromList] | None = None
    images: _Paths | None = None
    reference_videos: _Paths | None = None
    reference_downscale_factor: int | None = Field(default=None, ge=1)
    include_reference_in_output: bool | None = None
    guidance_scale: float | None = Field(default=None, ge=1)
    stg_scale: float | None = Field(default=None, ge=0)
    stg_mode: Literal["stg_av", "stg_v"] | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompts": ([],),
    "images": ([],),
    "reference_videos": ([],),
    "reference_downscale_factor": (1,),
    "include_reference_in_output": (False,),
}
_BECOMES = {
    "prompts": "validation.samples, one item for each prompt",
    "images": "a condition {type: first_frame, image_or_video: ...} in each of validation.samples",
    "reference_videos": "a condition {type: reference, video: ...} in each of validation.samples",
    "reference_downscale_factor": "downscale_factor in the reference condition",
    "include_reference_in_output": "include_in_output in the reference condition",
    "guidance_scale": "validation.video_cfg_scale and validation.audio_cfg_scale",
    "stg_scale": "validation.video_stg_scale and validation.audio_stg_scale",
    "stg_mode": "validation.video_stg_scale and validation.audio_stg_scale (stg_v: audio 0)",
}
_STRATEGY_BECOMES = {
    "text_to_video": "video: {...} (and audio: {...} where it said with_audio)",
    "video_to_video": "a condition {type: reference, latents_dir: ...} in video.conditions",
}
# Which new fields an old one would overwrite.
_REPLACES = {
    "prompts": ("samples",),
    "images": ("samples",),
    "reference_videos": ("samples",),
    "reference_downscale_factor": ("samples",),
    "include_reference_in_output": ("samples",),
    "guidance_scale": ("video_cfg_scale", "audio_cfg_scale"),
    "stg_scale": ("video_stg_scale", "audio_stg_scale"),
    "stg_mode": ("video_stg_scale", "audio_stg_scale"),
}


def take_old_names(tree: dict[str, Any], written: Collection[str]) -> list[Problem]:
    """Replace the older names in `tree`, the configuration as read, by what they mean today.

    Args:
        tree: with every default filled in. Changed in place.
        written: names of the `validation` fields that the user wrote; a default is no contradiction.

    Returns:
        What is wrong with them: types, bounds, and old and new names that say two things.

    Warns:
        OldNameWarning: once for each older name.
    """
    validation = tree.get("validation")
    if not isinstance(validation, dict):
        return []
    raw = {name: validation.pop(name) for name in _OldNames.model_fields if name in validation}
    given = {name: value for name, value in raw.items() if value is not None and not _is_neutral(name, value)}
    try:
        _OldNames.model_validate(given)
    except ValidationError as error:
        return explain(error, _OldNames, under="validation")
    problems = [*_contradictions(given, written), *_incomplete(given)]
    if not problems:
        _replace(given, validation)
        for name in given:
            text = f"validation.{name} is an older name: write {_BECOMES[name]}"
            warnings.warn(text, OldNameWarning, stacklevel=3)
    return problems


def warn_of_strategy(name: str) -> None:
    """Say what a strategy's older form is called today.

    Warns:
        OldNameWarning
    """
    text = (
        f"training_strategy.name: {name} is an older name: write name: flexible with {_STRATEGY_BECOMES[name]}; "
        "first_frame_conditioning_p is the probability of a condition {type: first_frame} in video.conditions"
    )
    warnings.warn(text, OldNameWarning, stacklevel=3)


def _is_neutral(name: str, value: Any) -> bool:
    # By type too: true is not the factor 1.
    return any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ()))


def _contradictions(given: dict[str, Any], written: Collection[str]) -> list[Problem]:
    return [
        Problem(
            f"validation.{old}",
            f"says the same as validation.{new}, which is given too",
            given[old],
            f"Remove validation.{old}: today that is {_BECOMES[old]}",
            involves=(f"validation.{new}",),
        )
        for old in given
        # One of a pair is enough to see it.
        for new in [name for name in _REPLACES[old] if name in written][:1]
    ]


def _incomplete(given: dict[str, Any]) -> list[Problem]:
    """Lists that do not belong together, and settings of references that are not there."""
    problems = []
    count = len(given.get("prompts", ()))
    for name in ("images", "reference_videos"):
        if name in given and len(given[name]) != count:
            message = f"has length {len(given[name])} and validation.prompts has {count}: each prompt takes one"
            remedy = "Make both lists equally long; null stands for a prompt without one"
            problems.append(Problem(f"validation.{name}", message, NOT_GIVEN, remedy, involves=("validation.prompts",)))
    for name in ("reference_downscale_factor", "include_reference_in_output"):
        if name in given and "reference_videos" not in given:
            message = "is about validation.reference_videos, and there are none"
            problems.append(Problem(f"validation.{name}", message, given[name], "Remove it, or give reference_videos"))
    return problems


def _replace(given: dict[str, Any], validation: dict[str, Any]) -> None:
    if "guidance_scale" in given:
        validation["video_cfg_scale"] = validation["audio_cfg_scale"] = given["guidance_scale"]
    if "stg_scale" in given:
        validation["video_stg_scale"] = validation["audio_stg_scale"] = given["stg_scale"]
    if given.get("stg_mode") == "stg_v":
        validation["audio_stg_scale"] = 0.0
    if "prompts" not in given:
        return
    blank = [None] * len(given["prompts"])
    images, references = given.get("images", blank), given.get("reference_videos", blank)
    validation["samples"] = [
        {"prompt": prompt, "conditions": _conditions(image, reference, given)}
        for prompt, image, reference in zip(given["prompts"], images, references, strict=True)
    ]


def _conditions(image: str | None, reference: str | None, given: dict[str, Any]) -> list[dict[str, Any]]:
    conditions: list[dict[str, Any]] = []
    if image is not None:
        conditions.append({"type": "first_frame", "image_or_video": image})
    if reference is not None:
        conditions.append(
            {
                "type": "reference",
                "video": reference,
                "downscale_factor": given.get("reference_downscale_factor"),
                "include_in_output": given.get("include_reference_in_output", False),
            }
        )
    return conditions
