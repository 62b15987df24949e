"""Whole denoising runs give the official implementation's latents."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ltx_trainer_plus import ModelHandle
from ltx_trainer_plus.flow.schedule import inference_sigmas
from ltx_trainer_plus.flow.tokens import Given, Tokens
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models import load_transformer
from ltx_trainer_plus.validation.denoise import Guidance, StreamGuidance, denoise
from ltx_trainer_plus.validation.states import SampleState

# Sixteen float32 forwards of random weights; guidance multiplies their rounding by about ten.
TOLERANCE = 1e-5
GIVEN_TOKENS = 6

GUIDANCE = Guidance(
    video=StreamGuidance(cfg_scale=3, stg_scale=1, modality_scale=3),
    audio=StreamGuidance(cfg_scale=7, stg_scale=1, modality_scale=3),
    stg_blocks=(1,),
    rescale=0.7,
)


@pytest.fixture(scope="module")
def loop(reference: Path) -> dict[str, Tensor]:
    tensors = load_file(reference / "sampling.safetensors")
    return {name.removeprefix("loop."): tensor for name, tensor in tensors.items() if name.startswith("loop.")}


@pytest.fixture(scope="module")
def handle(reference: Path) -> ModelHandle:
    return ModelHandle.of(load_transformer(reference / "ltx-2.3-tiny.safetensors", dtype=torch.float32))


def _state(loop: dict[str, Tensor]) -> SampleState:
    return SampleState(
        video=Tokens(loop["video_init"], loop["video_positions"]),
        audio=Tokens(loop["audio_init"], loop["audio_positions"]),
        positive=TextContext(loop["video_context"], loop["audio_context"]),
        negative=TextContext(loop["video_context_negative"], loop["audio_context_negative"]),
    )


def _assert_close(result: Tensor | None, expected: Tensor) -> None:
    assert result is not None
    torch.testing.assert_close(result, expected, atol=TOLERANCE, rtol=0)


def test_audio_and_video_together(handle: ModelHandle, loop: dict[str, Tensor]) -> None:
    video, audio = denoise(handle, _state(loop), GUIDANCE, inference_sigmas(4))
    _assert_close(video, loop["out.av.video"])
    _assert_close(audio, loop["out.av.audio"])


def test_a_video_alone_uses_neutral_modality_guidance(handle: ModelHandle, loop: dict[str, Tensor]) -> None:
    state = _state(loop)
    video, audio = denoise(
        handle, SampleState(state.video, None, state.positive, state.negative), GUIDANCE, inference_sigmas(4)
    )
    _assert_close(video, loop["out.video_only.video"])
    assert audio is None


def test_a_given_first_frame_stays_as_it_is(handle: ModelHandle, loop: dict[str, Tensor]) -> None:
    state = _state(loop)
    assert state.video is not None
    is_given = torch.zeros(1, loop["video_init"].shape[1], dtype=torch.bool)
    is_given[:, :GIVEN_TOKENS] = True
    given = state.video.with_given(Given(loop["video_clean"], is_given))
    video, audio = denoise(
        handle, SampleState(given, state.audio, state.positive, state.negative), GUIDANCE, inference_sigmas(4)
    )
    _assert_close(video, loop["out.first_frame.video"])
    _assert_close(audio, loop["out.first_frame.audio"])
    assert video is not None
    assert torch.equal(video[:, :GIVEN_TOKENS], loop["video_clean"][:, :GIVEN_TOKENS])
