"""Older names of validation fields: they mean what they meant, with one warning each."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.config import TrainerConfig, load_config, save_config
from ltx_trainer_plus.config.old_names import OldNameWarning
from tests.unit.config_files import load, problems


def loaded(folder: Path, text: str, *overrides: str) -> tuple[TrainerConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load(folder, text, *overrides)
    assert all(issubclass(warning.category, OldNameWarning) for warning in caught)
    return config, [str(warning.message).split(" is an older name")[0] for warning in caught]


def test_prompts_images_and_reference_videos_become_samples(tmp_path: Path) -> None:
    for name in ("a.png", "r.mp4", "s.mp4"):
        (tmp_path / name).touch()
    old, warned = loaded(
        tmp_path,
        f"""
        validation:
          prompts: [a cat, a dog]
          images: [{tmp_path}/a.png, null]
          reference_videos: [{tmp_path}/r.mp4, {tmp_path}/s.mp4]
          reference_downscale_factor: 2
          include_reference_in_output: true
        """,
    )
    reference = "downscale_factor: 2, include_in_output: true"
    new = load(
        tmp_path,
        f"""
        validation:
          samples:
            - prompt: a cat
              conditions:
                - {{type: first_frame, image_or_video: {tmp_path}/a.png}}
                - {{type: reference, video: {tmp_path}/r.mp4, {reference}}}
            - prompt: a dog
              conditions: [{{type: reference, video: {tmp_path}/s.mp4, {reference}}}]
        """,
    )
    assert old == new
    assert warned == [
        "validation.prompts",
        "validation.images",
        "validation.reference_videos",
        "validation.reference_downscale_factor",
        "validation.include_reference_in_output",
    ]


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("guidance_scale: 4", {"video_cfg_scale": 4.0, "audio_cfg_scale": 4.0}),
        ("stg_scale: 2.5", {"video_stg_scale": 2.5, "audio_stg_scale": 2.5}),
        ("stg_scale: 2, stg_mode: stg_av", {"video_stg_scale": 2.0, "audio_stg_scale": 2.0}),
        ("stg_scale: 2, stg_mode: stg_v", {"video_stg_scale": 2.0, "audio_stg_scale": 0.0}),
        ("stg_mode: stg_v", {"video_stg_scale": 1.0, "audio_stg_scale": 0.0}),
    ],
)
def test_one_scale_for_both_streams_becomes_two(tmp_path: Path, text: str, scales: dict[str, Any]) -> None:
    config, warned = loaded(tmp_path, f"validation: {{{text}}}")
    assert {name: getattr(config.validation, name) for name in scales} == scales
    assert warned == [f"validation.{item.split(':')[0]}" for item in text.split(", ")]


def test_neutral_values_say_nothing_and_new_files_do_not_warn(tmp_path: Path) -> None:
    text = """
    validation: {prompts: [], images: null, reference_videos: [], reference_downscale_factor: 1, guidance_scale: null,
                 include_reference_in_output: false, samples: [{prompt: a}], video_cfg_scale: 4.0}
    """
    assert loaded(tmp_path, text)[1] == []


@pytest.mark.parametrize(
    ("text", "override", "lines"),
    [
        (
            "prompts: [a], samples: [{prompt: b}]",
            None,
            [
                'validation.prompts: says the same as validation.samples, which is given too (given: ["a"]). Remove '
                "validation.prompts: today that is validation.samples, one item for each prompt."
            ],
        ),
        (
            # The new field has its default value, but it was written: two files may say two things.
            "guidance_scale: 4.0, video_cfg_scale: 3.0",
            None,
            [
                "validation.guidance_scale: says the same as validation.video_cfg_scale, which is given too "
                "(given: 4.0). Remove validation.guidance_scale: today that is validation.video_cfg_scale and "
                "validation.audio_cfg_scale."
            ],
        ),
        (
            "stg_scale: 2.0",
            "validation.audio_stg_scale=0",
            [
                "validation.stg_scale: says the same as validation.audio_stg_scale, which is given too (given: 2.0). "
                "Remove validation.stg_scale: today that is validation.video_stg_scale and validation.audio_stg_scale."
            ],
        ),
        (
            "prompts: [a, b], images: [a.png]",
            None,
            [
                "validation.images: has length 1 and validation.prompts has 2: each prompt takes one. "
                "Make both lists equally long; null stands for a prompt without one."
            ],
        ),
        (
            "prompts: [a], reference_downscale_factor: 2",
            None,
            [
                "validation.reference_downscale_factor: is about validation.reference_videos, and there are none "
                "(given: 2). Remove it, or give reference_videos."
            ],
        ),
        (
            "prompts: a, guidance_scale: 0, stg_mode: stg_w",
            None,
            [
                'validation.prompts: must be a list or null (given: "a").',
                "validation.guidance_scale: must be at least 1 or null (given: 0).",
                'validation.stg_mode: must be one of stg_av, stg_v or null (given: "stg_w"). Did you mean stg_v?',
            ],
        ),
    ],
)
def test_contradictions_name_both_fields(tmp_path: Path, text: str, override: str | None, lines: list[str]) -> None:
    assert problems(tmp_path, f"validation: {{{text}}}", *([override] if override else [])) == lines


@pytest.mark.parametrize("name", ["text_to_video", "video_to_video"])
def test_an_older_strategy_is_warned_of_once_where_it_was_written(tmp_path: Path, name: str) -> None:
    assert loaded(tmp_path, f"training_strategy: {{name: {name}}}")[1] == [f"training_strategy.name: {name}"]
    assert loaded(tmp_path, "", f"training_strategy.name={name}")[1] == [f"training_strategy.name: {name}"]


def test_the_default_strategy_and_what_is_saved_of_an_older_one_warn_of_nothing(tmp_path: Path) -> None:
    assert loaded(tmp_path, "training_strategy: {first_frame_conditioning_p: 0.5}")[1] == []
    old, _ = loaded(tmp_path, "training_strategy: {name: video_to_video}")
    save_config(old, tmp_path / "saved.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(tmp_path / "saved.yaml") == old
