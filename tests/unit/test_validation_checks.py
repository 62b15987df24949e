"""Before anything is loaded: what a run file asks for, whether the model can do it, and what it costs."""

from typing import Any

import pytest

from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.validation.checks import check_validation, forwards_per_sample
from ltx_trainer_plus.validation.requests import sample_requests

FACTORS = (8, 32)


def section(**fields: Any) -> ValidationConfig:
    return ValidationConfig.model_validate({"samples": [{"prompt": "a cat"}], "stg_blocks": [1], **fields})


def test_a_sample_takes_from_the_section_what_it_leaves_out() -> None:
    samples = [{"prompt": "a"}, {"prompt": "b", "video_dims": [64, 32, 9], "seed": 0}]
    first, second = sample_requests(section(samples=samples, seed=7, frame_rate=25, generate_audio=False))
    assert (first.width, first.height, first.frames, first.seed, first.frame_rate) == (960, 544, 89, 7, 25)
    assert (second.width, second.height, second.frames, second.seed, second.index) == (64, 32, 9, 0, 1)
    assert (second.video, second.audio) == ("generated", "absent")


@pytest.mark.parametrize(("frames", "fps", "steps"), [(25, 24.0, 26), (89, 24.0, 93), (121, 25.0, 121), (1, 60.0, 1)])
def test_audio_is_as_long_as_the_public_pipelines_make_it(frames: int, fps: float, steps: int) -> None:
    (request,) = sample_requests(section(video_dims=[64, 64, frames], frame_rate=fps))
    assert request.audio_latent_steps(LatentGeometry()) == steps
    assert request.video_latent_size(LatentGeometry()) == ((frames - 1) // 8 + 1, 2, 2)


def test_what_fits_has_no_problems() -> None:
    assert check_validation(section(), FACTORS, num_blocks=3) == []


def test_all_wrong_sizes_of_all_samples_are_reported_with_the_nearest_right_ones() -> None:
    samples = [{"prompt": "a"}, {"prompt": "b", "video_dims": [100, 16, 24]}, {"prompt": "c"}]
    problems = check_validation(section(samples=samples, video_dims=[960, 540, 89]), FACTORS, num_blocks=3)
    assert [str(problem) for problem in problems] == [
        "validation.video_dims: [960, 540, 89]: height 540 is not a multiple of 32, the video VAE's spatial factor.\n"
        "  Use 512 or 544.",
        "validation.samples.1.video_dims: [100, 16, 24]: width 100 is not a multiple of 32, the video VAE's spatial "
        "factor.\n  Use 96 or 128.",
        "validation.samples.1.video_dims: [100, 16, 24]: height 16 is not a multiple of 32, the video VAE's spatial "
        "factor.\n  Use 32.",
        "validation.samples.1.video_dims: [100, 16, 24]: 24 frames are not 1 plus a multiple of 8, the video VAE's "
        "temporal factor.\n  Use 17 or 25.",
    ]


def test_a_stg_block_that_the_model_lacks_is_named_with_both_remedies() -> None:
    (problem,) = check_validation(section(stg_blocks=[1, 28], audio_stg_scale=0), FACTORS, num_blocks=3)
    assert str(problem) == (
        "validation.stg_blocks: [1, 28]: block 28 does not exist: this model has 3 blocks (0 to 2).\n"
        "  Choose among them, or set validation.video_stg_scale: 0 to turn STG off."
    )
    (problem,) = check_validation(section(stg_blocks=[3, 28]), FACTORS, num_blocks=3)
    assert "blocks 3, 28 do not exist" in problem.message
    assert "validation.video_stg_scale: 0 and validation.audio_stg_scale: 0" in problem.message


@pytest.mark.parametrize(
    "fields",
    [
        {"video_stg_scale": 0, "audio_stg_scale": 0, "stg_blocks": [28]},
        {"video_stg_scale": 1, "audio_stg_scale": 0, "generate_video": False, "stg_blocks": [28]},
        {"stg_blocks": None},
        {"generate_video": False, "video_dims": [100, 100, 24]},
        {"interval": None, "video_dims": [100, 100, 24], "stg_blocks": [28]},
        {"samples": [], "video_dims": [100, 100, 24], "stg_blocks": [28]},
    ],
    ids=["stg off", "stg of an absent stream", "all blocks", "audio alone", "never", "no samples"],
)
def test_what_is_not_used_is_not_checked(fields: dict[str, Any]) -> None:
    assert check_validation(section(**fields), FACTORS, num_blocks=3) == []


@pytest.mark.parametrize(
    ("fields", "per_step"),
    [
        ({}, 4),
        ({"generate_audio": False}, 3),
        ({"video_cfg_scale": 1, "audio_cfg_scale": 1}, 3),
        ({"video_cfg_scale": 1}, 4),
        ({"video_stg_scale": 0, "audio_stg_scale": 0}, 3),
        ({"stg_blocks": []}, 3),
        ({"video_modality_guidance_scale": 1, "audio_modality_guidance_scale": 1}, 3),
        ({"generate_audio": False, "video_cfg_scale": 1, "video_stg_scale": 0}, 1),
    ],
)
def test_the_cost_counts_only_the_forwards_that_are_run(fields: dict[str, Any], per_step: int) -> None:
    assert forwards_per_sample(section(inference_steps=10, **fields)) == [10 * per_step]
