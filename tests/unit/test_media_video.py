"""Video files in and out, checked on real files."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from ltx_trainer_plus.media.audio import read_audio
from ltx_trainer_plus.media.files import MediaError
from ltx_trainer_plus.media.video import exact_frame_rate, read_video, write_video

RED, GREEN, BLUE, GREY = (200, 40, 40), (30, 180, 60), (40, 60, 210), (120, 120, 120)


def quarters(frames: int = 9, height: int = 48, width: int = 64) -> np.ndarray:
    """Frames whose four corners differ, so that turning and mirroring show."""
    picture = np.zeros((frames, height, width, 3), np.uint8)
    picture[:, : height // 2, : width // 2] = RED
    picture[:, : height // 2, width // 2 :] = GREEN
    picture[:, height // 2 :, : width // 2] = BLUE
    picture[:, height // 2 :, width // 2 :] = GREY
    return picture


def corners(picture: np.ndarray) -> np.ndarray:
    height, width = picture.shape[:2]
    return picture[[height // 4, height // 4, -height // 4, -height // 4], [width // 4, -width // 4] * 2].astype(int)


@pytest.mark.parametrize("fps", [Fraction(24), Fraction(24000, 1001), Fraction(30000, 1001), Fraction(25, 2)])
def test_a_written_video_keeps_frame_count_exact_rate_and_colours(tmp_path: Path, fps: Fraction) -> None:
    frames = quarters(25)
    write_video(tmp_path / "a.mp4", frames, fps)
    clip = read_video(tmp_path / "a.mp4")
    assert clip.fps == fps
    assert clip.frames.shape == frames.shape
    assert clip.frames.dtype == np.uint8
    # 4:2:0 colour and quantisation cost a few levels; a wrong matrix or range costs dozens.
    assert np.abs(corners(clip.frames[3]) - corners(frames[3])).max() <= 4


def test_a_float_frame_rate_means_the_ntsc_rate_it_rounds() -> None:
    assert exact_frame_rate(23.976) == Fraction(24000, 1001)
    assert exact_frame_rate(29.97) == Fraction(30000, 1001)
    assert exact_frame_rate(59.94) == Fraction(60000, 1001)
    assert exact_frame_rate(24.0) == 24
    assert exact_frame_rate(12.5) == Fraction(25, 2)
    assert exact_frame_rate(Fraction(2997, 125)) == Fraction(2997, 125)
    for impossible in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="frame rate"):
            exact_frame_rate(impossible)


def test_float_frames_in_zero_to_one_are_as_bright_in_the_file(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", torch.full((5, 32, 48, 3), 0.75), 24)
    clip = read_video(tmp_path / "a.mp4")
    assert clip.frames.shape == (5, 32, 48, 3)
    assert abs(clip.frames.mean() - 0.75 * 255) < 3


def test_frames_that_cannot_be_written_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with pytest.raises(ValueError, match="x / 2"):
        write_video(path, torch.linspace(-1, 1, 3 * 32 * 32 * 3).reshape(3, 32, 32, 3), 24)
    with pytest.raises(ValueError, match="even sizes"):
        write_video(path, np.zeros((3, 33, 48, 3), np.uint8), 24)
    with pytest.raises(ValueError, match=r"\(F, H, W, 3\)"):
        write_video(path, np.zeros((3, 3, 32, 48), np.uint8), 24)
    with pytest.raises(ValueError, match="sample rate"):
        write_video(path, quarters(), 24, audio=torch.zeros(2, 100))
    assert list(tmp_path.iterdir()) == []


def test_sound_lies_exactly_where_it_was_put(tmp_path: Path) -> None:
    rate = 48_000
    samples = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(rate) / rate)
    samples[:12_000] = 0
    write_video(tmp_path / "a.mp4", quarters(25), 25, torch.stack([samples, samples / 2]), rate)
    sound = read_audio(tmp_path / "a.mp4")
    assert sound is not None
    assert sound.rate == rate
    assert sound.samples.shape[0] == 2
    assert rate <= sound.samples.shape[1] < rate + 1024
    onset = int((sound.samples[0].abs() > 0.05).nonzero()[0])
    assert abs(onset - 12_000) < 100  # the encoder's 1,024 priming samples are not played
    assert (sound.samples[:, 13_000:47_000] - torch.stack([samples, samples / 2])[:, 13_000:47_000]).abs().max() < 0.02


def test_a_sample_rate_that_aac_lacks_is_resampled(tmp_path: Path) -> None:
    samples = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(24_001) / 24_001)
    write_video(tmp_path / "a.mp4", quarters(25), 25, samples[None], 24_001)
    sound = read_audio(tmp_path / "a.mp4")
    assert sound is not None
    assert sound.rate == 48_000
    expected = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(48_000) / 48_000)
    assert (sound.samples[1, 1000:47_000] - expected[1000:47_000]).abs().max() < 0.03


def test_sound_that_is_not_finite_is_written_as_silence(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", quarters(), 24, torch.full((2, 16_000), torch.nan), 16_000)
    sound = read_audio(tmp_path / "a.mp4")
    assert sound is not None
    assert sound.samples.abs().max() < 1e-3


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, quarters(), 24)
    before = path.read_bytes()

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(av.VideoFrame, "from_ndarray", broken)
    with pytest.raises(OSError, match="disk full"):
        write_video(path, quarters(30), 30)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def write_raw(path: Path, frames: np.ndarray, codec: str, pix_fmt: str, pts: list[int] | None = None, **stream: object):
    """A file by PyAV alone, for what `write_video` does not write."""
    with av.open(str(path), "w") as container:
        video = container.add_stream(codec, rate=24)
        video.height, video.width, video.pix_fmt = frames.shape[1], frames.shape[2], pix_fmt
        if "rotation" in stream:
            video.set_display_rotation(stream["rotation"])
        if "pixel_aspect" in stream:
            video.codec_context.sample_aspect_ratio = stream["pixel_aspect"]
        for index, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if pts is not None:
                frame.pts, frame.time_base = pts[index], Fraction(1, 24)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_rotated_video_comes_upright(tmp_path: Path, degrees: int) -> None:
    frames = quarters()
    write_raw(tmp_path / "a.mp4", frames, "libx264", "yuv420p", rotation=degrees)
    clip = read_video(tmp_path / "a.mp4")
    upright = np.rot90(frames[0], k=degrees // 90)
    assert clip.frames.shape[1:] == upright.shape
    assert np.abs(corners(clip.frames[0]) - corners(upright)).max() <= 5


@pytest.mark.parametrize(("name", "codec"), [("A.MKV", "libx264"), ("a.webm", "libvpx-vp9"), ("a.avi", "mpeg4")])
def test_containers_and_upper_case_names_are_read(tmp_path: Path, name: str, codec: str) -> None:
    frames = quarters()
    write_raw(tmp_path / name, frames, codec, "yuv420p")
    clip = read_video(tmp_path / name)
    assert clip.fps == 24
    assert clip.frames.shape == frames.shape
    assert np.abs(corners(clip.frames[-1]) - corners(frames[-1])).max() <= 12


def test_wide_pixels_are_made_square(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.mp4", quarters(3, 48, 64), "libx264", "yuv420p", pixel_aspect=Fraction(4, 3))
    assert read_video(tmp_path / "a.mp4").frames.shape == (3, 48, 85, 3)


def test_a_variable_rate_keeps_each_picture_at_its_time(tmp_path: Path) -> None:
    shades = np.arange(0, 250, 25)
    frames = np.broadcast_to(shades[:, None, None, None], (10, 32, 32, 3)).astype(np.uint8)
    # One second of pauses (two frames a second), then eight frames at 24 fps.
    pts = [0, 12, 24, 25, 26, 27, 28, 29, 30, 31]
    write_raw(tmp_path / "a.mkv", frames, "libx264", "yuv420p", pts=pts)
    clip = read_video(tmp_path / "a.mkv")
    times = np.arange(len(clip.frames)) / float(clip.fps)
    shown = clip.frames.mean(axis=(1, 2, 3))
    for time, shade in zip(times, shown, strict=True):
        wanted = max(index for index, tick in enumerate(pts) if tick / 24 <= time + 1e-6)
        within_a_frame = abs(shade - shades[max(wanted - 2, 0) : wanted + 3]).min()
        assert within_a_frame < 4, f"at {time:.2f} s"
    assert abs(len(clip.frames) / float(clip.fps) - 32 / 24) < 0.35


def test_a_browser_recording_with_the_rate_of_its_clock_keeps_its_pictures(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.webm"), "w") as container:
        video = container.add_stream("libvpx-vp9", rate=1000)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        for index, picture in enumerate(quarters(30)):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = 33 * index, Fraction(1, 1000)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
    clip = read_video(tmp_path / "a.webm")
    assert len(clip.frames) == 30
    assert abs(float(clip.fps) - 1000 / 33) < 0.5


def test_only_the_frames_asked_for_are_decoded(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", quarters(40), 24)
    assert len(read_video(tmp_path / "a.mp4", max_frames=9).frames) == 9
    assert len(read_video(tmp_path / "a.mp4", max_frames=400).frames) == 40


def test_one_frame_and_one_pixel_are_a_video(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.mkv", np.full((1, 1, 1, 3), 99, np.uint8), "ffv1", "bgr0")
    clip = read_video(tmp_path / "a.mkv")
    assert clip.frames.tolist() == [[[[99, 99, 99]]]]


def test_what_is_not_a_video_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("hello\n" * 100)
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:5,\nhttp://example.com/a.ts\n#EXT-X-ENDLIST\n")
    write_video(tmp_path / "whole.mp4", quarters(25), 24)
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "whole.mp4").read_bytes()[:300])
    for name in ("empty", "text", "list", "cut", "absent"):
        with pytest.raises(MediaError, match=rf"{name}\.mp4: \w+") as caught:
            read_video(tmp_path / f"{name}.mp4")
        assert caught.value.path == tmp_path / f"{name}.mp4"
        assert str(tmp_path) not in caught.value.reason
