"""From pictures of any size to what a video VAE encodes: the only code that resizes and crops."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


def cover_and_crop(frames: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Scale pictures until they just cover a size, and keep the centre.

    Args:
        frames: (F, H, W, 3) uint8.
        height, width: of the result, in pixels.

    Returns:
        (F, height, width, 3) uint8; bicubic, antialiased where it shrinks.
    """
    source_height, source_width = frames.shape[1:3]
    if (source_height, source_width) == (height, width):
        return frames
    # The part of the source that stays visible. Cutting it out first, with fractional edges, gives the pixels of
    # resizing the whole, without ever holding a whole 1 x 4000 strip blown up to cover a square.
    scale = max(height / source_height, width / source_width)
    left = (source_width - width / scale) / 2
    top = (source_height - height / scale) / 2
    box = (
        max(left, 0.0),
        max(top, 0.0),
        min(source_width - left, source_width),
        min(source_height - top, source_height),
    )
    result = np.empty((len(frames), height, width, 3), dtype=np.uint8)
    for target, frame in zip(result, frames, strict=True):
        picture = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC, box=box)
        target[:] = np.asarray(picture)
    return result


def frames_to_unit(frames: NDArray[np.uint8]) -> Tensor:
    """(F, H, W, 3) uint8 to what a video VAE encodes: (3, F, H, W) float32 in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(3, 0, 1, 2).float() / 127.5 - 1
