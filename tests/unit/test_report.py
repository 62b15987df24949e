"""The page of a run: what it takes from the folder, whole or half-written, and what it makes of it."""

import json
import math
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from ltx_trainer_plus.checkpoints.continuation import Change
from ltx_trainer_plus.commands.main import main
from ltx_trainer_plus.report.curves import charts, read_curves, thinned
from ltx_trainer_plus.report.page import report_html
from ltx_trainer_plus.report.run_files import read_run
from ltx_trainer_plus.run.starts import read_starts, record_start

HOSTILE = "a ball </script><script>alert(1)</script> & \"two\" 'three' <img src=x onerror=alert(2)> \u2028"


def config(*prompts: str, steps: int = 10) -> dict[str, Any]:
    return {"validation": {"samples": [{"prompt": prompt} for prompt in prompts]}, "optimization": {"steps": steps}}


def write_metrics(run: Path, *lines: dict[str, Any], rest: str = "") -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def write_sample(run: Path, name: str, made_at: float | None = None) -> None:
    (run / "samples").mkdir(parents=True, exist_ok=True)
    (run / "samples" / name).write_bytes(b"")
    if made_at is not None:
        os.utime(run / "samples" / name, (made_at, made_at))


class Page(HTMLParser):
    """A page as a browser would take it apart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, tag: str) -> str:
        return "".join(text for name, text in self.texts if name == tag)

    def data(self) -> dict[str, Any]:
        return json.loads(next(text for name, text in self.texts if name == "script"))


def page(run: Path) -> Page:
    return Page(report_html(read_run(run), run))


def test_losses_stand_together_and_every_curve_is_somewhere(tmp_path: Path) -> None:
    line = {
        "step": 1,
        "loss": 3.0,
        "loss/video": 1.0,
        "loss/video/sigma_0.9-1.0": 1.5,
        "loss/video/sigma_0.1-0.2": 0.5,
        "loss/audio": 2.0,
        "loss/audio/sigma_0.0-0.1": 2.0,
        "loss/smoothed": 3.0,
        "learning_rate": 1e-4,
        "grad_norm": 0.1,
        "step_time": 0.7,
        "skipped_steps": 0,
        "replaced_samples": 0,
        "something/new": 7.0,
    }
    write_metrics(tmp_path, line, {"step": 1, "held_out": 2.5, "held_out/video": 2.5})
    groups = {chart.title: list(chart.curves) for chart in charts(read_curves(tmp_path / "metrics.jsonl"))}
    expected = {
        "Loss": ["total", "video", "audio", "smoothed"],
        "Held-out loss": ["total", "video"],
        "Video loss by noise level (sigma)": ["0.1 to 0.2", "0.9 to 1.0"],
        "Audio loss by noise level (sigma)": ["0.0 to 0.1"],
        "Learning rate": ["learning rate"],
        "Gradient norm (before clipping)": ["grad norm"],
        "Step time (s)": ["step time"],
        "Skipped steps and replaced samples, since the start": ["skipped steps", "replaced samples"],
        "something/new": ["something/new"],
    }
    assert groups == expected
    assert list(groups) == list(expected)  # in this order on the page


def test_a_file_that_is_being_written_gives_all_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 2.0}\n\x00\x00\n[1]\n7\n{"loss": 1}\n{"step": 2, "loss": NaN, "note": "text"}\n'
        b'{"step": 3, "loss": null}\n{"step": 4, "loss": 1e999}\n{"step": 5, "loss": 1}\n{"step": 6, "loss": 0.\xc3'
    )
    assert read_curves(path) == {"loss": [(1, 2.0), (2, None), (3, None), (4, None), (5, 1.0)]}


def test_thinning_keeps_both_ends_every_peak_and_every_gap() -> None:
    curve: list[tuple[int, float | None]] = [(step, math.sin(step / 500)) for step in range(50_000)]
    curve[12_345] = (12_345, 99.0)
    curve[33_333] = (33_333, -99.0)
    curve[40_000] = (40_000, None)
    kept = thinned(curve, 4000)
    assert len(kept) <= 4002
    assert {(12_345, 99.0), (33_333, -99.0), (40_000, None), curve[0], curve[-1]} <= set(kept)
    assert kept == sorted(kept)
    for start in range(0, 50_000, 1000):  # in every part of it the highest point is exact
        part = [value for step, value in curve[start : start + 1000] if value is not None]
        assert max(v for s, v in kept if v is not None and start - 50 <= s < start + 1050) >= max(part)
    assert thinned(curve[:100], 100) == curve[:100]


def test_a_run_of_fifty_thousand_steps_with_every_noise_level_fits(tmp_path: Path) -> None:
    random.seed(0)
    names = [f"loss/{modality}/sigma_0.{i}-0.{i + 1}" for modality in ("video", "audio") for i in range(10)]
    names += ["loss", "loss/video", "loss/audio", "loss/smoothed", "learning_rate", "grad_norm", "step_time"]
    names += ["tokens_per_second", "memory_gib", "skipped_steps", "replaced_samples"]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 50_001):
            file.write(json.dumps({"step": step, **{name: random.random() for name in names}}) + "\n")
    for step in range(0, 50_001, 250):
        for number in range(1, 9):
            write_sample(tmp_path, f"step_{step:06d}_{number}.mp4")
    html = report_html(read_run(tmp_path), tmp_path)
    assert 1e6 < len(html.encode()) < 5e6
    data = Page(html).data()
    assert sum(len(chart["curves"]) for chart in data["charts"]) == len(names)
    assert data["range"] == [1, 50_000]


def test_texts_cannot_become_markup_or_script(tmp_path: Path) -> None:
    run = tmp_path / "run <b>"
    write_metrics(run, {"step": 1, f"loss/{HOSTILE}": 1.0, HOSTILE: 2.0})
    (run / "training_config.yaml").write_text(json.dumps(config(HOSTILE)))
    write_sample(run, "step_000001_1.mp4")
    record_start(run / "starts.jsonl", config(HOSTILE), 1, Path(HOSTILE), [Change("seed", HOSTILE, 1)])
    html = report_html(read_run(run), tmp_path)
    found = Page(html)
    assert [attributes.get("type") for attributes in found.all("script")] == ["application/json", None]
    assert found.all("img") == []
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert found.text("h1").strip() == "run <b>"
    assert HOSTILE in found.text("h3")
    assert "alert(1)" in found.text("pre")
    assert any(HOSTILE in json.dumps(chart, ensure_ascii=False).replace('\\"', '"') for chart in [found.data()])
    (video,) = found.all("video")
    assert (tmp_path / unquote(str(video["src"]))).is_file()


def test_samples_are_in_rows_by_prompt_over_steps_with_references(tmp_path: Path) -> None:
    (tmp_path / "training_config.yaml").write_text(json.dumps(config("a ball", "a sound")))
    for name in ("step_000100_1.mp4", "step_000000_1.mp4", "step_000020_1.mp4", "step_000020_2.wav"):
        write_sample(tmp_path, name)
    for name in ("step_000020_2_reference.wav", "step_000100_3.png", ".step_000200_1.12.tmp.mp4", "notes.txt"):
        write_sample(tmp_path, name)
    found = page(tmp_path)
    assert [video["src"] for video in found.all("video")] == [f"samples/step_{step:06d}_1.mp4" for step in (0, 20, 100)]
    assert [audio["src"] for audio in found.all("audio")] == [
        "samples/step_000020_2.wav",
        "samples/step_000020_2_reference.wav",
    ]
    assert [image["src"] for image in found.all("img")] == ["samples/step_000100_3.png"]
    assert re.findall(r"\d\. .*", found.text("h3")) == ["1. a ball", "2. a sound", "3. prompt unknown"]
    assert "given as a reference" in found.text("figcaption")


def test_a_sample_has_the_prompt_that_it_was_made_with_and_says_when_it_is_of_a_path_left(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    write_metrics(tmp_path, {"step": 1, "loss": 1.0})
    record_start(path, config("a ball"), 0, None, [])
    record_start(path, config("a cube"), 20, tmp_path / "w.safetensors", [Change("validation.samples", 1, 2)])
    first, second = (start.time for start in read_starts(path))
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0].replace(str(first), str(first - 100))}\n{lines[1]}\n")
    for step, made_at in ((0, first - 90), (20, first - 80), (30, first - 70), (40, second + 10)):
        write_sample(tmp_path, f"step_{step:06d}_1.mp4", made_at)
    shown = [(sample.step, sample.prompt, sample.is_older) for sample in read_run(tmp_path).samples]
    assert shown == [(0, "a ball", False), (20, "a ball", False), (30, "a ball", True), (40, "a cube", False)]


def test_what_changed_at_each_resume_is_listed(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 5, "loss": 1.0})
    record_start(tmp_path / "starts.jsonl", config("a"), 0, None, [])
    change = Change("optimization.learning_rate", 1e-4, 5e-5)
    record_start(tmp_path / "starts.jsonl", config("a"), 3, Path("old/weights.safetensors"), [change])
    record_start(tmp_path / "starts.jsonl", config("a"), 4, Path("old/weights.safetensors"), [])
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"time": 1, "st')
    found = page(tmp_path)
    cells = found.text("td")
    assert "optimization.learning_rate: 0.0001 -> 5e-05" in cells
    assert "old/weights.safetensors" in cells
    assert cells.strip().endswith("nothing")
    assert len(found.all("tr")) == 4
    assert found.data()["resumes"] == [3, 4]


def test_folders_of_older_releases_and_of_runs_that_have_just_begun_give_a_page(tmp_path: Path) -> None:
    older = tmp_path / "older"
    write_metrics(older, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, rest='{"step": 3')
    assert "does not say when it was started" in page(older).text("p")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "training_config.yaml").write_text("steps: [broken")
    found = page(begun)
    assert found.all("svg") == []
    assert "steps: [broken" in found.text("pre")
    assert "Step 0, as of" in found.text("p")
    record_start(begun / "starts.jsonl", config("a", steps=7), 0, None, [])
    assert "Step 0 of 7, as of" in page(begun).text("p")


def test_the_command_writes_the_page_and_links_samples_from_where_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a run #1 100%"
    write_metrics(run, {"step": 1, "loss": 2.0})
    write_sample(run, "step_000001_1.mp4")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    (video,) = Page((run / "report.html").read_text()).all("video")
    assert video["src"] == "samples/step_000001_1.mp4"
    # A link to the run folder, and a page elsewhere.
    (tmp_path / "link").symlink_to(run)
    output = tmp_path / "pages" / "deep" / "page.html"
    assert main(["report", str(tmp_path / "link"), "--output", str(output)]) == 0
    (video,) = Page(output.read_text()).all("video")
    assert (output.parent / unquote(str(video["src"]))).resolve() == (run / "samples/step_000001_1.mp4").resolve()
    assert "#" not in str(video["src"])
    assert sorted(path.name for path in output.parent.iterdir()) == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/missing"], "{}/missing is no folder: neither training_config.yaml nor metrics.jsonl is in it."),
        (["{}"], "{} holds no run: neither training_config.yaml nor metrics.jsonl is in it. Give the output_dir"),
        (["{}/run", "--output", "{}"], "--output: {} is a folder. Give a file, such as {}/report.html."),
        (["{}/run", "--output", "{}/file/page.html"], "--output: {}/file/page.html cannot be written ("),
    ],
)
def test_what_cannot_be_reported_is_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write_metrics(tmp_path / "run", {"step": 1, "loss": 2.0})
    (tmp_path / "file").write_text("")
    here = str(tmp_path)
    assert main(["report", *(argument.replace("{}", here) for argument in arguments)]) == 2
    assert capsys.readouterr().err.startswith(message.replace("{}", here))
