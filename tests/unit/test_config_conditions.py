"""Conditions of `training_strategy`: what is read, what the older strategies mean, and every message."""

from pathlib import Path

import pytest

from ltx_trainer_plus.config import load_config, save_config
from ltx_trainer_plus.config.conditions import (
    FirstFrameCondition,
    MaskCondition,
    PrefixCondition,
    ReferenceCondition,
    SpatialCropCondition,
    SuffixCondition,
)
from ltx_trainer_plus.config.strategy import FlexibleConfig
from tests.unit.config_files import load, problems

FIRST = "training_strategy.video.conditions.0"
VIDEO_TYPES = "one of first_frame, prefix, suffix, spatial_crop, mask, reference"
AUDIO_TYPES = "one of prefix, suffix, mask, reference"
CONDITION = "Each condition is a section, such as {type: prefix, temporal_boundary: 2}."
REGION = "It takes y1, x1, y2 and x2 in pixels, such as [0, 0, 256, 512]."
EVERYTHING = """
training_strategy:
  name: flexible
  video:
    conditions:
      - {type: first_frame, probability: 0.5}
      - {type: prefix, temporal_boundary: 2}
      - {type: spatial_crop, spatial_region: [0, 32, 64, 96]}
      - {type: mask, mask_dir: video_masks}
      - {type: reference, latents_dir: reference_latents}
  audio:
    conditions: [{type: suffix, temporal_boundary: 3}]
"""


def video(condition: str) -> str:
    return f"training_strategy: {{name: flexible, video: {{conditions: [{condition}]}}, audio: {{}}}}"


def audio(condition: str) -> str:
    return f"training_strategy: {{name: flexible, video: {{}}, audio: {{conditions: [{condition}]}}}}"


def test_every_condition_is_read_saved_and_read_again(tmp_path: Path) -> None:
    config = load(tmp_path, EVERYTHING)
    strategy = config.training_strategy
    assert strategy.video is not None
    assert strategy.audio is not None
    assert strategy.video.conditions == (
        FirstFrameCondition(probability=0.5),
        PrefixCondition(temporal_boundary=2),
        SpatialCropCondition(spatial_region=(0, 32, 64, 96)),
        MaskCondition(mask_dir="video_masks"),
        ReferenceCondition(latents_dir="reference_latents"),
    )
    assert strategy.audio.conditions == (SuffixCondition(temporal_boundary=3, probability=1.0),)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    changed = load(tmp_path, EVERYTHING, "training_strategy.video.conditions.1.temporal_boundary=4")
    assert changed.training_strategy.video is not None
    assert changed.training_strategy.video.conditions[1] == PrefixCondition(temporal_boundary=4)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (video("{type: prefix}"), f"{FIRST}.temporal_boundary: required, but not given."),
        (
            video("{type: prefix, temporal_boundary: 0}"),
            f"{FIRST}.temporal_boundary: must be at least 1 (given: 0).",
        ),
        (
            video("{type: suffix, temporal_boundary: 2.5}"),
            f"{FIRST}.temporal_boundary: must be a whole number (given: 2.5).",
        ),
        (
            video("{type: prefix, temporal_boundary: 2, probabilty: 0.5}"),
            f"{FIRST}.probabilty: unknown key (given: 0.5). Did you mean {FIRST}.probability?",
        ),
        (
            video("{type: first_frame, temporal_boundary: 2}"),
            f"{FIRST}.temporal_boundary: unknown key (given: 2). It belongs to a condition of type prefix or suffix.",
        ),
        (
            video("{type: first_frame, probability: 1.5}"),
            f"{FIRST}.probability: must be at most 1 (given: 1.5).",
        ),
        (
            video("{type: frist_frame}"),
            f'{FIRST}.type: must be {VIDEO_TYPES} (given: "frist_frame"). Did you mean first_frame?',
        ),
        (video("{probability: 0.5}"), f"{FIRST}.type: required, but not given. It is {VIDEO_TYPES}."),
        (
            video("first_frame"),
            f'{FIRST}: must be a section (lines of key: value) (given: "first_frame"). {CONDITION}',
        ),
        (
            "training_strategy: {name: flexible, video: {conditions: {type: first_frame}}}",
            f'training_strategy.video.conditions: must be a list (given: {{"type": "first_frame"}}). {CONDITION}',
        ),
        (
            video("{type: spatial_crop, spatial_region: [0, 32, 64]}"),
            f"{FIRST}.spatial_region: has too few items (given: [0, 32, 64]). {REGION}",
        ),
        (
            video("{type: spatial_crop, spatial_region: [-1, 0, 32, 64]}"),
            f"{FIRST}.spatial_region.0: must be at least 0 (given: -1). {REGION}",
        ),
        (
            video("{type: spatial_crop, spatial_region: [64, 0, 32, 64]}"),
            f"{FIRST}.spatial_region: is empty: y1 must be below y2, and x1 below x2 "
            f"(given: [64, 0, 32, 64]). {REGION}",
        ),
        (video("{type: mask}"), f"{FIRST}.mask_dir: required, but not given."),
        (
            video("{type: mask, mask_dir: ../masks}"),
            f"{FIRST}.mask_dir: must be the name of a folder inside data.preprocessed_data_root, such as latents "
            '(given: "../masks").',
        ),
        (
            video("{type: reference, latents_dir: /references}"),
            f"{FIRST}.latents_dir: must be the name of a folder inside data.preprocessed_data_root, such as latents "
            '(given: "/references").',
        ),
        (
            audio("{type: first_frame}"),
            f'training_strategy.audio.conditions.0.type: must be {AUDIO_TYPES} (given: "first_frame"). '
            "A condition of type first_frame is for video only.",
        ),
        (
            audio("{type: spatial_crop, spatial_region: [0, 0, 32, 32]}"),
            f'training_strategy.audio.conditions.0.type: must be {AUDIO_TYPES} (given: "spatial_crop"). '
            "A condition of type spatial_crop is for video only.",
        ),
        (
            "training_strategy: {name: flexible, video: {is_generated: false, conditions: [{type: first_frame}]}, "
            "audio: {}}",
            "training_strategy.video.conditions: the stream is given as a whole "
            "(training_strategy.video.is_generated: false), so it takes no conditions of its own "
            '(given: ["first_frame"]). Set training_strategy.video.is_generated: true to generate it, or '
            "training_strategy.video.conditions: [].",
        ),
        (
            video("{type: reference, latents_dir: r}, {type: reference, latents_dir: r}"),
            "training_strategy.video.conditions.1.latents_dir: is the folder of training_strategy.video.conditions.0 "
            'too: the same tokens would come twice (given: "r"). Remove one of the two.',
        ),
        (
            "training_strategy: {name: video_to_video}\nmodel: {training_mode: full}",
            "model.training_mode: training_strategy.name: video_to_video trains a LoRA only "
            '(given: "full"). Set model.training_mode: lora.',
        ),
        (
            "training_strategy: {name: video_to_video, with_audio: true}",
            "training_strategy.with_audio: unknown key (given: true). "
            "It belongs to training_strategy.name: text_to_video.",
        ),
        (
            "training_strategy: {first_frame_conditioning_p: 2}",
            "training_strategy.first_frame_conditioning_p: must be at most 1 (given: 2).",
        ),
    ],
)
def test_what_is_wrong_with_a_condition_is_said_at_its_field(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


def test_all_faults_of_all_conditions_are_told_together(tmp_path: Path) -> None:
    faults = problems(tmp_path, video("{type: prefix, temporal_boundary: 0, probability: 2}, {type: mask}"))
    assert [fault.split(": ")[0] for fault in faults] == [
        f"{FIRST}.probability",
        f"{FIRST}.temporal_boundary",
        "training_strategy.video.conditions.1.mask_dir",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "{name: text_to_video, first_frame_conditioning_p: 0.3}",
            "{name: flexible, video: {conditions: [{type: first_frame, probability: 0.3}]}}",
        ),
        (
            "{name: text_to_video, first_frame_conditioning_p: 0.0, with_audio: true, audio_latents_dir: sound}",
            "{name: flexible, video: {}, audio: {latents_dir: sound}}",
        ),
        (
            "{name: video_to_video, first_frame_conditioning_p: 0.3, reference_latents_dir: poses}",
            "{name: flexible, video: {conditions: [{type: reference, latents_dir: poses}, "
            "{type: first_frame, probability: 0.3}]}}",
        ),
        (
            "{name: video_to_video, first_frame_conditioning_p: 0.0}",
            "{name: flexible, video: {conditions: [{type: reference, latents_dir: reference_latents}]}}",
        ),
    ],
)
def test_an_older_strategy_becomes_the_flexible_one_that_it_means(tmp_path: Path, old: str, new: str) -> None:
    config = load(tmp_path, f"training_strategy: {old}")
    assert isinstance(config.training_strategy, FlexibleConfig)
    assert config == load(tmp_path, f"training_strategy: {new}")
