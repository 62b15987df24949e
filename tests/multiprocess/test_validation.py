"""Validation on two ranks: no wrapper is asked for anything, no rank waits for ever, training does not notice."""

import json
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.media.video import read_video
from tests.launch import run, torchrun_command
from tests.unit.media_files import assert_same_media

SCRIPT = Path(__file__).with_name("validation_script.py")
FORWARDS_PER_SAMPLE = 2 * 4  # steps; prompt, negative prompt, STG, isolated streams


@pytest.fixture(scope="module")
def alone(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of the same samples."""
    return _launched(1, "single", tiny_pipeline, tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def output(layout: str, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _launched(2, layout, tiny_pipeline, tmp_path_factory.mktemp(layout))


@pytest.fixture(scope="module")
def ranks(output: Path) -> list[dict[str, Any]]:
    return _results(output)


def _launched(processes: int, layout: str, model: Path, folder: Path) -> Path:
    run(torchrun_command(processes, SCRIPT, str(model), str(folder), layout), timeout=400)
    return folder


def _results(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "result.json").read_text())


def test_validation_with_stg_and_modality_guidance_reads_the_block_count_from_the_bare_model(
    layout: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        # DDP answers no question about the model. (FSDP2 changes the model's class in place: it is the bare model.)
        assert rank["asks_the_wrapper"] is (layout == "fsdp2")
        assert rank["3"]["skips_all_blocks"]
        assert rank["3"]["isolates"]


@pytest.mark.parametrize("samples", [3, 1])
def test_every_sample_becomes_exactly_one_file_and_every_rank_knows_all(
    samples: int, ranks: list[dict[str, Any]], output: Path
) -> None:
    names = [f"step_000250_{index}.mp4" for index in range(1, samples + 1)]
    assert sorted(path.name for path in (output / str(samples) / "samples").iterdir()) == names
    for rank in ranks:
        assert rank[str(samples)]["files"] == [[name, f"prompt {index}", index + 1] for index, name in enumerate(names)]
    for name in names:
        assert len(read_video(output / str(samples) / "samples" / name).frames) == 9


@pytest.mark.parametrize("samples", [3, 1])
def test_every_rank_runs_the_same_number_of_forwards(samples: int, ranks: list[dict[str, Any]]) -> None:
    expected = -(-samples // 2) * FORWARDS_PER_SAMPLE
    assert [rank[str(samples)]["forwards"] for rank in ranks] == [expected, expected]


def test_a_sample_does_not_depend_on_the_layout(output: Path, alone: Path) -> None:
    for index in (1, 2, 3):
        file = f"3/samples/step_000250_{index}.mp4"
        assert_same_media(output / file, alone / file)


def test_all_conditions_work_in_every_layout_and_give_the_same_files(
    ranks: list[dict[str, Any]], output: Path, alone: Path
) -> None:
    names = [f"step_000250_{index}.mp4" for index in (1, 2, 3, 4)]
    for rank in ranks:
        assert rank["conditions"]["files"] == names
        # Two rounds: the first sample alone needs three forwards a step, but its neighbour needs four.
        assert rank["conditions"]["forwards"] == 2 * FORWARDS_PER_SAMPLE
    for name in names:
        file = f"conditions/samples/{name}"
        assert_same_media(output / file, alone / file)
    assert _results(alone)[0]["conditions"]["forwards"] < 4 * FORWARDS_PER_SAMPLE


def test_one_rank_that_is_asked_to_stop_ends_the_validation_on_all_at_the_same_forward(
    ranks: list[dict[str, Any]], output: Path
) -> None:
    for rank in ranks:
        assert rank["stopped"] == {"files": 0, "forwards": FORWARDS_PER_SAMPLE // 2}
    assert not (output / "stopped").exists()


def test_the_training_losses_are_identical_with_and_without_validation(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(set(rank["losses"])) == 4
        assert rank["losses_with_validation"] == rank["losses"]
