"""The models: the LTX transformer, its official files, LoRA, and the frozen components around it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx_trainer_plus.models.loading import load_transformer, read_transformer_config, transformer_on_meta
    from ltx_trainer_plus.models.transformer import LTXTransformer

__all__ = ["LTXTransformer", "load_transformer", "read_transformer_config", "transformer_on_meta"]

_HOME = {
    "LTXTransformer": "transformer",
    "load_transformer": "loading",
    "read_transformer_config": "loading",
    "transformer_on_meta": "loading",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that importing one module of this package does not import diffusers.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
