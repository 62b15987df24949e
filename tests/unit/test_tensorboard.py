"""TensorBoard: real event files, read back with TensorBoard's own reader."""

import io
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.media.audio import write_wav
from ltx_trainer_plus.media.image import write_png
from ltx_trainer_plus.media.video import write_video
from ltx_trainer_plus.tracking.backend import Media, RecordedRun, Recorder
from tests.unit.config_files import load


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return load(tmp_path, "tracking: {backends: [tensorboard]}", "optimization.steps=7")


def record(config: TrainerConfig, folder: Path, step: int = 0) -> Recorder:
    return Recorder("tensorboard", RecordedRun(config, folder, step))


def events(folder: Path) -> EventAccumulator:
    everything = {"scalars": 0, "images": 0, "audio": 0, "tensors": 0}
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    found.Reload()
    return found


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    found = events(folder).Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def test_numbers_stand_at_their_steps_also_late_and_not_finite_ones(tmp_path: Path, config: TrainerConfig) -> None:
    run = record(config, tmp_path)
    run.log({"loss": 1.0, "grad_norm": math.nan}, step=5)
    run.log({"loss": 0.5, "grad_norm": math.inf}, step=6)
    run.log({"held_out": 0.75}, step=5)
    assert run.location == str(tmp_path / "tensorboard")
    assert run.id is None
    run.finish()
    assert scalars(tmp_path, "loss") == [(5, 1.0), (6, 0.5)]
    assert scalars(tmp_path, "held_out") == [(5, 0.75)]
    assert [str(value) for _, value in scalars(tmp_path, "grad_norm")] == ["nan", "inf"]


def test_the_resolved_configuration_is_a_text(tmp_path: Path, config: TrainerConfig) -> None:
    record(config, tmp_path).finish()
    ((step, text),) = texts(tmp_path, "config")
    assert step == 0
    assert "    optimization:\n" in text
    assert "      steps: 7\n" in text


def test_a_resumed_run_goes_on_and_replaces_what_it_does_again(tmp_path: Path, config: TrainerConfig) -> None:
    run = record(config, tmp_path)
    for step in range(1, 6):
        run.log({"loss": float(step)}, step)
    run.finish()
    run = record(config, tmp_path, step=3)
    for step in range(4, 7):
        run.log({"loss": step + 0.5}, step)
    run.finish()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5), (6, 6.5)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_video_is_a_picture_that_moves_in_its_own_time_with_its_sound_and_prompt(
    tmp_path: Path, config: TrainerConfig
) -> None:
    frames = torch.zeros(25, 64, 96, 3)
    frames[:, :, :, 0] = torch.linspace(0, 1, 25)[:, None, None]  # ever redder
    sound = torch.sin(torch.arange(16000) * 0.1).repeat(2, 1) * 0.5
    path = tmp_path / "a.mp4"
    write_video(path, frames, 25, audio=sound, sample_rate=16000)
    run = record(config, tmp_path)
    run.log_media([Media("samples/1", path, "a wall <b>turns</b> red")], step=4)

    # Before the end: samples come seldom, and are looked at while the run goes on.
    (image,) = events(tmp_path).Images("samples/1")
    assert (image.step, image.width, image.height) == (4, 96, 64)
    gif = Image.open(io.BytesIO(image.encoded_image_string))
    shown = []
    milliseconds = 0
    for index in range(gif.n_frames):
        gif.seek(index)
        milliseconds += gif.info["duration"]
        shown.append(float(np.asarray(gif.convert("RGB"))[..., 0].mean()))
    assert milliseconds == 1000
    assert shown == sorted(shown)
    assert shown[0] < 20
    assert shown[-1] > 235
    (heard,) = events(tmp_path).Audio("samples/1/sound")
    assert (heard.step, heard.sample_rate) == (4, 16000)
    assert heard.length_frames == pytest.approx(16000, abs=2000)  # the codec pads
    assert texts(tmp_path, "samples/1/prompt") == [(4, "a wall <b>turns</b> red")]
    run.finish()


def test_a_long_large_video_becomes_a_small_preview_of_the_same_length(tmp_path: Path, config: TrainerConfig) -> None:
    frames = torch.rand(121, 352, 640, 3)
    write_video(tmp_path / "a.mp4", frames, 24)
    run = record(config, tmp_path)
    run.log_media([Media("samples/1", tmp_path / "a.mp4", "noise")], step=1)
    run.finish()
    (image,) = events(tmp_path).Images("samples/1")
    assert (image.width, image.height) == (320, 176)
    gif = Image.open(io.BytesIO(image.encoded_image_string))
    assert 40 <= gif.n_frames <= 48
    assert gif.n_frames * gif.info["duration"] == pytest.approx(121 / 24 * 1000, rel=0.06)
    assert "samples/1/sound" not in events(tmp_path).Tags()["audio"]


def test_sound_and_still_samples_are_logged_as_such(tmp_path: Path, config: TrainerConfig) -> None:
    write_wav(tmp_path / "a.wav", torch.full((2, 1600), 0.25), 16000)
    picture = np.arange(32 * 48 * 3, dtype=np.uint8).reshape(32, 48, 3)
    write_png(tmp_path / "b.png", picture)
    run = record(config, tmp_path)
    run.log_media([Media("samples/1", tmp_path / "a.wav", "hum"), Media("samples/2", tmp_path / "b.png", "still")], 1)
    run.finish()
    (heard,) = events(tmp_path).Audio("samples/1/sound")
    assert heard.length_frames == 1600
    (image,) = events(tmp_path).Images("samples/2")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), picture)


def test_a_failure_in_the_middle_is_warned_of_once_and_what_follows_is_recorded(
    tmp_path: Path, config: TrainerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run = record(config, tmp_path)
    with caplog.at_level(logging.WARNING):
        run.log_media([Media("samples/1", tmp_path / "missing.mp4", "")], step=1)
        run.log_media([Media("samples/1", tmp_path / "missing.mp4", "")], step=2)
    run.log({"loss": 1.0}, step=3)
    run.finish()
    assert caplog.text.count("TensorBoard failed") == 1
    assert "Training goes on; metrics.jsonl is complete." in caplog.text
    assert scalars(tmp_path, "loss") == [(3, 1.0)]


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, config: TrainerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    run = record(config, tmp_path)
    run.log({"loss": 1.0}, step=1)
    run.finish()
    assert caplog.text.count("TensorBoard failed (") == 1
