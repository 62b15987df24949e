"""What can be said about validation before anything is loaded: whether it fits the model, and what it costs."""

from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.validation.denoise import Guidance
from ltx_trainer_plus.validation.requests import SampleRequest, sample_requests


def active_guidance(config: ValidationConfig) -> Guidance:
    """The section's guidance, without what the generated streams have no use for."""
    video, audio = config.generate_video, config.generate_audio
    return Guidance.of(config).for_streams(video=video, audio=audio, both_present=video and audio)


def forwards_per_sample(config: ValidationConfig) -> int:
    """Transformer forwards that one validation sample costs."""
    return config.inference_steps * active_guidance(config).forwards_per_step


def check_validation(config: ValidationConfig, factors: tuple[int, int], num_blocks: int) -> list[str]:
    """Find what this model cannot generate.

    Args:
        factors: temporal and spatial factor of the video VAE.
        num_blocks: of the transformer.

    Returns:
        A problem per string, each with field, value and remedy; empty where validation never runs or fits.
    """
    if config.interval is None or not config.samples:
        return []
    problems: list[str] = []
    if config.generate_video:
        # Samples that take the section's size share its problem.
        seen: dict[str, None] = {}
        for request, sample in zip(sample_requests(config), config.samples, strict=True):
            own = sample.video_dims is not None
            field = f"validation.samples.{request.index}.video_dims" if own else "validation.video_dims"
            seen.update(dict.fromkeys(_size_problems(field, request, *factors)))
        problems.extend(seen)
    return problems + _stg_problems(config, num_blocks)


def _size_problems(field: str, request: SampleRequest, temporal: int, spatial: int) -> list[str]:
    given = f"{field}: [{request.width}, {request.height}, {request.frames}]"
    problems = []
    for name, value in (("width", request.width), ("height", request.height)):
        if value % spatial or value < spatial:
            problems.append(
                f"{given}: {name} {value} is not a multiple of {spatial}, the video VAE's spatial factor.\n"
                f"  Use {_nearest(value, spatial, spatial)}."
            )
    if (request.frames - 1) % temporal or request.frames < 1:
        problems.append(
            f"{given}: {request.frames} frames are not 1 plus a multiple of {temporal}, the video VAE's temporal "
            f"factor.\n  Use {_nearest(request.frames, temporal, 1)}."
        )
    return problems


def _nearest(value: int, step: int, smallest: int) -> str:
    """The valid values (`smallest` plus multiples of `step`) around one that is not valid."""
    below = smallest + (value - smallest) // step * step
    return f"{below} or {below + step}" if below >= smallest else str(smallest)


def _stg_problems(config: ValidationConfig, num_blocks: int) -> list[str]:
    guidance = active_guidance(config)
    if not guidance.uses_stg or guidance.stg_blocks is None:
        return []
    missing = [block for block in guidance.stg_blocks if not 0 <= block < num_blocks]
    if not missing:
        return []
    scales = [
        f"validation.{stream}_stg_scale: 0"
        for stream, scale in (("video", guidance.video.stg_scale), ("audio", guidance.audio.stg_scale))
        if scale != 0
    ]
    named = f"block {missing[0]} does not" if len(missing) == 1 else f"blocks {', '.join(map(str, missing))} do not"
    return [
        f"validation.stg_blocks: {list(guidance.stg_blocks)}: {named} exist: this model has {num_blocks} blocks "
        f"(0 to {num_blocks - 1}).\n  Choose among them, or set {' and '.join(scales)} to turn STG off."
    ]
