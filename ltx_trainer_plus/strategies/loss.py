"""The training loss: masked velocity error of each stream and sample."""

from dataclasses import dataclass

from torch import Tensor

from ltx_trainer_plus.strategies.flexible import ModelInputs, StreamInputs


@dataclass(frozen=True)
class Losses:
    """Loss of every sample, float32.

    Attributes:
        total: (B,) sum over the streams that are generated.
        video, audio: (B,) each stream's part; None where it is not generated.
    """

    total: Tensor
    video: Tensor | None
    audio: Tensor | None


def stream_loss(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked squared error ÷ mean of the mask, for every sample.

    Args:
        prediction: (B, R + T, C) velocity of the R tokens of references, if any, then of the target.
        target: (B, T, C) velocity.
        mask: (B, R + T), 1 = in the loss, 0 = clean conditioning; 0 on references.

    Returns:
        (B,) float32; 0 for a sample whose tokens are all clean.
    """
    tokens = target.shape[1]
    error = (prediction[:, -tokens:].float() - target.float()).square().mean(dim=-1)  # (B, T)
    mask = mask[:, -tokens:].float()
    return (error * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def training_loss(inputs: ModelInputs, video_velocity: Tensor | None, audio_velocity: Tensor | None) -> Losses:
    """Losses of a batch; samples are not averaged yet.

    Raises:
        ValueError: the transformer gave no prediction for a stream that is generated, or no stream is.
    """
    video = _loss("video", video_velocity, inputs.video)
    audio = _loss("audio", audio_velocity, inputs.audio)
    parts = [part for part in (video, audio) if part is not None]
    if not parts:
        raise ValueError(
            "training_strategy: neither video nor audio is generated, so there is no loss. "
            "Set is_generated: true for one of them."
        )
    return Losses(total=sum(parts[1:], start=parts[0]), video=video, audio=audio)


def _loss(name: str, velocity: Tensor | None, stream: StreamInputs | None) -> Tensor | None:
    if stream is None or stream.target is None or stream.loss_mask is None:
        return None
    if velocity is None:
        raise ValueError(f"the transformer returned no {name} velocity although {name} is generated.")
    return stream_loss(velocity, stream.target, stream.loss_mask)
