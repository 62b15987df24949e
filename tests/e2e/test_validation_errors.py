"""Samples that cannot be made: the end of the run, or a warning, on every rank alike."""

import logging
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.validation.decode import SampleDecoder
from ltx_trainer_plus.validation.runner import SamplerFault, SamplesError
from scripts import train as script
from tests.launch import ROOT, run, torchrun_command
from tests.runs import VALIDATION, joint_run, losses, train, write_prepared_data, write_run_file

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


def test_a_file_in_the_place_of_the_samples_is_said_without_a_traceback(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples").touch()
    run_file = str(write_run_file(tmp_path / "run.yaml", {**settings, "validation": VALIDATION}))
    assert script.main([run_file]) == 2
    said = capfd.readouterr().err
    assert "The samples could not be made:\n  process 0: FileExistsError: [Errno 17] File exists: " in said
    assert "are left out with validation.on_error=warn." in said
    assert "Traceback" not in said

    settings["optimization"]["batch_size"] = 1
    write_run_file(tmp_path / "run.yaml", {**settings, "validation": VALIDATION})
    finished = run(torchrun_command(2, ROOT / "scripts/train.py", run_file), check=False, timeout=200)
    assert finished.returncode != 0
    assert finished.output.count("The samples could not be made:") == 1
    assert "process 1: FileExistsError" in finished.output
    # The launcher's own traceback comes after what the trainer has to say.
    assert "Traceback" not in finished.output.split("are left out with validation.on_error=warn.")[0]


def test_a_fault_of_the_program_in_the_sampler_keeps_its_traceback(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise AttributeError("no such attribute")

    monkeypatch.setattr(SampleDecoder, "decode", fails)
    with pytest.raises(SamplerFault, match="process 0: AttributeError: no such attribute") as raised:
        train({**settings, "validation": VALIDATION})
    assert isinstance(raised.value.__cause__, AttributeError)
