"""Files of prepared data: one of each kind, in every format that is trained on (docs/design.md, "Prepared data")."""

import pickle
import re
import zipfile
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ltx_trainer_plus.data.batch import TextFeatures
from ltx_trainer_plus.errors import UserError

# What the official trainer assumes of old files that do not say.
_OFFICIAL_FPS = 24.0


class DataError(UserError, ValueError):
    """Prepared data that cannot be trained on; the message names the file."""


def _read(path: Path) -> dict[str, Any]:
    """Entries of a file. Tensors are mapped, so that asking for their shape reads no numbers."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return {**(file.metadata() or {}), **{key: file.get_tensor(key) for key in file.keys()}}  # noqa: SIM118
        entries = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise DataError(
            f"{path}: holds {f'a pickled {found[1]}' if found else 'pickled objects'} beside tensors and plain values. "
            "Such files can run code when they are read, so they are refused. Prepare this clip again."
        ) from None
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read ({error or type(error).__name__}). Prepare this clip again."
        ) from error
    if not isinstance(entries, dict):
        raise DataError(
            f"{path}: holds a {type(entries).__name__} where named entries belong. Prepare this clip again."
        )
    return entries


def read_video(path: Path) -> tuple[Tensor, float]:
    """Latents (C, F, H, W) and frames per second. Old files without a rate count as 24 fps, as officially."""
    entries = _read(path)
    latents = _tensor(path, entries, "latents")
    if latents.ndim == 2:  # old files hold tokens
        sizes = [int(_number(path, key, _entry(path, entries, key))) for key in ("num_frames", "height", "width")]
        if len(latents) != sizes[0] * sizes[1] * sizes[2]:
            raise DataError(f"{path}: {len(latents)} tokens are not {sizes[0]} frames of {sizes[1]} × {sizes[2]}.")
        latents = latents.unflatten(0, sizes).permute(3, 0, 1, 2)
    _check_tensor(path, "latents", latents, 4)
    fps = _number(path, "fps", entries.get("fps", _OFFICIAL_FPS))
    if not 0 < fps < float("inf"):
        raise DataError(f"{path}: a frame rate of {fps} is not possible. Prepare this clip again.")
    return latents, fps


def read_audio(path: Path) -> Tensor:
    """Latents (C, T, M)."""
    latents = _tensor(path, _read(path), "latents")
    _check_tensor(path, "latents", latents, 3)
    return latents


def read_mask(path: Path) -> Tensor:
    """Mask (F, H, W) of a video or (T,) of an audio stream, float32, 1 = given."""
    mask = _tensor(path, _read(path), "mask")
    if mask.ndim not in (1, 3) or not mask.numel() or mask.is_complex():
        raise DataError(
            f"{path}: a mask of shape {tuple(mask.shape)} and {mask.dtype} where (frames, height, width) of the video "
            "latents or (steps,) of the audio latents belongs. Prepare this mask again."
        )
    return mask.float()


def read_text(path: Path) -> TextFeatures:
    """A caption: features before the connectors (official) or contexts after them (ours)."""
    entries = _read(path)
    if "video_context" in entries:
        video, audio = (_tensor(path, entries, f"{stream}_context") for stream in ("video", "audio"))
        text = TextFeatures("context", video, audio)
    else:
        if "prompt_embeds" in entries:  # old files have one for both streams
            video = audio = _tensor(path, entries, "prompt_embeds")
        else:
            video, audio = (_tensor(path, entries, f"{stream}_prompt_embeds") for stream in ("video", "audio"))
        text = TextFeatures("features", video, audio, _tensor(path, entries, "prompt_attention_mask") != 0)
    _check_tensor(path, "the text of the video", video, 2)
    _check_tensor(path, "the text of the audio", audio, 2)
    if text.mask is not None and text.mask.shape != video.shape[:1]:
        raise DataError(f"{path}: {len(video)} tokens have a mask of shape {tuple(text.mask.shape)}.")
    return text


def _entry(path: Path, entries: Mapping[str, Any], key: str) -> Any:
    if key not in entries:
        raise DataError(
            f"{path}: has no entry {key!r} (it has: {', '.join(entries) or 'none'}). Prepare this clip again."
        )
    return entries[key]


def _tensor(path: Path, entries: Mapping[str, Any], key: str) -> Tensor:
    value = _entry(path, entries, key)
    if not isinstance(value, Tensor):
        raise DataError(f"{path}: entry {key!r} is a {type(value).__name__}, not a tensor. Prepare this clip again.")
    return value


def _number(path: Path, key: str, value: Any) -> float:
    try:
        # Metadata of .safetensors is text, and a rate may be written exactly: 24000/1001.
        return float(Fraction(value)) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise DataError(f"{path}: entry {key!r} is {value!r}, not a number. Prepare this clip again.") from None


def _check_tensor(path: Path, what: str, tensor: Tensor, ndim: int) -> None:
    if tensor.ndim != ndim or not tensor.numel() or not tensor.is_floating_point():
        raise DataError(
            f"{path}: {what}: {tuple(tensor.shape)} of {tensor.dtype} where floating-point numbers in {ndim} "
            "dimensions belong. Prepare this clip again."
        )


def check_finite(path: Path, tensor: Tensor) -> None:
    """Raises `DataError` where a number is NaN or infinite: one such sample would spoil the weights."""
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise DataError(
            f"{path}: {bad} of {tensor.numel()} numbers are not finite (NaN or infinity). "
            "Prepare this clip again, or delete its file to train without it."
        )
