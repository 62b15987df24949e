"""Whether the conditions of a run can work with its prepared samples, found from their sizes."""

from collections.abc import Iterator
from typing import NamedTuple

from ltx_trainer_plus.config.conditions import ReferenceCondition, Stream, TrainingCondition
from ltx_trainer_plus.config.problems import Problem
from ltx_trainer_plus.config.strategy import StrategyConfig, StreamConfig
from ltx_trainer_plus.data.precomputed import PrecomputedDataset, SampleShape
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.strategies.conditions import fault, scale_of

_NAMED = 3  # samples that an error lists


def condition_problems(
    strategy: StrategyConfig, dataset: PrecomputedDataset, geometry: LatentGeometry
) -> list[Problem]:
    """Everything that makes a condition impossible with some sample; a fault that many samples share is told once."""
    shapes = _samples_by_shape(dataset)
    problems: list[Problem] = []
    for stream, index, condition in _conditions(strategy):
        path = f"training_strategy.{stream}.conditions.{index}"
        faults: dict[Problem, list[str]] = {}
        for shape, names in shapes.items():
            found = fault(condition, stream, _size(stream, shape), shape, geometry)
            if found is not None:
                faults.setdefault(found, []).extend(names)
        for one, names in faults.items():
            given = getattr(condition, one.path)
            given = list(given) if isinstance(given, tuple) else given
            problems.append(Problem(f"{path}.{one.path}", f"{_listed(names)}: {one.message}", given, one.remedy))
    return problems or _different_scales(strategy, shapes)


def reference_scale(strategy: StrategyConfig, dataset: PrecomputedDataset) -> ReferenceScale:
    """The scale of the video references; the checks made sure that all have the same."""
    scales = [found.scale for shape in dict.fromkeys(dataset.shapes) for found in _scales(strategy, shape)]
    # A reference of a single frame tells nothing about time, and counts as 1.
    return ReferenceScale(scales[0].spatial, max(scale.temporal for scale in scales)) if scales else ReferenceScale()


def _different_scales(strategy: StrategyConfig, shapes: dict[SampleShape, list[str]]) -> list[Problem]:
    """The weights file names one scale, by which references are prepared when the model is used."""
    first: dict[str, tuple[str, int]] = {}
    for shape, names in shapes.items():
        for path, scale, is_still in _scales(strategy, shape):
            factors = {"spatial": scale.spatial} | ({} if is_still else {"temporal": scale.temporal})
            for kind, factor in factors.items():
                other, expected = first.setdefault(kind, (names[0], factor))
                if factor != expected:
                    message = (
                        "the references of one run must be equally smaller than their targets: the "
                        f"{kind} factor is {expected} in sample {other} and {factor} in sample {names[0]}"
                    )
                    return [Problem(path, message, remedy="Prepare them all at the same fraction of the target's size")]
    return []


class _Scale(NamedTuple):
    path: str
    scale: ReferenceScale
    is_still: bool


def _scales(strategy: StrategyConfig, shape: SampleShape) -> list[_Scale]:
    found = []
    for stream, index, condition in _conditions(strategy):
        if stream == "video" and isinstance(condition, ReferenceCondition):
            path = f"training_strategy.video.conditions.{index}.latents_dir"
            is_still = dict(shape.references)[condition.latents_dir][1] == 1
            found.append(_Scale(path, scale_of(condition, _size(stream, shape), shape), is_still))
    return found


def _conditions(strategy: StrategyConfig) -> Iterator[tuple[Stream, int, TrainingCondition]]:
    streams: tuple[tuple[Stream, StreamConfig | None], ...] = (("video", strategy.video), ("audio", strategy.audio))
    for stream, settings in streams:
        for index, entry in enumerate(settings.conditions if settings else ()):
            yield stream, index, entry


def _samples_by_shape(dataset: PrecomputedDataset) -> dict[SampleShape, list[str]]:
    found: dict[SampleShape, list[str]] = {}
    for name, shape in zip(dataset.names, dataset.shapes, strict=True):
        found.setdefault(shape, []).append(name)
    return found


def _size(stream: Stream, shape: SampleShape) -> tuple[int, ...]:
    """Latent (frames, height, width), or (steps,)."""
    latent = shape.video if stream == "video" else shape.audio
    assert latent is not None
    return latent[1:] if stream == "video" else latent[1:2]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"sample{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"
