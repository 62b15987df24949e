"""The masked velocity loss."""

import pytest
import torch

from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.strategies.flexible import ModelInputs, StreamInputs
from ltx_trainer_plus.strategies.loss import stream_loss, training_loss


def learnt(samples: int, tokens: int) -> StreamInputs:
    """A stream whose target is 0 everywhere."""
    latent = torch.zeros(samples, tokens, 3)
    modality = Modality(latent, latent[:, 0, 0], latent[..., 0], latent, latent)
    return StreamInputs(modality, target=latent, loss_mask=torch.ones(samples, tokens))


def test_only_tokens_in_the_mask_count() -> None:
    target = torch.zeros(1, 4, 3)
    prediction = torch.tensor([1.0, 2.0, 100.0, 100.0]).view(1, 4, 1).expand(1, 4, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    assert stream_loss(prediction, target, mask).tolist() == [2.5]
    assert stream_loss(prediction, target, mask.bool()).tolist() == [2.5]


def test_a_sample_that_is_all_clean_has_loss_zero_and_zero_gradient() -> None:
    prediction = torch.randn(2, 4, 3, requires_grad=True)
    mask = torch.tensor([[0.0] * 4, [1.0] * 4])
    loss = stream_loss(prediction, torch.zeros(2, 4, 3), mask)
    assert loss[0] == 0
    assert loss[1] > 0
    loss.sum().backward()
    assert prediction.grad is not None
    assert prediction.grad[0].abs().max() == 0
    assert prediction.grad[1].abs().min() > 0


def test_the_loss_is_float32_whatever_the_prediction_is() -> None:
    prediction, target = torch.randn(2, 4, 3).bfloat16(), torch.randn(2, 4, 3)
    loss = stream_loss(prediction, target, torch.ones(2, 4))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, (prediction.float() - target).square().mean((1, 2)))


def test_streams_are_added_and_reported_apart() -> None:
    inputs = ModelInputs(video=learnt(2, 4), audio=learnt(2, 5))
    losses = training_loss(inputs, torch.full((2, 4, 3), 2.0), torch.full((2, 5, 3), 3.0))
    assert losses.video is not None
    assert losses.audio is not None
    assert (losses.video.tolist(), losses.audio.tolist(), losses.total.tolist()) == ([4, 4], [9, 9], [13, 13])
    assert inputs.target_tokens == 2 * 4 + 2 * 5


def test_a_stream_without_a_target_is_out_of_the_loss() -> None:
    inputs = ModelInputs(video=learnt(1, 4), audio=StreamInputs(learnt(1, 5).modality))
    losses = training_loss(inputs, torch.full((1, 4, 3), 2.0), torch.full((1, 5, 3), 3.0))
    assert losses.audio is None
    assert losses.total.tolist() == [4]


def test_a_missing_prediction_is_named() -> None:
    inputs = ModelInputs(video=learnt(1, 4))
    with pytest.raises(ValueError, match="no video velocity"):
        training_loss(inputs, None, None)
    with pytest.raises(ValueError, match="neither video nor audio is generated"):
        training_loss(ModelInputs(), None, None)
