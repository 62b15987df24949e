"""The entries of `training_strategy.video.conditions` and `.audio.conditions`."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ltx_trainer_plus.config.base import FromList, Section


def _inside_data_root(value: str) -> str:
    if not value.strip() or value.startswith(("/", "~")) or ".." in value.split("/"):
        raise PydanticCustomError(
            "latents_dir", "must be the name of a folder inside data.preprocessed_data_root, such as latents"
        )
    return value


FolderName = Annotated[str, AfterValidator(_inside_data_root)]
_Pixel = Annotated[int, Field(ge=0)]


def _is_a_region(value: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    top, left, bottom, right = value
    if top >= bottom or left >= right:
        raise PydanticCustomError("region", "is empty: it is y1, x1, y2, x2 in pixels, with y1 < y2 and x1 < x2")
    return value


class TrainingCondition(Section):
    """What every condition has: how often a sample (for `reference`: a batch) is trained with it."""

    type: str
    probability: float = Field(default=1.0, ge=0, le=1)


class FirstFrameCondition(TrainingCondition):
    """The first latent frame is given."""

    type: Literal["first_frame"] = "first_frame"


class PrefixCondition(TrainingCondition):
    """The first `temporal_boundary` latent frames (audio: latent steps) are given."""

    type: Literal["prefix"] = "prefix"
    temporal_boundary: int = Field(ge=1)


class SuffixCondition(TrainingCondition):
    """The last `temporal_boundary` latent frames (audio: latent steps) are given."""

    type: Literal["suffix"] = "suffix"
    temporal_boundary: int = Field(ge=1)


class SpatialCropCondition(TrainingCondition):
    """A rectangle is given: y1, x1, y2, x2 in pixels."""

    type: Literal["spatial_crop"] = "spatial_crop"
    spatial_region: Annotated[tuple[_Pixel, _Pixel, _Pixel, _Pixel], FromList, AfterValidator(_is_a_region)]


class MaskCondition(TrainingCondition):
    """What a prepared mask marks is given."""

    type: Literal["mask"] = "mask"
    mask_dir: FolderName


class ReferenceCondition(TrainingCondition):
    """Another clip's tokens are put before the target's."""

    type: Literal["reference"] = "reference"
    latents_dir: FolderName


# By stream and type.
CONDITION_ENTRIES: dict[str, dict[str, type[TrainingCondition]]] = {
    "video": {
        "first_frame": FirstFrameCondition,
        "prefix": PrefixCondition,
        "suffix": SuffixCondition,
        "spatial_crop": SpatialCropCondition,
        "mask": MaskCondition,
        "reference": ReferenceCondition,
    },
    "audio": {
        "prefix": PrefixCondition,
        "suffix": SuffixCondition,
        "mask": MaskCondition,
        "reference": ReferenceCondition,
    },
}


def _read(value: Any, stream: str) -> TrainingCondition:
    entries = CONDITION_ENTRIES[stream]
    if isinstance(value, TrainingCondition):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise PydanticCustomError("condition", "must be a section, such as {type: prefix, temporal_boundary: 2}")
    kind = value.get("type")
    if kind is None:
        raise _error("type", value, f"required, but not given: {stream} takes {', '.join(entries)}")
    if kind not in entries:
        elsewhere = [other for other in CONDITION_ENTRIES if kind in CONDITION_ENTRIES[other]]
        close = get_close_matches(str(kind).lower().replace("-", "_"), entries, n=1)
        hint = f"{kind} is for {elsewhere[0]} only. " if elsewhere else ""
        guess = f". Did you mean {close[0]}?" if close and not elsewhere else ""
        raise _error("type", kind, f"{hint}{stream} takes {', '.join(entries)}{guess}")
    fields = entries[kind].model_fields
    for key in value:
        if key not in fields:
            close = get_close_matches(str(key).lower().replace("-", "_"), fields, n=1)
            guess = f". Did you mean {close[0]}?" if close else ""
            raise _error(str(key), value[key], f"unknown key: {kind} takes {', '.join(fields)}{guess}")
    return entries[kind].model_validate(dict(value))


def _error(key: str, given: Any, message: str) -> ValidationError:
    error = PydanticCustomError("condition", "{message}", {"message": message})
    return ValidationError.from_exception_data("condition", [InitErrorDetails(type=error, loc=(key,), input=given)])


def _as_dict(condition: TrainingCondition) -> dict[str, Any]:
    return condition.model_dump(mode="json")


def _conditions_of(stream: str) -> Any:
    return (PlainValidator(lambda value: _read(value, stream)), PlainSerializer(_as_dict))


VideoConditions = Annotated[tuple[Annotated[TrainingCondition, *_conditions_of("video")], ...], FromList]
AudioConditions = Annotated[tuple[Annotated[TrainingCondition, *_conditions_of("audio")], ...], FromList]
