"""Which parameters a run's loss can reach."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.models.loading import transformer_on_meta

StreamRole = Literal["generated", "frozen", "absent"]
"""What a stream is to a run: denoised with a loss, given as clean conditioning, or not there."""


def reachable_parameters(config: Mapping[str, Any], *, video: StreamRole, audio: StreamRole) -> frozenset[str]:
    """Names of the transformer's parameters that get a gradient from the loss of the generated streams.

    Found by one forward and backward on the meta device (no weights, no numbers), because names do not tell: with a
    frozen stream the last block's attention into that stream is unreached, and a video-only run reaches no
    cross-modal parameter. DDP waits forever for a gradient that never comes, so only these may be trained.

    Args:
        config: of the transformer (`read_transformer_config` or `handle.config`).
        video: role of the video stream.
        audio: role of the audio stream.

    Raises:
        ValueError: neither stream is generated.
    """
    if "generated" not in (video, audio):
        raise ValueError(
            f"Nothing is trained: video is {video} and audio is {audio}. Let at least one stream be generated."
        )
    transformer = transformer_on_meta(config)
    context_width = "caption_channels" if transformer.config["use_prompt_embeddings"] else None
    outputs = transformer(
        video=None
        if video == "absent"
        else _tokens(
            channels=transformer.config["in_channels"],
            context_width=transformer.config[context_width or "cross_attention_dim"],
            position_dims=3,
            is_marked=True,
        ),
        audio=None
        if audio == "absent"
        else _tokens(
            channels=transformer.config["audio_in_channels"],
            context_width=transformer.config[context_width or "audio_cross_attention_dim"],
            position_dims=1,
            is_marked=False,
        ),
    )
    losses: list[Tensor] = [v.sum() for v, role in zip(outputs, (video, audio), strict=True) if role == "generated"]
    torch.stack(losses).sum().backward()
    return frozenset(name for name, parameter in transformer.named_parameters() if parameter.grad is not None)


def _tokens(*, channels: int, context_width: int, position_dims: int, is_marked: bool) -> Modality:
    tokens = 2
    with torch.device("meta"):
        return Modality(
            latent=torch.zeros(1, tokens, channels),
            sigma=torch.zeros(1),
            timesteps=torch.zeros(1, tokens),
            positions=torch.zeros(1, position_dims, tokens, 2),
            context=torch.zeros(1, tokens, context_width),
            keyframes_mask=torch.zeros(1, tokens, 1) if is_marked else None,
        )
