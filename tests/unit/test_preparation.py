"""Preparing real media with the tiny model: what the files hold, what is skipped, what a second run does."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from ltx_trainer_plus.commands.main import run_command
from ltx_trainer_plus.data.precomputed import PrecomputedDataset
from ltx_trainer_plus.media.audio import Waveform, read_audio, resample
from ltx_trainer_plus.media.geometry import cover_and_crop, frames_to_unit
from ltx_trainer_plus.media.image import write_png
from ltx_trainer_plus.media.mel import log_mel
from ltx_trainer_plus.media.video import read_video, write_video
from ltx_trainer_plus.models.components import load_audio_vae, load_video_vae
from ltx_trainer_plus.models.text import encode_prompts, load_connectors, load_text_encoder
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.preparation.clips import DatasetError
from ltx_trainer_plus.preparation.media import fit_sound
from ltx_trainer_plus.preparation.plan import PreparationSettings
from ltx_trainer_plus.preparation.prepare import prepare_dataset
from ltx_trainer_plus.preparation.report import PreparationReport

ALONE = Topology(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
Prepare = Callable[..., PreparationReport]


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A folder with one clip: 12 moving frames of 80x48 at 24000/1001 frames per second, with a mono tone."""
    folder = tmp_path / "clips"
    folder.mkdir()
    add_clip(folder, "a.mp4")
    return folder


def add_clip(
    folder: Path, name: str, *, frames: int = 12, sound: bool = True, caption: str | None = "a grey wave"
) -> Path:
    shades = np.linspace(0, 255, 80)[None, None, :, None] + np.arange(frames)[:, None, None, None] * 10
    pictures = np.broadcast_to(shades % 256, (frames, 48, 80, 3)).astype(np.uint8)
    tone = 0.4 * torch.sin(torch.arange(44_100) * 0.06)[None]
    write_video(folder / name, pictures, 23.976, tone if sound else None, 44_100)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption)
    return folder / name


@pytest.fixture
def prepare(clips: Path, tiny_pipeline: Path) -> Prepare:
    def run(dataset: Path = clips, **settings: object) -> PreparationReport:
        settings = {"resolution_buckets": "64x32x9", **settings}
        return prepare_dataset(PreparationSettings(dataset=dataset, model_path=tiny_pipeline, **settings), ALONE)

    return run


def written(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*.safetensors"))}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_the_files_hold_what_the_models_make_of_the_clip(clips: Path, prepare: Prepare, tiny_pipeline: Path) -> None:
    report = prepare(lora_trigger="TRIG")
    assert (report.prepared, report.new, report.captions, report.skipped) == (("a",), 1, 1, ())
    sample = PrecomputedDataset(clips, video_dir="latents", audio_dir="audio_latents")[0]

    video = read_video(clips / "a.mp4")
    frames = cover_and_crop(video.frames[:9], 32, 64)
    assert torch.equal(
        sample.video_latent, load_video_vae(tiny_pipeline, torch.float32).encode(frames_to_unit(frames)[None])[0]
    )
    assert sample.fps == 24_000 / 1001

    sound = read_audio(clips / "a.mp4")
    samples = round(9 * 1001 / 24_000 * 16_000)
    mel = log_mel(resample(sound.samples, sound.rate, 16_000)[:, :samples])
    expected = load_audio_vae(tiny_pipeline).encode(mel)[0]
    # The tail of the track beyond the cut reaches the filter of the last few samples differently.
    assert torch.allclose(sample.audio_latent, expected, atol=1e-3)

    encoder, connectors = (load(tiny_pipeline, dtype=torch.float32) for load in (load_text_encoder, load_connectors))
    (context,) = encode_prompts(["TRIG a grey wave"], encoder, connectors)
    assert sample.text.kind == "context"
    assert torch.equal(sample.text.video, context.video[0])
    assert torch.equal(sample.text.audio, context.audio[0])

    notes = metadata(clips / ".precomputed/latents/a.safetensors")
    assert (notes["num_frames"], notes["height"], notes["width"]) == ("2", "1", "2")
    notes = metadata(clips / ".precomputed/audio_latents/a.safetensors")
    assert (notes["num_time_steps"], notes["frequency_bins"]) == (str(expected.shape[1]), "16")
    assert float(notes["duration"]) == pytest.approx(9 * 1001 / 24_000)
    assert metadata(clips / ".precomputed/conditions/a.safetensors")["caption"] == "TRIG a grey wave"


def test_every_clip_that_cannot_be_prepared_is_named_with_its_reason(clips: Path, prepare: Prepare) -> None:
    add_clip(clips, "b.MP4")
    add_clip(clips, "short.mp4", frames=8)
    add_clip(clips, "silent.mp4", sound=False)
    add_clip(clips, "nocaption.mp4", caption=None)
    add_clip(clips, "a.mov")
    add_clip(clips, "cut.mp4")
    (clips / "cut.mp4").write_bytes((clips / "cut.mp4").read_bytes()[:400])
    for name, content in (("empty", ""), ("text", "hello\n" * 50)):
        (clips / f"{name}.mp4").write_text(content)
        (clips / f"{name}.txt").write_text("c")
    write_png(clips / "still.png", np.zeros((40, 60, 3), np.uint8))
    (clips / "still.txt").write_text("a still")

    report = prepare()
    assert report.prepared == ("a", "b")
    assert {(skip.item, skip.reason) for skip in report.skipped} == {
        ("short.mp4", "too short"),
        ("silent.mp4", "silent"),
        ("nocaption.mp4", "no caption"),
        ("a.mp4", "collision"),  # after a.mov in the folder's order
        ("cut.mp4", "unreadable"),
        ("empty.mp4", "unreadable"),
        ("text.mp4", "unreadable"),
        ("still.png", "too short"),
    }
    # Nothing of a skipped clip lies where training looks.
    names = {Path(name).stem for name in written(clips / ".precomputed")}
    assert names == {"a", "b"}

    console = Console(record=True, width=60, file=io.StringIO())
    report.print(console)
    summary = console.export_text()
    for skip in report.skipped:
        assert f"  {skip.item}: {skip.reason}: {skip.detail}\n" in summary
    assert "2 of 10 clips" in summary


def test_without_audio_silent_clips_and_pictures_are_welcome(clips: Path, prepare: Prepare) -> None:
    add_clip(clips, "silent.mp4", sound=False)
    write_png(clips / "still.png", np.full((50, 50, 3), 200, np.uint8))
    (clips / "still.txt").write_text("a still")
    report = prepare(with_audio=False, resolution_buckets="64x32x9;32x32x1")
    assert report.skipped == ()
    assert report.prepared == ("a", "silent", "still")
    assert {str(bucket): count for bucket, count in report.buckets} == {"64x32x9": 2, "32x32x1": 1}
    assert not (clips / ".precomputed/audio_latents").exists()
    dataset = PrecomputedDataset(clips, video_dir="latents", audio_dir=None)
    assert [shape.video[1:] for shape in dataset.shapes] == [(2, 1, 2), (2, 1, 2), (1, 1, 1)]


def test_sound_that_is_not_finite_is_named_and_leaves_no_file(clips: Path, prepare: Prepare) -> None:
    path = clips / "b.mkv"
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=24)
        video.width, video.height, video.pix_fmt = 80, 48, "yuv420p"
        audio = container.add_stream("pcm_f32le", rate=16_000, layout="mono")
        for _ in range(12):
            picture = av.VideoFrame.from_ndarray(np.zeros((48, 80, 3), np.uint8), format="rgb24")
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
        sound = av.AudioFrame.from_ndarray(np.full((1, 8000), np.nan, np.float32), format="flt", layout="mono")
        sound.sample_rate, sound.pts = 16_000, 0
        container.mux(audio.encode(sound))
    path.with_suffix(".txt").write_text("a grey wave")
    report = prepare()
    (skipped,) = report.skipped
    assert (skipped.item, skipped.reason) == ("b.mkv", "unreadable")
    assert "the latents of its sound hold numbers that are not finite" in skipped.detail
    assert report.prepared == ("a",)
    assert not [name for name in written(clips / ".precomputed") if "b." in name]


def test_one_pixel_and_one_frame_make_a_sample(clips: Path, prepare: Prepare) -> None:
    import av

    with av.open(str(clips / "dot.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 1, 1, "bgr0"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((1, 1, 3), 99, np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    (clips / "dot.txt").write_text("a dot")
    assert prepare(with_audio=False, resolution_buckets="64x32x9;32x32x1").prepared == ("a", "dot")


def test_a_second_run_makes_only_what_is_missing(clips: Path, prepare: Prepare) -> None:
    add_clip(clips, "b.mp4")
    prepare()
    output = clips / ".precomputed"
    before = written(output)
    assert len(before) == 6
    (output / "audio_latents/b.safetensors").unlink()
    (output / "conditions/a.safetensors").write_bytes(b"cut off")
    leftover = output / "latents/.b.123.tmp.safetensors"
    leftover.touch()
    report = prepare()
    assert (report.prepared, report.new, report.captions) == (("a", "b"), 1, 1)
    after = written(output)
    assert not leftover.exists()
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"audio_latents/b.safetensors", "conditions/a.safetensors"}
    report = prepare()
    assert (report.new, report.captions) == (0, 0)
    assert written(output) == after
    assert prepare(overwrite=True).new == 2


def test_a_change_remakes_exactly_what_depends_on_it(clips: Path, prepare: Prepare, tmp_path: Path) -> None:
    add_clip(clips, "b.mp4")
    prepare()
    output = clips / ".precomputed"

    def changed_by(**settings: object) -> set[str]:
        before = written(output)
        prepare(**settings)
        return {name for name, time in written(output).items() if before.get(name) != time}

    (clips / "a.txt").write_text("another caption")
    assert changed_by() == {"conditions/a.safetensors"}
    add_clip(clips, "b.mp4", frames=14)
    assert changed_by() == {"latents/b.safetensors", "audio_latents/b.safetensors"}
    assert changed_by(lora_trigger="T") == {"conditions/a.safetensors", "conditions/b.safetensors"}
    media = {f"{folder}/{name}.safetensors" for folder in ("latents", "audio_latents") for name in "ab"}
    assert changed_by(lora_trigger="T", resolution_buckets="32x32x9") == media
    assert metadata(output / "latents/a.safetensors")["bucket"] == "32x32x9"


def test_a_copied_model_is_the_same_model_and_another_one_is_not(
    clips: Path, prepare: Prepare, tiny_pipeline: Path, tmp_path: Path
) -> None:
    import shutil

    prepare(with_audio=False)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_pipeline, copy, ignore=shutil.ignore_patterns("transformer"), copy_function=shutil.copy)

    def prepared_again() -> tuple[int, int]:
        settings = PreparationSettings(clips, copy, resolution_buckets="64x32x9", with_audio=False)
        report = prepare_dataset(settings, ALONE)
        return report.new, report.captions

    assert prepared_again() == (0, 0)
    weights = next((copy / "vae").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert prepared_again() == (1, 0)


def test_what_is_out_of_date_and_cannot_be_remade_is_removed(clips: Path, prepare: Prepare) -> None:
    add_clip(clips, "b.mp4")
    add_clip(clips, "gone.mp4")
    add_clip(clips, "silent.mp4", sound=False)
    prepare(with_audio=False)
    prepare()
    (clips / "b.mp4").write_text("no longer a video")
    (clips / "gone.mp4").unlink()
    (clips / "d.json").write_text(
        json.dumps([{"video": f"{name}.mp4", "caption": "a grey wave"} for name in ("a", "b", "gone", "silent")])
    )
    report = prepare(clips / "d.json")
    assert [(skip.item, skip.reason) for skip in report.skipped] == [
        ("b.mp4", "unreadable"),
        ("gone.mp4", "unreadable"),
        ("silent.mp4", "silent"),
    ]
    left = set(written(clips / ".precomputed"))
    assert not {"latents/b.safetensors", "audio_latents/b.safetensors"} & left
    # All that is left of a clip that was deleted; and what is right but not wanted by this run.
    assert {"latents/gone.safetensors", "audio_latents/gone.safetensors", "latents/silent.safetensors"} <= left


def test_samples_of_other_data_sets_in_the_folder_are_pointed_out(
    clips: Path, prepare: Prepare, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert prepare(output_dir=output).strays == ()
    (clips / "a.mp4").rename(clips / "b.mp4")
    (clips / "a.txt").rename(clips / "b.txt")
    assert prepare(output_dir=output).strays == ("a",)


def test_nothing_is_begun_with_settings_that_cannot_work(clips: Path, prepare: Prepare, tiny_pipeline: Path) -> None:
    with pytest.raises(DatasetError, match="nearest that does is 64x32x9"):
        prepare(resolution_buckets="64x32x10")
    with pytest.raises(DatasetError, match="no such file or folder"):
        prepare(clips.parent / "cilps/dataset.json")
    assert not (clips.parent / "cilps").exists()
    with pytest.raises(DatasetError, match="--text-encoder-path"):
        prepare(text_encoder_path=clips / "gemma")
    checkpoint = clips / "ltx.safetensors"
    checkpoint.touch()
    with pytest.raises(DatasetError, match="diffusers pipeline folder"):
        prepare_dataset(PreparationSettings(clips, checkpoint, resolution_buckets="64x32x9"), ALONE)
    assert not (clips / ".precomputed").exists()
    (clips / ".precomputed/latents").mkdir(parents=True)
    (clips / ".precomputed/latents/a.pt").touch()
    with pytest.raises(DatasetError, match="official trainer"):
        prepare()


def test_a_second_run_in_the_same_folder_is_kept_out(clips: Path, prepare: Prepare) -> None:
    import fcntl

    (clips / ".precomputed").mkdir()
    with (clips / ".precomputed/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DatasetError, match="another run is preparing"):
            prepare()
    assert prepare().prepared == ("a",)


def test_sound_is_laid_at_the_first_frame_and_fitted_to_the_frames() -> None:
    ramp = torch.arange(1, 101).float()[None] / 100

    def fitted(track_start: float, start: float, length: int) -> list[int]:
        both = fit_sound(Waveform(ramp, 100, track_start), start=start, length=length, rate=100)
        assert both.shape == (2, length)
        assert torch.equal(both[0], both[1])
        return (both[0] * 100).round().int().tolist()

    assert fitted(0, 0, 4) == [1, 2, 3, 4]
    assert fitted(0, 0, 102) == [*range(1, 101), 0, 0]
    # The track begins before, and after, the first frame.
    assert fitted(0, 0.5, 3) == [51, 52, 53]
    assert fitted(0.02, 0, 4) == [0, 0, 1, 2]
    assert fitted(0, 7, 3) == [0, 0, 0]
    assert fitted(7, 0, 3) == [0, 0, 0]


def test_the_exit_status_tells_all_clips_from_some_and_none(clips: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    model, output = ["--model-path", str(tiny_pipeline)], ["--output-dir", str(tmp_path / "out"), "--device", "cpu"]

    def status(dataset: Path, buckets: str = "64x32x9") -> int:
        return run_command("prepare", [str(dataset), *model, *output, "--resolution-buckets", buckets])

    assert status(clips) == 0
    (clips / "broken.mp4").write_bytes(b"no video")
    (clips / "broken.txt").write_text("a broken one")
    assert status(clips) == 3
    assert status(tmp_path / "nowhere") == 2
    assert status(clips, "64x31x9") == 2
