"""The configuration of a run: typed sections, loading, checking and saving. Imports no torch: errors are instant."""

from ltx_trainer_plus.config.load import config_as_dict, load_config, save_config
from ltx_trainer_plus.config.schema import TrainerConfig

__all__ = ["TrainerConfig", "config_as_dict", "load_config", "save_config"]
