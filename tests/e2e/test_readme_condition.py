"""The README's way to add a condition, carried out as it stands there."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ltx_trainer_plus.config import ConfigError
from ltx_trainer_plus.config.conditions import CONDITION_ENTRIES
from ltx_trainer_plus.strategies.conditions import CONDITIONS
from tests.modes import mode_run
from tests.runs import losses, train


def section() -> str:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    return readme.partition("### Adding a condition\n")[2].partition("\n### ")[0]


@pytest.fixture
def carried_out() -> Iterator[None]:
    """Both blocks as if they stood at the end of the files that the text names."""
    before, entries = dict(CONDITIONS), {stream: dict(known) for stream, known in CONDITION_ENTRIES.items()}
    for file, block in re.findall(r"`(\S+)\.py` .*?```python\n(.*?)```", section(), flags=re.DOTALL):
        module = importlib.import_module(f"ltx_trainer_plus.{file.replace('/', '.')}")
        exec(compile(block, f"README.md ({file})", "exec"), vars(module))
    yield
    for known, former in ((CONDITIONS, before), *((CONDITION_ENTRIES[stream], entries[stream]) for stream in entries)):
        known.clear()  # type: ignore[attr-defined]
        known.update(former)  # type: ignore[attr-defined]


def test_the_section_is_short() -> None:
    assert 10 < len(section().strip().splitlines()) < 30


@pytest.mark.usefixtures("carried_out")
def test_a_condition_is_added_in_the_way_of_the_readme(reference: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"`conditions: \[\{type: (\w+), every: 2, probability: 0\.5\}\]`", section())
    condition = {"type": example, "every": 2}

    def strategy(**changes: object) -> dict[str, object]:
        return {"name": "flexible", "video": {"conditions": [condition | changes]}}

    result = train(mode_run(reference, tmp_path / "run", strategy()))
    assert result.step == 2
    assert all(torch.isfinite(torch.tensor(losses(tmp_path / "run"))))
    # It holds, and with a probability only sometimes: the same draws give another loss.
    train(mode_run(reference, tmp_path / "never", strategy(probability=0.0)))
    assert losses(tmp_path / "never")[0] != losses(tmp_path / "run")[0]
    saved = (tmp_path / "run/training_config.yaml").read_text()
    assert f"type: {example}" in saved
    with pytest.raises(ConfigError, match=r"training_strategy\.video\.conditions\.0\.every: must be at least 2"):
        train(mode_run(reference, tmp_path / "wrong", strategy(every=1)))
    audio_only = {"name": "flexible", "audio": {"conditions": [condition]}}
    with pytest.raises(ConfigError, match=f"{example} is for video only"):
        train(mode_run(reference, tmp_path / "audio", audio_only))
