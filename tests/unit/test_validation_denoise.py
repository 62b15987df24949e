"""The denoising loop: which forwards it runs, what each stream takes from them, and what it leaves alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ltx_trainer_plus import Modality, ModelHandle, Perturbations
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.schedule import inference_sigmas
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.validation.denoise import Guidance, StreamGuidance, denoise
from ltx_trainer_plus.validation.requests import SampleRequest
from ltx_trainer_plus.validation.states import SampleState, initial_state

REQUEST = SampleRequest(index=0, prompt="", width=64, height=64, frames=9, frame_rate=24.0, seed=3)
STRONG = StreamGuidance(cfg_scale=3, stg_scale=1, modality_scale=3)
EVERYTHING = Guidance(video=STRONG, audio=STRONG, stg_blocks=(1,), rescale=0.7)
NOTHING = Guidance(video=StreamGuidance(), audio=StreamGuidance())
SIGMAS = inference_sigmas(2)


class Recorder(nn.Module):
    """A wrapper, as a launch would put around the model, that notes how it is called."""

    def __init__(self, model: LTXTransformer) -> None:
        super().__init__()
        self.model = model
        self.calls: list[tuple[Modality | None, Modality | None, Perturbations | None]] = []

    def forward(
        self, video: Modality | None, audio: Modality | None, perturbations: Perturbations | None
    ) -> tuple[Tensor | None, Tensor | None]:
        self.calls.append((video, audio, perturbations))
        return self.model(video=video, audio=audio, perturbations=perturbations)


@pytest.fixture(scope="module")
def model(reference: Path) -> LTXTransformer:
    return load_transformer(reference / "ltx-2.3-tiny.safetensors", dtype=torch.float32)


@pytest.fixture
def recorder(model: LTXTransformer) -> Iterator[Recorder]:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    yield Recorder(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.fixture
def handle(recorder: Recorder) -> ModelHandle:
    return ModelHandle(forward_module=recorder, meta_module=recorder.model)


@pytest.fixture
def state(model: LTXTransformer) -> SampleState:
    def text(seed: int) -> TextContext:
        generator = torch.Generator().manual_seed(seed)
        width = model.config["cross_attention_dim"], model.config["audio_cross_attention_dim"]
        return TextContext(*(torch.randn(1, 7, size, generator=generator) for size in width))

    return initial_state(
        REQUEST,
        text(0),
        text(1),
        geometry=LatentGeometry(),
        transformer_config=model.config,
        device=torch.device("cpu"),
    )


def different(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return not torch.equal(one, other)


def test_each_guidance_term_is_one_forward_through_the_wrapper(
    handle: ModelHandle, recorder: Recorder, state: SampleState
) -> None:
    denoise(handle, state, EVERYTHING, SIGMAS)
    every = frozenset(range(3))
    per_step = [
        None,
        None,
        Perturbations(video_self=frozenset({1}), audio_self=frozenset({1})),
        Perturbations(audio_to_video=every, video_to_audio=every),
    ]
    assert [call[2] for call in recorder.calls] == per_step * 2
    texts = [call[0].context for call in recorder.calls[:4] if call[0] is not None]
    assert state.negative is not None
    expected = [state.positive.video, state.negative.video, state.positive.video, state.positive.video]
    assert all(torch.equal(text, wanted) for text, wanted in zip(texts, expected, strict=True))


def test_neutral_guidance_is_one_forward_per_step_and_needs_no_negative_text(
    handle: ModelHandle, recorder: Recorder, state: SampleState
) -> None:
    steps: list[int] = []
    denoise(handle, replace(state, negative=None), replace(NOTHING, rescale=0.7), SIGMAS, steps.append)
    assert len(recorder.calls) == 2
    assert steps == [1, 2]


def test_cfg_without_a_negative_text_is_refused(handle: ModelHandle, state: SampleState) -> None:
    with pytest.raises(ValueError, match=r"CFG is on \(video 3, audio 3\) but the sample has no negative text"):
        denoise(handle, replace(state, negative=None), EVERYTHING, SIGMAS)


def test_stg_of_one_stream_skips_only_its_own_self_attention(
    handle: ModelHandle, recorder: Recorder, state: SampleState
) -> None:
    only_video = replace(NOTHING, video=StreamGuidance(stg_scale=1), stg_blocks=None)
    denoise(handle, state, only_video, SIGMAS)
    assert recorder.calls[1][2] == Perturbations(video_self=frozenset(range(3)))


def test_a_term_that_one_stream_asks_for_is_combined_only_there(handle: ModelHandle, state: SampleState) -> None:
    one_step = inference_sigmas(1)  # in later steps the streams see each other's result
    plain = denoise(handle, state, NOTHING, one_step)
    for term in ({"cfg_scale": 3.0}, {"stg_scale": 1.0}, {"modality_scale": 3.0}):
        guided = denoise(handle, state, replace(NOTHING, audio=StreamGuidance(**term), rescale=0.7), one_step)
        assert guided[0] is not None
        assert plain[0] is not None
        assert torch.equal(guided[0], plain[0]), term
        assert different(guided[1], plain[1]), term


def test_a_stream_alone_runs_no_isolated_forward(handle: ModelHandle, recorder: Recorder, state: SampleState) -> None:
    video, audio = denoise(handle, replace(state, video=None), EVERYTHING, SIGMAS)
    assert video is None
    assert audio is not None
    assert [call[2] for call in recorder.calls] == [None, None, Perturbations(audio_self=frozenset({1}))] * 2


def test_a_frozen_stream_is_clean_unguided_and_returned_as_it_was(
    handle: ModelHandle, recorder: Recorder, state: SampleState
) -> None:
    assert state.audio is not None
    frozen = replace(state, audio=replace(state.audio, is_frozen=True))
    video, audio = denoise(handle, frozen, EVERYTHING, SIGMAS)
    assert audio is not None
    assert torch.equal(audio, state.audio.latent)
    assert video is not None
    # The video is still steered away from not hearing the sound.
    assert len(recorder.calls) == 8
    for _, given, perturbations in recorder.calls:
        assert given is not None
        assert not given.sigma.any()
        assert not given.timesteps.any()
        assert perturbations is None or not perturbations.audio_self


def test_a_bfloat16_model_is_given_bfloat16_and_the_sampler_keeps_float32(reference: Path, state: SampleState) -> None:
    recorder = Recorder(load_transformer(reference / "ltx-2.3-tiny.safetensors", dtype=torch.bfloat16))
    handle = ModelHandle(forward_module=recorder, meta_module=recorder.model)
    video, audio = denoise(handle, state, EVERYTHING, SIGMAS)
    assert video is not None
    assert audio is not None
    assert video.dtype == audio.dtype == torch.float32
    assert video.isfinite().all()
    # Rounded to bfloat16 between the steps it would stay so.
    assert different(video, video.bfloat16().float())
    for given in recorder.calls[-1][:2]:
        assert given is not None
        assert given.latent.dtype == given.context.dtype == torch.bfloat16
        assert given.sigma.dtype == given.positions.dtype == torch.float32


def test_no_graph_is_kept_and_the_state_stays_as_it_was(handle: ModelHandle, state: SampleState) -> None:
    assert state.video is not None
    before = state.video.latent.clone()
    video, _ = denoise(handle, state, EVERYTHING, SIGMAS)
    assert video is not None
    assert not video.requires_grad
    assert not video.is_inference()
    assert torch.equal(state.video.latent, before)
