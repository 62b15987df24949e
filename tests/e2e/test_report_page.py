"""The report of a run, opened in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ltx_trainer_plus.commands.main import main
from ltx_trainer_plus.media.video import write_video
from ltx_trainer_plus.run.starts import record_start
from tests.browser import Browser, browser
from tests.runs import VALIDATION, joint_run, train, write_prepared_data

STEPS = 200
PROMPT = 'a ball </script><script>document.title = "taken"</script> & "more"'
CONFIG = {"validation": {"samples": [{"prompt": PROMPT}]}, "optimization": {"steps": STEPS, "learning_rate": 1e-3}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the middle of writing its line of step 201."""
    run = tmp_path_factory.mktemp("runs") / "a run #1"
    (run / "samples").mkdir(parents=True)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            losses = {"loss": 2 + 1 / step, "loss/video": 1 + 1 / step, "loss/audio": 1.0}
            levels = {f"loss/video/sigma_0.{step % 10}-{(step % 10 + 1) / 10:.1f}": 1.0 + step % 10}
            line = {"step": step, **losses, **levels, "grad_norm": None if step == 50 else 0.5, "step_time": 0.1}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"step": STEPS, "held_out": 1.5}) + '\n{"step": 201, "lo')
    (run / "training_config.yaml").write_text(json.dumps(CONFIG, indent=2))
    record_start(run / "starts.jsonl", CONFIG, 0, None, [])
    record_start(run / "starts.jsonl", CONFIG, 100, run / "w.safetensors", [])
    frames = torch.zeros(25, 64, 96, 3)
    frames[..., 0] = torch.linspace(0.2, 1, 25)[:, None, None]
    sound = torch.sin(torch.arange(16000) * 0.1).repeat(2, 1) * 0.3
    for step in (0, 100, 200):
        write_video(run / "samples" / f"step_{step:06d}_1.mp4", frames, 25, audio=sound, sample_rate=16000)
    return run


@pytest.fixture(scope="module")
def opened(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as window:
        assert main(["report", str(run)]) == 0
        window.open("about:blank")
        window.requests()  # those of the browser's own first page
        window.open((run / "report.html").as_uri())
        yield window


@pytest.fixture
def page(opened: Browser) -> Browser:
    """The run's page, showing the whole run."""
    opened.run("zoom(null)")
    return opened


def shown_steps(page: Browser, chart: int = 0) -> list[float]:
    found = page.run(
        "const s = document.querySelectorAll('svg[role=img]')[arguments[0]].dataset; return [s.xMin, s.xMax]", chart
    )
    return [float(value) for value in found]


def place(page: Browser, chart: int = 0) -> tuple[float, float, float, float]:
    """Left, top, width and height of a chart in the window, once it is in sight."""
    left, top, width, height = page.run(
        "const s = document.querySelectorAll('svg[role=img]')[arguments[0]]; s.scrollIntoView({block: 'center'}); "
        "const r = s.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]",
        chart,
    )
    return left, top, width, height


def test_the_page_opens_without_an_error_and_asks_the_network_for_nothing(page: Browser) -> None:
    assert page.run("return document.title") == "a run #1"
    page.run("document.querySelectorAll('video').forEach((video) => video.scrollIntoView())")
    page.wait("setTimeout(done, 300)")
    asked = page.requests()
    assert {url.rpartition("/")[2] for url in asked} >= {"report.html", "step_000000_1.mp4", "step_000200_1.mp4"}
    assert all(url.startswith(("file://", "data:")) for url in asked), asked
    faults = [entry["message"] for entry in page.log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert faults == []


def test_curves_are_drawn_where_their_values_are(page: Browser) -> None:
    titles = page.run("return [...document.querySelectorAll('.chart figcaption')].map((one) => one.textContent)")
    assert titles[:3] == ["Loss", "Held-out loss", "Video loss by noise level (sigma)"]
    drawn = page.run(
        "return [...document.querySelectorAll('.chart')].map((chart) => [...chart.querySelectorAll('.curve')].map("
        "(curve) => [curve.dataset.label, curve.getTotalLength(), curve.getBBox().width]))"
    )
    assert [len(curves) for curves in drawn] == [3, 1, 10, 1, 1]
    for label, length, width in drawn[0]:
        assert width > 500, label
        assert length >= width
    # The loss falls: its first point is the highest of the picture, its last one is low.
    heights = page.run(
        "const curve = document.querySelector('.curve[data-label=total]'), end = curve.getTotalLength(); "
        "return [curve.getPointAtLength(0).y, curve.getPointAtLength(end).y, curve.getBBox().y]"
    )
    assert heights[0] == pytest.approx(heights[2], abs=0.2)
    assert heights[1] > heights[0] + 50
    assert page.run("return document.querySelectorAll('.chart .missing').length") == 1
    assert page.run("return document.querySelectorAll('.chart .resume').length") == len(titles)


def test_dragging_zooms_all_charts_and_a_double_click_shows_the_whole_run(page: Browser) -> None:
    assert shown_steps(page) == [1, STEPS]
    left, top, width, height = place(page)
    middle = top + height / 2
    whole = page.run("return document.querySelector('svg[role=img]').dataset.yMax")
    page.drag((left + 0.5 * width, middle), (left + 0.6 * width, middle), (left + 0.8 * width, middle))
    first, last = shown_steps(page)
    assert 70 < first < 110
    assert 140 < last < 175
    assert shown_steps(page, 3) == [first, last]
    assert float(page.run("return document.querySelector('svg[role=img]').dataset.yMax")) < float(whole)
    # Backwards, inside what is shown.
    page.drag((left + 0.8 * width, middle), (left + 0.7 * width, middle), (left + 0.5 * width, middle))
    narrower = shown_steps(page)
    assert narrower[0] > first
    assert narrower[1] < last
    page.double_click(left + 0.5 * width, middle)
    assert shown_steps(page) == shown_steps(page, 3) == [1, STEPS]


def test_the_mouse_reads_values_and_the_legend_hides_curves(page: Browser) -> None:
    left, top, width, height = place(page)
    page.move(left + 0.5 * width, top + height / 2)
    legend = page.run("return document.querySelector('.legend').innerText")
    assert "step 9" in legend or "step 8" in legend
    assert "2.01" in legend
    drawn = "return [...document.querySelector('.chart').querySelectorAll('.curve')].map((one) => one.dataset.label)"
    page.run("document.querySelector('.legend button').click()")
    assert page.run(drawn) == ["video", "audio"]
    page.run("document.querySelector('.legend button').click()")
    assert page.run(drawn) == ["total", "video", "audio"]


def test_logarithmic_is_a_choice(page: Browser) -> None:
    linear = page.run("return document.querySelector('svg[role=img]').dataset.yMax")
    page.run("document.getElementById('logarithmic').click()")
    assert float(page.run("return document.querySelector('svg[role=img]').dataset.yMax")) < float(linear) / 2
    page.run("document.getElementById('logarithmic').click()")
    assert page.run("return document.querySelector('svg[role=img]').dataset.yMax") == linear


def test_samples_play(page: Browser) -> None:
    assert page.run("return document.querySelectorAll('video').length") == 3
    page.run("document.querySelector('video').scrollIntoView()")
    page.run("document.querySelector('button.together').click()")
    video = page.wait(
        "const video = document.querySelectorAll('video')[2], begun = Date.now(); const look = () => "
        "video.readyState >= 2 && video.currentTime > 0 || Date.now() - begun > 20000 "
        "? done([video.readyState, video.duration, video.videoWidth, video.currentTime, video.error?.message ?? null]) "
        ": setTimeout(look, 50); look()"
    )
    ready, duration, wide, time, fault = video
    assert fault is None
    assert ready >= 2
    assert duration == pytest.approx(1.0, abs=0.15)
    assert wide == 96
    assert time > 0
    captions = page.run("return [...document.querySelectorAll('.samples figcaption')].map((one) => one.innerText)")
    assert captions == ["step 0", "step 100", "step 200"]


def test_texts_and_configuration_are_shown_as_they_are(page: Browser) -> None:
    assert page.run("return document.querySelector('h3').innerText") == f"1. {PROMPT}"
    assert page.run("return document.getElementById('config').innerText") == json.dumps(CONFIG, indent=2)
    assert "Step 200 of 200" in page.run("return document.body.innerText")
    assert page.run("return document.title") == "a run #1"


def test_a_real_run_without_wandb_has_its_curves_samples_and_configuration_on_the_page(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    data = write_prepared_data(tmp_path / "data")
    settings = joint_run(tiny_pipeline, data, tmp_path / "run")
    settings |= {"validation": {**VALIDATION, "loss": {"fraction": 0.2}}}
    train(settings)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    titles = re.findall("<figcaption>(?!step)(.*?)</figcaption>", page)
    assert {"Loss", "Held-out loss", "Learning rate", "Gradient norm (before clipping)", "Step time (s)"} <= {*titles}
    assert any(title.startswith("Video loss by noise level") for title in titles)
    assert any(title.startswith("Audio loss by noise level") for title in titles)
    videos = re.findall('<video [^>]*src="(.*?)"', page)
    assert videos == [f"samples/step_00000{step}_{number}.mp4" for number in (1, 2) for step in (0, 2, 4)]
    assert all((tmp_path / "run" / video).is_file() for video in videos)
    assert "<h3>1. a ball</h3>" in page
    assert "<h3>2. a square</h3>" in page
    assert "Step 4 of 4" in page
    assert "prompt: a square" in page.rpartition('<pre id="config">')[2]
