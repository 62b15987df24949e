"""The denoising loop: guided Euler steps from noise to clean latents, every forward through the `ModelHandle`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.schedule import euler_step
from ltx_trainer_plus.flow.tokens import Tokens
from ltx_trainer_plus.guidance import combine_guidance, isolated_modalities, stg_perturbations
from ltx_trainer_plus.modality import Modality, Perturbations, TextContext
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.validation.states import SampleState

Prediction = tuple[Tensor | None, Tensor | None]
_NOTHING: Prediction = (None, None)


@dataclass(frozen=True)
class StreamGuidance:
    """How strongly each guidance term pulls on one stream; the defaults are neutral.

    Attributes:
        cfg_scale: away from the negative prompt; 1 = off.
        stg_scale: away from the prediction with skipped self-attentions; 0 = off.
        modality_scale: away from the prediction that does not see the other stream; 1 = off.
    """

    cfg_scale: float = 1.0
    stg_scale: float = 0.0
    modality_scale: float = 1.0


@dataclass(frozen=True)
class Guidance:
    """Guidance of both streams: each has scales of its own, and they share the forwards.

    Attributes:
        stg_blocks: in which blocks STG skips self-attention; None = all.
        rescale: how far (0 to 1) the guided prediction is brought back to the deviation of the unguided one.
    """

    video: StreamGuidance
    audio: StreamGuidance
    stg_blocks: tuple[int, ...] | None = None
    rescale: float = 0.0

    @classmethod
    def of(cls, config: ValidationConfig) -> "Guidance":
        return cls(
            video=StreamGuidance(config.video_cfg_scale, config.video_stg_scale, config.video_modality_guidance_scale),
            audio=StreamGuidance(config.audio_cfg_scale, config.audio_stg_scale, config.audio_modality_guidance_scale),
            stg_blocks=None if config.stg_blocks is None else tuple(config.stg_blocks),
            rescale=config.guidance_rescale,
        )

    def for_streams(self, *, video: bool, audio: bool, both_present: bool) -> "Guidance":
        """What is left of it for these streams.

        Args:
            video: whether the video is generated; a frozen or absent stream is not guided.
            audio: whether the audio is generated.
            both_present: whether the model sees both streams; a stream alone has no other one to be guided by.
        """
        of_video = self.video if video else StreamGuidance()
        of_audio = self.audio if audio else StreamGuidance()
        if not both_present:
            of_video, of_audio = replace(of_video, modality_scale=1.0), replace(of_audio, modality_scale=1.0)
        if self.stg_blocks == ():  # nothing to skip
            of_video, of_audio = replace(of_video, stg_scale=0.0), replace(of_audio, stg_scale=0.0)
        return replace(self, video=of_video, audio=of_audio)

    @property
    def uses_negative(self) -> bool:
        return self.video.cfg_scale != 1 or self.audio.cfg_scale != 1

    @property
    def uses_stg(self) -> bool:
        return self.video.stg_scale != 0 or self.audio.stg_scale != 0

    @property
    def uses_isolation(self) -> bool:
        return self.video.modality_scale != 1 or self.audio.modality_scale != 1

    @property
    def forwards(self) -> "Forwards":
        """The forwards of a step beside the one with the prompt."""
        return Forwards(self.uses_negative, self.uses_stg, self.uses_isolation)

    @property
    def forwards_per_step(self) -> int:
        return 1 + sum(self.forwards)


class Forwards(NamedTuple):
    """Which forwards a step has beside the one with the prompt.

    Attributes:
        negative: with the negative prompt.
        perturbed: without some self-attentions.
        isolated: without the attentions between the streams.
    """

    negative: bool = False
    perturbed: bool = False
    isolated: bool = False

    def together_with(self, other: "Forwards") -> "Forwards":
        """Those that one of both has."""
        return Forwards(*map(bool.__or__, self, other))


NO_FORWARDS = Forwards()


@torch.no_grad()
def denoise(
    handle: ModelHandle,
    state: SampleState,
    guidance: Guidance,
    sigmas: Tensor,
    on_step: Callable[[int], None] | None = None,
    *,
    at_least: Forwards = NO_FORWARDS,
) -> Prediction:
    """Denoise a sample.

    Under `no_grad`, not `inference_mode`: what the model caches here must still be usable in training.

    Args:
        state: the streams at the schedule's first noise level, on the model's device. Not changed.
        sigmas: (steps + 1,) the schedule, on the CPU.
        on_step: called after each step with its number, from 1.
        at_least: forwards to run in any case, for ranks that run more of them meanwhile: a forward of a sharded model
            needs every rank. They change nothing in the result.

    Returns:
        The clean video tokens (B, T, C) and audio tokens, float32, without references; None where a stream is absent.

    Raises:
        ValueError: CFG is on and the state has no negative text, or an STG block does not exist.
    """
    guidance = guidance.for_streams(
        video=state.video is not None and not state.video.is_frozen,
        audio=state.audio is not None and not state.audio.is_frozen,
        both_present=state.video is not None and state.audio is not None,
    )
    if guidance.uses_negative and state.negative is None:
        raise ValueError(
            f"CFG is on (video {guidance.video.cfg_scale}, audio {guidance.audio.cfg_scale}) but the sample has no "
            "negative text. Give it one, or set both CFG scales to 1."
        )
    positive = _for_model(state.positive, handle)
    # Without a negative text nothing below asks for it.
    negative = positive if state.negative is None else _for_model(state.negative, handle)
    forwards = guidance.forwards.together_with(at_least)
    skipped = isolated = None
    if guidance.uses_stg:
        skipped = stg_perturbations(
            handle, guidance.stg_blocks, video=guidance.video.stg_scale != 0, audio=guidance.audio.stg_scale != 0
        )
    if forwards.isolated:
        isolated = isolated_modalities(handle)

    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas.tolist()), start=1):
        predict = partial(_predict, handle, state, sigma)
        videos, audios = zip(
            predict(positive),
            predict(negative) if forwards.negative else _NOTHING,
            predict(positive, skipped) if forwards.perturbed else _NOTHING,
            predict(positive, isolated) if forwards.isolated else _NOTHING,
            strict=True,
        )
        video = _combine(videos, guidance.video, guidance.rescale)
        audio = _combine(audios, guidance.audio, guidance.rescale)
        state = replace(
            state,
            video=_advance(state.video, video, sigma, sigma_next),
            audio=_advance(state.audio, audio, sigma, sigma_next),
        )
        if on_step is not None:
            on_step(step)
    return (
        None if state.video is None else state.video.without_references,
        None if state.audio is None else state.audio.without_references,
    )


def _predict(
    handle: ModelHandle,
    state: SampleState,
    sigma: float,
    text: TextContext,
    perturbations: Perturbations | None = None,
) -> Prediction:
    """The clean tokens that the model sees behind the noisy ones."""
    video = _modality(state.video, sigma, text.video, text.mask)
    audio = _modality(state.audio, sigma, text.audio, text.mask)
    velocities = handle(
        video=_in_dtype(video, handle.dtype), audio=_in_dtype(audio, handle.dtype), perturbations=perturbations
    )
    return _denoised(video, velocities[0]), _denoised(audio, velocities[1])


def _modality(tokens: Tokens | None, sigma: float, context: Tensor, context_mask: Tensor | None) -> Modality | None:
    if tokens is None:
        return None
    return tokens.modality(tokens.latent.new_full((len(tokens.latent),), sigma), context, context_mask)


def _in_dtype(modality: Modality | None, dtype: torch.dtype) -> Modality | None:
    return None if modality is None else replace(modality, latent=modality.latent.to(dtype))


def _denoised(modality: Modality | None, velocity: Tensor | None) -> Tensor | None:
    if modality is None or velocity is None:
        return None
    return modality.latent - modality.timesteps.unsqueeze(-1) * velocity.float()


def _combine(predictions: tuple[Tensor | None, ...], scales: StreamGuidance, rescale: float) -> Tensor | None:
    """Apply this stream's terms; a forward that only the other stream asked for is left out."""
    positive, negative, perturbed, isolated = predictions
    if positive is None:
        return None
    return combine_guidance(
        positive,
        negative=negative if scales.cfg_scale != 1 else None,
        perturbed=perturbed if scales.stg_scale != 0 else None,
        isolated=isolated if scales.modality_scale != 1 else None,
        cfg_scale=scales.cfg_scale,
        stg_scale=scales.stg_scale,
        modality_scale=scales.modality_scale,
        rescale=rescale,
    )


def _advance(tokens: Tokens | None, denoised: Tensor | None, sigma: float, sigma_next: float) -> Tokens | None:
    if tokens is None or denoised is None or tokens.is_frozen:
        return tokens
    latent = euler_step(tokens.latent, denoised, sigma, sigma_next)
    if tokens.is_given is not None:
        # Guidance and rescaling move given tokens too: put them back.
        latent = torch.where(tokens.is_given.unsqueeze(-1), tokens.latent, latent)
    return replace(tokens, latent=latent)


def _for_model(text: TextContext, handle: ModelHandle) -> TextContext:
    return TextContext(
        video=text.video.to(handle.device, handle.dtype),
        audio=text.audio.to(handle.device, handle.dtype),
        mask=None if text.mask is None else text.mask.to(handle.device),
    )
