"""Conditions of validation samples in the run file: what is accepted, and the message for everything that is not."""

from pathlib import Path

import pytest

from ltx_trainer_plus.config import config_as_dict, load_config, save_config
from ltx_trainer_plus.config.validation_conditions import ReferenceCondition
from tests.unit.config_files import load, problems

FILES = ("a.png", "a.mp4", "a.wav", "m.png")
AT = "validation.samples.0.conditions.0"


def text_of(folder: Path, *conditions: str, section: str = "") -> str:
    """A validation section with one sample of 25 frames of 96x64 at 24 per second; the files exist."""
    for name in FILES:
        (folder / name).touch()
    listed = ", ".join(conditions)
    for name in FILES:
        listed = listed.replace(f" {name}", f" {folder}/{name}")
    return (
        f"validation: {{{section} video_dims: [96, 64, 25], samples: [{{prompt: a, conditions: [{listed}]}}, "
        "{prompt: b}]}"
    )


ALL_EIGHT = (
    "{type: first_frame, image_or_video: a.png}",
    "{type: prefix, video: a.mp4, num_frames: 9}",
    "{type: suffix, audio: a.wav, duration: 0.5}",
    "{type: spatial_crop, video: a.mp4, spatial_region: [0, 32, 64, 96]}",
    "{type: mask, video: a.mp4, mask: m.png}",
    "{type: reference, video: a.mp4, downscale_factor: 2, temporal_scale_factor: 1, include_in_output: true}",
)


def test_all_eight_kinds_are_read_and_survive_saving(tmp_path: Path) -> None:
    config = load(tmp_path, text_of(tmp_path, *ALL_EIGHT))
    conditions = config.validation.samples[0].conditions
    assert [condition.type for condition in conditions] == [
        *("first_frame", "prefix", "suffix", "spatial_crop", "mask", "reference")
    ]
    assert [condition.stream for condition in conditions] == ["video", "video", "audio", "video", "video", "video"]
    assert conditions[5] == ReferenceCondition(
        video=tmp_path / "a.mp4", downscale_factor=2, temporal_scale_factor=1, include_in_output=True
    )
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    frozen = load(tmp_path, text_of(tmp_path, "{type: video_to_audio, video: a.mp4}")).validation
    assert (frozen.role_of(frozen.samples[0], "video"), frozen.role_of(frozen.samples[0], "audio")) == (
        *("frozen", "generated"),
    )
    assert frozen.role_of(frozen.samples[1], "video") == "generated"
    sound = load(tmp_path, text_of(tmp_path, "{type: audio_to_video, audio: a.wav}")).validation
    assert sound.role_of(sound.samples[0], "audio") == "frozen"


def test_a_given_video_is_there_although_no_video_is_generated(tmp_path: Path) -> None:
    text = text_of(tmp_path, "{type: video_to_audio, video: a.mp4}", section="generate_video: false,")
    validation = load(tmp_path, text).validation
    assert [validation.role_of(sample, "video") for sample in validation.samples] == ["frozen", "absent"]


@pytest.mark.parametrize(
    ("condition", "line"),
    [
        (
            "{image_or_video: a.png}",
            f"{AT}.type: required, but not given. It is one of first_frame, prefix, suffix, spatial_crop, mask, "
            "reference, video_to_audio, audio_to_video.",
        ),
        (
            "{type: first_fram, image_or_video: a.png}",
            f"{AT}.type: must be one of first_frame, prefix, suffix, spatial_crop, mask, reference, video_to_audio, "
            'audio_to_video (given: "first_fram"). Did you mean first_frame?',
        ),
        ("{type: first_frame}", f"{AT}.image_or_video: required, but not given."),
        (
            "{type: first_frame, image_or_video: 'https://example.org/a.png'}",
            f'{AT}.image_or_video: must be a local path, not a URL (given: "https://example.org/a.png").',
        ),
        # A condition on the wrong stream.
        (
            "{type: spatial_crop, video: a.mp4, spatial_region: [0, 0, 32, 32], audio: 1}",
            f"{AT}.audio: unknown key (given: 1). It belongs to a condition of type prefix or suffix or mask or "
            "reference or audio_to_video.",
        ),
        ("{type: prefix}", f"{AT}: prefix takes video or audio, one of them; neither is given. Name a file."),
        (
            "{type: mask, mask: m.png, video: a.mp4, audio: a.wav}",
            f"{AT}: mask takes video or audio, one of them; both are given. Make two conditions of it, one for each.",
        ),
        ("{type: prefix, video: a.mp4}", f"{AT}.num_frames: required with video, but not given."),
        (
            "{type: prefix, video: a.mp4, num_frames: 9, duration: 1.0}",
            f"{AT}.duration: does not belong to video (given: 1.0). Write num_frames instead.",
        ),
        # A boundary longer than the clip.
        (
            "{type: prefix, video: a.mp4, num_frames: 25}",
            f"{AT}.num_frames: nothing would be left to generate: the sample has 25 frames (given: 25). "
            "Give less of it, or make the sample longer (video_dims).",
        ),
        (
            "{type: suffix, audio: a.wav, duration: 1.5}",
            f"{AT}.duration: nothing would be left to generate: the sample has 1.042 s (given: 1.5). "
            "Give less of it, or make the sample longer (video_dims).",
        ),
        ("{type: suffix, audio: a.wav, duration: 0}", f"{AT}.duration: must be greater than 0 or null (given: 0)."),
        # A region outside the frame.
        (
            "{type: spatial_crop, video: a.mp4, spatial_region: [0, 0, 96, 64]}",
            f"{AT}.spatial_region: reaches outside the frame, which is 64 pixels high and 96 wide "
            "(given: [0, 0, 96, 64]). It is y1, x1, y2, x2: lower y2 and x2.",
        ),
        (
            "{type: spatial_crop, video: a.mp4, spatial_region: [0, 64, 32, 64]}",
            f"{AT}.spatial_region: is empty: y1 must be below y2, and x1 below x2 (given: [0, 64, 32, 64]). "
            "It takes y1, x1, y2 and x2 in pixels, such as [0, 0, 256, 512].",
        ),
        (
            "{type: spatial_crop, video: a.mp4, spatial_region: [0, 0, 64, 96]}",
            f"{AT}.spatial_region: is the whole frame (64 × 96): nothing is left to generate "
            "(given: [0, 0, 64, 96]). Make it smaller.",
        ),
        (
            "{type: spatial_crop, video: a.mp4, spatial_region: [0, 0, 64]}",
            f"{AT}.spatial_region: has too few items (given: [0, 0, 64]). "
            "It takes y1, x1, y2 and x2 in pixels, such as [0, 0, 256, 512].",
        ),
        # A reference with a non-integer scale.
        (
            "{type: reference, video: a.mp4, downscale_factor: 1.5}",
            f"{AT}.downscale_factor: must be a whole number or null (given: 1.5).",
        ),
        (
            "{type: reference, video: a.mp4, temporal_scale_factor: 2.0}",
            f"{AT}.temporal_scale_factor: must be a whole number or null (given: 2.0). Write 2.",
        ),
        (
            "{type: reference, audio: a.wav, downscale_factor: 2}",
            f"{AT}.downscale_factor: is about pictures, and this reference is a sound (given: 2). Remove it.",
        ),
        # A frozen stream with conditions; a sample with both frozen kinds.
        (
            "{type: first_frame, image_or_video: a.png}, {type: video_to_audio, video: a.mp4}",
            f"{AT}: first_frame is about the video, which video_to_audio gives as a whole. "
            "Remove it, or remove video_to_audio.",
        ),
        (
            "{type: audio_to_video, audio: a.wav}, {type: video_to_audio, video: a.mp4}",
            "validation.samples.0.conditions.1: video_to_audio comes after audio_to_video: one sample gives one stream "
            "and generates the other. Make two samples of them.",
        ),
        (
            "{type: first_frame, image_or_video: b.png}",
            f'{AT}.image_or_video: does not exist (given: "b.png"). '
            "Give a file; paths start at the folder you launch from.",
        ),
    ],
)
def test_what_is_wrong_with_a_condition_is_said_with_the_remedy(tmp_path: Path, condition: str, line: str) -> None:
    assert problems(tmp_path, text_of(tmp_path, condition)) == [line]


def test_a_condition_on_a_stream_that_is_not_there_is_named(tmp_path: Path) -> None:
    silent = text_of(tmp_path, "{type: prefix, audio: a.wav, duration: 0.5}", section="generate_audio: false,")
    assert problems(tmp_path, silent) == [
        f"{AT}: prefix is about the sound, and validation.generate_audio is false: the sample has none. "
        "Remove it, or set validation.generate_audio: true."
    ]
    nothing = text_of(tmp_path, "{type: video_to_audio, video: a.mp4}", section="generate_audio: false,")
    assert problems(tmp_path, nothing) == [
        "validation.generate_audio: is false, and validation.samples.0 gives the video (video_to_audio): nothing is "
        "left to generate (given: false). Set validation.generate_audio: true."
    ]


def test_what_is_never_sampled_is_not_checked(tmp_path: Path) -> None:
    text = text_of(tmp_path, "{type: prefix, video: no.mp4, num_frames: 99}", section="interval: null,")
    assert config_as_dict(load(tmp_path, text))["validation"]["samples"][0]["conditions"][0]["num_frames"] == 99
