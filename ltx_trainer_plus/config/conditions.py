"""The entries of `training_strategy.video.conditions` and `.audio.conditions`."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, PydanticKnownError

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
        raise PydanticCustomError("region", "is empty: y1 must be below y2, and x1 below x2")
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
    if not isinstance(kind, str) or kind not in entries:
        raise _errors(str(kind), _fault("type", kind, _unknown_type(kind, stream)))
    fields = entries[kind].model_fields
    unknown = [key for key in value if key not in fields]
    if unknown:
        takes = f"unknown key: {kind} takes {', '.join(fields)}"
        raise _errors(kind, *(_fault(key, value[key], takes + _guess(key, fields)) for key in unknown))
    try:
        return entries[kind].model_validate(dict(value))
    except ValidationError as error:
        raise _errors(kind, *map(_again, error.errors(include_url=False))) from None


def _unknown_type(kind: Any, stream: str) -> str:
    takes = f"{stream} takes {', '.join(CONDITION_ENTRIES[stream])}"
    if kind is None:
        return f"required, but not given: {takes}"
    others = [other for other, entries in CONDITION_ENTRIES.items() if kind in list(entries)]
    return f"{kind} is for {others[0]} only; {takes}" if others else takes + _guess(kind, CONDITION_ENTRIES[stream])


def _guess(given: Any, known: Iterable[str]) -> str:
    close = get_close_matches(str(given).lower().replace("-", "_"), list(known), n=1)
    return f". Did you mean {close[0]}?" if close else ""


def _fault(key: str, given: Any, message: str) -> InitErrorDetails:
    error = PydanticCustomError("condition", "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=(key,), input=given)


def _again(item: ErrorDetails) -> InitErrorDetails:
    """The same finding, to be raised once more; what pydantic does not know itself needs its message along."""
    kind: str | PydanticCustomError = item["type"]
    try:
        PydanticKnownError(item["type"], item.get("ctx"))  # type: ignore[arg-type]
    except KeyError:
        kind = PydanticCustomError("condition", "{message}", {"message": item["msg"]})
    return InitErrorDetails(type=kind, loc=item["loc"], input=item["input"], ctx=item.get("ctx", {}))


def _errors(kind: str, *details: InitErrorDetails) -> ValidationError:
    """Located as pydantic locates what is wrong inside a discriminated union: under the name of the chosen form."""
    return ValidationError.from_exception_data(
        "condition", [{**item, "loc": (kind, *item.get("loc", ()))} for item in details]
    )


def _as_dict(condition: TrainingCondition) -> dict[str, Any]:
    return condition.model_dump(mode="json")


def _conditions_of(stream: str) -> Any:
    return (PlainValidator(lambda value: _read(value, stream)), PlainSerializer(_as_dict))


VideoConditions = Annotated[tuple[Annotated[TrainingCondition, *_conditions_of("video")], ...], FromList]
AudioConditions = Annotated[tuple[Annotated[TrainingCondition, *_conditions_of("audio")], ...], FromList]
