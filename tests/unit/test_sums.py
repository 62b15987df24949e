"""Metrics: sums on the device, logged lines, the JSONL file."""

import json
import math
from pathlib import Path

import pytest
import torch

from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.step.sums import MetricWindow, StepMetrics
from ltx_trainer_plus.strategies.flexible import ModelInputs, StreamInputs
from ltx_trainer_plus.strategies.loss import Losses
from ltx_trainer_plus.tracking.log import JsonlWriter, MetricLog, memory_gib


def add(
    window: MetricWindow,
    video: tuple[list[float], list[float]] | None = None,
    audio: tuple[list[float], list[float]] | None = None,
    tokens: int = 1,
) -> None:
    """Count a micro-batch of streams (losses, sigmas) with `tokens` target tokens per sample and stream."""
    inputs, losses = {}, {}
    for name, stream in (("video", video), ("audio", audio)):
        if stream is not None:
            losses[name], sigma = torch.tensor(stream[0]), torch.tensor(stream[1])
            empty = torch.zeros(len(sigma), tokens, 1)
            modality = Modality(latent=empty, sigma=sigma, timesteps=sigma, positions=empty, context=empty)
            inputs[name] = StreamInputs(modality, target=empty)
    total = torch.stack(list(losses.values())).sum(0)
    window.add(ModelInputs(**inputs), Losses(total, losses.get("video"), losses.get("audio")))


def one_step(loss: float = 1.0, *, grad_norm: float = 2.0, skipped: bool = False, tokens: int = 10) -> StepMetrics:
    window = MetricWindow("cpu")
    add(window, video=([loss], [0.5]), tokens=tokens)
    window.set_step(grad_norm=torch.tensor(grad_norm), skipped=torch.tensor(float(skipped)))
    return window.reduce_async().read()


def record(log: MetricLog, step: int, metrics: StepMetrics, **options) -> dict[str, float] | None:
    values = {"learning_rate": 1e-4, "step_time": 0.5, "memory_gib": 1.0, **options}
    return log.record(step, metrics, **values)


def test_losses_are_means_over_all_samples_and_micro_steps_not_the_last_ones() -> None:
    window = MetricWindow("cpu")
    add(window, video=([1.0, 2.0], [0.3, 0.35]), audio=([10.0, 20.0], [0.0, 1.0]), tokens=25)
    add(window, video=([6.0, 3.0], [0.95, 0.399]), audio=([30.0, 40.0], [0.5, 0.5]), tokens=10)
    metrics = window.reduce_async().read()
    assert metrics.losses() == {
        "loss": 28.0,
        "loss/video": 3.0,
        "loss/video/sigma_0.3-0.4": 2.0,
        "loss/video/sigma_0.9-1.0": 6.0,
        "loss/audio": 25.0,
        "loss/audio/sigma_0.0-0.1": 10.0,
        "loss/audio/sigma_0.5-0.6": 35.0,
        "loss/audio/sigma_0.9-1.0": 20.0,
    }
    assert metrics.tokens == 2 * 2 * 25 + 2 * 2 * 10


def test_every_tenth_of_sigma_begins_its_own_bucket() -> None:
    window = MetricWindow("cpu")
    add(window, video=([float(i) for i in range(10)], [i / 10 for i in range(10)]))
    losses = window.reduce_async().read().losses()
    assert [losses[f"loss/video/sigma_{i / 10:.1f}-{(i + 1) / 10:.1f}"] for i in range(10)] == list(range(10))


def test_a_stream_that_is_not_trained_has_no_numbers() -> None:
    window = MetricWindow("cpu")
    add(window, audio=([1.0], [0.5]))
    assert set(window.reduce_async().read().losses()) == {"loss", "loss/audio", "loss/audio/sigma_0.5-0.6"}


def test_counting_keeps_no_graph() -> None:
    losses = torch.ones(2, requires_grad=True) * 3
    window = MetricWindow("cpu")
    window.add(ModelInputs(), Losses(total=losses, video=None, audio=None))
    window.set_step(grad_norm=losses.sum())
    assert not window._sums.requires_grad


def test_a_nan_stays_in_its_own_bucket() -> None:
    window = MetricWindow("cpu")
    add(window, video=([math.nan, 1.0], [0.15, 0.25]))
    losses = window.reduce_async().read().losses()
    assert math.isnan(losses["loss"])
    assert math.isnan(losses["loss/video/sigma_0.1-0.2"])
    assert losses["loss/video/sigma_0.2-0.3"] == 1.0


def test_a_stop_request_is_seen() -> None:
    assert not one_step().stop_requested
    window = MetricWindow("cpu")
    window.request_stop()
    assert window.reduce_async().read().stop_requested


def test_a_logged_line_has_the_documented_keys() -> None:
    line = record(MetricLog(), 1, one_step(), learning_rate=3e-4, memory_gib=1.5)
    assert line == {
        "step": 1,
        "loss": 1.0,
        "loss/video": 1.0,
        "loss/video/sigma_0.5-0.6": 1.0,
        "loss/smoothed": 1.0,
        "learning_rate": 3e-4,
        "grad_norm": 2.0,
        "step_time": 0.5,
        "tokens_per_second": 20.0,
        "memory_gib": 1.5,
        "skipped_steps": 0,
        "replaced_samples": 0,
    }


def test_the_smoothed_loss_is_the_mean_of_the_last_ten_logged_steps() -> None:
    log = MetricLog()
    lines = [record(log, step, one_step(float(step))) for step in range(1, 16)]
    assert [line["loss/smoothed"] for line in lines if line][:3] == [1.0, 1.5, 2.0]
    assert log.smoothed_loss == sum(range(6, 16)) / 10


def test_a_line_of_several_steps_holds_their_means() -> None:
    log = MetricLog(log_every=2)
    assert record(log, 1, one_step(1.0, grad_norm=1.0, tokens=10), step_time=1.0) is None
    line = record(log, 2, one_step(3.0, grad_norm=3.0, tokens=50), step_time=3.0)
    assert line is not None
    assert (line["step"], line["loss"], line["grad_norm"]) == (2, 2.0, 2.0)
    assert (line["step_time"], line["tokens_per_second"]) == (2.0, 15.0)
    last = record(log, 3, one_step(7.0), is_last=True)
    assert last is not None
    assert last["loss"] == 7.0


def test_a_skipped_step_is_counted_and_hides_nothing() -> None:
    log = MetricLog(log_every=2)
    record(log, 1, one_step(math.nan, grad_norm=math.inf, skipped=True))
    line = record(log, 2, one_step(3.0))
    assert line is not None
    assert (line["loss"], line["grad_norm"], line["skipped_steps"]) == (3.0, 2.0, 1)

    log = MetricLog()
    record(log, 1, one_step(4.0))
    line = record(log, 2, one_step(math.nan, skipped=True))
    assert line is not None
    assert math.isnan(line["loss"])
    assert (line["loss/smoothed"], line["skipped_steps"]) == (4.0, 1)


def test_every_line_is_on_disk_at_once_in_full_precision(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write({"step": 1, "loss": 1 / 3, "grad_norm": math.nan})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": 1 / 3, "grad_norm": None}


def test_a_resumed_run_keeps_earlier_lines_and_writes_the_later_ones_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(1, 31):
        writer.write({"step": step, "loss": float(step), "skipped_steps": 2})
    writer.close()
    before = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"step": 31, "lo')

    writer = JsonlWriter(path, resumed_step=20)
    assert path.read_text() == "".join(before[:20])
    assert [line["step"] for line in writer.earlier] == list(range(11, 21))
    log = MetricLog(earlier=writer.earlier)
    line = record(log, 21, one_step(21.0))
    assert line is not None
    assert (line["loss/smoothed"], line["skipped_steps"]) == (sum(range(12, 22)) / 10, 2)
    writer.write(line)
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == list(range(1, 22))


def test_a_full_disk_is_warned_of_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    writer = JsonlWriter("/dev/full")
    writer.write({"step": 1})
    writer.write({"step": 2})
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text


def test_memory_is_that_of_the_process_on_a_cpu() -> None:
    assert 0.05 < memory_gib(torch.device("cpu")) < 64
