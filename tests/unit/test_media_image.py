"""Still pictures, and the sizes and ranges of pictures in general."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ltx_trainer_plus.media.files import MediaError
from ltx_trainer_plus.media.geometry import cover_and_crop, frames_to_unit
from ltx_trainer_plus.media.image import is_image, read_image, write_png


def gradient(height: int, width: int) -> np.ndarray:
    rows = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    columns = np.linspace(0, 255, width)[None].repeat(height, 0)
    return np.stack([rows, columns, np.full_like(rows, 40)], axis=-1).round().astype(np.uint8)


def test_a_png_reads_back_exactly(tmp_path: Path) -> None:
    picture = gradient(33, 47)
    write_png(tmp_path / "a.PNG", picture)
    assert is_image(tmp_path / "a.PNG")
    assert np.array_equal(read_image(tmp_path / "a.PNG"), picture)


def test_a_photo_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held a quarter turn to the side
    Image.fromarray(gradient(32, 64)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = read_image(tmp_path / "a.jpg")
    assert upright.shape == (64, 32, 3)
    assert np.abs(upright.astype(int) - np.rot90(gradient(32, 64), k=-1)).mean() < 4


def test_transparency_is_laid_over_white_and_palettes_are_resolved(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").tolist() == [[[255, 255, 255]] * 4] * 4
    Image.new("RGB", (4, 4), (255, 0, 0)).convert("P").save(tmp_path / "p.png")
    assert read_image(tmp_path / "p.png")[0, 0].tolist() == [255, 0, 0]


def test_what_is_not_a_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.png").touch()
    write_png(tmp_path / "whole.png", gradient(64, 64))
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:100])
    for name in ("text", "empty", "cut", "absent"):
        with pytest.raises(MediaError, match=rf"{name}\.png: \w+"):
            read_image(tmp_path / f"{name}.png")


@pytest.mark.parametrize("size", [(32, 32), (64, 32), (32, 96), (160, 224)])
def test_covering_a_size_equals_resizing_the_whole_and_cutting_the_centre(size: tuple[int, int]) -> None:
    height, width = size
    source = gradient(90, 120)
    scale = max(height / 90, width / 120)
    whole = np.asarray(
        Image.fromarray(source).resize((round(120 * scale), round(90 * scale)), Image.Resampling.BICUBIC)
    )
    top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
    expected = whole[top : top + height, left : left + width].astype(int)
    result = cover_and_crop(source[None], height, width)
    assert result.shape == (1, height, width, 3)
    # Rounding the resized whole to pixels shifts it by up to one pixel of the gradient.
    assert np.abs(result[0] - expected).max() <= 255 / min(whole.shape[:2]) + 1


def test_a_fitting_picture_is_left_alone_and_extreme_ones_fit() -> None:
    exact = gradient(32, 64)[None]
    assert np.array_equal(cover_and_crop(exact, 32, 64), exact)
    for height, width in ((1, 1), (1, 4000), (4000, 1)):
        picture = np.full((2, height, width, 3), 77, np.uint8)
        assert np.array_equal(cover_and_crop(picture, 544, 960), np.full((2, 544, 960, 3), 77, np.uint8))


def test_frames_fill_the_range_of_the_vae() -> None:
    frames = np.arange(2 * 4 * 32 * 3, dtype=np.uint8).reshape(2, 4, 32, 3)
    video = frames_to_unit(frames)
    assert video.shape == (3, 2, 4, 32)
    assert video.dtype == torch.float32
    assert (float(video.min()), float(video.max())) == (-1.0, 1.0)
    assert torch.allclose((video[1, 0] + 1) * 127.5, torch.from_numpy(frames[0, :, :, 1]).float(), atol=1e-4)
