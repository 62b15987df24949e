"""Conditions of training: which tokens are given, and that nothing else depends on them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ltx_trainer_plus.config.optimization import FlowMatchingConfig
from ltx_trainer_plus.config.strategy import FlexibleConfig
from ltx_trainer_plus.data.batch import Batch, ReferenceClip, TextFeatures
from ltx_trainer_plus.flow.positions import LatentGeometry, patchify_video
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.modality import Modality, TextContext
from ltx_trainer_plus.strategies.draws import StreamDraws
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy, ModelInputs
from ltx_trainer_plus.strategies.loss import training_loss

F, H, W, STEPS = 4, 2, 3, 6
TEXT = torch.zeros(2, 5, 4)


def strategy(video: list[dict[str, Any]] | None = None, audio: list[dict[str, Any]] | None = None, **options: Any):
    body = {"video": {"conditions": video or []}, "audio": {"conditions": audio or []}}
    config = FlexibleConfig.model_validate({"name": "flexible", **body})
    return FlexibleStrategy(config.video, config.audio, LatentGeometry(), FlowMatchingConfig(), **options)


def batch(ordinals: tuple[int, ...] = (0, 1), **options: Any) -> Batch:
    generator = torch.Generator().manual_seed(0)
    size = len(ordinals)
    return Batch(
        names=tuple(map(str, ordinals)),
        ordinals=ordinals,
        text=TextFeatures("context", TEXT[:size], TEXT[:size]),
        video_latent=torch.randn(size, 8, F, H, W, generator=generator),
        fps=torch.full((size,), 24.0),
        audio_latent=torch.randn(size, 8, STEPS, 16, generator=generator),
        **options,
    )


def drawn_video(made: FlexibleStrategy, data: Batch, seed: int) -> StreamDraws:
    drawn = made.draw(data, seed).video
    assert drawn is not None
    return drawn


def prepared(made: FlexibleStrategy, data: Batch, seed: int = 0) -> ModelInputs:
    return made.prepare(data, made.draw(data, seed), TextContext(TEXT[: len(data)], TEXT[: len(data)]))


def video_of(inputs: ModelInputs) -> tuple[Modality, Tensor, Tensor]:
    """The video that is generated: the transformer's, the target and the loss mask."""
    assert inputs.video is not None
    assert inputs.video.target is not None
    assert inputs.video.loss_mask is not None
    return inputs.video.modality, inputs.video.target, inputs.video.loss_mask


def given_video(inputs: ModelInputs) -> Tensor:
    """(B, F, H, W): 1 where the video is given."""
    return (1 - video_of(inputs)[2]).unflatten(1, (F, H, W))


def frames(*numbers: int) -> Tensor:
    expected = torch.zeros(2, F, H, W)
    expected[:, list(numbers)] = 1
    return expected


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"type": "first_frame"}, frames(0)),
        ({"type": "prefix", "temporal_boundary": 2}, frames(0, 1)),
        ({"type": "suffix", "temporal_boundary": 3}, frames(1, 2, 3)),
    ],
)
def test_given_tokens_are_clean_at_level_0_and_out_of_the_loss(condition: dict[str, Any], expected: Tensor) -> None:
    data = batch()
    inputs = prepared(strategy([condition]), data)
    video, _, _ = video_of(inputs)
    assert torch.equal(given_video(inputs), expected)
    is_given = expected.flatten(1).bool()
    assert data.video_latent is not None
    clean = patchify_video(data.video_latent)
    assert torch.equal(video.latent[is_given], clean[is_given])
    assert not torch.isclose(video.latent[~is_given], clean[~is_given]).all(dim=-1).any()
    levels = video.sigma.view(-1, 1).expand_as(video.timesteps)
    assert torch.equal(video.timesteps, torch.where(is_given, 0.0, levels))


def test_a_crop_gives_the_tokens_that_lie_in_it_as_a_whole() -> None:
    aligned = given_video(prepared(strategy([{"type": "spatial_crop", "spatial_region": [32, 0, 64, 64]}]), batch()))
    expected = torch.zeros(2, F, H, W)
    expected[:, :, 1, :2] = 1
    assert torch.equal(aligned, expected)
    uneven = given_video(prepared(strategy([{"type": "spatial_crop", "spatial_region": [20, 0, 64, 95]}]), batch()))
    assert torch.equal(uneven, expected)


def test_a_mask_gives_what_it_marks_with_more_than_a_half() -> None:
    mask = torch.linspace(0, 1, F * H * W).expand(2, -1).unflatten(1, (F, H, W))
    inputs = prepared(strategy([{"type": "mask", "mask_dir": "m"}]), batch(masks={"m": mask}))
    assert torch.equal(given_video(inputs), (mask > 0.5).float())


def test_conditions_add_up() -> None:
    both = [{"type": "first_frame"}, {"type": "suffix", "temporal_boundary": 1}]
    assert torch.equal(given_video(prepared(strategy(both), batch())), frames(0, 3))


def test_a_sample_that_is_given_as_a_whole_has_no_loss_and_its_neighbour_its_own() -> None:
    mask = torch.ones(2, F, H, W)
    mask[1, 0] = 0
    inputs = prepared(strategy([{"type": "mask", "mask_dir": "m"}]), batch(masks={"m": mask}))
    _, target, _ = video_of(inputs)
    assert inputs.audio is not None
    losses = training_loss(inputs, target + 1, inputs.audio.target)
    torch.testing.assert_close(losses.total, torch.tensor([0.0, 1.0]))


def test_a_probability_is_drawn_for_each_sample_and_condition_apart() -> None:
    made = strategy(
        [{"type": "first_frame", "probability": 0.25}, {"type": "suffix", "temporal_boundary": 1, "probability": 0.75}]
    )
    given = drawn_video(made, batch(tuple(range(600))), 3).conditions
    first, last = given.float().mean(dim=0).tolist()
    assert first == pytest.approx(0.25, abs=0.05)
    assert last == pytest.approx(0.75, abs=0.05)
    both = (given[:, 0] & given[:, 1]).float().mean().item()
    assert both == pytest.approx(0.25 * 0.75, abs=0.05)
    never = strategy([{"type": "first_frame", "probability": 0.0}])
    assert not drawn_video(never, batch(tuple(range(50))), 3).conditions.any()


def test_draws_do_not_depend_on_the_batch_nor_on_other_conditions() -> None:
    first = {"type": "first_frame", "probability": 0.5}
    reference = {"type": "reference", "latents_dir": "r", "probability": 0.5}
    made = strategy([first])
    together = made.draw(batch(tuple(range(20))), seed=5)
    conditions = drawn_video(made, batch(tuple(range(20))), 5).conditions
    for position in (0, 7, 19):
        alone = drawn_video(made, batch((position,)), 5)
        assert torch.equal(alone.conditions[0], conditions[position])
    more = strategy(
        [reference, first, {"type": "prefix", "temporal_boundary": 1}],
        [first | {"type": "prefix", "temporal_boundary": 2}],
        shape_group=20,
    )
    drawn = more.draw(batch(tuple(range(20))), seed=5)
    assert drawn.video is not None
    assert drawn.audio is not None
    assert torch.equal(drawn.video.conditions[:, 0], conditions[:, 0])
    for stream, other in ((drawn.video, together.video), (drawn.audio, together.audio)):
        assert other is not None
        assert torch.equal(stream.sigma, other.sigma)
        assert torch.equal(stream.noise, other.noise)
    assert not torch.equal(drawn.audio.conditions[:, 0], drawn.video.conditions[:, 0])


def test_a_reference_is_drawn_once_for_a_group_and_alike_in_any_batch() -> None:
    reference = {"type": "reference", "latents_dir": "r", "probability": 0.5}
    made = strategy([reference], [reference | {"latents_dir": "a"}], shape_group=4)
    keys = [made.sequence_key(position, 1) for position in range(400)]
    groups = [keys[i : i + 4] for i in range(0, 400, 4)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len(set(keys)) == 4  # either, both, none
    assert sum(key[0] for key in keys) / 400 == pytest.approx(0.5, abs=0.15)
    assert [made.sequence_key(position, 2) for position in range(400)] != keys
    start = 4 * next(i for i in range(99) if groups[i][0] != groups[i + 1][0])
    with pytest.raises(ValueError, match="draw different references"):
        made.draw(batch(tuple(range(start, start + 8))), seed=1)
    draws = made.draw(batch((start + 1, start + 2)), seed=1)
    assert draws.video is not None
    assert draws.audio is not None
    assert draws.video.references + draws.audio.references == keys[start]


def test_references_come_before_the_target_in_the_order_of_the_run_file() -> None:
    fps = torch.full((2,), 24.0)
    clips = {
        "same": ReferenceClip(torch.full((2, 8, F, 2, 2), 2.0), fps),
        "small": ReferenceClip(torch.full((2, 8, F, 1, 1), 1.0), fps),
    }
    data = replace(batch(references=clips), video_latent=torch.zeros(2, 8, F, 2, 2))
    conditions = [{"type": "reference", "latents_dir": "small"}, {"type": "reference", "latents_dir": "same"}]
    inputs = prepared(strategy([*conditions, {"type": "first_frame"}], uses_keyframes=True), data)
    video, velocity, loss_mask = video_of(inputs)
    small, same, target = video.latent.split([F, F * 4, F * 4], dim=1)
    assert small.eq(1).all()
    assert same.eq(2).all()
    assert target[:, :4].eq(0).all()
    assert velocity.shape[1] == F * 4
    assert loss_mask.sum(dim=1).tolist() == [12.0, 12.0]
    # The first latent frame of every clip is one pixel frame; those of the references lie where the target's do.
    marks = video.keyframes_mask
    assert marks is not None
    assert marks[0, :, 0].nonzero().flatten().tolist() == [0, *range(4, 8), *range(20, 24)]
    assert torch.equal(video.positions[:, :, 4:20], video.positions[:, :, 20:])


def test_a_run_without_conditions_keeps_one_level_for_all_tokens() -> None:
    assert video_of(prepared(strategy(), batch()))[0].timesteps.shape == (2, 1)
    with_condition = strategy([{"type": "first_frame", "probability": 0.0}])
    assert video_of(prepared(with_condition, batch()))[0].timesteps.shape == (2, F * H * W)


@pytest.mark.parametrize(
    ("target", "reference", "scale"),
    [
        ((5, 4, 8), (5, 4, 8), ReferenceScale(1, 1)),
        ((5, 4, 8), (5, 2, 4), ReferenceScale(2, 1)),
        ((5, 4, 8), (3, 4, 8), ReferenceScale(1, 2)),
        ((5, 4, 8), (2, 1, 2), ReferenceScale(4, 4)),
        ((5, 4, 8), (1, 2, 4), ReferenceScale(2, 1)),  # a still picture
        ((1, 4, 8), (1, 4, 8), ReferenceScale(1, 1)),
    ],
)
def test_the_scale_of_a_reference(target, reference, scale) -> None:
    assert ReferenceScale.between(target, reference) == scale
    assert ReferenceScale.from_metadata({"step": "3", **scale.as_metadata()}) == scale


def test_metadata_leaves_factor_1_out_and_contradictions_are_refused() -> None:
    assert ReferenceScale().as_metadata() == {}
    assert ReferenceScale(1, 2).as_metadata() == {"reference_temporal_scale_factor": "2"}
    assert ReferenceScale.from_metadata({"reference_downscale_factor": "2"}) == ReferenceScale(2, 1)
    with pytest.raises(ValueError, match="disagree"):
        ReferenceScale.from_metadata({"reference_downscale_factor": "2", "reference_spatial_scale_factor": "4"})
    with pytest.raises(ValueError, match=r"'1\.5', not a whole number"):
        ReferenceScale.from_metadata({"reference_downscale_factor": "1.5"})
