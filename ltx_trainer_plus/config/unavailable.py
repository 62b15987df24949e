"""Features that the configuration can name and the program does not have yet: each is refused, with what to set.

Whoever adds a feature removes its lines here.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any

from ltx_trainer_plus.config.problems import NOT_GIVEN, Problem
from ltx_trainer_plus.config.schema import TrainerConfig

# Field, the values that work, what does not, what to do.
_FIELDS: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    (
        "model.video_vae_path",
        (None,),
        "a VAE file of its own cannot be read yet",
        "Set model.video_vae_path: null, and give a diffusers pipeline folder as model.model_path",
    ),
    (
        "model.audio_vae_path",
        (None,),
        "a VAE file of its own cannot be read yet",
        "Set model.audio_vae_path: null, and give a diffusers pipeline folder as model.model_path",
    ),
    (
        "optimization.optimizer_type",
        ("adamw",),
        "this optimizer is not available yet",
        "Set optimization.optimizer_type: adamw",
    ),
    (
        "acceleration.mixed_precision_mode",
        ("bf16", "no", None),
        "fp16 is not available yet",
        'Set acceleration.mixed_precision_mode: bf16, or "no" for float32',
    ),
    (
        "acceleration.quantization",
        (None,),
        "quantization is not available yet",
        "Set acceleration.quantization: null",
    ),
    (
        "acceleration.load_text_encoder_in_8bit",
        (False,),
        "8-bit loading is not available yet",
        "Set acceleration.load_text_encoder_in_8bit: false",
    ),
    (
        "acceleration.offload_optimizer_during_validation",
        (False,),
        "offloading is not available yet",
        "Set acceleration.offload_optimizer_during_validation: false",
    ),
    (
        "acceleration.parallel",
        ("auto", "ddp"),
        "sharding is not available yet",
        "Set acceleration.parallel: ddp, or auto",
    ),
    (
        "acceleration.compile",
        (None, False),
        "compiling is not available yet",
        "Set acceleration.compile: null",
    ),
    ("hub.push_to_hub", (False,), "uploading is not available yet", "Set hub.push_to_hub: false"),
    ("hub.hub_model_id", (None,), "uploading is not available yet", "Set hub.hub_model_id: null"),
)

_SAMPLES = "Write validation.samples instead, one item for each prompt"
_SCALES = "Write validation.video_cfg_scale and validation.audio_cfg_scale instead"
_STG = "Write validation.video_stg_scale and validation.audio_stg_scale instead (0 turns one off)"
_NO_CONDITIONS = "Remove it, and leave the conditions of validation.samples empty"
# Field of `validation`, the values that mean nothing, what to do.
_OLD_NAMES: dict[str, tuple[tuple[Any, ...], str]] = {
    "prompts": ((None, []), _SAMPLES),
    "images": ((None, []), _NO_CONDITIONS),
    "reference_videos": ((None, []), _NO_CONDITIONS),
    "reference_downscale_factor": ((None, 1), _NO_CONDITIONS),
    "include_reference_in_output": ((None, False), _NO_CONDITIONS),
    "guidance_scale": ((None,), _SCALES),
    "stg_scale": ((None,), _STG),
    "stg_mode": ((None,), _STG),
}


def take_old_names(tree: dict[str, Any]) -> list[Problem]:
    """Remove the older names from `tree`, the configuration as read, and refuse those that would mean something."""
    validation = tree.get("validation")
    if not isinstance(validation, dict):
        return []
    problems = []
    for name, (harmless, remedy) in _OLD_NAMES.items():
        given = validation.pop(name, None)
        if given not in harmless:
            problems.append(Problem(f"validation.{name}", "this older name is not read yet", given, remedy))
    return problems


def unavailable(config: TrainerConfig) -> list[Problem]:
    """Every field that asks for something that does not exist yet."""
    problems = [
        Problem(path, message, given, remedy)
        for path, working, message, remedy in _FIELDS
        if (given := reduce(getattr, path.split("."), config)) not in working
    ]
    return [*problems, *_validation(config), *_files(config)]


def _validation(config: TrainerConfig) -> Iterator[Problem]:
    for index, sample in enumerate(config.validation.samples):
        if sample.conditions:
            yield _conditions(f"validation.samples.{index}.conditions", sample.conditions)


def _conditions(path: str, conditions: tuple[dict[str, Any], ...]) -> Problem:
    types = [condition.get("type", condition) for condition in conditions]
    return Problem(path, "conditions are not available yet", types, f"Set {path}: []")


def _files(config: TrainerConfig) -> Iterator[Problem]:
    model, validation = config.model, config.validation
    if model.text_encoder_path is not None and model.text_encoder_path.is_file():
        yield Problem(
            "model.text_encoder_path",
            "a packed text encoder file cannot be read yet",
            model.text_encoder_path,
            "Give the folder of the text encoder, or null to use the one of the pipeline folder",
        )
    if validation.samples and validation.interval is not None and model.model_path.is_file():
        yield Problem(
            "validation.samples",
            f"samples need VAEs and a vocoder, which cannot be read yet from a single file ({model.model_path})",
            NOT_GIVEN,
            "Give a diffusers pipeline folder as model.model_path, or set validation.interval: null",
            involves=("model.model_path", "validation.interval"),
        )
