"""Preparation under two processes, started as users start it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ltx_trainer_plus.media.video import write_video
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.preparation.plan import PreparationSettings
from ltx_trainer_plus.preparation.prepare import prepare_dataset
from ltx_trainer_plus.preparation.report import PreparationReport
from tests.launch import ROOT, accelerate_command, run, torchrun_command

SCRIPT = ROOT / "scripts/process_dataset.py"


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for index in range(6):
        pictures = np.full((9, 32, 64, 3), 40 * index, np.uint8)
        write_video(folder / f"{index}.mp4", pictures, 24, 0.1 * index * torch.ones(2, 16_000), 16_000)
        (folder / f"{index}.txt").write_text(f"shade {index}")
    return folder


def arguments(clips: Path, model: Path, output: Path) -> list[str]:
    return [
        *(str(clips), "--model-path", str(model), "--resolution-buckets", "64x32x9"),
        *("--output-dir", str(output), "--device", "cpu"),
    ]


def files(folder: Path) -> dict[str, object]:
    """Metadata and numbers of every prepared file; the order of a file's metadata is random."""
    found: dict[str, object] = {}
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "np") as file:
            tensors = {key: file.get_tensor(key).tolist() for key in file.keys()}  # noqa: SIM118
            found[str(path.relative_to(folder))] = (file.metadata(), tensors)
    return found


def test_two_processes_share_the_clips_and_make_what_one_makes(
    clips: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    finished = run(accelerate_command("cpu_ddp", SCRIPT, *arguments(clips, tiny_pipeline, tmp_path / "two")))
    assert finished.output.count("Prepared: 6 of 6 clips") == 1
    assert "Encoding clips (process 1 of 2): 3 of 3" in finished.output
    assert "Encoding captions (process 1 of 2): 3 of 3" in finished.output

    def prepared_alone(output: Path) -> PreparationReport:
        settings = PreparationSettings(clips, tiny_pipeline, resolution_buckets="64x32x9", output_dir=output)
        alone = Topology(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
        return prepare_dataset(settings, alone)

    assert prepared_alone(tmp_path / "one").new == 6
    one = files(tmp_path / "one")
    assert len(one) == 18
    assert one == files(tmp_path / "two")
    # One process goes on where two were.
    report = prepared_alone(tmp_path / "two")
    assert (report.new, report.captions) == (0, 0)


def test_a_skipped_clip_is_named_once_and_fails_the_launch_after_all_work_is_done(
    clips: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    for name in ("1", "2"):  # one for each process
        (clips / f"{name}.mp4").write_text("no video")
    finished = run(torchrun_command(2, SCRIPT, *arguments(clips, tiny_pipeline, tmp_path / "out")), check=False)
    assert finished.returncode != 0
    assert finished.output.count("1.mp4: unreadable") == finished.output.count("2.mp4: unreadable") == 1
    assert "Prepared: 4 of 6 clips" in finished.output
    assert len(files(tmp_path / "out")) == 12


def test_a_mistake_ends_both_processes_with_one_message(clips: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    wrong = [*arguments(clips, tiny_pipeline, tmp_path / "out"), "--caption-column", "words"]
    (clips / "dataset.csv").write_text("video,caption\n0.mp4,c\n")
    finished = run(torchrun_command(2, SCRIPT, *wrong), check=False, timeout=60)
    assert finished.returncode != 0
    assert finished.output.count("there is no column words") == 1
    assert "Traceback" not in finished.output.split("there is no column words")[0]
