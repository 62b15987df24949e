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
    ("hub.push_to_hub", (False,), "uploading is not available yet", "Set hub.push_to_hub: false"),
    ("hub.hub_model_id", (None,), "uploading is not available yet", "Set hub.hub_model_id: null"),
)


def unavailable(config: TrainerConfig) -> list[Problem]:
    """Every field that asks for something that does not exist yet."""
    problems = [
        Problem(path, message, given, remedy)
        for path, working, message, remedy in _FIELDS
        if (given := reduce(getattr, path.split("."), config)) not in working
    ]
    return [*problems, *_optimizer(config), *_files(config)]


def _optimizer(config: TrainerConfig) -> Iterator[Problem]:
    if config.optimization.optimizer_type == "adamw8bit":
        yield Problem(
            "optimization.optimizer_type",
            "this optimizer is not available yet",
            "adamw8bit",
            "Set optimization.optimizer_type: adamw",
        )


def _files(config: TrainerConfig) -> Iterator[Problem]:
    model, validation = config.model, config.validation
    if model.text_encoder_path is not None and model.text_encoder_path.is_file():
        yield Problem(
            "model.text_encoder_path",
            "a packed text encoder file cannot be read yet",
            model.text_encoder_path,
            "Give the folder of the text encoder, or null to use the one of the pipeline folder",
        )
    if validation.makes_samples and model.model_path.is_file():
        yield Problem(
            "validation.samples",
            f"samples need VAEs and a vocoder, which cannot be read yet from a single file ({model.model_path})",
            NOT_GIVEN,
            "Give a diffusers pipeline folder as model.model_path, or set validation.interval: null",
            involves=("model.model_path", "validation.interval"),
        )
