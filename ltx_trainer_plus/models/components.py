"""The frozen models around the transformer: pictures, sound and waveforms to normalised latents and back.

They come from a diffusers pipeline folder. Latents are normalised everywhere in this project; only this module knows
the statistics.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE
from torch import Tensor

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models.json_files import read_json
from ltx_trainer_plus.models.pipeline_folder import check_components, component_folder

__all__ = [
    "AudioDecoder",
    "AudioVAE",
    "VideoVAE",
    "check_components",
    "component_folder",
    "load_audio_decoder",
    "load_audio_vae",
    "load_video_vae",
    "read_vae_factors",
]

# Decoding works on pieces of at most this size, so that its memory does not grow with the video.
TILE_PIXELS, TILE_OVERLAP_PIXELS = 512, 64
TILE_LATENT_FRAMES, TILE_OVERLAP_LATENT_FRAMES = 17, 4

_VOCODERS = {"LTX2Vocoder": LTX2Vocoder, "LTX2VocoderWithBWE": LTX2VocoderWithBWE}


def read_vae_factors(model_path: str | Path) -> tuple[int, int]:
    """Temporal and spatial factor of the video VAE, without loading it: (8, 32) for every LTX-2 so far.

    Raises:
        ModelError: see `component_folder`.
    """
    return _factors(_read_config(component_folder(model_path, "vae")))


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(folder / "config.json")
    return config


def _factors(config: dict[str, Any]) -> tuple[int, int]:
    # diffusers derives a missing ratio from the number of blocks alone (16 and 64 for LTX-2): count what they do.
    scaling = config.get("spatio_temporal_scaling", True)
    kinds = config.get("downsample_type", ("spatial", "temporal", "spatiotemporal", "spatiotemporal"))
    scales = [scaling] * len(kinds) if isinstance(scaling, bool) else scaling
    used = [kind for kind, scaled in zip(kinds, scales, strict=False) if scaled]
    temporal = config.get("patch_size_t", 1) * 2 ** sum("temporal" in kind for kind in used)
    spatial = config.get("patch_size", 4) * 2 ** sum("spati" in kind for kind in used)
    return config.get("temporal_compression_ratio") or temporal, config.get("spatial_compression_ratio") or spatial


class VideoVAE:
    """Frames to normalised latents and back.

    Attributes:
        temporal_factor: pixel frames per latent frame (the first latent frame is one pixel frame).
        spatial_factor: pixels per latent pixel, in height and width.
    """

    def __init__(self, vae: AutoencoderKLLTX2Video, temporal_factor: int, spatial_factor: int) -> None:
        self._vae = vae.eval().requires_grad_(False)
        # The tile sizes below are computed from these by diffusers.
        self._vae.temporal_compression_ratio, self._vae.spatial_compression_ratio = temporal_factor, spatial_factor
        self.temporal_factor, self.spatial_factor = temporal_factor, spatial_factor

    @torch.no_grad()
    def encode(self, frames: Tensor, tiled: bool = False) -> Tensor:
        """Encode to the mode of the posterior.

        Args:
            frames: (B, 3, F, H, W) in [-1, 1]; F = 1 plus a multiple of the temporal factor, H and W multiples of
                the spatial factor.
            tiled: work on pieces of 512 pixels: less memory, small differences at their borders.

        Returns:
            (B, C, f, h, w) float32, normalised per channel.

        Raises:
            ValueError: the frames' shape does not fit the factors.
        """
        self._check(frames)
        self._set_tiling(tiled)
        latents = self._vae.encode(frames.to(self._vae.device, self._vae.dtype)).latent_dist.mode().float()
        mean, std = self._statistics()
        return (latents - mean) * self._vae.config["scaling_factor"] / std

    @torch.no_grad()
    def decode(self, latents: Tensor, tiled: bool = True) -> Tensor:
        """Decode normalised latents.

        Args:
            latents: (B, C, f, h, w), normalised.
            tiled: work on pieces of 512 pixels and 129 frames, blended where they overlap. What fits into one
                piece is decoded in one piece, exactly as with False.

        Returns:
            (B, 3, F, H, W) float32 in [-1, 1].
        """
        self._set_tiling(tiled)
        mean, std = self._statistics()
        latents = latents.to(self._vae.device, torch.float32) * std / self._vae.config["scaling_factor"] + mean
        latents = latents.to(self._vae.dtype)
        frames = self._decode_in_time(latents) if tiled else self._vae.decode(latents).sample
        return frames.float().clamp(-1, 1)

    def _decode_in_time(self, latents: Tensor) -> Tensor:
        # Not diffusers' own tiling in time (0.42.1): it places every tile after the first one frame too late.
        frames: Tensor = self._vae.decode(latents[:, :, :TILE_LATENT_FRAMES]).sample
        step = TILE_LATENT_FRAMES - TILE_OVERLAP_LATENT_FRAMES
        for start in range(step, latents.shape[2] - TILE_OVERLAP_LATENT_FRAMES, step):
            tile = self._vae.decode(latents[:, :, start : start + TILE_LATENT_FRAMES]).sample
            shared = frames.shape[2] - start * self.temporal_factor
            weight = torch.linspace(0, 1, shared + 2, device=tile.device, dtype=tile.dtype)[1:-1].view(-1, 1, 1)
            blended = torch.lerp(frames[:, :, -shared:], tile[:, :, :shared], weight)
            frames = torch.cat([frames[:, :, :-shared], blended, tile[:, :, shared:]], dim=2)
        return frames

    def _set_tiling(self, tiled: bool) -> None:
        stride = TILE_PIXELS - TILE_OVERLAP_PIXELS
        if tiled:
            self._vae.enable_tiling(TILE_PIXELS, TILE_PIXELS, None, stride, stride)
        else:
            self._vae.disable_tiling()

    def _statistics(self) -> tuple[Tensor, Tensor]:
        mean, std = self._vae.latents_mean.float(), self._vae.latents_std.float()
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)

    def _check(self, frames: Tensor) -> None:
        count, height, width = frames.shape[2:]
        if (count - 1) % self.temporal_factor or height % self.spatial_factor or width % self.spatial_factor:
            raise ValueError(
                f"{count} frames of {width}x{height} do not fit this video VAE: frames must be 1 plus a multiple of "
                f"{self.temporal_factor}, width and height multiples of {self.spatial_factor}.\n"
                "  Crop the clip to such a size first."
            )


class AudioVAE:
    """Mel spectrograms to normalised latents.

    Attributes:
        sample_rate: of the sound that the spectrogram is made of, in Hz.
    """

    def __init__(self, vae: AutoencoderKLLTX2Audio) -> None:
        self._vae = vae.eval().requires_grad_(False)
        self.sample_rate: int = vae.config["sample_rate"]

    @torch.no_grad()
    def encode(self, mel: Tensor) -> Tensor:
        """Encode to the mode of the posterior.

        Args:
            mel: (B, 2, T, 64) log-mel spectrogram of stereo sound.

        Returns:
            (B, 8, t, 16) float32, normalised; t = ceil(T / 4).
        """
        latents = self._vae.encode(mel.to(self._vae.device, self._vae.dtype)).latent_dist.mode().float()
        mean, std = _audio_statistics(self._vae, latents)
        return (latents - mean) / std


class AudioDecoder:
    """Normalised latents to a waveform: the audio VAE's decoder, then the vocoder.

    Attributes:
        sample_rate: of the waveform, in Hz.
    """

    def __init__(self, vae: AutoencoderKLLTX2Audio, vocoder: LTX2Vocoder | LTX2VocoderWithBWE) -> None:
        self._vae = vae.eval().requires_grad_(False)
        self._vocoder = vocoder.eval().requires_grad_(False)
        self.sample_rate: int = vocoder.config["output_sampling_rate"]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents.

        Args:
            latents: (B, 8, t, 16).

        Returns:
            (B, 2, N) float32 in [-1, 1]; N = (4t - 3) mel frames of 10 ms at `sample_rate`.
        """
        latents = latents.to(self._vae.device, torch.float32)
        mean, std = _audio_statistics(self._vae, latents)
        mel = self._vae.decode((latents * std + mean).to(self._vae.dtype)).sample
        waveform: Tensor = self._vocoder(mel.to(self._vocoder.dtype))
        return waveform.float().clamp(-1, 1)


def _audio_statistics(vae: AutoencoderKLLTX2Audio, latents: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics belong to packed features (channel times frequency); here they are shaped like the latents."""
    channels, _, bins = latents.shape[1:]
    mean, std = vae.latents_mean.float(), vae.latents_std.float()
    return mean.view(1, channels, 1, bins), std.view(1, channels, 1, bins)


def encoding_dtype(device: torch.device) -> torch.dtype:
    """What the text encoder, its connectors and the video VAE run in, in preparation and in validation alike: what
    means the same should look the same to the model. (Audio VAEs have little to do, and rounding is heard: float32.)
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load_video_vae(
    model_path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> VideoVAE:
    """Load the video VAE of a pipeline folder.

    Raises:
        ModelError: `model_path` is a single file, or the VAE is not there, or of a kind that is not supported.
    """
    folder = component_folder(model_path, "vae")
    config = _read_config(folder)
    if config.get("_class_name") != "AutoencoderKLLTX2Video" or config.get("timestep_conditioning"):
        raise ModelError(
            f"{folder}: this is {config.get('_class_name')} with timestep_conditioning="
            f"{bool(config.get('timestep_conditioning'))}; only AutoencoderKLLTX2Video without it is supported.\n"
            "  Use the pipeline folder of an LTX-2 or LTX-2.3 release."
        )
    vae = AutoencoderKLLTX2Video.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
    return VideoVAE(vae.to(device), *_factors(config))


def load_audio_vae(
    model_path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> AudioVAE:
    """Load the audio VAE of a pipeline folder, to encode with.

    Raises:
        ModelError: see `component_folder`.
    """
    return AudioVAE(_load_audio_autoencoder(model_path, dtype, device))


def load_audio_decoder(
    model_path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> AudioDecoder:
    """Load the audio VAE and the vocoder of a pipeline folder, to decode with.

    Raises:
        ModelError: see `component_folder`.
    """
    folder = component_folder(model_path, "vocoder")
    name = _read_config(folder).get("_class_name", "")
    if name not in _VOCODERS:
        raise ModelError(
            f"{folder}: {name or 'no class'} is not a vocoder that is known here ({', '.join(_VOCODERS)}).\n"
            "  Use the pipeline folder of an LTX-2 or LTX-2.3 release."
        )
    vocoder = _VOCODERS[name].from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
    return AudioDecoder(_load_audio_autoencoder(model_path, dtype, device), vocoder.to(device))


def _load_audio_autoencoder(
    model_path: str | Path, dtype: torch.dtype, device: str | torch.device
) -> AutoencoderKLLTX2Audio:
    folder = component_folder(model_path, "audio_vae")
    vae = AutoencoderKLLTX2Audio.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
    return vae.to(device)
