"""Samples that cannot be made: the end of the run, or a warning, on every rank alike."""

import logging
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.validation.decode import SampleDecoder
from ltx_trainer_plus.validation.runner import SamplesError
from tests.runs import VALIDATION, joint_run, losses, train, write_prepared_data

Settings = dict[str, Any]


@pytest.fixture
def settings(tiny_pipeline: Path, tmp_path: Path) -> Settings:
    settings = joint_run(tiny_pipeline, write_prepared_data(tmp_path / "data"), tmp_path / "run")
    settings["lora"]["dropout"] = 0.3
    return settings


def _fails(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_on_error_warn_goes_on_as_if_nothing_had_been(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(settings)
    monkeypatch.setattr(SampleDecoder, "decode", _fails)
    failing = {**settings, "validation": {**VALIDATION, "on_error": "warn"}}
    failing["output_dir"] = f"{settings['output_dir']}_failing"
    with caplog.at_level(logging.WARNING):
        result = train(failing)
    assert result.step == 4
    assert losses(Path(failing["output_dir"])) == losses(Path(settings["output_dir"]))
    warnings = [record.getMessage() for record in caplog.records if "could not be made" in record.getMessage()]
    assert len(warnings) == 3
    assert "process 0: OSError: [Errno 28] No space left on device" in warnings[0]


def test_on_error_raise_ends_the_run_with_the_cause(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleDecoder, "decode", _fails)
    with pytest.raises(SamplesError, match="No space left"):
        train({**settings, "validation": VALIDATION})
