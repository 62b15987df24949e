"""Conditions of validation samples, encoded once at the start: the encoders are gone before training begins."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ltx_trainer_plus.config import ConfigError, Problem
from ltx_trainer_plus.config.validation_conditions import (
    AudioToVideoCondition,
    ReferenceCondition,
    VideoToAudioCondition,
)
from ltx_trainer_plus.flow.positions import LatentGeometry, patchify_audio, patchify_video
from ltx_trainer_plus.flow.references import ReferenceScale, audio_reference, video_reference
from ltx_trainer_plus.flow.tokens import Given, Tokens
from ltx_trainer_plus.media.geometry import frames_to_unit
from ltx_trainer_plus.media.mel import SAMPLE_RATE, log_mel
from ltx_trainer_plus.models.components import AudioVAE, VideoVAE, encoding_dtype, load_audio_vae, load_video_vae
from ltx_trainer_plus.parallel.collectives import from_main
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation.condition_files import LoadedCondition, check_condition_files, load_condition
from ltx_trainer_plus.validation.given import NOTHING_GIVEN, GivenSample
from ltx_trainer_plus.validation.media import Frames
from ltx_trainer_plus.validation.requests import SampleRequest


def encode_conditions(
    requests: Sequence[SampleRequest], model_path: Path, geometry: LatentGeometry, topology: Topology
) -> tuple[GivenSample, ...]:
    """Encode the conditions of every sample, in the order of the requests.

    A collective: the main process loads the VAEs' encoders, encodes and lets them go; the others receive the result.

    Raises:
        ConfigError: files that cannot be used, all of them named; on every process.
    """
    if not any(request.conditions for request in requests):
        return (NOTHING_GIVEN,) * len(requests)

    def encode() -> tuple[GivenSample, ...]:
        if problems := check_condition_files(requests, geometry):
            raise ConfigError(problems)
        encoders = _Encoders(model_path, topology.device)
        given = tuple(_given(request, geometry, encoders) for request in requests)
        encoders.release()
        return given

    return from_main(encode, topology)


class _Encoders:
    """The VAEs' encoders, each loaded when the first condition needs it."""

    def __init__(self, model_path: Path, device: torch.device) -> None:
        self._model_path = model_path
        self._device = device
        self._video: VideoVAE | None = None
        self._audio: AudioVAE | None = None

    def encode(self, clip: Frames | Tensor) -> Tensor:
        """A clip's latent on the CPU: (1, C, F, H, W) of frames, (1, 8, T, 16) of sound."""
        if isinstance(clip, np.ndarray):
            if self._video is None:
                self._video = load_video_vae(self._model_path, encoding_dtype(self._device), self._device)
            return self._video.encode(frames_to_unit(clip)[None].to(self._device), tiled=True).cpu()
        if self._audio is None:
            self._audio = load_audio_vae(self._model_path, torch.float32, self._device)
            if self._audio.sample_rate != SAMPLE_RATE:
                text = f"its audio VAE takes sound at {self._audio.sample_rate} Hz; only {SAMPLE_RATE} Hz is known"
                remedy = "Leave out conditions on the sound, or use an LTX-2 or LTX-2.3 pipeline folder"
                raise ConfigError([Problem("model.model_path", text, self._model_path, remedy)])
        return self._audio.encode(log_mel(clip.to(self._device))).cpu()

    def release(self) -> None:
        self._video = self._audio = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _given(request: SampleRequest, geometry: LatentGeometry, encoders: _Encoders) -> GivenSample:
    sample = NOTHING_GIVEN
    for condition in request.conditions:
        loaded = load_condition(condition, request, geometry)
        latent = encoders.encode(loaded.clip)
        stream = sample.video if condition.stream == "video" else sample.audio
        if isinstance(condition, ReferenceCondition):
            reference = _reference(condition, latent, request, geometry)
            stream = replace(stream, references=(*stream.references, reference))
            if condition.include_in_output:
                sample = _with_kept(sample, condition, loaded.clip)
        else:
            is_frozen = isinstance(condition, VideoToAudioCondition | AudioToVideoCondition)
            stream = replace(_with_clean(stream, loaded, latent), is_frozen=is_frozen)
        sample = replace(sample, video=stream) if condition.stream == "video" else replace(sample, audio=stream)
    return sample


def _with_clean(stream: Given, loaded: LoadedCondition, latent: Tensor) -> Given:
    """The stream with one more condition's tokens, which replace those of the conditions before it."""
    assert loaded.is_given is not None
    size = loaded.is_given.shape
    latent = latent if loaded.last is None else latent[:, :, -loaded.last :]
    room = min(latent.shape[2], size[0] - loaded.at)
    whole = latent.new_zeros(*latent.shape[:2], size[0], *latent.shape[3:])
    whole[:, :, loaded.at : loaded.at + room] = latent[:, :, :room]
    tokens = patchify_video(whole) if len(size) == 3 else patchify_audio(whole)
    return stream.and_tokens(tokens, loaded.is_given.reshape(1, -1))


def _reference(
    condition: ReferenceCondition, latent: Tensor, request: SampleRequest, geometry: LatentGeometry
) -> Tokens:
    if condition.stream == "audio":
        return audio_reference(latent[:, :, : request.audio_latent_steps(geometry)], geometry)
    scale = ReferenceScale(condition.downscale_factor or 1, condition.temporal_scale_factor or 1)
    rate = torch.tensor([request.frame_rate])
    return video_reference(latent, rate / scale.temporal, rate, scale, geometry)


def _with_kept(sample: GivenSample, condition: ReferenceCondition, clip: Frames | Tensor) -> GivenSample:
    if isinstance(clip, np.ndarray):
        frames = torch.from_numpy(clip).repeat_interleave(condition.temporal_scale_factor or 1, dim=0)
        return replace(sample, shown=(*sample.shown, frames))
    return replace(sample, heard=(*sample.heard, clip))
