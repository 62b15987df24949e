"""Training state: what it holds, exact restoration, strictness, no pickle."""

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ltx_trainer_plus.checkpoints.saved_state import read_state_header
from ltx_trainer_plus.checkpoints.state import (
    CheckpointError,
    TrainingState,
)
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config.optimization import OptimizationConfig
from ltx_trainer_plus.step.optimizers import create_scheduler
from ltx_trainer_plus.step.trained import Trained
from tests.states import read_state


class Run:
    """Two layers, AdamW with two groups, and the trainer's own learning-rate schedule."""

    def __init__(self, seed: int = 0, *, width: int = 3, fused: bool = False, reverse: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2, bias=False))
        groups = [list(self.model[0].parameters()), list(self.model[1].parameters())]
        groups = [{"params": group, "weight_decay": 0.1} for group in (groups[::-1] if reverse else groups)]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=fused)
        self.schedule = OptimizationConfig(learning_rate=1e-2, steps=20, scheduler_type="cosine")
        self.scheduler = create_scheduler(self.optimizer, self.schedule)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
            loss = self.model(data).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def collect(self, **options) -> TrainingState:
        return self.trained().state(self.step, **options)

    def trained(self) -> Trained:
        handle = SimpleNamespace(trainable_parameters=self.model.named_parameters)
        return Trained(handle, self.optimizer, self.scheduler)  # type: ignore[arg-type]

    def restore(self, state: TrainingState) -> None:
        self.trained().restore(state)
        self.scheduler = create_scheduler(self.optimizer, self.schedule, steps_done=state.step)
        self.step = state.step


def through_the_disk(state: TrainingState, folder: Path) -> TrainingState:
    CheckpointStore(folder).save(state.step, "lora", {}, state=state)
    return read_state(folder / f"training_state_step_{state.step:05d}.safetensors")


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_that_is_saved_and_restored_continues_bit_for_bit(tmp_path: Path, fused: bool) -> None:
    whole = Run(fused=fused)
    expected = whole.train(10)

    first = Run(fused=fused)
    losses = first.train(5)
    second = Run(seed=99, fused=fused)
    second.restore(through_the_disk(first.collect(), tmp_path))
    losses += second.train(5)
    assert losses == expected
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_entries_belong_to_names_not_to_positions(tmp_path: Path) -> None:
    expected = Run().train(10)[5:]
    first = Run()
    first.train(5)
    second = Run(seed=99, reverse=True)
    second.restore(through_the_disk(first.collect(), tmp_path))
    assert second.train(5) == pytest.approx(expected, rel=1e-6)


def test_a_collected_state_does_not_change_while_training_goes_on() -> None:
    run = Run()
    run.train(3)
    state = run.collect()
    before = {key: tensor.clone() for key, tensor in state.tensors.items()}
    run.train(3)
    assert all(torch.equal(before[key], tensor) for key, tensor in state.tensors.items())


def test_a_minimal_state_holds_no_tensors_and_its_step_places_the_schedule() -> None:
    first = Run()
    first.train(5)
    state = first.collect(level="minimal", info={"seed": 42})
    assert state.tensors == {}
    assert state.info["seed"] == 42
    second = Run()
    second.restore(state)
    assert second.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
    assert not second.optimizer.state


def test_the_present_configuration_keeps_its_optimizer_settings() -> None:
    first = Run()
    first.train(1)
    second = Run()
    second.optimizer.param_groups[0]["weight_decay"] = 0.5
    second.restore(first.collect())
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_the_file_holds_plain_types_only_and_says_what_wrote_it(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    state = through_the_disk(
        run.collect(info={"config": {"seed": 1, "path": Path("x")}, "wandb_run_id": None}), tmp_path
    )
    assert json.loads(json.dumps(state.info)) == state.info
    assert state.info["config"] == {"seed": 1, "path": "x"}
    assert state.info["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    # What another tool would do with the tensors: torch's own safe loader takes them.
    torch.save(state.tensors, tmp_path / "tensors.pt")
    assert torch.load(tmp_path / "tensors.pt", weights_only=True).keys() == state.tensors.keys()
    header = read_state_header(tmp_path / "training_state_step_00001.safetensors")
    assert header == TrainingState(1, {}, state.info)


def test_what_is_no_plain_type_is_refused_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"info\.loss: a Tensor"):
        Run().collect(info={"loss": torch.ones(1)})


def test_another_set_of_parameters_is_an_error_that_names_them_and_changes_nothing() -> None:
    run = Run()
    run.train(1)
    state = run.collect()
    wider = Run(width=5)
    before = [p.clone() for p in wider.model.parameters()]
    with pytest.raises(CheckpointError, match=r"0\.weight: saved \(3, 4\), now \(5, 4\)"):
        wider.restore(state)
    assert all(torch.equal(a, b) for a, b in zip(before, wider.model.parameters(), strict=True))

    state.tensors["parameter.extra"] = state.tensors.pop("parameter.1.weight")
    with pytest.raises(
        CheckpointError, match=r"(?s)only in the training state: extra.*only in this run: 1\.weight"
    ) as caught:
        Run().restore(state)
    assert "checkpoints.no_resume: true" in str(caught.value)


def test_another_kind_of_optimizer_is_an_error() -> None:
    run = Run()
    run.train(1)
    state = run.collect()
    other = Run()
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=1e-2)
    with pytest.raises(CheckpointError, match="holds AdamW, this run uses SGD"):
        other.restore(state)


def test_an_optimizer_over_other_parameters_than_the_named_ones_is_an_error() -> None:
    run = Run()
    run.model = Run().model
    with pytest.raises(CheckpointError, match="3 parameters that are not among the named ones"):
        run.collect()


class Malicious:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_foreign_state_is_refused_with_a_reason_and_never_unpickled(tmp_path: Path, writer: str) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "training_state_step_00005.safetensors"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Malicious(trace)))
    else:
        torch.save(Malicious(trace), path)
    with pytest.raises(CheckpointError, match="never unpickled") as caught:
        read_state(path)
    assert str(path) in str(caught.value)
    assert not trace.exists()


def test_a_safetensors_file_that_is_no_state_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="not a training state of this trainer"):
        read_state(tmp_path / "a.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors", {**TrainingState(1).metadata(), "version": "99"})
    with pytest.raises(CheckpointError, match="version 99"):
        read_state(tmp_path / "b.safetensors")
