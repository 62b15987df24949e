"""W&B: real offline runs, read back from the files they leave."""

import json
import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from ltx_trainer_plus.config import TrainerConfig, load_config
from ltx_trainer_plus.media.audio import write_wav
from ltx_trainer_plus.media.image import write_png
from ltx_trainer_plus.media.video import read_video, write_video
from ltx_trainer_plus.tracking.backend import Media, RecordedRun, Recorder


def record(config: TrainerConfig, folder: Path, resume_id: str | None = None) -> Recorder:
    return Recorder("wandb", RecordedRun(config, folder, resume_id=resume_id))


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {{model_path: {tmp_path / 'model'}}}\n"
        f"data: {{preprocessed_data_root: {tmp_path / 'data'}}}\n"
        "wandb: {enabled: true, project: a-project, tags: [one, two]}\n"
    )
    return load_config(path, ["optimization.steps=7"])


def records(folder: Path) -> list[Record]:
    """The records of the one offline run in `folder`, once W&B's service has written the last of them."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = list(parse_records(path.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{path} is incomplete")


def parse_records(data: bytes) -> Iterator[Record]:
    """LevelDB's log format after a header of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def history(folder: Path) -> list[dict[str, Any]]:
    def key(item: Any) -> str:
        return item.key or "/".join(item.nested_key)

    return [
        {key(item): json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def media_files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(f"wandb/offline-run-*/files/media/{pattern}"))


def test_an_offline_run_lies_in_the_run_folder_with_the_resolved_configuration(
    tmp_path: Path, config: TrainerConfig
) -> None:
    run = record(config, tmp_path)
    assert run.id
    assert run.location
    assert Path(run.location).parent == tmp_path / "wandb"
    run.finish()
    (found,) = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    saved = {item.key: json.loads(item.value_json) for item in found.config.update}
    assert saved["optimization"]["steps"] == 7
    assert (found.project, list(found.tags), found.run_id) == ("a-project", ["one", "two"], Path(run_id(tmp_path)).name)


def run_id(folder: Path) -> str:
    (path,) = folder.glob("wandb/offline-run-*")
    return path.name.rsplit("-", 1)[1]


def test_a_validation_logged_after_later_training_steps_is_retained_at_its_own_step(
    tmp_path: Path, config: TrainerConfig
) -> None:
    run = record(config, tmp_path)
    run.log({"loss": 1.0}, step=5)
    run.log({"loss": 0.5}, step=6)
    run.log({"validation/loss": 0.7}, step=5)
    run.finish()
    lines = history(tmp_path)
    assert [(line["step"], line.get("loss"), line.get("validation/loss")) for line in lines] == [
        (5, 1.0, None),
        (6, 0.5, None),
        (5, None, 0.7),
    ]
    metrics = [record.metric for record in records(tmp_path) if record.WhichOneof("record_type") == "metric"]
    assert any(metric.step_metric == "step" for metric in metrics)


def test_a_sample_is_the_file_itself_bright_at_its_own_frame_rate_with_its_prompt(
    tmp_path: Path, config: TrainerConfig
) -> None:
    frames = torch.full((9, 32, 48, 3), 0.9)
    path = tmp_path / "samples" / "step_000005_1.mp4"
    path.parent.mkdir()
    write_video(path, frames, 24)

    run = record(config, tmp_path)
    run.log_media([Media("samples/1", path, "a bright wall")], step=5)
    run.finish()
    (line,) = history(tmp_path)
    assert line["step"] == 5
    assert line["samples/1/caption"] == "a bright wall"
    (logged,) = media_files(tmp_path, "videos/**/*.mp4")
    assert logged.read_bytes() == path.read_bytes()
    assert not media_files(tmp_path, "**/*.gif")
    clip = read_video(logged)
    assert clip.fps == 24
    assert clip.frames.shape == (9, 32, 48, 3)
    assert abs(float(np.asarray(clip.frames).mean()) - 0.9 * 255) < 3


def test_sound_and_still_samples_are_logged_as_such(tmp_path: Path, config: TrainerConfig) -> None:
    write_wav(tmp_path / "a.wav", torch.zeros(2, 1600), 16000)
    write_png(tmp_path / "b.png", torch.zeros(32, 48, 3, dtype=torch.uint8).numpy())
    run = record(config, tmp_path)
    run.log_media(
        [Media("samples/1", tmp_path / "a.wav", "hum"), Media("samples/2", tmp_path / "b.png", "still")], step=1
    )
    run.finish()
    assert len(history(tmp_path)) == 1
    assert len(media_files(tmp_path, "audio/**/*.wav")) == 1
    assert len(media_files(tmp_path, "images/**/*.png")) == 1


def test_samples_are_left_out_where_the_configuration_says_so(tmp_path: Path, config: TrainerConfig) -> None:
    write_png(tmp_path / "b.png", torch.zeros(32, 48, 3, dtype=torch.uint8).numpy())
    quiet = config.model_copy(update={"wandb": config.wandb.model_copy(update={"log_validation_videos": False})})
    run = record(quiet, tmp_path)
    run.log_media([Media("samples/1", tmp_path / "b.png", "still")], step=1)
    run.finish()
    assert history(tmp_path) == []
    assert not media_files(tmp_path, "**/*.png")


def test_a_resumed_run_keeps_its_id(tmp_path: Path, config: TrainerConfig) -> None:
    run = record(config, tmp_path, resume_id="abcd1234")
    assert run.id == "abcd1234"
    run.finish()


def test_a_failure_in_the_middle_is_warned_of_once_and_stops_nothing(
    tmp_path: Path, config: TrainerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run = record(config, tmp_path)
    with caplog.at_level(logging.WARNING):
        run.log_media([Media("samples/1", tmp_path / "missing.mp4", "")], step=1)
        run.log_media([Media("samples/1", tmp_path / "missing.mp4", "")], step=2)
    run.log({"loss": 1.0}, step=3)
    run.finish()
    assert caplog.text.count("Training goes on") == 1
    assert history(tmp_path)[-1]["loss"] == 1.0


def fail_online(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Have every start that talks to the server fail."""
    start = wandb.init

    def init(**options: Any) -> Any:
        if options["mode"] is None:
            raise wandb.errors.CommError(reason)
        return start(**options)

    monkeypatch.setattr(wandb, "init", init)


def test_an_unreachable_server_means_an_offline_run(
    tmp_path: Path, config: TrainerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_online(monkeypatch, "no route to host")
    run = record(config, tmp_path)
    run.log({"loss": 1.0}, step=1)
    run.finish()
    assert "no route to host" in caplog.text
    assert "wandb sync" in caplog.text
    assert history(tmp_path)[-1]["loss"] == 1.0


def test_a_run_that_the_server_does_not_continue_is_named_and_recorded_offline(
    tmp_path: Path, config: TrainerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_online(monkeypatch, "the run was deleted")
    run = record(config, tmp_path, resume_id="abcd1234")
    run.log({"loss": 1.0}, step=1)
    run.finish()
    assert "W&B could not continue run abcd1234 (the run was deleted)" in caplog.text
    assert "wandb sync" in caplog.text
    assert history(tmp_path)[-1]["loss"] == 1.0


def test_another_run_than_the_one_to_continue_is_said(
    tmp_path: Path, config: TrainerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: start(**{**options, "id": "other567"}))
    run = record(config, tmp_path, resume_id="abcd1234")
    run.finish()
    assert "W&B could not continue run abcd1234; this is run other567." in caplog.text


def test_a_wandb_that_cannot_even_record_is_said_and_stops_nothing(
    tmp_path: Path, config: TrainerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wandb, "init", fails)
    run = record(config, tmp_path, resume_id="abcd1234")
    run.log({"loss": 1.0}, step=1)
    run.finish()
    assert "W&B could not continue run abcd1234" in caplog.text
    assert "W&B failed (OSError: [Errno 28] No space left on device). Training goes on" in caplog.text
