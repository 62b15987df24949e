"""What can be said about validation before anything is loaded: whether it fits the model, and what it costs."""

from collections.abc import Iterator

from ltx_trainer_plus.config import Problem, ValidationConfig
from ltx_trainer_plus.config.conditions import region_fault
from ltx_trainer_plus.config.validation_conditions import (
    FirstFrameCondition,
    PrefixCondition,
    ReferenceCondition,
    SpatialCropCondition,
    SuffixCondition,
)
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.validation.denoise import Guidance
from ltx_trainer_plus.validation.requests import SampleRequest, sample_requests


def sample_guidance(config: ValidationConfig, request: SampleRequest) -> Guidance:
    """The section's guidance, without what the sample's generated streams have no use for."""
    return Guidance.of(config).for_streams(
        video=request.video == "generated",
        audio=request.audio == "generated",
        both_present="absent" not in (request.video, request.audio),
    )


def uses_negative_prompt(config: ValidationConfig) -> bool:
    """Whether some sample is guided away from the negative prompt."""
    return any(sample_guidance(config, request).uses_negative for request in sample_requests(config))


def forwards_per_sample(config: ValidationConfig) -> list[int]:
    """Transformer forwards that each validation sample costs."""
    return [
        config.inference_steps * sample_guidance(config, request).forwards_per_step
        for request in sample_requests(config)
    ]


def check_validation(config: ValidationConfig, factors: tuple[int, int], num_blocks: int) -> list[Problem]:
    """Find what this model cannot generate.

    Args:
        factors: temporal and spatial factor of the video VAE.
        num_blocks: of the transformer.

    Returns:
        Each with value and remedy; empty where validation never runs or fits.
    """
    if not config.makes_samples:
        return []
    # Samples that take the section's size share its problem.
    sizes: dict[Problem, None] = {}
    conditions: list[Problem] = []
    geometry = LatentGeometry(temporal=factors[0], spatial=factors[1])
    for request, sample in zip(sample_requests(config), config.samples, strict=True):
        own = sample.video_dims is not None
        field = f"validation.samples.{request.index}.video_dims" if own else "validation.video_dims"
        found = list(_size_problems(field, request, *factors)) if request.video != "absent" else []
        sizes.update(dict.fromkeys(found))
        if not found:
            conditions += _condition_problems(request, geometry)
    return [*sizes, *conditions, *_stg_problems(config, num_blocks)]


def _condition_problems(request: SampleRequest, geometry: LatentGeometry) -> Iterator[Problem]:
    """Conditions that do not meet the borders of latent frames, steps or cells."""
    for number, condition in enumerate(request.conditions):
        field = f"validation.samples.{request.index}.conditions.{number}"
        if isinstance(condition, FirstFrameCondition) and request.frames == 1:
            yield Problem(
                field,
                "first_frame: the sample has one frame, so nothing would be left to generate.\n"
                "  Make the sample longer (video_dims), or remove the condition.",
            )
        elif isinstance(condition, PrefixCondition | SuffixCondition):
            yield from _boundary_problems(field, condition, request, geometry)
        elif isinstance(condition, SpatialCropCondition):
            yield from _region_problems(field, condition, request, geometry)
        elif isinstance(condition, ReferenceCondition) and condition.stream == "video":
            yield from _reference_problems(field, condition, request, geometry)


def _boundary_problems(
    field: str, condition: PrefixCondition | SuffixCondition, request: SampleRequest, geometry: LatentGeometry
) -> Iterator[Problem]:
    frames, temporal = condition.num_frames, geometry.temporal
    if condition.duration is not None and condition.stream == "audio":
        steps = request.audio_latent_steps(geometry)
        if geometry.audio_steps(condition.duration) >= steps:
            yield Problem(
                f"{field}.duration",
                f"{condition.duration}: all {steps} latent steps of the sound would be given, none "
                "generated.\n  Give less of it, or make the sample longer (video_dims).",
            )
    elif frames is not None and isinstance(condition, PrefixCondition) and (frames - 1) % temporal:
        yield Problem(
            f"{field}.num_frames",
            f"{frames}: the first frames can be given as 1 plus a multiple of {temporal}, the "
            f"video VAE's temporal factor.\n  Use {_nearest(frames, temporal, 1)}.",
        )
    elif frames is not None and isinstance(condition, SuffixCondition) and frames % temporal > 1:
        yield Problem(
            f"{field}.num_frames",
            f"{frames}: the last frames can be given as a multiple of {temporal}, the video VAE's "
            f"temporal factor (one more is taken as the next multiple).\n  Use {_nearest(frames, temporal, temporal)}.",
        )


def _region_problems(
    field: str, condition: SpatialCropCondition, request: SampleRequest, geometry: LatentGeometry
) -> Iterator[Problem]:
    region = condition.spatial_region
    if found := region_fault(region, request.height, request.width, cell=geometry.spatial):
        message, remedy = found
        yield Problem(f"{field}.spatial_region", f"{list(region)}: {message}.\n  {remedy}.")


def _reference_problems(
    field: str, condition: ReferenceCondition, request: SampleRequest, geometry: LatentGeometry
) -> Iterator[Problem]:
    spatial, temporal = condition.downscale_factor or 1, condition.temporal_scale_factor or 1
    cell = geometry.spatial * spatial
    if request.width % cell or request.height % cell:
        yield Problem(
            f"{field}.downscale_factor",
            f"{spatial}: the reference would be {request.width / spatial:g}x"
            f"{request.height / spatial:g}, which the video VAE cannot take (multiples of {geometry.spatial}).\n"
            f"  Make width and height of the sample multiples of {cell} (video_dims), or use another factor.",
        )
    period = geometry.temporal * temporal
    if (request.frames - 1) % period:
        yield Problem(
            f"{field}.temporal_scale_factor",
            f"{temporal}: the sample's {request.frames} frames make no whole latent "
            f"frames of the reference.\n  Use {_nearest(request.frames, period, 1)} frames (video_dims), or another "
            "factor.",
        )


def _size_problems(field: str, request: SampleRequest, temporal: int, spatial: int) -> list[Problem]:
    given = [request.width, request.height, request.frames]
    problems = []
    for name, value in (("width", request.width), ("height", request.height)):
        if value % spatial or value < spatial:
            fault = f"{name} {value} is not a multiple of {spatial}, the video VAE's spatial factor"
            problems.append(Problem(field, f"{given}: {fault}.\n  Use {_nearest(value, spatial, spatial)}."))
    if (request.frames - 1) % temporal or request.frames < 1:
        fault = f"{request.frames} frames are not 1 plus a multiple of {temporal}, the video VAE's temporal factor"
        problems.append(Problem(field, f"{given}: {fault}.\n  Use {_nearest(request.frames, temporal, 1)}."))
    return problems


def _nearest(value: int, step: int, smallest: int) -> str:
    """The valid values (`smallest` plus multiples of `step`) around one that is not valid."""
    below = smallest + (value - smallest) // step * step
    return f"{below} or {below + step}" if below >= smallest else str(smallest)


def _stg_problems(config: ValidationConfig, num_blocks: int) -> list[Problem]:
    guidances = [sample_guidance(config, request) for request in sample_requests(config)]
    blocks = config.stg_blocks
    missing = [block for block in blocks or () if not 0 <= block < num_blocks]
    if not missing or not any(guidance.uses_stg for guidance in guidances):
        return []
    scales = [
        f"validation.{stream}_stg_scale: 0"
        for stream in ("video", "audio")
        if any(getattr(guidance, stream).stg_scale != 0 for guidance in guidances)
    ]
    named = f"block {missing[0]} does not" if len(missing) == 1 else f"blocks {', '.join(map(str, missing))} do not"
    message = (
        f"{list(blocks or ())}: {named} exist: this model has {num_blocks} blocks (0 to {num_blocks - 1}).\n"
        f"  Choose among them, or set {' and '.join(scales)} to turn STG off."
    )
    return [Problem("validation.stg_blocks", message)]
