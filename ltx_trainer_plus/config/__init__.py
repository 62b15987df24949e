"""The configuration of a run: typed sections, loading, checking and saving. Imports no torch: errors are instant."""

from ltx_trainer_plus.config.checks import check_paths
from ltx_trainer_plus.config.load import config_as_dict, load_config, save_config
from ltx_trainer_plus.config.problems import ConfigError, Problem
from ltx_trainer_plus.config.schema import LoraConfig, TrainerConfig
from ltx_trainer_plus.config.strategy import StreamConfig, StreamRole
from ltx_trainer_plus.config.validation import SampleConfig, ValidationConfig

__all__ = [
    "ConfigError",
    "LoraConfig",
    "Problem",
    "SampleConfig",
    "StreamConfig",
    "StreamRole",
    "TrainerConfig",
    "ValidationConfig",
    "check_paths",
    "config_as_dict",
    "load_config",
    "save_config",
]
