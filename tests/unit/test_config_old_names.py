"""Older names of validation fields: they mean what they meant, with one warning each."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.config import TrainerConfig
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
