"""Whether the conditions of a run can work with its prepared samples, found from their sizes."""

from collections.abc import Iterator

from ltx_trainer_plus.config.problems import Problem
from ltx_trainer_plus.config.strategy import StrategyConfig, StreamConfig
from ltx_trainer_plus.data.precomputed import PrecomputedDataset, SampleShape
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.strategies.conditions import CONDITIONS, Condition, Fault, Reference, Stream

_NAMED = 3  # samples that an error lists


def condition_problems(
    strategy: StrategyConfig, dataset: PrecomputedDataset, geometry: LatentGeometry
) -> list[Problem]:
    """Everything that makes a condition impossible with some sample; a fault that many samples share is told once."""
    shapes = _samples_by_shape(dataset)
    problems: list[Problem] = []
    for stream, index, condition in _conditions(strategy):
        path = f"training_strategy.{stream}.conditions.{index}"
        faults: dict[Fault, list[str]] = {}
        for shape, names in shapes.items():
            fault = condition.fault(stream, _size(stream, shape), shape, geometry)
            if fault is not None:
                faults.setdefault(fault, []).extend(names)
        for fault, names in faults.items():
            given = getattr(condition.settings, fault.field)
            given = list(given) if isinstance(given, tuple) else given
            problems.append(Problem(f"{path}.{fault.field}", f"{_listed(names)}: {fault.text}", given))
    return problems or _different_scales(strategy, shapes)


def reference_scale(strategy: StrategyConfig, dataset: PrecomputedDataset) -> ReferenceScale:
    """The scale of the video references, read off one sample; the checks made sure that all have the same."""
    scales = _scales(strategy, dataset.shapes[0])
    return scales[0][1] if scales else ReferenceScale()


def _different_scales(strategy: StrategyConfig, shapes: dict[SampleShape, list[str]]) -> list[Problem]:
    """The weights file names one scale, by which references are prepared when the model is used."""
    first: tuple[str, str, ReferenceScale] | None = None
    for shape, names in shapes.items():
        for path, scale in _scales(strategy, shape):
            if first is None:
                first = (path, names[0], scale)
            elif scale != first[2]:
                message = (
                    f"the references of one run must be equally smaller than their targets: {names[0]} has a spatial "
                    f"factor of {scale.spatial} and a temporal one of {scale.temporal}, {first[1]} "
                    f"({first[0].rpartition('.')[0]}) has {first[2].spatial} and {first[2].temporal}"
                )
                return [Problem(path, message, remedy="Prepare them all at the same fraction of the target's size")]
    return []


def _scales(strategy: StrategyConfig, shape: SampleShape) -> list[tuple[str, ReferenceScale]]:
    return [
        (f"training_strategy.video.conditions.{index}.latents_dir", condition.scale(_size(stream, shape), shape))
        for stream, index, condition in _conditions(strategy)
        if stream == "video" and isinstance(condition, Reference)
    ]


def _conditions(strategy: StrategyConfig) -> Iterator[tuple[Stream, int, Condition | Reference]]:
    streams: tuple[tuple[Stream, StreamConfig | None], ...] = (("video", strategy.video), ("audio", strategy.audio))
    for stream, settings in streams:
        for index, entry in enumerate(settings.conditions if settings else ()):
            yield stream, index, CONDITIONS[entry.type](entry)


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
