"""One safetensors file of a checkpoint: checked, written through to the disk, and what vouches for it later."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ltx_trainer_plus.atomic import flush_to_disk

Sums = dict[str, int | str]
"""`size` in bytes and `sha256` of a file."""


class NotFiniteError(ValueError):
    """A tensor that should be saved holds NaN or infinity."""


def check_finite(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises: NotFiniteError: names the tensor and the file `name` that it would have been in."""
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NotFiniteError(f"{key} of {name} holds values that are not finite")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Sums:
    """Write a file and wait until it is on the disk."""
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path, metadata)
    flush_to_disk(path)
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
