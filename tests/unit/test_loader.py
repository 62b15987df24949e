"""Batches as the training loop gets them, over real files and real worker processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ltx_trainer_plus.config.optimization import FlowMatchingConfig
from ltx_trainer_plus.config.strategy import AudioStreamConfig, VideoStreamConfig
from ltx_trainer_plus.data.batch import Batch, Sample, TextFeatures, collate
from ltx_trainer_plus.data.loader import training_loader
from ltx_trainer_plus.data.order import SampleOrder
from ltx_trainer_plus.data.precomputed import PrecomputedDataset
from ltx_trainer_plus.data.sample_files import DataError
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy
from ltx_trainer_plus.strategies.loss import training_loss

SIZES = {"wide": (2, 2, 4), "tall": (2, 4, 2), "still": (1, 2, 2)}


def write_data(root: Path, kinds: list[str]) -> PrecomputedDataset:
    generator = torch.Generator().manual_seed(0)
    for number, kind in enumerate(kinds):
        files = {
            "latents": {"latents": torch.randn(4, *SIZES[kind], generator=generator)},
            "audio_latents": {"latents": torch.randn(2, 5, 3, generator=generator)},
            "conditions": {"video_context": torch.ones(3, 6), "audio_context": torch.ones(3, 4)},
        }
        for folder, tensors in files.items():
            path = root / ".precomputed" / folder / f"{number:03}_{kind}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"fps": "24.0"})
    return PrecomputedDataset(root, video_dir="latents", audio_dir="audio_latents")


def loader_of(dataset: PrecomputedDataset, shape_group: int, **options: Any) -> Generator[Batch]:
    order = SampleOrder(dataset.shapes, seed=5, shape_group=shape_group)
    defaults = {"start": 0, "data_rank": 0, "data_ranks": 1, "batch_size": 2, "accumulation": 1, "workers": 0}
    return training_loader(dataset, order, pin_memory=False, **(defaults | options))


def step_losses(
    dataset: PrecomputedDataset, layout: tuple[int, int, int], *, shape_group: int, steps: int
) -> tuple[list[float], list[list[str]]]:
    """Loss of each step for a model that always predicts 0, and the names of its samples, over all ranks."""
    data_ranks, batch_size, accumulation = layout
    strategy = FlexibleStrategy(VideoStreamConfig(), AudioStreamConfig(), LatentGeometry(), FlowMatchingConfig())
    losses, names = [0.0] * steps, [[] for _ in range(steps)]  # type: ignore[var-annotated]
    for rank in range(data_ranks):
        batches = loader_of(
            dataset,
            shape_group,
            data_rank=rank,
            data_ranks=data_ranks,
            batch_size=batch_size,
            accumulation=accumulation,
        )
        step = 0
        for batch in batches:
            inputs = strategy.prepare(
                batch, strategy.draw(batch, seed=1), TextContext(batch.text.video, batch.text.audio)
            )
            assert inputs.video is not None
            assert inputs.audio is not None
            zeros = [torch.zeros_like(stream.target) for stream in (inputs.video, inputs.audio)]  # type: ignore[arg-type]
            losses[step] += training_loss(inputs, *zeros).total.double().sum().item()
            names[step] += batch.names
            step += batch.ends_step
            if step == steps:
                break
    samples = data_ranks * batch_size * accumulation
    return [loss / samples for loss in losses], [sorted(step) for step in names]


@pytest.mark.parametrize("layout", [(2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)])
def test_every_layout_computes_the_same_loss_curve_with_several_shapes(
    layout: tuple[int, int, int], tmp_path: Path
) -> None:
    """Shapes mixed in one micro-batch of the widest layout, each of a group of its own in the narrow ones."""
    dataset = write_data(tmp_path, ["wide"] * 5 + ["tall"] * 3 + ["still"])
    losses, names = step_losses(dataset, (1, 4, 1), shape_group=1, steps=8)
    other_losses, other_names = step_losses(dataset, layout, shape_group=1, steps=8)
    assert other_names == names
    assert all(len(step) == 4 for step in names)
    # float32 sums in another order
    assert other_losses == pytest.approx(losses, rel=1e-6)
    assert len(set(losses)) == 8


def test_a_micro_batch_of_one_shape_is_one_batch(tmp_path: Path) -> None:
    dataset = write_data(tmp_path, ["wide"] * 5 + ["tall"] * 3)
    for batch in islice(loader_of(dataset, 2, accumulation=1), 20):
        assert len(batch) == 2
        assert batch.ends_step
    flags = [batch.ends_step for batch in islice(loader_of(dataset, 2, accumulation=3), 9)]
    assert flags == [False, False, True] * 3


def test_workers_give_the_same_batches_and_leave_the_global_generator_alone(tmp_path: Path) -> None:
    dataset = write_data(tmp_path, ["wide"] * 5 + ["tall"] * 3)
    state = torch.get_rng_state()
    alone = list(islice(loader_of(dataset, 1), 12))
    with closing(loader_of(dataset, 1, workers=2)) as batches:
        for expected, batch in zip(alone, batches, strict=False):
            assert (batch.names, batch.ordinals) == (expected.names, expected.ordinals)
            assert torch.equal(batch.video_latent, expected.video_latent)
            assert torch.equal(batch.fps, torch.full((len(batch),), 24.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_resumed_loader_continues_the_first_one(tmp_path: Path) -> None:
    dataset = write_data(tmp_path, ["wide"] * 5 + ["tall"] * 3)
    whole = [batch.ordinals for batch in islice(loader_of(dataset, 2, accumulation=2), 20)]
    resumed = [batch.ordinals for batch in islice(loader_of(dataset, 2, accumulation=2, start=4 * 4), 12)]
    assert resumed == whole[8:]


def test_one_clip_on_two_ranks_trains_again_and_again(tmp_path: Path) -> None:
    dataset = write_data(tmp_path, ["wide"])
    ranks = [list(islice(loader_of(dataset, 2, data_rank=rank, data_ranks=2), 5)) for rank in (0, 1)]
    assert [batch.names for batches in ranks for batch in batches] == [("000_wide", "000_wide")] * 10
    ordinals = [ordinal for batches in ranks for batch in batches for ordinal in batch.ordinals]
    assert sorted(ordinals) == list(range(20))


def test_different_samples_get_different_draws_on_every_rank(tmp_path: Path) -> None:
    """2 ranks, equal shapes; the same run twice is identical."""
    dataset = write_data(tmp_path, ["wide"] * 4)
    strategy = FlexibleStrategy(VideoStreamConfig(), AudioStreamConfig(), LatentGeometry(), FlowMatchingConfig())

    def draws() -> list[torch.Tensor]:
        batches = [b for rank in (0, 1) for b in islice(loader_of(dataset, 2, data_rank=rank, data_ranks=2), 3)]
        every = [strategy.draw(batch, seed=0) for batch in batches]
        videos = [draw.video for draw in every if draw.video is not None]
        return [row for drawn in videos for values in (drawn.noise, drawn.sigma) for row in values]

    first, second = draws(), draws()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({tuple(row.reshape(-1).tolist()) for row in first}) == len(first)


def test_a_damaged_sample_names_its_file_through_the_worker(tmp_path: Path) -> None:
    dataset = write_data(tmp_path, ["wide"] * 2)
    _ = dataset.shapes  # read before the damage, as at the start of a run
    bad = tmp_path / ".precomputed/latents/001_wide.safetensors"
    save_file({"latents": torch.full((4, *SIZES["wide"]), float("nan"))}, bad, metadata={"fps": "24.0"})
    message = r"001_wide\.safetensors: 64 of 64 numbers are not finite"
    with closing(loader_of(dataset, 1, workers=1)) as batches, pytest.raises(DataError, match=message):
        next(batches)


SIGNAL_SCRIPT = """
import signal, sys
from pathlib import Path
from ltx_trainer_plus.data.loader import training_loader
from ltx_trainer_plus.data.precomputed import PrecomputedDataset
from ltx_trainer_plus.data.order import SampleOrder

received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(number))
dataset = PrecomputedDataset(sys.argv[1], video_dir="latents", audio_dir="audio_latents")
order = SampleOrder(dataset.shapes, seed=0, shape_group=1)
batches = training_loader(dataset, order, start=0, data_rank=0, data_ranks=1, batch_size=1, accumulation=1,
                          workers=2, pin_memory=False)
for _ in range(2):  # one of each worker: before that it may not be shielded yet
    next(batches)
print("ready", flush=True)
while len(received) < 2:
    next(batches)
for _ in range(50):
    next(batches)
batches.close()
print("finished", flush=True)
"""


def test_a_signal_to_the_process_group_leaves_the_workers_at_work(tmp_path: Path) -> None:
    write_data(tmp_path, ["wide"] * 2)
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNAL_SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output, errors) == (0, "finished\n", "")


def test_samples_of_different_shapes_are_never_stacked() -> None:
    text = TextFeatures("context", torch.ones(2, 3), torch.ones(2, 3))
    samples = [Sample("a", text, torch.ones(1, 1, 2, 2), 24.0), Sample("b", text, torch.ones(1, 1, 2, 3), 24.0)]
    with pytest.raises(ValueError, match=r"'a' has .*'b' has "):
        collate(samples, [0, 1])


def test_a_batch_keeps_every_part_when_it_moves() -> None:
    text = TextFeatures("features", torch.ones(2, 3), torch.ones(2, 4), torch.tensor([True, False]))
    batch = collate([Sample("a", text, torch.ones(1, 1, 2, 2), 24.0, torch.ones(1, 2, 3))] * 2, [4, 9], ends_step=False)
    moved = batch.to("meta")
    assert (moved.names, moved.ordinals, moved.ends_step, moved.text.kind) == (("a", "a"), (4, 9), False, "features")
    tensors = [moved.video_latent, moved.audio_latent, moved.fps, moved.text.video, moved.text.audio, moved.text.mask]
    assert all(tensor is not None and tensor.is_meta and len(tensor) == 2 for tensor in tensors)
    assert batch.fps is not None
    assert batch.fps.tolist() == [24.0, 24.0]
