"""What the transformer receives and the resulting loss, against the official trainer's numbers."""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ltx_trainer_plus.config.optimization import FlowMatchingConfig
from ltx_trainer_plus.config.strategy import FlexibleConfig
from ltx_trainer_plus.data.batch import Batch, ReferenceClip, TextFeatures
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.modality import Modality, TextContext
from ltx_trainer_plus.strategies.draws import Draws, StreamDraws
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy, StreamInputs
from ltx_trainer_plus.strategies.loss import training_loss

MODES = [
    "t2v_av",
    "t2v_video_only",
    "t2a",
    "i2v",
    "extend_prefix",
    "extend_suffix",
    "outpaint",
    "inpaint",
    "a2v",
    "v2a",
    "v2v_ic",
    "av2av_ic",
]
TOLERANCE = {"rtol": 0, "atol": 1e-6}  # float32 rounding of numbers of order 1


@pytest.fixture(scope="module")
def official(reference: Path) -> dict[str, Tensor]:
    return load_file(reference / "strategies.safetensors")


def strategy_of(mode: str, reference: Path, **options: Any) -> FlexibleStrategy:
    return made_of(json.loads((reference / "strategies.json").read_text())[mode], **options)


def made_of(body: dict[str, Any], **options: Any) -> FlexibleStrategy:
    config = FlexibleConfig.model_validate({"name": "flexible", **body})
    return FlexibleStrategy(config.video, config.audio, LatentGeometry(), FlowMatchingConfig(), **options)


def official_batch(official: dict[str, Tensor]) -> Batch:
    return Batch(
        names=("a", "b"),
        ordinals=(0, 1),
        text=TextFeatures("context", official["video_context"], official["audio_context"]),
        video_latent=official["video_latents"],
        fps=torch.tensor([24.0, 24.0]),
        audio_latent=official["audio_latents"],
        masks={folder: official[folder] for folder in ("video_masks", "audio_masks")},
        references={
            "reference_latents": ReferenceClip(official["reference_latents"], torch.tensor([24.0, 24.0])),
            "reference_audio_latents": ReferenceClip(official["reference_audio_latents"]),
        },
    )


def official_draws(official: dict[str, Tensor], strategy: FlexibleStrategy) -> Draws:
    """The official noise and sigmas; conditions as they are drawn here, each with probability 1."""
    draws = strategy.draw(official_batch(official), seed=0)

    def officially(stream: str) -> StreamDraws | None:
        drawn: StreamDraws | None = getattr(draws, stream)
        return drawn and replace(drawn, sigma=official[f"{stream}_sigma"], noise=official[f"{stream}_noise"])

    return Draws(officially("video"), officially("audio"))


def assert_stream_equals(ours: Modality | None, official: dict[str, Tensor], prefix: str) -> None:
    if f"{prefix}.latent" not in official:
        assert ours is None
        return
    assert ours is not None
    for name in ("latent", "sigma", "positions"):
        torch.testing.assert_close(getattr(ours, name), official[f"{prefix}.{name}"], **TOLERANCE)
    timesteps = official[f"{prefix}.timesteps"]
    torch.testing.assert_close(ours.timesteps.expand_as(timesteps), timesteps, **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_the_transformer_receives_the_official_inputs(mode: str, official: dict[str, Tensor], reference: Path) -> None:
    strategy = strategy_of(mode, reference)
    context = TextContext(official["video_context"], official["audio_context"])
    inputs = strategy.prepare(official_batch(official), official_draws(official, strategy), context)

    for stream in ("video", "audio"):
        ours: StreamInputs | None = getattr(inputs, stream)
        assert_stream_equals(ours and ours.modality, official, f"{mode}.{stream}")
        target, mask = (ours.target, ours.loss_mask) if ours else (None, None)
        if f"{mode}.{stream}.targets" in official:
            torch.testing.assert_close(target, official[f"{mode}.{stream}.targets"], **TOLERANCE)
            torch.testing.assert_close(mask, official[f"{mode}.{stream}.loss_mask"], **TOLERANCE)
        else:
            assert target is None
            assert mask is None
        if ours is not None:
            assert torch.equal(ours.modality.context, official[f"{stream}_context"])


def test_a_reference_of_half_the_size_and_half_the_rate_lies_where_the_official_one_does(reference: Path) -> None:
    official = load_file(reference / "strategy_temporal_reference.safetensors")
    strategy = made_of({"video": {"conditions": [{"type": "reference", "latents_dir": "reference_latents"}]}})
    zeros = torch.zeros(2, 5, 4)
    batch = Batch(
        names=("a", "b"),
        ordinals=(0, 1),
        text=TextFeatures("context", zeros, zeros),
        video_latent=official["video_latents"],
        fps=torch.tensor([24.0, 24.0]),
        references={"reference_latents": ReferenceClip(official["reference_latents"], torch.tensor([12.0, 12.0]))},
    )
    drawn = strategy.draw(batch, 0).video
    assert drawn is not None
    draws = Draws(replace(drawn, sigma=official["video_sigma"], noise=official["video_noise"]))
    inputs = strategy.prepare(batch, draws, TextContext(zeros, zeros))
    assert inputs.video is not None
    for name in ("latent", "timesteps", "positions"):
        torch.testing.assert_close(getattr(inputs.video.modality, name), official[f"video.{name}"], **TOLERANCE)
    torch.testing.assert_close(inputs.video.target, official["video.targets"], **TOLERANCE)
    torch.testing.assert_close(inputs.video.loss_mask, official["video.loss_mask"], **TOLERANCE)
    losses = training_loss(inputs, official["video.prediction"], None)
    torch.testing.assert_close(losses.total, official["loss"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_the_official_one(mode: str, official: dict[str, Tensor], reference: Path) -> None:
    strategy = strategy_of(mode, reference)
    context = TextContext(official["video_context"], official["audio_context"])
    inputs = strategy.prepare(official_batch(official), official_draws(official, strategy), context)
    losses = training_loss(inputs, official.get(f"{mode}.video.prediction"), official.get(f"{mode}.audio.prediction"))
    # The mean over thousands of squares of order 1 rounds at a few 1e-7 of its value, which is about 4.
    torch.testing.assert_close(losses.total, official[f"{mode}.loss"], rtol=1e-6, atol=1e-6)
    parts = [part for part in (losses.video, losses.audio) if part is not None]
    assert len(parts) == sum(f"{mode}.{stream}.targets" in official for stream in ("video", "audio"))
    torch.testing.assert_close(torch.stack(parts).sum(0), losses.total)


def test_keyframe_tokens_are_those_of_the_causal_first_frame(official: dict[str, Tensor], reference: Path) -> None:
    context = TextContext(official["video_context"], official["audio_context"])
    batch = official_batch(official)
    for uses_keyframes in (True, False):
        strategy = strategy_of("t2v_av", reference, uses_keyframes=uses_keyframes)
        inputs = strategy.prepare(batch, official_draws(official, strategy), context)
        assert inputs.audio is not None
        assert inputs.audio.modality.keyframes_mask is None
        assert inputs.video is not None
        marks = inputs.video.modality.keyframes_mask
        if not uses_keyframes:
            assert marks is None
            continue
        assert marks is not None
        starts_at_zero = inputs.video.modality.positions[:, 0, :, 0] == 0
        assert torch.equal(marks[..., 0], starts_at_zero.float())  # 2 × 4 of 24 tokens
        assert marks.sum() == 16
    # The 2.5 reference marks the same tokens.
    io = load_file(reference / "ltx-2.5-tiny-io.safetensors")
    assert torch.equal(io["video_keyframes_mask"][..., 0], (io["video_positions"][:, 0, :, 0] == 0).float())


def test_draws_are_keyed_by_stream_position_and_not_by_batch(official: dict[str, Tensor], reference: Path) -> None:
    strategy = strategy_of("t2v_av", reference)
    whole = official_batch(official)
    together = strategy.draw(whole, seed=7)
    again = strategy.draw(whole, seed=7)
    assert together.video is not None
    assert together.audio is not None
    for name in ("video.sigma", "video.noise", "audio.sigma", "audio.noise"):
        value = attrgetter(name)
        drawn = value(together)
        assert torch.equal(drawn, value(again))
        assert not torch.equal(drawn[0], drawn[1])
        for row in (0, 1):  # each sample alone, as on another rank
            single = Batch(
                names=whole.names[row : row + 1],
                ordinals=whole.ordinals[row : row + 1],
                text=whole.text,
                video_latent=official["video_latents"][row : row + 1],
                audio_latent=official["audio_latents"][row : row + 1],
            )
            assert torch.equal(value(strategy.draw(single, seed=7))[0], drawn[row])
        assert not torch.equal(value(strategy.draw(whole, seed=8)), drawn)
    assert not torch.equal(together.video.noise[0, :9], together.audio.noise[0])
    assert abs(together.video.noise.std().item() - 1) < 0.05


def test_frozen_and_absent_streams_draw_nothing(official: dict[str, Tensor], reference: Path) -> None:
    batch = official_batch(official)
    a2v = strategy_of("a2v", reference).draw(batch, seed=0)
    assert a2v.video is not None
    assert a2v.audio is None
    t2v = strategy_of("t2v_av", reference).draw(batch, seed=0)
    assert t2v.video is not None
    assert torch.equal(a2v.video.noise, t2v.video.noise)  # what the other stream does changes nothing
    assert strategy_of("t2a", reference).draw(batch, seed=0).video is None


def test_sigma_leans_to_noise_with_the_stream_s_own_token_count(official: dict[str, Tensor], reference: Path) -> None:
    strategy = strategy_of("t2v_av", reference)
    small, large = torch.zeros(1, 1, 1, 1, 1), torch.zeros(1, 1, 8, 32, 32)
    batch = official_batch(official)

    def mean_sigmas(latent: Tensor) -> tuple[float, float]:
        ordinals = tuple(range(400))
        many = Batch(batch.names, ordinals, batch.text, latent, audio_latent=torch.zeros(1, 1, 9, 1))
        draws = strategy.draw(many, seed=0)
        assert draws.video is not None
        assert draws.audio is not None
        return draws.video.sigma.mean().item(), draws.audio.sigma.mean().item()

    video_small, audio_small = mean_sigmas(small)
    video_large, audio_large = mean_sigmas(large)
    assert video_large > video_small + 0.15
    assert audio_large == audio_small


def test_preparing_changes_nothing_it_was_lent(official: dict[str, Tensor], reference: Path) -> None:
    strategy = strategy_of("t2v_av", reference)
    batch, draws = official_batch(official), official_draws(official, strategy)
    before = {name: tensor.clone() for name, tensor in official.items()}
    strategy.prepare(batch, draws, TextContext(official["video_context"], official["audio_context"]))
    assert all(torch.equal(official[name], tensor) for name, tensor in before.items())


def test_a_batch_without_the_latents_that_the_run_needs_is_an_error(
    official: dict[str, Tensor], reference: Path
) -> None:
    text = TextFeatures("context", official["video_context"], official["audio_context"])
    batch = Batch(("a", "b"), (0, 1), text, official["video_latents"], torch.tensor([24.0, 24.0]))
    with pytest.raises(ValueError, match=r"training_strategy\.audio\.latents_dir"):
        strategy_of("t2v_av", reference).draw(batch, seed=0)
