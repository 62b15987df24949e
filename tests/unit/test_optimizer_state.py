"""What optimizers keep, whatever its form: saved, and put back so that the run goes on bit for bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ltx_trainer_plus.checkpoints.saved_state import read_state
from ltx_trainer_plus.checkpoints.state import CheckpointError, TrainingState
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config.optimization import OptimizationConfig
from ltx_trainer_plus.step.optimizers import create_optimizer, create_scheduler
from ltx_trainer_plus.step.trained import Trained

HERE = __name__
EACH: dict[str, dict[str, Any]] = {
    "adamw": {},
    "prodigy": {"learning_rate": 1.0, "optimizer_params": {"weight_decay": 0.1, "use_bias_correction": True}},
    "torch.optim.Adafactor": {},
    "torch.optim.SGD": {"optimizer_params": {"momentum": 0.9}},
    "torch.optim.NAdam": {},
    f"{HERE}.Small": {},
}


class Packed(Tensor):
    """A tensor made of two others, as 8-bit moments are: int8 codes and one scale."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Packed":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Packed":
        return Packed(**inner)

    def whole(self) -> Tensor:
        return self.codes * self.scale

    def pack(self, value: Tensor) -> None:
        self.scale.copy_(value.abs().max() / 127 + 1e-12)
        self.codes.copy_((value / self.scale).round())

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a packed tensor")


class Small(torch.optim.Optimizer):
    """Keeps packed moments, a rate that is a tensor, and in its groups a tensor and a number that steps change."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": torch.tensor(lr), "beta": beta, "seen": torch.zeros(3), "largest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    codes = torch.zeros_like(parameter, dtype=torch.int8)
                    state |= {"moment": Packed(codes, torch.zeros(())), "steps": 0, "has_moved": False}
                moment = state["moment"].whole().lerp(parameter.grad, 1 - group["beta"])
                state["moment"].pack(moment)
                state["steps"] += 1
                state["has_moved"] = True
                group["seen"][0] += parameter.grad.sum()
                group["largest"] = max(group["largest"], parameter.grad.abs().max().item())
                rate = group["lr"] / (1 + group["seen"].norm() + group["largest"]) / state["steps"] ** 0.5
                parameter.sub_(rate * moment)


class SGD(torch.optim.SGD):
    """Somebody else's."""


class Run:
    """Two layers, the second of which begins at zero, as the second factor of a LoRA does."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
        if seed == 0:
            nn.init.zeros_(self.model[1].weight)
        settings = {"learning_rate": 1e-2, "steps": 20, "scheduler_type": "cosine", "optimizer_type": kind}
        self.config = OptimizationConfig.model_validate({**settings, **EACH.get(kind, {})})
        self.optimizer = create_optimizer(self.model.parameters(), self.config)
        self.step = 0
        self.trained = self._trained()

    def _trained(self) -> Trained:
        handle = SimpleNamespace(trainable_parameters=self.model.named_parameters, device=torch.device("cpu"))
        scheduler = create_scheduler(self.optimizer, self.config, steps_done=self.step)
        return Trained(handle, self.optimizer, scheduler)  # type: ignore[arg-type]

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
            loss = (self.model(data) - data[:, :2]).square().mean()
            loss.backward()
            self.trained.update(torch.tensor(1.0))
            self.step += 1
            losses.append(loss.item())
        return losses

    def restore(self, state: TrainingState) -> None:
        self.step = state.step
        self.trained = self._trained()
        self.trained.restore(state)


def through_the_disk(state: TrainingState, folder: Path) -> TrainingState:
    CheckpointStore(folder).save(state.step, "lora", {}, state=state)
    return read_state(folder / f"training_state_step_{state.step:05d}.safetensors")


@pytest.mark.parametrize("done", [0, 1, 5])
@pytest.mark.parametrize("kind", EACH)
def test_a_run_of_any_optimizer_continues_bit_for_bit(tmp_path: Path, kind: str, done: int) -> None:
    whole = Run(kind)
    expected = whole.train(done + 5)
    assert len(set(expected)) == done + 5
    first = Run(kind)
    losses = first.train(done)
    second = Run(kind, seed=99)
    second.restore(through_the_disk(first.trained.state(first.step), tmp_path))
    losses += second.train(5)
    assert losses == expected
    ours, theirs = (run.trained.state(run.step) for run in (second, whole))
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[key], theirs.tensors[key]) for key in theirs.tensors)
    assert ours.info["optimizer"] == theirs.info["optimizer"]


def test_the_forms_of_state_are_all_in_the_file(tmp_path: Path) -> None:
    run = Run(f"{HERE}.Small")
    run.train(3)
    state = through_the_disk(run.trained.state(3), tmp_path)
    saved = state.info["optimizer"]
    assert saved["state"]["0.bias"] == {"steps": 3, "has_moved": True}
    assert saved["groups"][0]["largest"] == run.optimizer.param_groups[0]["largest"] > 0
    codes = state.tensors["optimizer.moment/codes.0.weight"][...]
    assert codes.dtype == torch.int8
    assert torch.equal(codes, run.optimizer.state[run.model[0].weight]["moment"].codes)
    assert state.tensors["optimizer_group.seen.0.weight"].shape == (3,)


def test_the_present_configuration_keeps_its_settings_of_any_optimizer() -> None:
    first = Run("prodigy")
    first.train(3)
    second = Run("prodigy", seed=1)
    second.optimizer.param_groups[0]["d_coef"] = 2.0
    second.restore(first.trained.state(3))
    ours, theirs = second.optimizer.param_groups[0], first.optimizer.param_groups[0]
    assert ours["d_coef"] == 2.0
    changing = ("d", "d_max", "d_numerator", "d_denom", "d_hat", "k")
    assert {key: ours[key] for key in changing} == {key: theirs[key] for key in changing}
    assert ours["k"] == 3


def test_a_state_from_before_optimizers_could_be_chosen_still_resumes() -> None:
    whole = Run("adamw")
    expected = whole.train(6)[3:]
    first = Run("adamw")
    first.train(3)
    state = first.trained.state(3)
    del state.info["optimizer"]["package"]  # it held no more than the name of the class
    second = Run("adamw", seed=1)
    second.restore(state)
    assert second.train(3) == expected


def test_another_optimizers_state_is_refused_by_name_and_nothing_is_changed() -> None:
    first = Run("prodigy")
    first.train(1)
    second = Run("torch.optim.SGD", seed=1)
    before = [parameter.detach().clone() for parameter in second.model.parameters()]
    with pytest.raises(CheckpointError, match="holds Prodigy, this run uses SGD"):
        second.restore(first.trained.state(1))
    namesake = Run(f"{HERE}.SGD")
    namesake.train(1)
    with pytest.raises(CheckpointError, match="holds tests's SGD, this run uses torch's SGD"):
        second.restore(namesake.trained.state(1))
    assert all(torch.equal(a, b) for a, b in zip(before, second.model.parameters(), strict=True))
    assert not second.optimizer.state
