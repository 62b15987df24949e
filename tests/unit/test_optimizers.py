"""Optimizers: how one is chosen, what is refused, and that a step which is not finite changes nothing of any."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ltx_trainer_plus.config.optimization import OptimizationConfig
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import load_transformer
from ltx_trainer_plus.step.ema import WeightAverage
from ltx_trainer_plus.step.optimizers import clip_gradients, create_optimizer, optimizer_problems, update_weights
from tests.unit.config_files import problems

CPU = torch.device("cpu")
EACH: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "prodigy": {"learning_rate": 1.0},
    "torch.optim.Adafactor": {"optimizer_params": {"beta2_decay": -0.5}},
    # Its fused form takes found_inf too, and would leave its momentum unwritten after a first step that is skipped.
    "torch.optim.SGD": {"optimizer_params": {"momentum": 0.9, "fused": True}},
}


class AnyKeyword(torch.optim.SGD):
    """Takes what it is given, as wrappers of optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1, **others: Any) -> None:
        super().__init__(params, lr=lr, **others)


def config_of(kind: str) -> OptimizationConfig:
    return OptimizationConfig.model_validate({"learning_rate": 1e-2, "optimizer_type": kind, **EACH[kind]})


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (3,))]


def step(trained: list[nn.Parameter], optimizer: Optimizer, gradient: float) -> Tensor:
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 0.1)
    assert trained[0].grad is not None
    trained[0].grad[2, 1] = gradient
    return update_weights(optimizer, clip_gradients(trained, 1.0), CPU)


def everything(trained: list[nn.Parameter], optimizer: Optimizer) -> list[Any]:
    """Weights, state and group entries, as comparable values."""
    values = [*(p.detach() for p in trained)]
    values += [value for state in optimizer.state.values() for value in state.values()]
    values += [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return copy.deepcopy([value.tolist() if isinstance(value, Tensor) else value for value in values])


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("gradient", [float("nan"), float("inf"), 1e38])
def test_a_step_that_is_not_finite_changes_no_weight_no_moment_and_no_group_entry(kind: str, gradient: float) -> None:
    trained = parameters()
    optimizer = create_optimizer(trained, config_of(kind))
    for _ in range(3):
        assert step(trained, optimizer, 0.2).item() == 0
    before = everything(trained, optimizer)
    assert step(trained, optimizer, gradient).item() == 1
    assert everything(trained, optimizer) == before
    step(trained, optimizer, 0.3)
    assert everything(trained, optimizer) != before
    assert all(parameter.isfinite().all() for parameter in trained)


@pytest.mark.parametrize("kind", EACH)
def test_a_first_step_that_is_not_finite_is_as_if_it_had_not_been(kind: str) -> None:
    runs = []
    for gradients in ([float("nan"), 0.2, 0.3], [0.2, 0.3]):
        trained = parameters()
        optimizer = create_optimizer(trained, config_of(kind))
        for gradient in gradients:
            step(trained, optimizer, gradient)
        runs.append(everything(trained, optimizer))
    assert runs[0] == runs[1]


def test_a_skipped_step_does_not_move_the_average(reference: Path) -> None:
    model = load_transformer(reference / "ltx-2.3-tiny.safetensors", torch.float32)
    model.requires_grad_(False)
    model.proj_in.requires_grad_(True)
    handle = ModelHandle.of(model)
    average = WeightAverage(handle, 0.9)
    parameter = dict(handle.trainable_parameters())["proj_in.bias"]
    with torch.no_grad():
        parameter.add_(1)
    average.update(torch.zeros(()))
    before = average.tensors()["proj_in.bias"].clone()
    average.update(torch.ones(()))
    assert torch.equal(average.tensors()["proj_in.bias"], before)
    assert average.updates == 1
    average.update(torch.zeros(()))
    assert not torch.equal(average.tensors()["proj_in.bias"], before)
    assert average.updates == 2


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"optimizer_type": "torch.optim.Adafactr"},
            "optimization.optimizer_type: cannot be imported (module 'torch.optim' has no attribute 'Adafactr') "
            '(given: "torch.optim.Adafactr"). '
            "Give the dotted path of a class that is installed, such as torch.optim.Adafactor, or adamw.",
        ),
        (
            {"optimizer_type": "no_such_package.Lion"},
            "optimization.optimizer_type: cannot be imported (No module named 'no_such_package') "
            '(given: "no_such_package.Lion"). '
            "Give the dotted path of a class that is installed, such as torch.optim.Adafactor, or adamw.",
        ),
        (
            {"optimizer_type": "torch.nn.Linear"},
            "optimization.optimizer_type: is no class of optimizers (a subclass of torch.optim.Optimizer) "
            '(given: "torch.nn.Linear"). '
            "Give the dotted path of a class that is installed, such as torch.optim.Adafactor, or adamw.",
        ),
        (
            {"optimizer_type": "torch.optim.Adafactor", "optimizer_params": {"betas": [0.9, 0.99]}},
            "optimization.optimizer_params.betas: unknown key: optimization.optimizer_type: torch.optim.Adafactor "
            "takes beta2_decay, eps, d, weight_decay, foreach, maximize (given: [0.9, 0.99]). Remove it.",
        ),
        (
            {"optimizer_type": "prodigy", "optimizer_params": {"d_coeff": 2.0}},
            "optimization.optimizer_params.d_coeff: unknown key: optimization.optimizer_type: prodigy takes betas, "
            "beta3, eps, weight_decay, decouple, use_bias_correction, safeguard_warmup, d0, d_coef, growth_rate, "
            "fsdp_in_use, slice_p (given: 2.0). Did you mean optimization.optimizer_params.d_coef?",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_names_that_exist(given: dict[str, Any], line: str) -> None:
    assert [str(problem) for problem in optimizer_problems(OptimizationConfig.model_validate(given))] == [line]


def test_names_are_not_checked_where_the_constructor_takes_any() -> None:
    given = {"optimizer_type": f"{__name__}.AnyKeyword", "optimizer_params": {"momentum": 0.5}}
    config = OptimizationConfig.model_validate(given)
    assert optimizer_problems(config) == []
    assert create_optimizer(parameters(), config).param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "optimization: {optimizer_type: adam}",
            "optimization.optimizer_type: there is no such optimizer. It is adamw, prodigy, or the dotted path of an "
            'installed class (given: "adam"). '
            "Set optimization.optimizer_type: adamw, or a path such as torch.optim.Adafactor.",
        ),
        (
            "optimization: {optimizer_params: {lr: 1.0}}",
            "optimization.optimizer_params.lr: the rate is a setting of its own, which the schedule starts from "
            "(given: 1.0). Set optimization.learning_rate instead.",
        ),
        (
            "optimization: {optimizer_params: {eps: 1.0}}",
            "optimization.optimizer_params.eps: adamw has a setting of its own for it (given: 1.0). "
            "Set optimization.eps instead.",
        ),
        (
            "optimization: {optimizer_type: prodigy, weight_decay: 0.5}",
            "optimization.weight_decay: is for optimizer_type: adamw alone, and the optimizer is prodigy (given: 0.5). "
            "Set optimization.optimizer_params.weight_decay instead, if prodigy has it.",
        ),
    ],
)
def test_settings_that_the_optimizer_does_not_take_are_refused(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


def test_params_reach_the_constructor_and_adamw_stays_fused() -> None:
    given = {"optimizer_params": {"amsgrad": True}, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2}
    (group,) = create_optimizer(parameters(), OptimizationConfig.model_validate(given)).param_groups
    assert {name: group[name] for name in ("amsgrad", "fused", "betas", "eps", "weight_decay", "lr")} == {
        "amsgrad": True,
        "fused": True,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.2,
        "lr": 5e-4,
    }
