"""The demo: media files in, a LoRA and validation videos out, from the installed command and from the checkout."""

import re
import shutil
import sys
from pathlib import Path

import av
import pytest
from safetensors.torch import load_file

from tests.launch import ROOT, run
from tests.runs import metrics


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install .` puts into an environment, in a folder of its own."""
    source, wheels, target = (tmp_path_factory.mktemp("wheel") / name for name in ("source", "wheels", "target"))
    source.mkdir()
    # A copy: setuptools leaves a `build` folder behind, and would take old files from it.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("ltx_trainer_plus", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(source)], cwd=source)
    (wheel,) = wheels.iterdir()
    run([*pip, "install", *offline, "--target", str(target), str(wheel)], cwd=wheels)
    return target


def test_the_installed_demo_trains_a_lora_on_two_processes_and_shows_what_it_made(
    installed: Path, tmp_path: Path
) -> None:
    environment = {"PYTHONPATH": str(installed)}
    command = str(installed / "bin" / "ltx-trainer-plus")
    finished = run([command, "demo"], timeout=600, environment=environment, cwd=tmp_path)
    assert f"--config_file {installed}/ltx_trainer_plus/configs/accelerate/cpu_ddp.yaml" in finished.output
    assert (installed / "ltx_trainer_plus" / "py.typed").is_file()
    output = Path("demo/runs/001")
    assert f"  {output}/samples/step_" in finished.output
    output = tmp_path / output
    lines = metrics(output)
    assert len(lines) >= 60
    # Two processes: a global batch of 4 samples, each with 4*2*3 video and 27 audio tokens.
    assert lines[-1]["tokens_per_second"] * lines[-1]["step_time"] == pytest.approx(4 * (24 + 27))
    assert lines[-1]["loss/smoothed"] < 0.9 * lines[9]["loss/smoothed"]
    shown = re.search(r"smoothed loss: ([\d.]+) -> ([\d.]+)", finished.output)
    assert shown is not None
    assert float(shown[1]) > float(shown[2])
    for path in (output / "checkpoints").glob("lora_weights_*"):
        newest = max(output.glob("checkpoints/lora*")).name
        assert str(path.relative_to(tmp_path)) in finished.output or path.name != newest
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
def test_the_demo_takes_ones_own_clips(tmp_path: Path) -> None:
    demo, own = tmp_path / "demo", tmp_path / "own"
    own.mkdir()
    run([sys.executable, "scripts/make_demo_data.py", "--output", str(demo)], timeout=300)
    for index, clip in enumerate(sorted((demo / "clips").glob("*.mp4"))[:3]):
        (own / f"Mine {index}.MP4").write_bytes(clip.read_bytes())
        (own / f"Mine {index}.txt").write_text(f"clip number {index}")
    command = [sys.executable, "scripts/demo.py", "--output", str(demo), "--clips", str(own)]
    run([*command, "optimization.steps=12", "validation.interval=6"], timeout=600)
    assert len(metrics(demo / "runs/001")) == 12
