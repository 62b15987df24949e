"""`make demo`: media files in, a LoRA and validation videos out."""

import re
import sys
from pathlib import Path

import av
import pytest
from safetensors.torch import load_file

from tests.launch import ROOT, run
from tests.runs import metrics


def newest_run() -> Path:
    return max((ROOT / "demo/runs").glob("[0-9][0-9][0-9]"))


def test_the_demo_trains_a_lora_on_two_processes_and_shows_what_it_made():
    finished = run([sys.executable, "scripts/demo.py"], timeout=600)
    output = newest_run()
    lines = metrics(output)
    assert len(lines) >= 60
    # Two processes: a global batch of 4 samples, each with 4*2*3 video and 27 audio tokens.
    assert lines[-1]["tokens_per_second"] * lines[-1]["step_time"] == pytest.approx(4 * (24 + 27))
    assert lines[-1]["loss/smoothed"] < 0.9 * lines[9]["loss/smoothed"]
    shown = re.search(r"smoothed loss: ([\d.]+) -> ([\d.]+)", finished.output)
    assert shown is not None
    assert float(shown[1]) > float(shown[2])
    for path in (output / "checkpoints").glob("lora_weights_*"):
        assert str(path.relative_to(ROOT)) in finished.output or path.name != max(output.glob("checkpoints/lora*")).name
        assert any(tensor.count_nonzero() for name, tensor in load_file(path).items() if ".lora_B." in name)
    videos = sorted((output / "samples").glob("*.mp4"))
    assert len({video.name.rsplit("_", 1)[0] for video in videos}) >= 2
    for video in videos:
        with av.open(str(video)) as container:
            assert container.streams.video[0].average_rate == 24
            assert sum(1 for _ in container.decode(video=0)) == 25
        with av.open(str(video)) as container:
            assert container.streams.audio, "the sample has no sound"
    assert len(list(output.glob("wandb/offline-run-*"))) == 1


@pytest.mark.slow
def test_the_demo_takes_ones_own_clips(tmp_path: Path):
    source = sorted((ROOT / "demo/clips").glob("*.mp4"))
    if not source:
        run([sys.executable, "scripts/make_demo_data.py", "--output", "demo"], timeout=300)
        source = sorted((ROOT / "demo/clips").glob("*.mp4"))
    for index, clip in enumerate(source[:3]):
        (tmp_path / f"Mine {index}.MP4").write_bytes(clip.read_bytes())
        (tmp_path / f"Mine {index}.txt").write_text(f"clip number {index}")
    run(
        [sys.executable, "scripts/demo.py", "--clips", str(tmp_path), "optimization.steps=12", "validation.interval=6"],
        timeout=600,
    )
    assert len(metrics(newest_run())) == 12
