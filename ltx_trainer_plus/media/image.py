"""Still pictures to arrays and back."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.media.files import MediaError

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


def is_image(path: str | Path) -> bool:
    """Whether the name is a picture's; everything else is tried as a video."""
    return Path(path).suffix.lower() in IMAGE_SUFFIXES


def read_image(path: str | Path) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB, turned upright by its EXIF orientation; transparency is laid over white.

    Raises:
        MediaError: missing, damaged or not a picture.
    """
    path = Path(path)
    if not path.is_file():
        raise MediaError(path, "there is no such file")
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                white = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(white, upright)
            return np.asarray(upright.convert("RGB"))
    except UnidentifiedImageError as error:
        raise MediaError(path, "it is not a picture that Pillow reads") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(path, f"the picture cannot be read ({error})") from error


def write_png(path: str | Path, picture: NDArray[np.uint8] | Tensor) -> None:
    """Write (H, W, 3) uint8 RGB, whole or not at all."""
    array = np.asarray(picture)
    if array.ndim != 3 or array.shape[-1] != 3 or array.dtype != np.uint8:
        raise ValueError(f"A picture must be (H, W, 3) uint8; this is {array.shape} {array.dtype}.")
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(array)).save(temporary, format="PNG")
