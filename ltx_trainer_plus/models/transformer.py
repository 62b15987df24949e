"""The LTX transformer: our front (embeddings, modulation, block loop, output) over the blocks of diffusers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    LTX2VideoTransformer3DModel,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ltx_trainer_plus.modality import Modality, Perturbations

VIDEO, AUDIO = 0, 1  # rows of the perturbation mask

_MASKED = -10000.0  # what the official model adds to the logits of a masked text token


class SkippableSelfAttention:
    """Self-attention that passes its value projection through where the perturbation mask is 0 (STG).

    It blends instead of branching: a Python branch on a tensor would break `fullgraph` compilation and wait for the
    device. At 1 and at 0 the blend is exact. Each stream reads its own row of the mask, so video can be perturbed
    without audio.
    """

    # Read and written by diffusers' `set_attention_backend` and context parallelism.
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
        rotate = apply_split_rotary_emb if attn.rope_type == "split" else apply_interleaved_rotary_emb
        value = attn.to_v(hidden_states)
        query = rotate(attn.norm_q(attn.to_q(hidden_states)), query_rotary_emb)
        key = rotate(attn.norm_k(attn.to_k(hidden_states)), query_rotary_emb)

        # Autocast runs the norms in float32 on some devices; the attention kernels want one dtype.
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
        out = attended.to(value.dtype)
        if perturbation_mask is not None:
            out = torch.lerp(value, out, perturbation_mask[self.row].to(value.dtype))

        if attn.to_gate_logits is not None:
            gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))  # (B, T, heads)
            out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](out))


@dataclass(frozen=True)
class _StreamModules:
    """The front's modules of one stream, looked up at each forward: parallel wrappers replace parameters."""

    proj_in: nn.Module
    time_embed: nn.Module
    prompt_adaln: nn.Module | None
    caption_projection: nn.Module | None
    cross_scale_shift: nn.Module
    cross_gate: nn.Module
    rope: nn.Module
    cross_rope: nn.Module
    scale_shift_table: Tensor
    norm_out: nn.Module
    proj_out: nn.Module
    width: int
    position_dims: int


@dataclass(frozen=True)
class _StreamState:
    """What the blocks need of one stream: tokens, text, modulation and rotary tables."""

    hidden: Tensor  # (B, T, width)
    context: Tensor  # (B, S, width)
    context_bias: Tensor | None  # (B, 1, S), added to the logits
    modulation: Tensor  # (B, T or 1, mods * width)
    embedded_time: Tensor  # (B, T or 1, width)
    prompt_modulation: Tensor | None  # (B, 1, 2 * width)
    cross_scale_shift: Tensor  # (B, T or 1, 4 * width)
    cross_gate: Tensor  # (B, 1, width)
    rotary: tuple[Tensor, Tensor]
    cross_rotary: tuple[Tensor, Tensor]


class LTXTransformer(LTX2VideoTransformer3DModel):
    """LTX-2, 2.3 and 2.5: predicts the velocity of every video and audio token.

    The parameters are those of diffusers' class, under the same names; the forward is ours, because diffusers feeds
    the audio-video cross-attention the wrong noise levels when the streams are at different sigmas (DESIGN §4;
    checked against reference/*-io.safetensors).

    Attributes:
        compute_dtype: what matrix products run in; float32, or else the forward runs under autocast. Weights may
            be kept in another dtype (float32 masters of adapters or of a full fine-tune).
        gradient_checkpointing: recompute each block in the backward instead of keeping its activations.
    """

    @functools.wraps(LTX2VideoTransformer3DModel.__init__)  # diffusers reads the config keys off the signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_dtype = torch.get_default_dtype()
        for block in self.transformer_blocks:
            block.perturbed_attn = True  # hand the mask through, whatever the stored config says
            block.attn1.set_processor(SkippableSelfAttention(VIDEO))
            block.audio_attn1.set_processor(SkippableSelfAttention(AUDIO))

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks; perturbations name them 0 to `num_blocks - 1`."""
        return len(self.transformer_blocks)

    def forward(
        self,
        video: Modality | None = None,
        audio: Modality | None = None,
        perturbations: Perturbations | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Predict the velocity of the streams that are given.

        Args:
            video: the video tokens; None = no video stream.
            audio: the audio tokens; None = no audio stream.
            perturbations: the attentions to skip.

        Returns:
            (B, T, C) velocity of the video and of the audio; None for a stream that was not given.

        Raises:
            ValueError: no stream at all, or a perturbation of a block that does not exist.
            TypeError: a context mask that is not bool.
        """
        perturbations = perturbations or Perturbations()
        self._check_inputs(video, audio, perturbations)
        present = video if video is not None else audio
        assert present is not None
        with _autocast(present.latent.device, self.compute_dtype):
            v, a = self._video_modules(), self._audio_modules()
            video_in = self._enter(v, video, audio) if video is not None else None
            audio_in = self._enter(a, audio, video) if audio is not None else None
            batch, device = present.latent.shape[0], present.latent.device
            video_hidden, audio_hidden = self._run_blocks(
                video_in or self._placeholder(v, batch, device),
                audio_in or self._placeholder(a, batch, device),
                perturbations,
                is_joint=video is not None and audio is not None,
            )
            return (
                _leave(v, video_hidden, video_in.embedded_time) if video_in is not None else None,
                _leave(a, audio_hidden, audio_in.embedded_time) if audio_in is not None else None,
            )

    def _check_inputs(self, video: Modality | None, audio: Modality | None, perturbations: Perturbations) -> None:
        if video is None and audio is None:
            raise ValueError("The transformer was given neither video nor audio; give at least one Modality.")
        for name, stream in (("video", video), ("audio", audio)):
            if stream is not None and stream.context_mask is not None and stream.context_mask.dtype != torch.bool:
                raise TypeError(
                    f"{name}.context_mask is {stream.context_mask.dtype}; it must be bool (True = attend). "
                    "A float mask could be multiplicative or additive: convert it with `mask > 0` or `mask == 0`."
                )
        for name in ("video_self", "audio_self", "audio_to_video", "video_to_audio"):
            outside = sorted(b for b in getattr(perturbations, name) if not 0 <= b < self.num_blocks)
            if outside:
                raise ValueError(
                    f"Perturbations.{name} names block {outside[0]}, but this model has {self.num_blocks} blocks "
                    f"(0 to {self.num_blocks - 1})."
                )

    def _video_modules(self) -> _StreamModules:
        return _StreamModules(
            proj_in=self.proj_in,
            time_embed=self.time_embed,
            prompt_adaln=getattr(self, "prompt_adaln", None),
            caption_projection=getattr(self, "caption_projection", None),
            cross_scale_shift=self.av_cross_attn_video_scale_shift,
            cross_gate=self.av_cross_attn_video_a2v_gate,
            rope=self.rope,
            cross_rope=self.cross_attn_rope,
            scale_shift_table=self.scale_shift_table,
            norm_out=self.norm_out,
            proj_out=self.proj_out,
            width=self.proj_in.out_features,
            position_dims=3,
        )

    def _audio_modules(self) -> _StreamModules:
        return _StreamModules(
            proj_in=self.audio_proj_in,
            time_embed=self.audio_time_embed,
            prompt_adaln=getattr(self, "audio_prompt_adaln", None),
            caption_projection=getattr(self, "audio_caption_projection", None),
            cross_scale_shift=self.av_cross_attn_audio_scale_shift,
            cross_gate=self.av_cross_attn_audio_v2a_gate,
            rope=self.audio_rope,
            cross_rope=self.cross_attn_audio_rope,
            scale_shift_table=self.audio_scale_shift_table,
            norm_out=self.audio_norm_out,
            proj_out=self.audio_proj_out,
            width=self.audio_proj_in.out_features,
            position_dims=1,
        )

    def _enter(self, modules: _StreamModules, stream: Modality, other: Modality | None) -> _StreamState:
        """Embed one stream's tokens, text and noise levels.

        Which level goes where is the official rule (DESIGN §4): the cross-modal scale and shift follow the stream's
        own tokens, the cross-modal gate follows the other stream's sigma, the prompt follows the stream's own sigma.
        """
        dtype, scale = self.compute_dtype, self.config.timestep_scale_multiplier
        token_levels = stream.timesteps.flatten(1).float() * scale  # (B, T) or (B, 1)
        sample_level = stream.sigma.reshape(-1, 1).float() * scale

        hidden = modules.proj_in(stream.latent.to(dtype))
        if stream.keyframes_mask is not None and self.config.use_keyframes_abs_pos_embedding:
            marker = (stream.keyframes_mask > 0).to(hidden.dtype)
            hidden = hidden + marker * self.keyframes_abs_pos_embedding.to(hidden.dtype)

        context = stream.context.to(dtype)
        if modules.caption_projection is not None:
            context = modules.caption_projection(context)
        bias = None
        if stream.context_mask is not None:
            bias = torch.zeros_like(stream.context_mask, dtype=dtype).masked_fill(~stream.context_mask, _MASKED)
            bias = bias.unsqueeze(1)

        modulation, embedded_time = _embed_levels(modules.time_embed, token_levels, dtype)
        prompt_modulation = None
        if modules.prompt_adaln is not None:
            prompt_modulation, _ = _embed_levels(modules.prompt_adaln, sample_level, dtype)

        batch = hidden.shape[0]
        if other is not None:
            gate_scale = self.config.cross_attn_timestep_scale_multiplier / scale
            other_level = other.sigma.reshape(-1, 1).float() * scale * gate_scale
            cross_scale_shift, _ = _embed_levels(modules.cross_scale_shift, token_levels, dtype)
            cross_gate, _ = _embed_levels(modules.cross_gate, other_level, dtype)
        else:
            cross_scale_shift = hidden.new_zeros(batch, 1, 4 * modules.width)
            cross_gate = hidden.new_zeros(batch, 1, modules.width)

        return _StreamState(
            hidden=hidden,
            context=context,
            context_bias=bias,
            modulation=modulation,
            embedded_time=embedded_time,
            prompt_modulation=prompt_modulation,
            cross_scale_shift=cross_scale_shift,
            cross_gate=cross_gate,
            rotary=modules.rope(stream.positions),
            cross_rotary=modules.cross_rope(stream.positions[:, 0:1]),
        )

    def _placeholder(self, modules: _StreamModules, batch: int, device: torch.device) -> _StreamState:
        """One token standing for an absent stream: the blocks always compute both.

        With both cross-modal attentions off it reaches nothing, and the other stream's result is bit-identical.
        """
        zeros = functools.partial(torch.zeros, batch, 1, dtype=self.compute_dtype, device=device)
        positions = torch.zeros(batch, modules.position_dims, 1, 2, device=device)
        width = modules.width
        mods: int = modules.time_embed.num_mod_params  # type: ignore[assignment]
        return _StreamState(
            hidden=zeros(width),
            context=zeros(width),
            context_bias=None,
            modulation=zeros(mods * width),
            embedded_time=zeros(width),
            prompt_modulation=zeros(2 * width) if modules.prompt_adaln is not None else None,
            cross_scale_shift=zeros(4 * width),
            cross_gate=zeros(width),
            rotary=modules.rope(positions),
            cross_rotary=modules.cross_rope(positions[:, 0:1]),
        )

    def _run_blocks(
        self, video: _StreamState, audio: _StreamState, perturbations: Perturbations, *, is_joint: bool
    ) -> tuple[Tensor, Tensor]:
        call: Callable[..., Any] = _call
        if self.gradient_checkpointing and torch.is_grad_enabled():
            call = _call_checkpointed
        mask_for = _perturbation_masks(video.hidden)
        video_hidden, audio_hidden = video.hidden, audio.hidden
        for index, block in enumerate(self.transformer_blocks):
            # Always the same arguments with the same types: each new combination would be one more graph to compile.
            video_hidden, audio_hidden = call(
                block,
                hidden_states=video_hidden,
                audio_hidden_states=audio_hidden,
                encoder_hidden_states=video.context,
                audio_encoder_hidden_states=audio.context,
                temb=video.modulation,
                temb_audio=audio.modulation,
                temb_ca_scale_shift=video.cross_scale_shift,
                temb_ca_audio_scale_shift=audio.cross_scale_shift,
                temb_ca_gate=video.cross_gate,
                temb_ca_audio_gate=audio.cross_gate,
                temb_prompt=video.prompt_modulation,
                temb_prompt_audio=audio.prompt_modulation,
                video_rotary_emb=video.rotary,
                audio_rotary_emb=audio.rotary,
                ca_video_rotary_emb=video.cross_rotary,
                ca_audio_rotary_emb=audio.cross_rotary,
                encoder_attention_mask=video.context_bias,
                audio_encoder_attention_mask=audio.context_bias,
                use_a2v_cross_attention=is_joint and index not in perturbations.audio_to_video,
                use_v2a_cross_attention=is_joint and index not in perturbations.video_to_audio,
                perturbation_mask=mask_for(index in perturbations.video_self, index in perturbations.audio_self),
            )
            # float32 masters of the modulation tables would turn the residual stream into float32 after block 0.
            video_hidden = video_hidden.to(self.compute_dtype)
            audio_hidden = audio_hidden.to(self.compute_dtype)
        return video_hidden, audio_hidden


def _autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    # Off for float32, also where somebody outside has turned it on. The meta device has no autocast of its own.
    kind = "cpu" if device.type == "meta" else device.type
    return torch.autocast(kind, dtype=None if dtype == torch.float32 else dtype, enabled=dtype != torch.float32)


def _embed_levels(adaln: nn.Module, levels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Modulation (B, N, mods * width) and time embedding (B, N, width) of noise levels (B, N)."""
    modulation, embedded = adaln(levels.flatten(), batch_size=levels.shape[0], hidden_dtype=dtype)
    return modulation.unflatten(0, levels.shape), embedded.unflatten(0, levels.shape)


def _perturbation_masks(like: Tensor) -> Callable[[bool, bool], Tensor]:
    """Masks (2, 1, 1, 1) by (video skipped, audio skipped), made on the device without copying from the host."""

    @functools.cache
    def mask(skips_video: bool, skips_audio: bool) -> Tensor:
        rows = torch.ones(2, 1, 1, 1, dtype=torch.float32, device=like.device)
        if skips_video:
            rows[VIDEO].zero_()
        if skips_audio:
            rows[AUDIO].zero_()
        return rows

    return mask


def _call(block: nn.Module, **arguments: Any) -> tuple[Tensor, Tensor]:
    return block(**arguments)


def _call_checkpointed(block: nn.Module, **arguments: Any) -> tuple[Tensor, Tensor]:
    return checkpoint(block, use_reentrant=False, **arguments)


def _leave(modules: _StreamModules, hidden: Tensor, embedded_time: Tensor) -> Tensor:
    """Velocity (B, T, C) from the last block's tokens."""
    shift, scale = (modules.scale_shift_table + embedded_time.unsqueeze(2)).unbind(2)
    return modules.proj_out(modules.norm_out(hidden) * (1 + scale) + shift)
