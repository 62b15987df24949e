"""Conditions of validation: encoded from real files, kept exactly through denoising, and seen in the result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ltx_trainer_plus import ModelHandle
from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.positions import (
    LatentGeometry,
    audio_positions,
    patchify_audio,
    patchify_video,
    unpatchify_video,
)
from ltx_trainer_plus.flow.references import ReferenceScale, reference_video_positions
from ltx_trainer_plus.flow.schedule import inference_sigmas
from ltx_trainer_plus.flow.tokens import Tokens
from ltx_trainer_plus.media.audio import read_audio, write_wav
from ltx_trainer_plus.media.geometry import frames_to_unit
from ltx_trainer_plus.media.image import write_png
from ltx_trainer_plus.media.mel import log_mel
from ltx_trainer_plus.media.video import read_video, write_video
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models import load_transformer
from ltx_trainer_plus.models.components import AudioVAE, VideoVAE, load_audio_vae, load_video_vae
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation.cache import PromptContexts
from ltx_trainer_plus.validation.conditions import encode_conditions
from ltx_trainer_plus.validation.denoise import Forwards, Guidance, denoise
from ltx_trainer_plus.validation.given import GivenSample
from ltx_trainer_plus.validation.media import Place, first_frames
from ltx_trainer_plus.validation.requests import SampleRequest, sample_requests
from ltx_trainer_plus.validation.runner import ValidationRunner
from ltx_trainer_plus.validation.states import SampleState, initial_state
from tests.unit.media_files import make_sound, make_video

ALONE = Topology(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
GEOMETRY = LatentGeometry()
SIZE = (4, 2, 2)  # latent frames, rows, columns of 25 frames of 64x64
STEPS = 26  # latent steps of their sound


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    make_video(folder / "clip.mp4", 33)
    make_sound(folder / "tone.wav", 1.5)
    mask = np.zeros((64, 64, 3), dtype=np.uint8)
    mask[:32] = 255
    write_png(folder / "top.png", mask)
    return folder


def section(*conditions: dict[str, Any], **fields: Any) -> ValidationConfig:
    return ValidationConfig.model_validate(
        {
            "samples": [{"prompt": "a", "conditions": list(conditions), "seed": 3}],
            "video_dims": [64, 64, 25],
            "inference_steps": 2,
            "stg_blocks": [0],
            **fields,
        }
    )


def given_for(model: Path, *conditions: dict[str, Any], **fields: Any) -> tuple[GivenSample, SampleRequest]:
    (request,) = sample_requests(section(*conditions, **fields))
    (given,) = encode_conditions((request,), model, GEOMETRY, ALONE)
    return given, request


def context(seed: int) -> TextContext:
    generator = torch.Generator().manual_seed(seed)
    return TextContext(torch.randn(1, 16, 64, generator=generator), torch.randn(1, 16, 32, generator=generator))


@pytest.fixture(scope="module")
def handle(tiny_pipeline: Path) -> ModelHandle:
    return ModelHandle.of(load_transformer(tiny_pipeline, dtype=torch.float32))


@pytest.fixture(scope="module")
def vae(tiny_pipeline: Path) -> VideoVAE:
    return load_video_vae(tiny_pipeline, torch.float32)


@pytest.fixture(scope="module")
def audio_vae(tiny_pipeline: Path) -> AudioVAE:
    return load_audio_vae(tiny_pipeline)


def encoded(vae: VideoVAE, clip: Path, frames: slice) -> Tensor:
    """Tokens of a slice of a clip, as preparation encodes training samples."""
    return vae.encode(frames_to_unit(read_video(clip).frames[frames])[None])


def given_tokens(stream: Any) -> Tensor:
    assert stream.clean is not None
    assert stream.is_given is not None
    return stream.clean[stream.is_given]


def cells(stream: Any) -> Tensor:
    """(F, H, W) 1 where a latent cell is given."""
    return stream.is_given.float().view(SIZE)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.png"])
def test_the_first_frame_of_a_picture_or_a_video_is_the_first_latent_frame(
    name: str, media: Path, vae: VideoVAE, tiny_pipeline: Path
) -> None:
    if name == "clip.png":
        write_png(media / name, read_video(media / "clip.mp4").frames[0])
    given, _ = given_for(tiny_pipeline, {"type": "first_frame", "image_or_video": str(media / name)})
    assert cells(given.video).flatten(1).sum(1).tolist() == [4, 0, 0, 0]
    expected = patchify_video(encoded(vae, media / "clip.mp4", slice(1)))[0]
    torch.testing.assert_close(given_tokens(given.video), expected, atol=1e-5, rtol=0)


def test_a_prefix_is_what_training_would_give(media: Path, vae: VideoVAE, tiny_pipeline: Path) -> None:
    condition = {"type": "prefix", "video": str(media / "clip.mp4"), "num_frames": 9}
    given, _ = given_for(tiny_pipeline, condition)
    assert cells(given.video).flatten(1).sum(1).tolist() == [4, 4, 0, 0]
    # Training cuts it out of the latent of a longer clip; the VAE is causal, so the first frames do not see the rest.
    expected = patchify_video(encoded(vae, media / "clip.mp4", slice(25))[:, :, :2])[0]
    torch.testing.assert_close(given_tokens(given.video), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("frames", "latent_frames"), [(8, 1), (9, 2), (16, 2)])
def test_a_suffix_holds_the_last_frames_and_no_single_frame_latent(
    frames: int, latent_frames: int, media: Path, vae: VideoVAE, tiny_pipeline: Path
) -> None:
    condition = {"type": "suffix", "video": str(media / "clip.mp4"), "num_frames": frames}
    given, _ = given_for(tiny_pipeline, condition)
    assert cells(given.video).flatten(1).sum(1).tolist() == [0] * (4 - latent_frames) + [4] * latent_frames
    latent = encoded(vae, media / "clip.mp4", slice(33 - 8 * latent_frames - 1, 33))[:, :, -latent_frames:]
    torch.testing.assert_close(given_tokens(given.video), patchify_video(latent)[0], atol=1e-5, rtol=0)


def test_a_suffix_that_is_the_whole_file_repeats_its_first_frame_in_front(media: Path, tiny_pipeline: Path) -> None:
    short = make_video(media / "short.mp4", 9)
    given, _ = given_for(tiny_pipeline, {"type": "suffix", "video": str(short), "num_frames": 9})
    assert cells(given.video).flatten(1).sum(1).tolist() == [0, 0, 4, 4]
    assert bool(given_tokens(given.video).isfinite().all())


def test_prefix_and_suffix_of_a_sound_stand_at_its_ends(media: Path, audio_vae: AudioVAE, tiny_pipeline: Path) -> None:
    sound = str(media / "tone.wav")
    prefix, _ = given_for(tiny_pipeline, {"type": "prefix", "audio": sound, "duration": 0.4})
    suffix, _ = given_for(tiny_pipeline, {"type": "suffix", "audio": sound, "duration": 0.4})
    assert prefix.audio.is_given is not None
    assert suffix.audio.is_given is not None
    assert prefix.audio.is_given.int().tolist() == [[1] * 10 + [0] * 16]
    assert suffix.audio.is_given.int().tolist() == [[0] * 16 + [1] * 10]
    track = read_audio(sound)
    assert track is not None
    expected = patchify_audio(audio_vae.encode(log_mel(track.samples[:, : round(25 / 24 * 16_000)])))[0]
    torch.testing.assert_close(given_tokens(prefix.audio), expected[:10], atol=1e-5, rtol=0)
    # The tone's last second begins at another phase, but nothing else tells its latents apart.
    assert given_tokens(suffix.audio).shape == (10, 128)


def test_a_region_is_given_in_its_whole_latent_cells(media: Path, vae: VideoVAE, tiny_pipeline: Path) -> None:
    clip = media / "clip.mp4"
    given, _ = given_for(tiny_pipeline, {"type": "spatial_crop", "video": str(clip), "spatial_region": [0, 32, 60, 64]})
    assert cells(given.video).tolist() == [[[0, 1], [0, 0]]] * 4
    latent = encoded(vae, clip, slice(25))[:, :, :, :1, 1:]
    torch.testing.assert_close(given_tokens(given.video), patchify_video(latent)[0], atol=1e-5, rtol=0)


def test_a_mask_is_a_picture_a_video_or_prepared_latent_cells(media: Path, tiny_pipeline: Path) -> None:
    clip = str(media / "clip.mp4")
    still, _ = given_for(tiny_pipeline, {"type": "mask", "video": clip, "mask": str(media / "top.png")})
    assert cells(still.video).tolist() == [[[1, 1], [0, 0]]] * 4
    stored = torch.zeros(SIZE)
    stored[1, 0, 1] = 1
    torch.save({"mask": stored}, media / "cells.pt")
    exact, _ = given_for(tiny_pipeline, {"type": "mask", "video": clip, "mask": str(media / "cells.pt")})
    assert torch.equal(cells(exact.video), stored)
    moving = np.zeros((25, 64, 64, 3), dtype=np.uint8)
    moving[:9, :, :32] = 255  # the first latent frame and the second one
    write_video(media / "moving.mp4", moving, 24)
    video, _ = given_for(tiny_pipeline, {"type": "mask", "video": clip, "mask": str(media / "moving.mp4")})
    assert cells(video.video).tolist() == [[[1, 0], [1, 0]]] * 2 + [[[0, 0], [0, 0]]] * 2


def test_a_sound_is_given_where_the_level_of_its_mask_is_one(media: Path, tiny_pipeline: Path) -> None:
    level = torch.zeros(1, 17_000)
    level[:, 8_000:] = 1
    write_wav(media / "level.wav", level, 16_000)
    condition = {"type": "mask", "audio": str(media / "tone.wav"), "mask": str(media / "level.wav")}
    given, _ = given_for(tiny_pipeline, condition)
    assert given.audio.is_given is not None
    # Half a second is 50 mel frames: step 13 covers the frames 49 to 53.
    assert given.audio.is_given.int().tolist() == [[0] * 13 + [1] * 13]


def test_references_are_encoded_at_their_own_size_and_rate(media: Path, vae: VideoVAE, tiny_pipeline: Path) -> None:
    clip = str(media / "clip.mp4")
    conditions = (
        {"type": "reference", "video": clip, "downscale_factor": 2, "temporal_scale_factor": 2},
        {"type": "reference", "audio": str(media / "tone.wav")},
    )
    given, _ = given_for(tiny_pipeline, *conditions, video_dims=[64, 64, 33])
    (video,), (audio,) = given.video.references, given.audio.references
    assert video.latent.shape == (1, 3, 128)  # 17 frames of 32x32
    rate = torch.tensor([24.0])
    expected = reference_video_positions((3, 1, 1), rate / 2, rate, ReferenceScale(2, 2), GEOMETRY)
    assert torch.equal(video.positions, expected)
    assert audio.latent.shape == (1, 34, 128)
    assert torch.equal(audio.positions, audio_positions(34, GEOMETRY))


def test_a_clip_is_brought_to_the_samples_frame_rate(media: Path, tiny_pipeline: Path) -> None:
    fast = make_video(media / "fast.mp4", 50, fps=48)
    shown = first_frames(fast, Place(64, 64, 25, 24.0), 25)
    assert np.array_equal(shown, read_video(fast).frames[::2])
    same = first_frames(media / "clip.mp4", Place(64, 64, 25, 24000 / 1001), 25)
    assert np.array_equal(same, read_video(media / "clip.mp4").frames[:25])


CONDITIONS: dict[str, list[dict[str, Any]]] = {
    "first_frame": [{"type": "first_frame", "image_or_video": "clip.mp4"}],
    "prefix": [
        {"type": "prefix", "video": "clip.mp4", "num_frames": 9},
        {"type": "prefix", "audio": "tone.wav", "duration": 0.5},
    ],
    "suffix": [
        {"type": "suffix", "video": "clip.mp4", "num_frames": 9},
        {"type": "suffix", "audio": "tone.wav", "duration": 0.5},
    ],
    "spatial_crop": [{"type": "spatial_crop", "video": "clip.mp4", "spatial_region": [0, 0, 32, 64]}],
    "mask": [{"type": "mask", "video": "clip.mp4", "mask": "top.png"}],
    "video_to_audio": [{"type": "video_to_audio", "video": "clip.mp4"}],
    "audio_to_video": [{"type": "audio_to_video", "audio": "tone.wav"}],
    "several": [
        {"type": "first_frame", "image_or_video": "clip.mp4"},
        {"type": "spatial_crop", "video": "clip.mp4", "spatial_region": [0, 0, 32, 64]},
        {"type": "reference", "video": "clip.mp4"},
        {"type": "prefix", "audio": "tone.wav", "duration": 0.5},
        {"type": "reference", "audio": "tone.wav"},
    ],
}


def in_folder(media: Path, conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    files = ("video", "audio", "mask", "image_or_video")
    return [{key: str(media / value) if key in files else value for key, value in one.items()} for one in conditions]


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditioned_tokens_of_the_final_latents_equal_the_clean_ones_exactly(
    name: str, media: Path, handle: ModelHandle, tiny_pipeline: Path
) -> None:
    given, request = given_for(tiny_pipeline, *in_folder(media, CONDITIONS[name]))
    state = initial_state(
        request,
        context(0),
        context(1),
        geometry=GEOMETRY,
        transformer_config=handle.config,
        device=handle.device,
        given=given,
    )
    results = denoise(handle, state, Guidance.of(section()), inference_sigmas(2))
    measured = 0
    for result, stream, tokens in zip(results, (given.video, given.audio), (16, STEPS), strict=True):
        assert result is not None
        assert result.shape == (1, tokens, 128)  # references are not in it
        if stream.clean is None or stream.is_given is None:
            continue
        assert torch.equal(result[stream.is_given], stream.clean[stream.is_given])
        generated = result[~stream.is_given]
        assert not torch.isclose(generated, stream.clean[~stream.is_given]).any(-1).all() or not generated.numel()
        measured += int(stream.is_given.sum())
    assert measured


def test_the_model_sees_given_tokens_clean_and_references_before_the_stream(
    media: Path, handle: ModelHandle, tiny_pipeline: Path
) -> None:
    given, request = given_for(tiny_pipeline, *in_folder(media, CONDITIONS["several"]))
    state = initial_state(
        request,
        context(0),
        None,
        geometry=GEOMETRY,
        transformer_config={**handle.config, "use_keyframes_abs_pos_embedding": True},
        device=handle.device,
        given=given,
    )
    assert state.video is not None
    assert state.audio is not None
    video, (reference,) = state.video, given.video.references
    assert video.reference_tokens == reference.latent.shape[1] == 16
    assert torch.equal(video.latent[:, :16], reference.latent)
    assert torch.equal(video.positions[:, :, :16], reference.positions)
    assert video.is_generated[0, :16].sum() == 0
    target = video.is_generated[0, 16:].view(SIZE)
    assert target[0].sum() == 0  # first_frame
    assert target[1:, 0].sum() == 0  # spatial_crop
    assert target[1:, 1].min() == 1
    # Each clip's first latent frame comes from a single frame.
    assert video.keyframes_mask is not None
    assert video.keyframes_mask.flatten().tolist() == ([1] * 4 + [0] * 12) * 2
    assert state.audio.reference_tokens == STEPS


def test_a_frozen_stream_is_given_at_noise_level_zero(media: Path, handle: ModelHandle, tiny_pipeline: Path) -> None:
    given, request = given_for(tiny_pipeline, *in_folder(media, CONDITIONS["video_to_audio"]))
    state = initial_state(
        request,
        context(0),
        context(1),
        geometry=GEOMETRY,
        transformer_config=handle.config,
        device=handle.device,
        given=given,
    )
    assert state.video is not None
    assert state.video.is_frozen
    seen: list[tuple[float, float]] = []

    def look(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        assert torch.equal(inputs["video"].latent, given.video.clean)  # type: ignore[arg-type]
        seen.append((float(inputs["video"].timesteps.max()), float(inputs["audio"].sigma)))

    hook = handle.forward_module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        denoise(handle, state, Guidance.of(section()), inference_sigmas(2))
    finally:
        hook.remove()
    assert {video for video, _ in seen} == {0.0}
    assert min(audio for _, audio in seen) > 0


def test_forwards_that_only_another_rank_needs_change_nothing(handle: ModelHandle) -> None:
    state = SampleState(Tokens(torch.randn(1, 4, 128), torch.zeros(1, 3, 4, 2)), None, context(0), negative=context(1))
    guidance = replace(Guidance.of(section()), rescale=0.0).for_streams(video=False, audio=False, both_present=False)
    forwards: list[Any] = []
    hook = handle.forward_module.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        alone, _ = denoise(handle, state, guidance, inference_sigmas(2))
        assert len(forwards) == 2
        together, _ = denoise(handle, state, guidance, inference_sigmas(2), at_least=Forwards(True, True, True))
        assert len(forwards) == 2 + 2 * 4
    finally:
        hook.remove()
    assert torch.equal(alone, together)  # type: ignore[arg-type]


def test_results_show_frozen_streams_and_references(media: Path, handle: ModelHandle, tiny_pipeline: Path) -> None:
    reference = {"type": "reference", "video": "clip.mp4", "downscale_factor": 2, "include_in_output": True}
    spoken = {"type": "reference", "audio": "tone.wav", "include_in_output": True}
    config = ValidationConfig.model_validate(
        {
            **section().model_dump(),
            "samples": [
                {"prompt": "a", "conditions": in_folder(media, [reference, spoken])},
                {"prompt": "a", "conditions": in_folder(media, CONDITIONS["video_to_audio"])},
                {"prompt": "a", "conditions": in_folder(media, CONDITIONS["audio_to_video"])},
            ],
        }
    )
    given = encode_conditions(sample_requests(config), tiny_pipeline, GEOMETRY, ALONE)
    folder = media / "run"
    runner = ValidationRunner(
        config,
        PromptContexts({"a": context(0)}, context(1)),
        model_path=tiny_pipeline,
        geometry=GEOMETRY,
        topology=ALONE,
        sample_path=RunFolder(folder).sample,
        given=given,
    )
    files = runner.run(handle, 7)
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        "step_000007_1.mp4",
        "step_000007_1_reference.wav",
        "step_000007_2.mp4",
        "step_000007_3.mp4",
    ]
    beside = read_video(files[0].path).frames
    assert beside.shape == (25, 64, 128, 3)
    # The reference stands on the left, scaled up; H.264 and two scalings leave a small difference.
    left = beside[:, :, :64].astype(float)
    assert np.abs(left - read_video(media / "clip.mp4").frames[:25]).mean() < 12
    # The given video is decoded into the result: what the VAE makes of its latents.
    vae = load_video_vae(tiny_pipeline, torch.float32)
    assert given[1].video.clean is not None
    pixels = vae.decode(unpatchify_video(given[1].video.clean, *SIZE))[0].add(1).mul(127.5).round().byte()
    write_video(media / "expected.mp4", pixels.permute(1, 2, 3, 0), 24)
    assert np.array_equal(read_video(files[1].path).frames, read_video(media / "expected.mp4").frames)


def test_validation_ends_between_two_denoising_steps_when_asked(
    handle: ModelHandle, tiny_pipeline: Path, tmp_path: Path
) -> None:
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    runner = ValidationRunner(
        ValidationConfig.model_validate({**section().model_dump(), "samples": [{"prompt": "a"}] * 3}),
        PromptContexts({"a": context(0)}, context(1)),
        model_path=tiny_pipeline,
        geometry=GEOMETRY,
        topology=ALONE,
        sample_path=RunFolder(tmp_path).sample,
        should_stop=should_stop,
    )
    assert runner.run(handle, 1) == []
    assert len(asked) == 3  # in the second sample's first step
    assert not (tmp_path / "samples").exists()
    assert len(runner.run(handle, 1)) == 3  # the next validation is whole again
