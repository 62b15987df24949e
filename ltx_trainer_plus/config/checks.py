"""What no single field shows: settings that contradict each other, and paths that do not exist."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ltx_trainer_plus.config.base import Section
from ltx_trainer_plus.config.explain import explain
from ltx_trainer_plus.config.optimization import OPTIMIZERS, SAMPLING_PARAMS, SCHEDULER_PARAMS, OptimizationConfig
from ltx_trainer_plus.config.problems import NOT_GIVEN, Problem
from ltx_trainer_plus.config.schema import TrainerConfig
from ltx_trainer_plus.config.strategy import FlexibleConfig, VideoToVideoConfig
from ltx_trainer_plus.config.validation_checks import condition_path_problems, validation_problems


def contradictions(config: TrainerConfig) -> list[Problem]:
    """Settings that are fine one by one, and cannot work together."""
    checks = (_batch, _streams, _optimizer, _schedule, _sampling, _validation, _held_out, _checkpoints)
    return [problem for check in checks for problem in check(config)]


def check_paths(config: TrainerConfig) -> list[Problem]:
    """Files and folders that must exist and do not, or stand in the way."""
    return [*_path_problems(config), *condition_path_problems(config.validation)]


def _batch(config: TrainerConfig) -> Iterator[Problem]:
    size, group = config.optimization.batch_size, config.data.shape_group
    if group is not None and size % group:
        yield Problem(
            "data.shape_group",
            f"optimization.batch_size ({size}) is no multiple of it, so a batch would hold a part of a group",
            group,
            "Set it to a divisor of the batch size, or to null for the batch size itself",
            involves=("optimization.batch_size",),
        )


def _checkpoints(config: TrainerConfig) -> Iterator[Problem]:
    if config.checkpoints.keep_last_n == 0:
        yield Problem(
            "checkpoints.keep_last_n",
            "would delete the checkpoint that was just written",
            0,
            "Set it to 1 or more, or to -1 to keep all",
        )
    if config.checkpoints.keep_best and config.validation.loss is None:
        yield Problem(
            "checkpoints.keep_best",
            "the best checkpoint is the one with the lowest held-out loss, and this run computes none",
            True,
            "Set validation.loss: {fraction: 0.05}, or checkpoints.keep_best: false",
            involves=("validation.loss",),
        )


def _held_out(config: TrainerConfig) -> Iterator[Problem]:
    settings = config.validation.loss
    if settings is None:
        return
    if (settings.preprocessed_data_root is None) == (settings.fraction is None):
        yield Problem(
            "validation.loss",
            "needs exactly one of preprocessed_data_root (samples prepared apart) and fraction (of the data set)",
            NOT_GIVEN,
            "Set validation.loss: {fraction: 0.05}, for example",
        )
    if config.validation.loss_interval is None:
        yield Problem(
            "validation.loss.interval",
            "is null, and so is validation.interval: the loss would never be computed",
            None,
            "Set validation.loss.interval to a number of steps, or validation.loss: null",
            involves=("validation.interval",),
        )


def _streams(config: TrainerConfig) -> Iterator[Problem]:
    strategy = config.training_strategy
    if isinstance(strategy, VideoToVideoConfig) and config.model.training_mode != "lora":
        yield Problem(
            "model.training_mode",
            "training_strategy.name: video_to_video trains a LoRA only",
            config.model.training_mode,
            "Set model.training_mode: lora",
            involves=("training_strategy",),
        )
    if not isinstance(strategy, FlexibleConfig):
        return
    if "generated" not in (strategy.video_role, strategy.audio_role):
        yield Problem(
            "training_strategy",
            f"nothing would be trained: video is {strategy.video_role} and audio is {strategy.audio_role}",
            NOT_GIVEN,
            "Give training_strategy.video or training_strategy.audio with is_generated: true",
        )
    if strategy.video and strategy.audio and strategy.video.latents_dir == strategy.audio.latents_dir:
        yield Problem(
            "training_strategy.audio.latents_dir",
            "is the folder of the video latents",
            strategy.audio.latents_dir,
            "Give each stream its own folder, such as latents and audio_latents",
            involves=("training_strategy.video.latents_dir",),
        )
    for name, stream in (("video", strategy.video), ("audio", strategy.audio)):
        if stream is None or not stream.conditions:
            continue
        path = f"training_strategy.{name}"
        if not stream.is_generated:
            yield Problem(
                f"{path}.conditions",
                f"the stream is given as a whole ({path}.is_generated: false), so it takes no conditions of its own",
                [condition.type for condition in stream.conditions],
                f"Set {path}.is_generated: true to generate it, or {path}.conditions: []",
                involves=(f"{path}.is_generated",),
            )
        folders = [getattr(condition, "latents_dir", None) for condition in stream.conditions]
        for index, folder in enumerate(folders):
            if folder is not None and folder in folders[:index]:
                yield Problem(
                    f"{path}.conditions.{index}.latents_dir",
                    f"is the folder of {path}.conditions.{folders.index(folder)} too: the same tokens would come twice",
                    folder,
                    "Remove one of the two",
                )


def _optimizer(config: TrainerConfig) -> Iterator[Problem]:
    optimization = config.optimization
    kind, params = optimization.optimizer_type, optimization.optimizer_params
    if kind not in (*OPTIMIZERS, "adamw8bit") and "." not in kind:
        yield Problem(
            "optimization.optimizer_type",
            f"there is no such optimizer. It is {', '.join(OPTIMIZERS)}, or the dotted path of an installed class",
            kind,
            "Set optimization.optimizer_type: adamw, or a path such as torch.optim.Adafactor",
        )
        return
    if "lr" in params:
        yield Problem(
            "optimization.optimizer_params.lr",
            "the rate is a setting of its own, which the schedule starts from",
            params["lr"],
            "Set optimization.learning_rate instead",
        )
    for name in ("betas", "eps", "weight_decay"):
        value = getattr(optimization, name)
        if kind != "adamw" and value != OptimizationConfig.model_fields[name].default:
            yield Problem(
                f"optimization.{name}",
                f"is for optimizer_type: adamw alone, and the optimizer is {kind}",
                value,
                f"Set optimization.optimizer_params.{name} instead, if {kind} has it",
                involves=("optimization.optimizer_type",),
            )
        if kind == "adamw" and name in params:
            yield Problem(
                f"optimization.optimizer_params.{name}",
                "adamw has a setting of its own for it",
                params[name],
                f"Set optimization.{name} instead",
            )


def _schedule(config: TrainerConfig) -> Iterator[Problem]:
    optimization = config.optimization
    params, problems = _params(
        optimization.scheduler_params,
        SCHEDULER_PARAMS[optimization.scheduler_type],
        "optimization.scheduler_params",
        "optimization.scheduler_type",
        optimization.scheduler_type,
    )
    yield from problems
    # Only when it was written: the official default of the restarts is above a small rate, and such files must run.
    eta_min = getattr(params, "eta_min", 0.0) if "eta_min" in optimization.scheduler_params else 0.0
    if eta_min > optimization.learning_rate:
        yield Problem(
            "optimization.scheduler_params.eta_min",
            f"is above optimization.learning_rate ({optimization.learning_rate}): the rate would rise, not fall",
            eta_min,
            "Set it below the learning rate",
            involves=("optimization.learning_rate",),
        )


def _sampling(config: TrainerConfig) -> Iterator[Problem]:
    flow = config.flow_matching
    params, problems = _params(
        flow.timestep_sampling_params,
        SAMPLING_PARAMS[flow.timestep_sampling_mode],
        "flow_matching.timestep_sampling_params",
        "flow_matching.timestep_sampling_mode",
        flow.timestep_sampling_mode,
    )
    yield from problems
    low, high = getattr(params, "min_value", 0.0), getattr(params, "max_value", 1.0)
    if low >= high:
        yield Problem(
            "flow_matching.timestep_sampling_params.min_value",
            f"must be below max_value ({high})",
            low,
            "Swap them, or leave both out for 0 to 1",
        )


def _params(
    given: dict[str, Any], model: type[Section], path: str, chosen_by: str, choice: str
) -> tuple[Section | None, list[Problem]]:
    """The parameters of a choice, typed; or what is wrong with them (an unknown one names the choice)."""
    try:
        return model.model_validate(given), []
    except ValidationError as error:
        found = explain(error, model, under=path)
    takes = f"{chosen_by}: {choice} takes {', '.join(model.model_fields) or 'no parameters'}"
    problems = []
    for one in found:
        if one.message == "unknown key":
            remedy = one.remedy if one.remedy.startswith("Did") else "Remove it"
            one = replace(one, message=f"unknown key: {takes}", remedy=remedy)
        problems.append(replace(one, involves=(chosen_by,)))
    return None, problems


def _validation(config: TrainerConfig) -> Iterator[Problem]:
    return validation_problems(config.validation)


def _path_problems(config: TrainerConfig) -> Iterator[Problem]:
    model, root = config.model, config.data.preprocessed_data_root
    if not model.model_path.exists():
        yield Problem(
            "model.model_path",
            "does not exist",
            model.model_path,
            "Give a local folder or file; a model of the Hub has to be downloaded first",
        )
    if model.text_encoder_path is not None and not model.text_encoder_path.exists():
        yield Problem(
            "model.text_encoder_path",
            "does not exist",
            model.text_encoder_path,
            "Give the folder of the text encoder, or null to use the one of the pipeline folder",
        )
    if isinstance(model.load_checkpoint, Path) and not model.load_checkpoint.exists():
        yield Problem(
            "model.load_checkpoint",
            "does not exist",
            model.load_checkpoint,
            "Give a checkpoint file or a folder that holds some, latest for this run's own folder, or null",
        )
    held_out = config.validation.loss.preprocessed_data_root if config.validation.loss is not None else None
    if held_out is not None and not held_out.is_dir():
        yield Problem(
            "validation.loss.preprocessed_data_root",
            "is no folder" if held_out.exists() else "does not exist",
            held_out,
            "Give a folder that scripts/process_dataset.py wrote, or validation.loss.fraction",
        )
    if not root.is_dir():
        yield Problem(
            "data.preprocessed_data_root",
            "is no folder" if root.exists() else "does not exist",
            root,
            "Give the folder that scripts/process_dataset.py wrote",
        )
    if config.output_dir.exists() and not config.output_dir.is_dir():
        yield Problem("output_dir", "is a file", config.output_dir, "Give a folder; it is created when it is missing")
