"""LTX Trainer Plus: a trainer for LTX-2-family audio-video models that behaves the same in every parallel layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx_trainer_plus.config import load_config
    from ltx_trainer_plus.errors import UserError
    from ltx_trainer_plus.modality import Modality, Perturbations
    from ltx_trainer_plus.model_handle import ModelHandle
    from ltx_trainer_plus.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Modality", "ModelHandle", "Perturbations", "Trainer", "UserError", "load_config"]

_HOME = {
    "Modality": "modality",
    "ModelHandle": "model_handle",
    "Perturbations": "modality",
    "Trainer": "trainer",
    "UserError": "errors",
    "load_config": "config",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `ltx-trainer-plus --help` and config errors should not wait for torch and diffusers.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
