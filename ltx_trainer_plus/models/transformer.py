"""The LTX transformer: our forward over the blocks of diffusers."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ltx_trainer_plus.modality import Modality, Perturbations
from ltx_trainer_plus.models.attention import AUDIO, VIDEO, SkippableSelfAttention, perturbation_mask
from ltx_trainer_plus.models.streams import StreamModules, StreamState


class LTXTransformer(LTX2VideoTransformer3DModel):
    """LTX-2, 2.3 and 2.5: predicts the velocity of every video and audio token.

    The parameters are those of diffusers' class, under the same names; the forward is ours, because diffusers feeds
    the audio-video cross-attention the wrong noise levels when the streams are at different sigmas
    (docs/design.md, "The model"; checked against tests/reference/*-io.safetensors).

    Attributes:
        compute_dtype: what matrix products run in. For float32 autocast is off, for anything else every forward runs
            under it: the same arithmetic whether a parallel layout keeps a weight in this dtype or in float32.
        gradient_checkpointing: recompute each block in the backward instead of keeping its activations.
    """

    # `wraps`, because diffusers reads the config keys off the signature.
    @functools.wraps(LTX2VideoTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_dtype = torch.get_default_dtype()
        for block in self._blocks:
            block.perturbed_attn = True  # hand the mask through, whatever a stored config says
            block.attn1.set_processor(SkippableSelfAttention(VIDEO))
            block.audio_attn1.set_processor(SkippableSelfAttention(AUDIO))

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks; perturbations name them 0 to `num_blocks - 1`."""
        return len(self.transformer_blocks)

    @property
    def _blocks(self) -> Iterable[Any]:
        return self.transformer_blocks

    def forward(  # type: ignore[override]
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
        self._check(video, audio, perturbations)
        latent = (video or audio).latent  # type: ignore[union-attr]
        with _autocast(latent.device, self.compute_dtype):
            video_modules, audio_modules = self._video_modules(), self._audio_modules()
            video_in = video_modules.enter(video, audio) if video else video_modules.placeholder(latent)
            audio_in = audio_modules.enter(audio, video) if audio else audio_modules.placeholder(latent)
            is_joint = video is not None and audio is not None
            video_hidden, audio_hidden = self._run_blocks(video_in, audio_in, perturbations, is_joint=is_joint)
            return (
                video_modules.leave(video_hidden, video_in.embedded_time) if video else None,
                audio_modules.leave(audio_hidden, audio_in.embedded_time) if audio else None,
            )

    def _check(self, video: Modality | None, audio: Modality | None, perturbations: Perturbations) -> None:
        if video is None and audio is None:
            raise ValueError("The transformer was given neither video nor audio; give at least one Modality.")
        for name, stream in (("video", video), ("audio", audio)):
            if stream is not None and stream.context_mask is not None and stream.context_mask.dtype != torch.bool:
                raise TypeError(
                    f"{name}.context_mask is {stream.context_mask.dtype}; it must be bool (True = attend). "
                    "Whether a float mask multiplies or adds cannot be seen: convert it with `mask > 0` or `mask == 0`."
                )
        for name in ("video_self", "audio_self", "audio_to_video", "video_to_audio"):
            check_blocks(f"Perturbations.{name}", getattr(perturbations, name), self.num_blocks)

    def _run_blocks(
        self, video: StreamState, audio: StreamState, perturbations: Perturbations, *, is_joint: bool
    ) -> tuple[Tensor, Tensor]:
        is_checkpointed = self.gradient_checkpointing and torch.is_grad_enabled()
        masks: dict[tuple[bool, bool], Tensor] = {}
        video_hidden, audio_hidden = video.hidden, audio.hidden
        for index, block in enumerate(self._blocks):
            skips = (index in perturbations.video_self, index in perturbations.audio_self)
            if skips not in masks:
                masks[skips] = perturbation_mask(video.hidden.device, skips_video=skips[0], skips_audio=skips[1])
            # Always the same arguments with the same types: each new combination would be one more graph to compile.
            arguments: dict[str, Any] = {
                "hidden_states": video_hidden,
                "audio_hidden_states": audio_hidden,
                "encoder_hidden_states": video.context,
                "audio_encoder_hidden_states": audio.context,
                "temb": video.modulation,
                "temb_audio": audio.modulation,
                "temb_ca_scale_shift": video.cross_scale_shift,
                "temb_ca_audio_scale_shift": audio.cross_scale_shift,
                "temb_ca_gate": video.cross_gate,
                "temb_ca_audio_gate": audio.cross_gate,
                "temb_prompt": video.prompt_modulation,
                "temb_prompt_audio": audio.prompt_modulation,
                "video_rotary_emb": video.rotary,
                "audio_rotary_emb": audio.rotary,
                "ca_video_rotary_emb": video.cross_rotary,
                "ca_audio_rotary_emb": audio.cross_rotary,
                "encoder_attention_mask": video.context_bias,
                "audio_encoder_attention_mask": audio.context_bias,
                "use_a2v_cross_attention": is_joint and index not in perturbations.audio_to_video,
                "use_v2a_cross_attention": is_joint and index not in perturbations.video_to_audio,
                "perturbation_mask": masks[skips],
            }
            if is_checkpointed:
                video_hidden, audio_hidden = checkpoint(block, use_reentrant=False, **arguments)
            else:
                video_hidden, audio_hidden = block(**arguments)
            # float32 masters of the modulation tables would turn the residual stream into float32 after block 0.
            video_hidden, audio_hidden = video_hidden.to(self.compute_dtype), audio_hidden.to(self.compute_dtype)
        return video_hidden, audio_hidden

    def _video_modules(self) -> StreamModules:
        return StreamModules(
            config=self.config,
            compute_dtype=self.compute_dtype,
            position_dims=3,
            proj_in=self.proj_in,
            keyframes_embedding=getattr(self, "keyframes_abs_pos_embedding", None),
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
        )

    def _audio_modules(self) -> StreamModules:
        return StreamModules(
            config=self.config,
            compute_dtype=self.compute_dtype,
            position_dims=1,
            proj_in=self.audio_proj_in,
            keyframes_embedding=None,
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
        )


def check_blocks(what: str, blocks: Iterable[int], num_blocks: int) -> None:
    """Raise a ValueError naming the first of `blocks` that the model does not have; `what` says whose they are."""
    outside = sorted(block for block in blocks if not 0 <= block < num_blocks)
    if outside:
        raise ValueError(
            f"{what}: block {outside[0]} does not exist: this model has {num_blocks} blocks (0 to {num_blocks - 1}). "
            "Choose among them."
        )


def _autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    # For float32 it is switched off, also where somebody outside has switched it on. Meta has no autocast of its own.
    kind = "cpu" if device.type == "meta" else device.type
    return torch.autocast(kind, dtype=None if dtype == torch.float32 else dtype, enabled=dtype != torch.float32)
