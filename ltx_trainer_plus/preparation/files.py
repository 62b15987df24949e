"""Prepared files: written whole or not at all, with a fingerprint of what made them."""

import hashlib
import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.modality import TextContext

VIDEO_FOLDER, AUDIO_FOLDER, TEXT_FOLDER = "latents", "audio_latents", "conditions"
# Part of every fingerprint. Raise it when the same input shall give other numbers.
_VERSION = 1
_SAMPLE_BYTES = 65_536


def fingerprint(**what: Any) -> str:
    """A short text that changes as soon as anything in `what` (plain JSON values) does."""
    text = json.dumps({"version": _VERSION, **what}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def media_identity(path: Path) -> list[int]:
    """Which content a media file has, without reading it: size and time of the last change; a missing file has none."""
    if not path.is_file():
        return []
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def component_identity(folder: Path) -> str:
    """Which model a folder (or file) holds: its files' names, sizes and samples of their content.

    The place and the time of the download do not count: a model that was copied is the same model.
    """
    digest = hashlib.sha256()
    files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        # Notes of download tools change without the model changing.
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def prepared_path(root: Path, folder: str, name: str) -> Path:
    """Where a clip's prepared file lies. Not `with_suffix`: a name may have dots in it."""
    return root / folder / f"{name}.safetensors"


def is_current(path: Path, wanted: str) -> bool:
    """Whether a whole prepared file with this fingerprint is there. Reads its header only."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("fingerprint") == wanted
    except (OSError, SafetensorError):
        return False


def write_video_latents(path: Path, latents: Tensor, *, fps: Fraction, made_by: str, notes: Mapping[str, str]) -> None:
    """`latents` (C, F, H, W), normalised; the metadata gives their sizes and the rate of the frames they are from."""
    _, frames, height, width = latents.shape
    sizes = {"num_frames": str(frames), "height": str(height), "width": str(width), "fps": repr(float(fps))}
    _write(path, {"latents": latents}, {**notes, **sizes, "fingerprint": made_by})


def write_audio_latents(path: Path, latents: Tensor, *, seconds: float, made_by: str, notes: Mapping[str, str]) -> None:
    """`latents` (8, T, 16), normalised."""
    _, steps, bins = latents.shape
    sizes = {"num_time_steps": str(steps), "frequency_bins": str(bins), "duration": repr(seconds)}
    _write(path, {"latents": latents}, {**notes, **sizes, "fingerprint": made_by})


def write_context(path: Path, context: TextContext, *, caption: str, made_by: str) -> None:
    """`video_context` (S, D) and `audio_context` (S, D'), after the connectors: every token is valid."""
    tensors = {"video_context": context.video, "audio_context": context.audio}
    _write(path, tensors, {"caption": caption, "fingerprint": made_by})


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with replacing(path) as temporary:
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, temporary, metadata=metadata)
