"""Writing checkpoints while training goes on: one at a time, what was at the moment of saving, errors in the end."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ltx_trainer_plus.checkpoints.state import CheckpointError
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.checkpoints.writer import CheckpointWriter
from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.position import DataPosition
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import load_transformer
from ltx_trainer_plus.models.lora import add_lora
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.step.trained import Trained

TARGETS = ["transformer_blocks.0.attn1.to_q"]


class GatedStore(CheckpointStore):
    """Writes only when it is let, or fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()
        self.error: OSError | None = None
        self.writing = 0
        self.most = 0

    def save(self, *args: Any, **kwargs: Any) -> Path:
        self.writing += 1
        self.most = max(self.most, self.writing)
        assert self.may_write.wait(30)
        self.writing -= 1
        if self.error is not None:
            raise CheckpointError(f"The checkpoint could not be saved: {self.error}") from self.error
        return super().save(*args, **kwargs)


@pytest.fixture
def handle(reference: Path) -> ModelHandle:
    model = load_transformer(reference / "ltx-2.3-tiny.safetensors", torch.float32)
    add_lora(model, rank=2, alpha=2, dropout=0.0, target_names=TARGETS, seed=0)
    return ModelHandle.of(model)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatedStore]:
    store = GatedStore(tmp_path / "checkpoints")
    yield store
    store.may_write.set()


def writer(store: CheckpointStore, handle: ModelHandle, **checkpoints: Any) -> CheckpointWriter:
    config = TrainerConfig.model_validate(
        {
            "model": {"model_path": "."},
            "data": {"preprocessed_data_root": "."},
            "lora": {"rank": 2, "alpha": 2},
            "checkpoints": {"precision": "float32", **checkpoints},
        }
    )
    optimizer = torch.optim.AdamW([parameter for _, parameter in handle.trainable_parameters()])
    return CheckpointWriter(
        config,
        Topology(0, 0, 1, torch.device("cpu")),
        store,
        Trained(handle, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        metadata={},
        data=DataPosition(batch_size=1, accumulation=1, data_ranks=1, shape_group=1, data_set="x"),
        info={},
    )


def test_training_goes_on_while_a_checkpoint_of_the_moment_is_written(store: GatedStore, handle: ModelHandle) -> None:
    saver = writer(store, handle)
    before = {name: parameter.detach().clone() for name, parameter in handle.trainable_parameters()}
    saver.save(1)  # returns although nothing can be written yet
    assert store.whole() == []
    with torch.no_grad():
        for _, parameter in handle.trainable_parameters():
            parameter.add_(1)
    store.may_write.set()
    weights = saver.flush()
    assert weights is not None
    saved = load_file(weights)
    lora_a = saved["diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight"]
    assert torch.equal(lora_a, next(iter(before.values())))


def test_at_most_one_is_in_flight(store: GatedStore, handle: ModelHandle) -> None:
    saver = writer(store, handle)
    saver.save(1)
    second = threading.Thread(target=saver.save, args=(2,))
    second.start()
    second.join(0.3)
    assert second.is_alive()  # waits for the first
    assert store.most == 1
    store.may_write.set()
    second.join(30)
    saver.flush()
    assert store.most == 1
    assert [checkpoint.step for checkpoint in store.whole()] == [1, 2]


def test_a_failure_is_raised_at_the_next_save_and_known_before(store: GatedStore, handle: ModelHandle) -> None:
    saver = writer(store, handle)
    store.error = OSError(28, "No space left on device")
    store.may_write.set()
    saver.save(1)
    with pytest.raises(CheckpointError, match="No space left"):
        saver.save(2)
    saver.save(3)
    for thread in threading.enumerate():
        if thread.name == "checkpoint writer":
            thread.join()
    assert saver.has_failed
    with pytest.raises(CheckpointError, match="No space left"):
        saver.flush()


def test_on_error_warn_goes_on(store: GatedStore, handle: ModelHandle, caplog: pytest.LogCaptureFixture) -> None:
    saver = writer(store, handle, on_error="warn")
    store.error = OSError(28, "No space left on device")
    store.may_write.set()
    saver.save(1)
    with caplog.at_level(logging.WARNING):
        assert saver.flush() is None
    assert "No space left" in caplog.text
    assert "checkpoints.on_error: warn" in caplog.text
    assert not saver.has_failed
    store.error = None
    saver.save(2)
    assert saver.flush() == store.folder / "lora_weights_step_00002.safetensors"


def test_what_is_not_finite_is_not_saved(tmp_path: Path, handle: ModelHandle) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last_n=1)
    saver = writer(store, handle)
    saver.save(1)
    saver.flush()
    with torch.no_grad():
        handle.trainable_parameters()[0][1][0, 0] = float("nan")
    saver.save(2)
    with pytest.raises(CheckpointError, match=r"step 2 is not saved: .*lora_A.* not finite"):
        saver.flush()
    assert [checkpoint.step for checkpoint in store.whole()] == [1]


def test_the_best_checkpoint_outlives_retention(tmp_path: Path, handle: ModelHandle) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last_n=1)
    saver = writer(store, handle)
    for step, loss in ((1, 0.5), (2, 0.3), (3, None), (4, None)):
        saver.save(step)
        if loss is not None:
            assert saver.set_best(step, loss)
    saver.flush()
    assert [checkpoint.step for checkpoint in store.whole()] == [2, 4]
    assert saver.best_loss() == 0.3
