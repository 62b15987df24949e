"""What no single field of the `validation` section shows: conditions that cannot work, alone or together."""

from collections.abc import Iterator
from typing import Any

from ltx_trainer_plus.config.conditions import region_fault
from ltx_trainer_plus.config.problems import NOT_GIVEN, Problem
from ltx_trainer_plus.config.validation import SampleConfig, ValidationConfig
from ltx_trainer_plus.config.validation_conditions import (
    Condition,
    MaskCondition,
    PrefixCondition,
    ReferenceCondition,
    SpatialCropCondition,
    SuffixCondition,
    frozen_stream,
)

_NOUN = {"video": "video", "audio": "sound"}
_FREEZES = {"video": "video_to_audio", "audio": "audio_to_video"}


def validation_problems(validation: ValidationConfig) -> Iterator[Problem]:
    """Problems of guidance and conditions that need no model and no file to be seen."""
    if validation.interval is None:
        return  # never sampled
    if not validation.generate_video and not validation.generate_audio:
        yield Problem(
            "validation.generate_video",
            "neither video nor audio would be generated (validation.generate_audio is false too)",
            False,
            "Set one of them to true, or validation.interval: null to turn validation off",
            involves=("validation.generate_audio", "validation.interval"),
        )
    has_video_stg = validation.generate_video and validation.video_stg_scale > 0
    has_audio_stg = validation.generate_audio and validation.audio_stg_scale > 0
    if validation.stg_blocks == () and (has_video_stg or has_audio_stg):
        yield Problem(
            "validation.stg_blocks",
            "names no block, but validation.video_stg_scale or validation.audio_stg_scale turns STG on",
            [],
            "Name blocks, write null for all, or set both scales to 0",
            involves=("validation.video_stg_scale", "validation.audio_stg_scale", "validation.interval"),
        )
    for index, sample in enumerate(validation.samples):
        yield from _sample_problems(f"validation.samples.{index}", sample, validation)


def condition_path_problems(validation: ValidationConfig) -> Iterator[Problem]:
    """Files of conditions that do not exist."""
    if validation.interval is None:
        return
    for index, sample in enumerate(validation.samples):
        for number, condition in enumerate(sample.conditions):
            for name, path in condition.files.items():
                if not path.is_file():
                    where = f"validation.samples.{index}.conditions.{number}.{name}"
                    message = "is a folder" if path.is_dir() else "does not exist"
                    yield Problem(where, message, path, "Give a file; paths start at the folder you launch from")


def _sample_problems(path: str, sample: SampleConfig, validation: ValidationConfig) -> Iterator[Problem]:
    frozen: str | None = None
    for number, condition in enumerate(sample.conditions):
        where = f"{path}.conditions.{number}"
        kind = frozen_stream((condition,))
        if kind is not None and frozen is not None:
            yield Problem(
                where,
                f"{condition.type} comes after {_FREEZES[frozen]}: one sample gives one stream and generates the other",
                NOT_GIVEN,
                "Make two samples of them",
            )
        frozen = frozen or kind
        yield from _condition_problems(where, condition, sample, validation)
    if frozen is not None and (validation.generate_video or validation.generate_audio):
        yield from _frozen_problems(path, sample, validation)


def _frozen_problems(path: str, sample: SampleConfig, validation: ValidationConfig) -> Iterator[Problem]:
    frozen = frozen_stream(sample.conditions)
    assert frozen is not None
    other = "audio" if frozen == "video" else "video"
    if not getattr(validation, f"generate_{other}"):
        yield Problem(
            f"validation.generate_{other}",
            f"is false, and {path} gives the {_NOUN[frozen]} ({_FREEZES[frozen]}): nothing is left to generate",
            False,
            f"Set validation.generate_{other}: true",
        )
    for number, condition in enumerate(sample.conditions):
        if condition.stream == frozen and frozen_stream((condition,)) is None:
            yield Problem(
                f"{path}.conditions.{number}",
                f"{condition.type} is about the {_NOUN[frozen]}, which {_FREEZES[frozen]} gives as a whole",
                NOT_GIVEN,
                f"Remove it, or remove {_FREEZES[frozen]}",
            )


def _condition_problems(
    path: str, condition: Condition, sample: SampleConfig, validation: ValidationConfig
) -> Iterator[Problem]:
    if isinstance(condition, PrefixCondition | SuffixCondition | MaskCondition | ReferenceCondition):
        given = [name for name in ("video", "audio") if getattr(condition, name) is not None]
        if len(given) != 1:
            yield Problem(
                path,
                f"{condition.type} takes video or audio, one of them; "
                + ("both are given" if given else "neither is given"),
                NOT_GIVEN,
                "Make two conditions of it, one for each" if given else "Name a file",
            )
            return
    if validation.role_of(sample, condition.stream) == "absent":
        yield Problem(
            path,
            f"{condition.type} is about the {_NOUN[condition.stream]}, and validation.generate_{condition.stream} is "
            "false: the sample has none",
            NOT_GIVEN,
            f"Remove it, or set validation.generate_{condition.stream}: true",
            involves=(f"validation.generate_{condition.stream}",),
        )
    if isinstance(condition, PrefixCondition | SuffixCondition):
        yield from _boundary_problems(path, condition, sample, validation)
    elif isinstance(condition, SpatialCropCondition):
        width, height, _ = validation.dims_of(sample)
        if found := region_fault(condition.spatial_region, height, width):
            message, remedy = found
            yield Problem(f"{path}.spatial_region", message, list(condition.spatial_region), remedy)
    elif isinstance(condition, ReferenceCondition) and condition.stream == "audio":
        for name in ("downscale_factor", "temporal_scale_factor"):
            if getattr(condition, name) not in (None, 1):
                message = "is about pictures, and this reference is a sound"
                yield Problem(f"{path}.{name}", message, getattr(condition, name), "Remove it")


def _boundary_problems(
    path: str, condition: PrefixCondition | SuffixCondition, sample: SampleConfig, validation: ValidationConfig
) -> Iterator[Problem]:
    frames = validation.dims_of(sample)[2]
    lengths: dict[str, tuple[Any, float, str]] = {
        "num_frames": (condition.num_frames, frames, f"{frames} frames"),
        "duration": (condition.duration, frames / validation.frame_rate, f"{frames / validation.frame_rate:.3f} s"),
    }
    needed, unused = ("num_frames", "duration") if condition.stream == "video" else ("duration", "num_frames")
    if lengths[unused][0] is not None:
        message = f"does not belong to {condition.stream}"
        yield Problem(f"{path}.{unused}", message, lengths[unused][0], f"Write {needed} instead")
    given, whole, described = lengths[needed]
    if given is None:
        yield Problem(f"{path}.{needed}", f"required with {condition.stream}, but not given")
    elif given >= whole:
        yield Problem(
            f"{path}.{needed}",
            f"nothing would be left to generate: the sample has {described}",
            given,
            "Give less of it, or make the sample longer (video_dims)",
        )
