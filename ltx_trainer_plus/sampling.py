"""Samples outside training: a base model, with or without trained weights, through the sampler of validation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ltx_trainer_plus.checkpoints.adapters import read_reference_scale
from ltx_trainer_plus.checkpoints.state import CheckpointError
from ltx_trainer_plus.config import ConfigError, Problem, TrainerConfig
from ltx_trainer_plus.config.validation_conditions import ReferenceCondition
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import load_transformer, transformer_on_meta
from ltx_trainer_plus.models.lora import add_trained_lora
from ltx_trainer_plus.models.official import TRANSFORMER_PREFIX
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.run.preflight import validation_problems
from ltx_trainer_plus.tracking.progress import TrainingProgress
from ltx_trainer_plus.validation.cache import encode_validation_prompts
from ltx_trainer_plus.validation.conditions import encode_conditions
from ltx_trainer_plus.validation.requests import SampleRequest, sample_requests, with_reference_scale
from ltx_trainer_plus.validation.runner import SampleFile, ValidationRunner


@dataclass(frozen=True)
class TrainedWeights:
    """A weights file of this trainer or the official one.

    Attributes:
        path: a LoRA file, or a whole transformer's (full fine-tuning), which is told by what it holds.
        strength: factor on what a LoRA adds.
    """

    path: Path
    strength: float = 1.0


def generate_samples(
    config: TrainerConfig,
    weights: TrainedWeights | None,
    *,
    stem: Callable[[SampleRequest], Path],
    dtype: torch.dtype,
    topology: Topology,
    console: Console | None = None,
) -> list[SampleFile]:
    """Generate `config.validation.samples`, dealt to the processes; each has the whole model.

    Args:
        config: of it, `model`, `validation` and nothing else is read.
        weights: what training made; None = the base model.
        stem: a sample's file without its suffix.
        dtype: of the computation.
        console: where the main process shows progress.

    Returns:
        All files, in the order of the samples, on every process.

    Raises:
        ConfigError: the model cannot make these samples, or a file of a condition cannot be used.
        CheckpointError: the weights file cannot be read or does not fit the model.
    """
    scale = ReferenceScale() if weights is None else read_reference_scale(weights.path)
    geometry = _checked_geometry(config, scale)
    config = config.model_copy(update={"validation": with_reference_scale(config.validation, scale)})
    contexts = encode_validation_prompts(config, topology)
    requests = sample_requests(config.validation)
    given = encode_conditions(requests, config.model.model_path, geometry, topology)
    handle = _load(config.model.model_path, weights, dtype, topology.device)
    with _SamplingProgress(console if topology.is_main else None) as progress:
        runner = ValidationRunner(
            config.validation,
            contexts,
            model_path=config.model.model_path,
            geometry=geometry,
            topology=topology,
            sample_path=lambda _, number: stem(requests[number - 1]),
            given=given,
            progress=progress,
        )
        return runner.run(handle, 0)


def _checked_geometry(config: TrainerConfig, scale: ReferenceScale) -> LatentGeometry:
    try:
        transformer = transformer_on_meta(config.model.model_path)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("model.model_path", str(error))]) from error
    geometry = LatentGeometry.of(transformer.config)
    problems = validation_problems(config, geometry, transformer.num_blocks, scale)
    problems += _other_scales(config, scale)
    if problems:
        raise ConfigError(problems)
    return geometry


def _other_scales(config: TrainerConfig, scale: ReferenceScale) -> list[Problem]:
    """References of another scale than those that the LoRA was trained with."""
    if scale == ReferenceScale():
        return []  # not trained with references, or with whole ones: the file does not tell
    problems = []
    for index, sample in enumerate(config.validation.samples):
        for number, condition in enumerate(sample.conditions):
            if not isinstance(condition, ReferenceCondition) or condition.stream != "video":
                continue
            for field, trained in (("downscale_factor", scale.spatial), ("temporal_scale_factor", scale.temporal)):
                given = getattr(condition, field)
                if given not in (None, trained):
                    path = f"validation.samples.{index}.conditions.{number}.{field}"
                    message = f"the LoRA was trained with {trained} (its file says so)"
                    problems.append(Problem(path, message, given, f"Set it to {trained}, or leave it out"))
    return problems


def _load(model_path: Path, weights: TrainedWeights | None, dtype: torch.dtype, device: torch.device) -> ModelHandle:
    if weights is None:
        return ModelHandle.of(load_transformer(model_path, dtype, device))
    try:
        with safe_open(weights.path, "pt") as file:
            is_whole = all(key.startswith(TRANSFORMER_PREFIX) for key in file.keys())  # noqa: SIM118
        if is_whole:
            return ModelHandle.of(load_transformer(weights.path, dtype, device))
        transformer = load_transformer(model_path, dtype, device)
        add_trained_lora(transformer, load_file(weights.path), strength=weights.strength)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{weights.path} cannot be used: {error}") from error
    return ModelHandle.of(transformer)


class _SamplingProgress(TrainingProgress):
    """A bar for each sample on a terminal, a line elsewhere."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn("{task.completed}/{task.total}"))
        self._bar = Progress(*columns, console=console, disable=console is None or not console.is_terminal)
        self._task = self._bar.add_task("", visible=False)

    def __enter__(self) -> "_SamplingProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def validation(self, sample: int, samples: int, denoising_step: int, denoising_steps: int) -> None:
        text = f"sample {sample} of {samples}"
        self._bar.update(self._task, description=text, completed=denoising_step, total=denoising_steps, visible=True)
        if self._console is not None and not self._console.is_terminal and denoising_step == 1:
            self._console.print(f"{text}: {denoising_steps} denoising steps", markup=False, highlight=False)
