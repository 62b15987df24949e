"""What can happen to the files of a run and of its data."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_a_foreign_file(path: Path) -> None:
    torch.save({"state": torch.ones(3)}, path)


def scale_latents(root: Path, name: str, factor: float) -> None:
    """Multiply the video latents of a prepared sample: from 1e30 on its loss is not finite."""
    path = root / ".precomputed" / "latents" / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        metadata, latents = file.metadata(), file.get_tensor("latents")
    save_file({"latents": latents * factor}, path, metadata)
