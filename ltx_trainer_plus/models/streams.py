"""One stream's way into the transformer blocks and out of them: embeddings, noise levels, output projection."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ltx_trainer_plus.modality import Modality

_MASKED = -10000.0  # added to the logits of a masked text token


@dataclass(frozen=True)
class StreamState:
    """What the blocks need of one stream. T tokens, S text tokens; N = T, or 1 where all tokens share one level."""

    hidden: Tensor  # (B, T, width)
    context: Tensor  # (B, S, width)
    context_bias: Tensor | None  # (B, 1, S), added to the logits
    modulation: Tensor  # (B, N, mods * width)
    embedded_time: Tensor  # (B, N, width)
    prompt_modulation: Tensor | None  # (B, 1, 2 * width)
    cross_scale_shift: Tensor  # (B, N, 4 * width)
    cross_gate: Tensor  # (B, 1, width)
    rotary: tuple[Tensor, Tensor]
    cross_rotary: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StreamModules:
    """The modules around the blocks that belong to one stream.

    Looked up again at every forward, because parallel wrappers and adapters replace modules and parameters.
    """

    config: Any
    compute_dtype: torch.dtype
    position_dims: int
    proj_in: Any
    keyframes_embedding: Tensor | None
    time_embed: Any
    prompt_adaln: Any | None
    caption_projection: Any | None
    cross_scale_shift: Any
    cross_gate: Any
    rope: Any
    cross_rope: Any
    scale_shift_table: Tensor
    norm_out: Any
    proj_out: Any

    def enter(self, stream: Modality, other: Modality | None) -> StreamState:
        """Embed a stream's tokens, text and noise levels; `other` is the other stream, whose sigma gates this one.

        Which level goes where is the official rule (docs/design.md, "The model"; checked against
        tests/reference/*-io.safetensors): the cross-modal scale and shift follow the stream's own tokens, the
        cross-modal gate follows the other stream's sigma, the prompt follows the stream's own sigma.
        """
        dtype, scale = self.compute_dtype, self.config["timestep_scale_multiplier"]
        token_levels = stream.timesteps.flatten(1).float() * scale  # (B, N)
        own_level = _per_sample(stream.sigma) * scale

        hidden = self.proj_in(stream.latent.to(dtype))
        if stream.keyframes_mask is not None and self.keyframes_embedding is not None:
            marker = (stream.keyframes_mask > 0).to(hidden.dtype)
            hidden = hidden + marker * self.keyframes_embedding.to(hidden.dtype)

        context = stream.context.to(dtype)
        if self.caption_projection is not None:
            context = self.caption_projection(context)
        bias = None
        if stream.context_mask is not None:
            bias = torch.zeros_like(stream.context_mask, dtype=dtype).masked_fill(~stream.context_mask, _MASKED)
            bias = bias.unsqueeze(1)

        modulation, embedded_time = self._embed(self.time_embed, token_levels)
        if other is not None:
            gate_factor = self.config["cross_attn_timestep_scale_multiplier"] / scale
            cross_scale_shift, _ = self._embed(self.cross_scale_shift, token_levels)
            cross_gate, _ = self._embed(self.cross_gate, _per_sample(other.sigma) * scale * gate_factor)
        else:
            cross_scale_shift, cross_gate = self._zeros(hidden, 4), self._zeros(hidden, 1)
        return StreamState(
            hidden=hidden,
            context=context,
            context_bias=bias,
            modulation=modulation,
            embedded_time=embedded_time,
            prompt_modulation=None if self.prompt_adaln is None else self._embed(self.prompt_adaln, own_level)[0],
            cross_scale_shift=cross_scale_shift,
            cross_gate=cross_gate,
            rotary=self.rope(stream.positions),
            cross_rotary=self.cross_rope(stream.positions[:, 0:1]),
        )

    def placeholder(self, like: Tensor) -> StreamState:
        """One token standing for an absent stream, because the blocks always compute both.

        With both cross-modal attentions off it reaches nothing: the other stream's result is bit-identical to a
        model without this stream. `like` (B, ...) gives batch size and device.
        """
        positions = torch.zeros(like.shape[0], self.position_dims, 1, 2, device=like.device)
        return StreamState(
            hidden=self._zeros(like, 1),
            context=self._zeros(like, 1),
            context_bias=None,
            modulation=self._zeros(like, self.time_embed.num_mod_params),
            embedded_time=self._zeros(like, 1),
            prompt_modulation=None if self.prompt_adaln is None else self._zeros(like, 2),
            cross_scale_shift=self._zeros(like, 4),
            cross_gate=self._zeros(like, 1),
            rotary=self.rope(positions),
            cross_rotary=self.cross_rope(positions[:, 0:1]),
        )

    def leave(self, hidden: Tensor, embedded_time: Tensor) -> Tensor:
        """Velocity (B, T, C) from the last block's tokens (B, T, width)."""
        shift, scale = (self.scale_shift_table + embedded_time.unsqueeze(2)).unbind(2)
        return self.proj_out(self.norm_out(hidden) * (1 + scale) + shift)

    def _embed(self, adaln: Any, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Modulation (B, N, mods * width) and time embedding (B, N, width) of noise levels (B, N)."""
        modulation, embedded = adaln(levels.flatten(), batch_size=levels.shape[0], hidden_dtype=self.compute_dtype)
        return modulation.unflatten(0, levels.shape), embedded.unflatten(0, levels.shape)

    def _zeros(self, like: Tensor, widths: int) -> Tensor:
        width = widths * self.proj_in.out_features
        return torch.zeros(like.shape[0], 1, width, dtype=self.compute_dtype, device=like.device)


def _per_sample(sigma: Tensor) -> Tensor:
    return sigma.reshape(-1, 1).float()
