"""Conditions against prepared data: what a run refuses before it starts, and what it says."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ltx_trainer_plus.config import ConfigError
from ltx_trainer_plus.config.strategy import FlexibleConfig
from ltx_trainer_plus.data.batch import collate
from ltx_trainer_plus.data.precomputed import PrecomputedDataset
from ltx_trainer_plus.data.sample_files import DataError
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.run.preflight import check_equal_forwards, check_run
from ltx_trainer_plus.strategies.checks import condition_problems, reference_scale
from tests.unit.config_files import load

REFERENCE = {"type": "reference", "latents_dir": "reference_latents"}
MASK = {"type": "mask", "mask_dir": "video_masks"}
FIRST = "training_strategy.video.conditions.0"


@pytest.fixture
def data(reference: Path, tmp_path: Path) -> Path:
    """Six official samples of 3 x 2 x 4 video latents (64 x 128 pixels) and 18 audio steps, free to be changed."""
    return Path(shutil.copytree(reference / "official-precomputed", tmp_path / "prepared"))


def opened(root: Path) -> PrecomputedDataset:
    return PrecomputedDataset(
        root,
        video_dir="latents",
        audio_dir="audio_latents",
        masks=("video_masks", "audio_masks"),
        references={"reference_latents": "video", "reference_audio_latents": "audio"},
    )


def strategy(video: list[dict[str, Any]], audio: list[dict[str, Any]] | None = None) -> FlexibleConfig:
    body = {"video": {"conditions": video}, "audio": {"conditions": audio or []}}
    return FlexibleConfig.model_validate({"name": "flexible", **body})


def refused(root: Path, video: list[dict[str, Any]], audio: list[dict[str, Any]] | None = None) -> list[str]:
    return [str(problem) for problem in condition_problems(strategy(video, audio), opened(root), LatentGeometry())]


def change(root: Path, file: str, **entries: Any) -> None:
    path = root / file
    torch.save({**torch.load(path, weights_only=True), **entries}, path)


def test_masks_and_references_are_read_and_stacked(reference: Path) -> None:
    dataset = opened(reference / "official-precomputed")
    assert dataset.skipped == [
        (
            "clips/clip_06",
            "no file in audio_latents or conditions or video_masks or audio_masks or reference_latents or "
            "reference_audio_latents",
        )
    ]
    batch = collate([dataset[0], dataset[1]], [0, 1])
    assert batch.masks["video_masks"].shape == (2, 3, 2, 4)
    assert batch.masks["audio_masks"].shape == (2, 18)
    assert batch.references["reference_latents"].latent.shape == (2, 128, 3, 1, 2)
    assert batch.references["reference_latents"].fps is not None
    assert batch.references["reference_latents"].fps.tolist() == [24.0, 24.0]
    assert batch.references["reference_audio_latents"].fps is None
    moved = batch.to("meta")
    assert moved.masks["video_masks"].is_meta
    assert moved.references["reference_latents"].latent.is_meta
    assert dataset.shapes[0].references[0] == ("reference_latents", (128, 3, 1, 2))


def test_everything_that_official_data_offers_is_accepted(reference: Path) -> None:
    root = reference / "official-precomputed"
    video = [
        REFERENCE,
        MASK,
        {"type": "first_frame"},
        {"type": "prefix", "temporal_boundary": 2},
        {"type": "spatial_crop", "spatial_region": [0, 32, 64, 96]},
    ]
    audio = [
        {"type": "reference", "latents_dir": "reference_audio_latents"},
        {"type": "mask", "mask_dir": "audio_masks"},
        {"type": "suffix", "temporal_boundary": 17},
    ]
    assert refused(root, video, audio) == []
    assert reference_scale(strategy(video, audio), opened(root)) == ReferenceScale(spatial=2)
    assert reference_scale(strategy([], audio), opened(root)) == ReferenceScale()


@pytest.mark.parametrize("kind", ["prefix", "suffix"])
def test_a_boundary_that_leaves_nothing_of_the_clip(data: Path, kind: str) -> None:
    assert refused(data, [{"type": kind, "temporal_boundary": 3}]) == [
        f"{FIRST}.temporal_boundary: samples clips/clip_00, clips/clip_01, clips/clip_02 and 3 more: gives 3 latent "
        "frames of a clip that has 3: nothing is left to generate. Set it below 3, or train longer clips (given: 3)."
    ]
    assert refused(data, [], [{"type": kind, "temporal_boundary": 20}]) == [
        "training_strategy.audio.conditions.0.temporal_boundary: samples clips/clip_00, clips/clip_01, clips/clip_02 "
        "and 3 more: gives 20 latent steps of a clip that has 18: nothing is left to generate. Set it below 18, or "
        "train longer clips (given: 20)."
    ]


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (
            [0, 32, 96, 96],
            "reaches outside the frame, which is 64 pixels high and 128 wide. It is y1, x1, y2, x2: lower y2 and x2",
        ),
        (
            [0, 8, 64, 60],
            "holds no whole square of 32 × 32 pixels, the grid of the latents. Give multiples of 32",
        ),
        ([0, 0, 64, 128], "is the whole frame (64 × 128): nothing is left to generate. Make it smaller"),
    ],
)
def test_a_region_that_the_frame_does_not_have(data: Path, region: list[int], text: str) -> None:
    (line,) = refused(data, [{"type": "spatial_crop", "spatial_region": region}])
    assert line == (
        f"{FIRST}.spatial_region: samples clips/clip_00, clips/clip_01, clips/clip_02 and 3 more: {text} "
        f"(given: {region})."
    )


def test_a_mask_of_another_size_than_its_latents(data: Path) -> None:
    change(data, "video_masks/clips/clip_02.pt", mask=torch.ones(3, 4, 8))
    assert refused(data, [MASK]) == [
        f"{FIRST}.mask_dir: sample clips/clip_02: its mask is of size 3 × 4 × 8, the latents are 3 × 2 × 4: a mask "
        "has one number for each latent position. Prepare the masks again from these clips "
        '(given: "video_masks").'
    ]
    change(data, "video_masks/clips/clip_02.pt", mask=torch.ones(3, 8))
    with pytest.raises(DataError, match=r"clip_02\.pt: a mask of shape \(3, 8\).*\(frames, height, width\)"):
        refused(data, [MASK])


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (
            (3, 2, 3),
            "the target is 2 × 4 latents and the reference 2 × 3: not smaller by one whole number in both directions",
        ),
        (
            (3, 4, 8),
            "the target is 2 × 4 latents and the reference 4 × 8: not smaller by one whole number in both directions",
        ),
        (
            (4, 1, 2),
            "the target has 3 latent frames and the reference 4: without the first, 2 is no whole multiple of 3",
        ),
    ],
)
def test_a_reference_that_is_not_smaller_by_a_whole_number(data: Path, size: tuple[int, ...], why: str) -> None:
    change(data, "reference_latents/clips/clip_01.pt", latents=torch.zeros(128, *size))
    assert refused(data, [REFERENCE]) == [
        f"{FIRST}.latents_dir: sample clips/clip_01: {why}. Prepare the references again at a whole fraction of the "
        'target\'s size (given: "reference_latents").'
    ]


def test_references_of_two_scales_in_one_run(data: Path) -> None:
    change(data, "reference_latents/clips/clip_01.pt", latents=torch.zeros(128, 3, 2, 4))
    assert refused(data, [REFERENCE]) == [
        f"{FIRST}.latents_dir: the references of one run must be equally smaller than their targets: the spatial "
        "factor is 2 in sample clips/clip_00 and 1 in sample clips/clip_01. Prepare them all at the same fraction of "
        "the target's size."
    ]
    change(data, "reference_latents/clips/clip_01.pt", latents=torch.zeros(128, 2, 1, 2))
    (line,) = refused(data, [REFERENCE])
    assert "the temporal factor is 1 in sample clips/clip_00 and 2 in sample clips/clip_01" in line


def test_a_still_picture_goes_with_references_of_any_rate(data: Path) -> None:
    for index in range(6):
        frames = 1 if index == 0 else 2
        change(data, f"reference_latents/clips/clip_0{index}.pt", latents=torch.zeros(128, frames, 1, 2))
    assert refused(data, [REFERENCE]) == []
    assert reference_scale(strategy([REFERENCE]), opened(data)) == ReferenceScale(spatial=2, temporal=2)


def test_a_missing_folder_of_a_condition_is_named_with_those_that_there_are(data: Path) -> None:
    shutil.rmtree(data / "video_masks")
    with pytest.raises(DataError, match=r"no folder 'video_masks' \(it has: audio_latents, audio_masks, conditions"):
        opened(data)


def test_samples_without_a_partner_are_named(data: Path) -> None:
    (data / "video_masks/clips/clip_03.pt").unlink()
    (data / "reference_latents/clips/clip_04.pt").unlink()
    dataset = opened(data)
    assert dataset.names == [f"clips/clip_0{i}" for i in (0, 1, 2, 5)]
    assert dict(dataset.skipped)["clips/clip_03"] == "no file in video_masks"
    assert dict(dataset.skipped)["clips/clip_04"] == "no file in reference_latents"


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("video_masks/clips/clip_00.pt", {"mask": torch.full((3, 2, 4), float("nan"))}),
        ("reference_latents/clips/clip_00.pt", {"latents": torch.full((128, 3, 1, 2), float("nan"))}),
        ("reference_audio_latents/clips/clip_00.pt", {"latents": torch.full((8, 18, 16), float("inf"))}),
    ],
)
def test_numbers_that_are_not_finite_name_their_file(data: Path, file: str, entries: dict[str, Any]) -> None:
    change(data, file, **entries)
    with pytest.raises(DataError, match=rf"{file}: \d+ of \d+ numbers are not finite"):
        opened(data)[0]


def test_a_mask_that_would_run_code_is_refused(data: Path) -> None:
    torch.save({"mask": pickle.Pickler}, data / "video_masks/clips/clip_00.pt")
    with pytest.raises(DataError, match=r"clip_00\.pt: holds a pickled pickle\.Pickler"):
        opened(data)[0]


def test_a_run_says_all_of_it_before_it_starts(data: Path, reference: Path, tmp_path: Path) -> None:
    change(data, "reference_latents/clips/clip_01.pt", latents=torch.zeros(128, 3, 2, 3))
    text = f"""
    model: {{model_path: {reference}/ltx-2.3-tiny-monolith.safetensors}}
    data: {{preprocessed_data_root: {data}}}
    validation: {{interval: null}}
    training_strategy:
      name: flexible
      video:
        conditions: [{{type: reference, latents_dir: reference_latents}}, {{type: prefix, temporal_boundary: 5}}]
    """
    with pytest.raises(ConfigError) as error:
        check_run(load(tmp_path, text))
    assert [problem.path for problem in error.value.problems] == [
        f"{FIRST}.latents_dir",
        "training_strategy.video.conditions.1.temporal_boundary",
    ]


def test_references_of_another_model_are_refused(data: Path, reference: Path, tmp_path: Path) -> None:
    change(data, "reference_latents/clips/clip_00.pt", latents=torch.zeros(16, 3, 1, 2))
    text = f"""
    model: {{model_path: {reference}/ltx-2.3-tiny-monolith.safetensors}}
    data: {{preprocessed_data_root: {data}}}
    validation: {{interval: null}}
    training_strategy:
      name: flexible
      video: {{conditions: [{{type: reference, latents_dir: reference_latents}}]}}
    """
    with pytest.raises(ConfigError, match="the reference in reference_latents has 16 channels, the model takes 128"):
        check_run(load(tmp_path, text))


@pytest.mark.parametrize(
    ("probability", "group", "is_refused"), [(0.5, 1, True), (1.0, 1, False), (0.5, 2, False), (0.0, 1, False)]
)
def test_a_sharded_run_needs_equally_many_forwards_on_every_rank(
    data: Path, reference: Path, tmp_path: Path, probability: float, group: int, is_refused: bool
) -> None:
    config = load(
        tmp_path,
        f"""
        model: {{model_path: {reference}/ltx-2.3-tiny-monolith.safetensors}}
        data: {{preprocessed_data_root: {data}, shape_group: {group}}}
        validation: {{interval: null}}
        training_strategy:
          name: flexible
          video: {{conditions: [{{type: reference, latents_dir: reference_latents, probability: {probability}}}]}}
        """,
    )
    facts = check_run(config)
    if not is_refused:
        check_equal_forwards(config, facts)
        return
    with pytest.raises(ConfigError) as error:
        check_equal_forwards(config, facts)
    assert [str(problem) for problem in error.value.problems] == [
        "data.shape_group: micro-batches of 2 samples hold several groups, which need forwards of their own "
        "(references are drawn with a probability below 1). A sharded model takes part in every forward of every "
        "process, and their numbers would differ (given: 1). Set it to 2, or leave it out."
    ]


def test_held_out_samples_must_fit_the_conditions_too(data: Path, reference: Path, tmp_path: Path) -> None:
    change(data, "video_masks/clips/clip_02.pt", mask=torch.ones(3, 4, 8))
    text = f"""
    model: {{model_path: {reference}/ltx-2.3-tiny-monolith.safetensors}}
    data: {{preprocessed_data_root: {reference}/official-precomputed}}
    validation: {{interval: null, loss: {{preprocessed_data_root: {data}, interval: 10}}}}
    training_strategy:
      name: flexible
      video: {{conditions: [{{type: mask, mask_dir: video_masks}}]}}
    """
    with pytest.raises(ConfigError, match=r"sample clips/clip_02: its mask is of size 3 × 4 × 8"):
        check_run(load(tmp_path, text))
