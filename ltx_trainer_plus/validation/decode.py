"""From clean tokens to a file that people open: MP4, WAV or PNG."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ltx_trainer_plus.flow.positions import LatentGeometry, unpatchify_audio, unpatchify_video
from ltx_trainer_plus.media.audio import write_wav
from ltx_trainer_plus.media.geometry import cover_and_crop
from ltx_trainer_plus.media.image import write_png
from ltx_trainer_plus.media.video import write_video
from ltx_trainer_plus.models.components import (
    AudioDecoder,
    VideoVAE,
    encoding_dtype,
    load_audio_decoder,
    load_video_vae,
)
from ltx_trainer_plus.validation.requests import SampleRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodedSample:
    """A sample as people see and hear it, on the CPU.

    Attributes:
        frames: (F, H, W, 3) uint8, or None.
        frame_rate: frames per second.
        waveform: (2, N) float32 in [-1, 1], no longer than the video; or None.
        sample_rate: of the waveform, in Hz.
    """

    frames: Tensor | None
    frame_rate: float
    waveform: Tensor | None = None
    sample_rate: int | None = None


class SampleDecoder:
    """The video VAE and the audio decoder, each loaded to `device` when the first sample needs it.

    Make one per validation: what it has loaded goes with it, and training has the memory again.
    """

    def __init__(self, model_path: Path, geometry: LatentGeometry, device: torch.device) -> None:
        self._model_path = model_path
        self._geometry = geometry
        self._device = device
        self._video_vae: VideoVAE | None = None
        self._audio_decoder: AudioDecoder | None = None

    def decode(
        self,
        request: SampleRequest,
        video: Tensor | None,
        audio: Tensor | None,
        references: Sequence[Tensor] = (),
    ) -> DecodedSample:
        """Decode one sample.

        Args:
            video: (1, T, C) clean tokens, or None.
            audio: (1, A, C') clean tokens, or None.
            references: to be shown to the left of the result, each (F, H, W, 3) uint8 of the same shape of picture.

        Raises:
            ModelError: `model_path` has no VAE or vocoder that can be loaded.
        """
        if any(tokens is not None and not bool(tokens.isfinite().all()) for tokens in (video, audio)):
            logger.warning(
                "Validation sample %d is not finite: the model has diverged. Its file shows and plays nothing useful.",
                request.index + 1,
            )
        frames = None if video is None else _beside(references, self._frames(video, request))
        if audio is None:
            return DecodedSample(frames, request.frame_rate)
        waveform, sample_rate = self._waveform(audio)
        return DecodedSample(
            frames, request.frame_rate, waveform[:, : round(request.duration * sample_rate)], sample_rate
        )

    def _frames(self, tokens: Tensor, request: SampleRequest) -> Tensor:
        if self._video_vae is None:
            self._video_vae = load_video_vae(self._model_path, encoding_dtype(self._device), self._device)
        latent = unpatchify_video(tokens, *request.video_latent_size(self._geometry))
        pixels = self._video_vae.decode(latent, tiled=True)[0]  # (3, F, H, W) in [-1, 1]
        pixels = pixels.nan_to_num().add(1).mul(127.5).round().to(torch.uint8)
        return pixels.permute(1, 2, 3, 0).contiguous().cpu()

    def _waveform(self, tokens: Tensor) -> tuple[Tensor, int]:
        if self._audio_decoder is None:
            self._audio_decoder = load_audio_decoder(self._model_path, torch.float32, self._device)
        waveform = self._audio_decoder.decode(unpatchify_audio(tokens))[0]
        # The AAC encoder refuses what is not finite.
        return waveform.nan_to_num().cpu(), self._audio_decoder.sample_rate


def _beside(references: Sequence[Tensor], frames: Tensor) -> Tensor:
    """References and result in one picture, from left to right; a short reference stands still at its end."""
    count, height, width = frames.shape[:3]
    parts = []
    for reference in references:
        shown = torch.arange(count).clamp(max=len(reference) - 1)
        parts.append(torch.from_numpy(cover_and_crop(reference[shown].numpy(), height, width)))
    return torch.cat([*parts, frames], dim=2)


def write_sample(stem: Path, sample: DecodedSample) -> Path:
    """Write `<stem>.mp4`, or `.wav` where there is no video, or `.png` where there is one frame.

    A single frame's moment of sound is left out: nobody hears it, and a picture is what was asked for.

    Returns:
        The file, complete.
    """
    if sample.frames is None:
        if sample.waveform is None or sample.sample_rate is None:
            raise ValueError(f"{stem}: the sample has neither frames nor sound; there is nothing to write.")
        path = stem.with_name(f"{stem.name}.wav")
        write_wav(path, sample.waveform, sample.sample_rate)
    elif len(sample.frames) == 1:
        path = stem.with_name(f"{stem.name}.png")
        write_png(path, sample.frames[0].numpy())
    else:
        path = stem.with_name(f"{stem.name}.mp4")
        write_video(path, sample.frames, sample.frame_rate, sample.waveform, sample.sample_rate)
    return path
