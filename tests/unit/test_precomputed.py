"""Reading prepared data: official, old official and our own."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ltx_trainer_plus.data.precomputed import PrecomputedDataset
from ltx_trainer_plus.data.sample_files import DataError

SHAPE = (4, 2, 3, 5)  # C, F, H, W


def write(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata=metadata)


def write_pt(path: Path, entries: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(entries, path)


def write_ours(root: Path, name: str, *, audio: bool = True, fps: str = "24.0") -> None:
    """One sample as `process_dataset.py` writes it."""
    data = root / ".precomputed"
    write(data / f"latents/{name}.safetensors", {"latents": torch.randn(SHAPE)}, fps=fps, fingerprint="f")
    if audio:
        write(data / f"audio_latents/{name}.safetensors", {"latents": torch.randn(8, 6, 16)}, num_time_steps="6")
    contexts = {"video_context": torch.randn(7, 12), "audio_context": torch.randn(7, 6)}
    write(data / f"conditions/{name}.safetensors", contexts, caption="a cat")


def test_official_data_is_read(reference: Path) -> None:
    data = PrecomputedDataset(reference / "official-precomputed", video_dir="latents", audio_dir="audio_latents")
    assert data.names == [f"clips/clip_0{i}" for i in range(6)]
    sample = data[2]
    stored = torch.load(reference / "official-precomputed/latents/clips/clip_02.pt", weights_only=True)
    assert sample.video_latent is not None
    assert torch.equal(sample.video_latent, stored["latents"])
    assert sample.audio_latent is not None
    assert sample.audio_latent.shape == (8, 18, 16)
    assert (sample.name, sample.fps) == ("clips/clip_02", 24.0)
    assert sample.text.kind == "features"
    assert sample.text.video.shape == (128, 32)
    assert sample.text.audio.shape == (128, 16)
    assert sample.text.mask is not None
    assert sample.text.mask.dtype == torch.bool
    assert not sample.text.mask.all()


def test_a_clip_that_lacks_a_part_is_named(reference: Path) -> None:
    data = PrecomputedDataset(reference / "official-precomputed", video_dir="latents", audio_dir=None)
    assert data.skipped == [("clips/clip_06", "no file in conditions")]
    both = PrecomputedDataset(reference / "official-precomputed", video_dir="latents", audio_dir="audio_latents")
    assert both.skipped == [("clips/clip_06", "no file in audio_latents or conditions")]


def test_old_official_data_is_read(reference: Path) -> None:
    """Old names, one caption for both streams, and tokens instead of latents in two of the files."""
    root = reference / "official-precomputed-legacy"
    data = PrecomputedDataset(root, video_dir="latents", audio_dir=None)
    assert data.names == [f"latent_{i}" for i in range(4)]
    assert data.skipped == []
    for index, sample in enumerate(data[i] for i in range(4)):
        assert sample.video_latent is not None
        assert sample.video_latent.shape == (128, 2, 2, 3)
        assert (sample.fps, sample.audio_latent) == (25.0, None)
        condition = torch.load(root / f"conditions/condition_{index}.pt", weights_only=True)
        assert torch.equal(sample.text.video, condition["prompt_embeds"])
        assert torch.equal(sample.text.audio, condition["prompt_embeds"])
    tokens = torch.load(root / "latents/latent_1.pt", weights_only=True)["latents"]
    latent = data[1].video_latent
    assert latent is not None
    assert torch.equal(latent[:, 1, 0, 2], tokens[1 * 6 + 0 * 3 + 2])


def test_our_own_data_is_read_with_the_exact_frame_rate(tmp_path: Path) -> None:
    write_ours(tmp_path, "day/one", fps="24000/1001")
    for root in (tmp_path, tmp_path / ".precomputed"):
        sample = PrecomputedDataset(root, video_dir="latents", audio_dir="audio_latents")[0]
        assert sample.fps == 24000 / 1001
        assert sample.text.kind == "context"
        assert sample.text.mask is None
        assert sample.video_latent is not None
        assert sample.video_latent.shape == SHAPE


def test_a_run_without_a_stream_does_not_ask_for_its_files(tmp_path: Path) -> None:
    write_ours(tmp_path, "one", audio=False)
    assert PrecomputedDataset(tmp_path, video_dir="latents", audio_dir=None)[0].audio_latent is None
    write_ours(tmp_path, "two")
    shutil.rmtree(tmp_path / ".precomputed/latents")
    sample = PrecomputedDataset(tmp_path, video_dir=None, audio_dir="audio_latents")[0]
    assert (sample.name, sample.video_latent, sample.fps) == ("two", None, None)


def test_shapes_come_from_headers_and_agree_with_the_samples(reference: Path, tmp_path: Path) -> None:
    data = PrecomputedDataset(reference / "official-precomputed", video_dir="latents", audio_dir="audio_latents")
    assert len(data.shapes) == 6
    assert data.shapes[0] == ((128, 3, 2, 4), (8, 18, 16), "features", (128, 32), (128, 16), (), ())
    assert data.shape_of(3) == data.shapes[3]
    write_ours(tmp_path, "one")
    ours = PrecomputedDataset(tmp_path, video_dir="latents", audio_dir=None)
    assert ours.shapes == [(SHAPE, None, "context", (7, 12), (7, 6), (), ())]


def test_dots_in_names_links_and_left_over_files(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write_ours(elsewhere, "a.b.c")
    data = tmp_path / "data/.precomputed"
    for folder in ("latents", "audio_latents", "conditions"):
        (data / folder).mkdir(parents=True)
        (data / folder / "linked").symlink_to(elsewhere / ".precomputed" / folder)
        (data / folder / ".half-written.safetensors").write_bytes(b"x")
        (data / folder / "notes.txt").write_text("x")
    dataset = PrecomputedDataset(tmp_path / "data", video_dir="latents", audio_dir="audio_latents")
    assert dataset.names == ["linked/a.b.c"]
    assert dataset.skipped == []


def test_a_missing_folder_says_which_there_are(tmp_path: Path) -> None:
    write_ours(tmp_path, "one", audio=False)
    with pytest.raises(DataError, match=r"no folder 'audio_latents' \(it has: conditions, latents\)"):
        PrecomputedDataset(tmp_path, video_dir="latents", audio_dir="audio_latents")
    with pytest.raises(DataError, match="is not a folder"):
        PrecomputedDataset(tmp_path / "nothing", video_dir="latents", audio_dir=None)


def test_no_complete_sample_is_an_error_with_the_counts(tmp_path: Path) -> None:
    write_ours(tmp_path, "one")
    (tmp_path / ".precomputed/conditions/one.safetensors").rename(tmp_path / ".precomputed/conditions/1.safetensors")
    with pytest.raises(DataError, match=r"no complete sample \(1 in latents, 1 in conditions\)"):
        PrecomputedDataset(tmp_path, video_dir="latents", audio_dir=None)


def test_a_sample_that_exists_in_both_formats_is_refused(tmp_path: Path) -> None:
    write_ours(tmp_path, "one")
    write_pt(tmp_path / ".precomputed/latents/one.pt", {"latents": torch.zeros(SHAPE)})
    with pytest.raises(DataError, match=r"one exists as \.pt and as \.safetensors"):
        PrecomputedDataset(tmp_path, video_dir="latents", audio_dir=None)


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_pickled_object_is_refused_and_never_run(tmp_path: Path) -> None:
    write_ours(tmp_path, "one")
    victim = tmp_path / ".precomputed/latents/one.safetensors"
    victim.unlink()
    write_pt(victim.with_suffix(".pt"), {"latents": torch.zeros(SHAPE), "x": Evil(tmp_path / "ran")})
    data = PrecomputedDataset(tmp_path, video_dir="latents", audio_dir=None)
    with pytest.raises(DataError, match=r"one\.pt: holds a pickled \S*mkdir beside tensors"):
        data[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("folder", ["latents", "audio_latents", "conditions"])
def test_numbers_that_are_not_finite_name_the_file(folder: str, bad: float, tmp_path: Path) -> None:
    write_ours(tmp_path, "one")
    path = tmp_path / f".precomputed/{folder}/one.safetensors"
    tensors = {"latents": torch.randn(SHAPE if folder == "latents" else (8, 6, 16))}
    if folder == "conditions":
        tensors = {"video_context": torch.randn(7, 12), "audio_context": torch.randn(7, 6)}
    next(iter(tensors.values())).view(-1)[3] = bad
    write(path, tensors, fps="24.0")
    data = PrecomputedDataset(tmp_path, video_dir="latents", audio_dir="audio_latents")
    with pytest.raises(DataError, match=rf"{folder}/one\.safetensors: 1 of \d+ numbers are not finite"):
        data[0]


def test_all_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        write_ours(tmp_path, name)
    latents = tmp_path / ".precomputed/latents"
    cut = (latents / "a.safetensors").read_bytes()[:100]
    (latents / "a.safetensors").write_bytes(cut)
    for name, entries in {
        "b": {"latents": torch.zeros(2, 3)},
        "c": {"latents": torch.zeros(SHAPE), "fps": 0},
        "d": [1, 2],
        "e": {"latent": torch.zeros(SHAPE)},
    }.items():
        (latents / f"{name}.safetensors").unlink()
        write_pt(latents / f"{name}.pt", entries)
    data = PrecomputedDataset(tmp_path, video_dir="latents", audio_dir=None)
    with pytest.raises(DataError) as caught:
        _ = data.shapes
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    for line, words in zip(
        lines,
        [
            "a.safetensors: cannot be read",
            "b.pt: has no entry 'num_frames'",
            "c.pt: a frame rate of 0.0",
            "d.pt: holds a list",
            "e.pt: has no entry 'latents' (it has: latent)",
        ],
        strict=True,
    ):
        assert words in line


def test_a_truncated_pt_file_is_named(tmp_path: Path) -> None:
    write_ours(tmp_path, "one")
    path = tmp_path / ".precomputed/latents/one.safetensors"
    path.unlink()
    write_pt(path.with_suffix(".pt"), {"latents": torch.zeros(SHAPE), "fps": 24.0})
    path.with_suffix(".pt").write_bytes(path.with_suffix(".pt").read_bytes()[:-200])
    with pytest.raises(DataError, match=r"one\.pt: cannot be read"):
        PrecomputedDataset(tmp_path, video_dir="latents", audio_dir=None)[0]
