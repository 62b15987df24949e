"""Where a sample starts: noise of its own, every token in its place, given tokens clean."""

from dataclasses import replace

import torch

from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, video_positions
from ltx_trainer_plus.flow.tokens import Given, Tokens
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.validation.requests import SampleRequest
from ltx_trainer_plus.validation.states import SampleState, initial_state

REQUEST = SampleRequest(index=0, prompt="", width=96, height=64, frames=17, frame_rate=25.0, seed=3)
CONFIG = {"in_channels": 128, "audio_in_channels": 128}
TEXT = TextContext(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))


def state_of(request: SampleRequest, **config: bool) -> SampleState:
    return initial_state(
        request,
        TEXT,
        None,
        geometry=LatentGeometry(),
        transformer_config={**CONFIG, **config},
        device=torch.device("cpu"),
    )


def streams(state: SampleState) -> tuple[Tokens, Tokens]:
    assert state.video is not None
    assert state.audio is not None
    return state.video, state.audio


def test_every_token_has_its_place_and_unit_noise() -> None:
    video, audio = streams(state_of(REQUEST))
    assert video.latent.shape == (1, 3 * 2 * 3, 128)
    assert torch.equal(video.positions, video_positions(3, 2, 3, torch.tensor([25.0]), LatentGeometry()))
    assert audio.latent.shape == (1, 17, 128)
    assert torch.equal(audio.positions, audio_positions(17, LatentGeometry()))
    for latent in (video.latent, audio.latent):
        assert latent.dtype == torch.float32
        assert abs(latent.std().item() - 1) < 0.05


def test_the_noise_is_the_seeds_and_nothing_else_has_a_say_in_it() -> None:
    torch.manual_seed(1)
    first = streams(state_of(REQUEST))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = streams(state_of(replace(REQUEST, index=5, prompt="another")))
    assert torch.equal(torch.get_rng_state(), before)
    audio_alone = state_of(replace(REQUEST, video="absent"))
    assert audio_alone.video is None
    assert audio_alone.audio is not None
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.latent, other.latent)
    assert torch.equal(audio_alone.audio.latent, first[1].latent)


def test_streams_and_seeds_have_different_noise() -> None:
    # 9 frames of 96x64 are 12 tokens; 12 audio steps at 9 / 18.75 seconds: equal shapes, so equality would show.
    request = replace(REQUEST, frames=9, frame_rate=18.75)
    latents = [stream.latent for seed in (0, 1, 2) for stream in streams(state_of(replace(request, seed=seed)))]
    assert {tuple(latent.shape) for latent in latents} == {(1, 12, 128)}
    for index, one in enumerate(latents):
        assert not any(torch.equal(one, other) for other in latents[:index])


def test_the_keyframe_marker_is_on_the_causal_first_frame_of_models_that_use_it() -> None:
    assert streams(state_of(REQUEST))[0].keyframes_mask is None
    mask = streams(state_of(REQUEST, use_keyframes_abs_pos_embedding=True))[0].keyframes_mask
    assert mask is not None
    assert mask.shape == (1, 18, 1)
    assert mask.squeeze().tolist() == [1] * 6 + [0] * 12


def test_given_tokens_are_clean_and_the_others_noise() -> None:
    video, _ = streams(state_of(REQUEST))
    is_given = torch.zeros(1, 18, dtype=torch.bool)
    is_given[:, :6] = True
    clean = torch.full((1, 18, 128), 7.0)
    given = video.with_given(Given(clean, is_given))
    assert torch.equal(given.latent[:, :6], clean[:, :6])
    assert torch.equal(given.latent[:, 6:], video.latent[:, 6:])
    assert torch.equal(given.is_generated, ~is_given)
