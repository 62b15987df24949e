"""Run files for the tests of the configuration: a smallest valid one, and what is wrong with a changed one."""

from pathlib import Path

import pytest

from ltx_trainer_plus.config import ConfigError, TrainerConfig, load_config


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def smallest(folder: Path) -> Path:
    """A valid run file: the two required paths and nothing else."""
    for name in ("model", "data"):
        (folder / name).mkdir(exist_ok=True)
    text = f"model: {{model_path: {folder}/model}}\ndata: {{preprocessed_data_root: {folder}/data}}\n"
    return write(folder, text, "smallest.yaml")


def load(folder: Path, text: str = "", *overrides: str) -> TrainerConfig:
    """The smallest run file with `text` merged over it."""
    return load_config([smallest(folder), write(folder, text)], overrides)


def problems(folder: Path, text: str = "", *overrides: str) -> list[str]:
    """Every line that is reported for the smallest run file with `text` merged over it."""
    with pytest.raises(ConfigError) as error:
        load(folder, text, *overrides)
    lines = [str(problem) for problem in error.value.problems]
    assert str(error.value).splitlines()[1:] == [f"  {line}" for line in lines]
    return lines
