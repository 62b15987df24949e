"""Inputs of the transformer that have the right shapes and nothing in them: for tracing and for counting costs."""

from collections.abc import Mapping
from typing import Any

import torch

from ltx_trainer_plus.modality import Modality


def example_inputs(
    config: Mapping[str, Any], *, video_tokens: int, audio_tokens: int, text_tokens: int, batch: int = 1
) -> dict[str, Modality | None]:
    """The transformer's streams by argument name, all zero, on the default device; no tokens = None.

    All tokens of a stream share one noise level: timesteps are (B, 1).

    Args:
        config: of the transformer (`read_transformer_config` or `handle.config`).
    """

    def stream(tokens: int, channels: int, position_dims: int, width: int) -> Modality | None:
        if tokens == 0:
            return None
        return Modality(
            latent=torch.zeros(batch, tokens, channels),
            sigma=torch.zeros(batch),
            timesteps=torch.zeros(batch, 1),
            positions=torch.zeros(batch, position_dims, tokens, 2),
            context=torch.zeros(batch, text_tokens, width),
        )

    captions = config["caption_channels"] if config["use_prompt_embeddings"] else None
    video_width, audio_width = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    return {
        "video": stream(video_tokens, config["in_channels"], 3, captions or video_width),
        "audio": stream(audio_tokens, config["audio_in_channels"], 1, captions or audio_width),
    }
