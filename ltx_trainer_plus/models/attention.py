"""Self-attention that can be skipped per stream (STG), written so that the blocks compile without graph breaks."""

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from torch import Tensor

VIDEO, AUDIO = 0, 1
"""Rows of the perturbation mask."""


class SkippableSelfAttention:
    """Self-attention that passes its value projection through where the perturbation mask is 0 (STG).

    It blends instead of branching: a Python branch on a tensor would break `fullgraph` compilation and wait for the
    device. At 1 and at 0 the blend is exact. Each stream reads its own row of the mask, so video can be perturbed
    without audio.
    """

    # Written by diffusers' `set_attention_backend` and context parallelism.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, row: int) -> None:
        self.row = row

    # diffusers inspects this signature and drops, with a warning, what it does not find in it.
    def __call__(
        self,
        attn: LTX2Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> Tensor:
        """Attend. `hidden_states` (B, T, C); `perturbation_mask` (2, 1, 1, 1), one row per stream, 1 = attend."""
        assert query_rotary_emb is not None
        assert perturbation_mask is not None
        rotate = apply_split_rotary_emb if attn.rope_type == "split" else apply_interleaved_rotary_emb
        value = attn.to_v(hidden_states)
        query = rotate(attn.norm_q(attn.to_q(hidden_states)), query_rotary_emb)
        key = rotate(attn.norm_k(attn.to_k(hidden_states)), query_rotary_emb)

        # Autocast runs the norms in float32 on CUDA; the attention kernels want one dtype.
        attended = dispatch_attention_fn(
            query.to(value.dtype).unflatten(2, (attn.heads, -1)),
            key.to(value.dtype).unflatten(2, (attn.heads, -1)),
            value.unflatten(2, (attn.heads, -1)),
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2, 3)
        out = torch.lerp(value, attended.to(value.dtype), perturbation_mask[self.row].to(value.dtype))

        if attn.to_gate_logits is not None:
            gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))  # (B, T, heads)
            out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](out))


def perturbation_mask(device: torch.device, *, skips_video: bool, skips_audio: bool) -> Tensor:
    """Mask (2, 1, 1, 1) with one row per stream, filled on the device: nothing waits for a copy from the host."""
    mask = torch.ones(2, 1, 1, 1, device=device)
    if skips_video:
        mask[VIDEO].zero_()
    if skips_audio:
        mask[AUDIO].zero_()
    return mask
