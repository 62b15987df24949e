"""Files of conditions that cannot be used: each is named, with the reason, before anything is encoded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ltx_trainer_plus.config import ConfigError, ValidationConfig
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.media.image import write_png
from ltx_trainer_plus.media.video import write_video
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation.checks import check_validation
from ltx_trainer_plus.validation.condition_files import check_condition_files
from ltx_trainer_plus.validation.conditions import encode_conditions
from ltx_trainer_plus.validation.requests import sample_requests
from tests.unit.media_files import make_sound, make_video, pictures

GEOMETRY = LatentGeometry()
AT = "validation.samples.0.conditions.0"


class Anything:
    """An object that a pickle can hold."""


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_video(folder / "clip.mp4", 25, width=128, height=96)
    make_video(folder / "short.mp4", 12)
    write_video(folder / "silent.mp4", pictures(25), 24)
    make_sound(folder / "tone.wav", 0.5)
    (folder / "broken.mp4").write_bytes(b"no video at all")
    write_png(folder / "small.png", np.zeros((32, 32, 3), dtype=np.uint8))
    torch.save({"mask": torch.ones(2, 2, 2)}, folder / "wrong.pt")
    torch.save({"mask": torch.full((4, 2, 2), torch.nan)}, folder / "nan.pt")
    torch.save({"mask": Anything()}, folder / "object.pt")
    torch.save({"latents": torch.ones(1)}, folder / "nothing.pt")
    return folder


def section(media: Path, *conditions: dict[str, Any], **fields: Any) -> ValidationConfig:
    files = ("video", "audio", "mask", "image_or_video")
    listed = [{key: str(media / value) if key in files else value for key, value in one.items()} for one in conditions]
    return ValidationConfig.model_validate(
        {"samples": [{"prompt": "a", "conditions": listed}], "video_dims": [64, 64, 25], "stg_blocks": [0], **fields}
    )


@pytest.mark.parametrize(
    ("condition", "field", "reason"),
    [
        (
            {"type": "video_to_audio", "video": "short.mp4"},
            "video",
            "it has 12 frames at 24 frames per second, and 25 are needed",
        ),
        (
            {"type": "prefix", "video": "short.mp4", "num_frames": 17},
            "video",
            "it has 12 frames at 24 frames per second, and 17 are needed",
        ),
        (
            {"type": "suffix", "video": "short.mp4", "num_frames": 16},
            "video",
            "it has 12 frames at 24 frames per second, and 16 are needed",
        ),
        (
            {"type": "prefix", "audio": "tone.wav", "duration": 0.8},
            "audio",
            "it lasts 0.500 s, and 0.8 s of it are asked for",
        ),
        ({"type": "audio_to_video", "audio": "silent.mp4"}, "audio", "it has no sound track"),
        ({"type": "first_frame", "image_or_video": "broken.mp4"}, "image_or_video", "ffmpeg cannot read it"),
        # A mask of the wrong size.
        (
            {"type": "mask", "video": "clip.mp4", "mask": "small.png"},
            "mask",
            "the mask is 32x32; it must be as large as the video (128x96) or the sample (64x64)",
        ),
        (
            {"type": "mask", "video": "clip.mp4", "mask": "wrong.pt"},
            "mask",
            "the mask has 2x2x2 latent cells, and the sample has 4x2x2",
        ),
        ({"type": "mask", "audio": "tone.wav", "mask": "wrong.pt"}, "mask", "the mask has 2x2x2 latent cells, and"),
        ({"type": "mask", "video": "clip.mp4", "mask": "nan.pt"}, "mask", "the mask holds values that are not finite"),
        (
            {"type": "mask", "video": "clip.mp4", "mask": "object.pt"},
            "mask",
            "it holds a pickled object, which could run code; save the mask as a tensor",
        ),
        ({"type": "mask", "video": "clip.mp4", "mask": "nothing.pt"}, "mask", "it holds no tensor named mask"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    media: Path, condition: dict[str, Any], field: str, reason: str
) -> None:
    requests = sample_requests(section(media, condition))
    (problem,) = check_condition_files(requests, GEOMETRY)
    assert problem.path == f"{AT}.{field}"
    assert problem.message.startswith(f"{media / condition[field]}: {reason}")


def test_all_of_them_are_told_together_before_a_model_is_loaded(media: Path) -> None:
    conditions = (
        {"type": "first_frame", "image_or_video": "broken.mp4"},
        {"type": "suffix", "audio": "tone.wav", "duration": 0.8},
    )
    alone = Topology(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    with pytest.raises(ConfigError) as error:
        encode_conditions(sample_requests(section(media, *conditions)), media / "no model", GEOMETRY, alone)
    assert [problem.path for problem in error.value.problems] == [
        "validation.samples.0.conditions.0.image_or_video",
        "validation.samples.0.conditions.1.audio",
    ]


@pytest.mark.parametrize(
    ("condition", "fields", "problem"),
    [
        (
            {"type": "prefix", "video": "clip.mp4", "num_frames": 8},
            {},
            ".num_frames: 8: the first frames can be given as 1 plus a multiple of 8, the video VAE's temporal "
            "factor.\n  Use 1 or 9.",
        ),
        (
            {"type": "suffix", "video": "clip.mp4", "num_frames": 12},
            {},
            ".num_frames: 12: the last frames can be given as a multiple of 8, the video VAE's temporal factor (one "
            "more is taken as the next multiple).\n  Use 8 or 16.",
        ),
        (
            {"type": "suffix", "audio": "tone.wav", "duration": 1.03},
            {},
            ".duration: 1.03: all 26 latent steps of the sound would be given, none generated.\n"
            "  Give less of it, or make the sample longer (video_dims).",
        ),
        (
            {"type": "first_frame", "image_or_video": "clip.mp4"},
            {"video_dims": [64, 64, 1]},
            ": first_frame: the sample has one frame, so nothing would be left to generate.\n"
            "  Make the sample longer (video_dims), or remove the condition.",
        ),
        (
            {"type": "spatial_crop", "video": "clip.mp4", "spatial_region": [8, 0, 56, 64]},
            {},
            ".spatial_region: [8, 0, 56, 64]: holds no whole square of 32 × 32 pixels, the grid of the "
            "latents.\n  Give multiples of 32.",
        ),
        (
            {"type": "reference", "video": "clip.mp4", "downscale_factor": 3},
            {"video_dims": [96, 64, 25]},
            ".downscale_factor: 3: the reference would be 32x21.3333, which the video VAE cannot take (multiples of "
            "32).\n  Make width and height of the sample multiples of 96 (video_dims), or use another factor.",
        ),
        (
            {"type": "reference", "video": "clip.mp4", "temporal_scale_factor": 2},
            {},
            ".temporal_scale_factor: 2: the sample's 25 frames make no whole latent frames of the reference.\n"
            "  Use 17 or 33 frames (video_dims), or another factor.",
        ),
    ],
)
def test_conditions_that_do_not_meet_the_borders_of_latents_are_told_with_the_nearest_that_do(
    media: Path, condition: dict[str, Any], fields: dict[str, Any], problem: str
) -> None:
    (found,) = check_validation(section(media, condition, **fields), (8, 32), num_blocks=3)
    assert str(found) == AT + problem
