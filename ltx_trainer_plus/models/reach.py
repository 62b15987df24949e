"""Which parameters a run's loss can reach."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ltx_trainer_plus.models.example_inputs import example_inputs
from ltx_trainer_plus.models.loading import transformer_on_meta

_TOKENS = 2

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
    with torch.device("meta"):
        inputs = example_inputs(
            transformer.config,
            video_tokens=0 if video == "absent" else _TOKENS,
            audio_tokens=0 if audio == "absent" else _TOKENS,
            text_tokens=_TOKENS,
        )
        if (marked := inputs["video"]) is not None:
            inputs["video"] = replace(marked, keyframes_mask=torch.zeros(1, _TOKENS, 1))
    outputs = transformer(**inputs)
    losses: list[Tensor] = [v.sum() for v, role in zip(outputs, (video, audio), strict=True) if role == "generated"]
    torch.stack(losses).sum().backward()
    return frozenset(name for name, parameter in transformer.named_parameters() if parameter.grad is not None)
