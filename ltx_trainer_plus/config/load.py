"""From YAML files and command-line overrides to a checked TrainerConfig, and back to YAML."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ltx_trainer_plus.config.schema import TrainerConfig


def load_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> TrainerConfig:
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    tree = OmegaConf.create({"training_strategy": {"name": "text_to_video"}})
    for file in files:
        tree = OmegaConf.merge(tree, OmegaConf.load(file))  # type: ignore[assignment]
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(tree, key, OmegaConf.create(f"v: {value}").v)
    return TrainerConfig.model_validate(OmegaConf.to_container(tree, resolve=True))


def config_as_dict(config: TrainerConfig) -> dict[str, Any]:
    """The configuration as plain dicts, lists, texts and numbers."""
    return config.model_dump(mode="json")


def save_config(config: TrainerConfig, path: str | Path) -> None:
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(config_as_dict(config))))
