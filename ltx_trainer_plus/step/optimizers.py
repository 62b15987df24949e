"""The optimizer and the learning-rate schedule of a run."""

import inspect
import io
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    LRScheduler,
    PolynomialLR,
    StepLR,
)

from ltx_trainer_plus.config.optimization import OPTIMIZERS, OptimizationConfig
from ltx_trainer_plus.config.problems import Problem
from ltx_trainer_plus.models.shards import local_part, total_norm


def optimizer_class(optimizer_type: str) -> type[Optimizer]:
    """The class that `optimization.optimizer_type` stands for.

    Raises:
        ValueError: it cannot be imported, or is no optimizer.
    """
    module, _, name = OPTIMIZERS.get(optimizer_type, optimizer_type).rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot be imported ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError("is no class of optimizers (a subclass of torch.optim.Optimizer)")
    return found


def optimizer_settings(kind: type[Optimizer]) -> tuple[str, ...]:
    """What the constructor of a class of optimizers takes beside the parameters."""
    _, *settings = inspect.signature(kind).parameters.values()
    return tuple(setting.name for setting in settings if setting.kind is not setting.VAR_KEYWORD)


def optimizer_problems(config: OptimizationConfig) -> list[Problem]:
    """A class that does not exist, and parameters that its constructor does not take."""
    chosen = config.optimizer_type
    try:
        kind = optimizer_class(chosen)
    except ValueError as error:
        remedy = "Give the dotted path of a class that is installed, such as torch.optim.Adafactor, or adamw"
        return [Problem("optimization.optimizer_type", str(error), chosen, remedy)]
    if any(setting.kind is setting.VAR_KEYWORD for setting in inspect.signature(kind).parameters.values()):
        return []  # nobody but the constructor knows
    takes = [name for name in optimizer_settings(kind) if name != "lr"]
    problems = []
    for name, value in config.optimizer_params.items():
        if name not in takes:
            close = get_close_matches(name, takes, n=1)
            remedy = f"Did you mean optimization.optimizer_params.{close[0]}?" if close else "Remove it"
            message = f"unknown key: optimization.optimizer_type: {chosen} takes {', '.join(takes) or 'no parameters'}"
            problems.append(Problem(f"optimization.optimizer_params.{name}", message, value, remedy))
    return problems


def create_optimizer(parameters: Iterable[Parameter], config: OptimizationConfig) -> Optimizer:
    """The chosen optimizer over the prepared (replicated or sharded) parameters.

    AdamW is fused: one kernel per step, and an implementation that takes `found_inf` (see `update_weights`).
    """
    settings: dict[str, Any] = {"lr": config.learning_rate}
    if config.optimizer_type == "adamw":
        settings |= {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay, "fused": True}
    # Prodigy prints its weight decay, once per process, into the progress.
    with redirect_stdout(io.StringIO()):
        return optimizer_class(config.optimizer_type)(parameters, **{**settings, **config.optimizer_params})


def update_weights(optimizer: Optimizer, norm: Tensor, device: torch.device) -> Tensor:
    """Step, unless the norm of the gradients is not finite: then nothing of the weights or the optimizer changes.

    A fused Adam is told on the device. Any other optimizer can only be left uncalled, for which the host waits for
    the norm.

    Args:
        norm: () of the gradients averaged over the ranks.
        device: where collectives work.

    Returns:
        () 1 where the step was left out, else 0; equal on all ranks.
    """
    not_finite = torch.isfinite(norm).logical_not().float()
    if _takes_found_inf(optimizer):
        optimizer.found_inf = not_finite  # type: ignore[attr-defined]
        optimizer.step()
        return not_finite
    if dist.is_available() and dist.is_initialized():
        # A rank that steps alone is worse than a wait: it would hang in an optimizer that sums over the ranks.
        agreed = not_finite.to(device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        not_finite = agreed.to(norm.device)
    if not not_finite.item():
        optimizer.step()
    return not_finite


def _takes_found_inf(optimizer: Optimizer) -> bool:
    # Not by `_step_supports_amp_scaling`, which a fused SGD has too: it makes its momentum in a first step that is
    # left out, and never writes it.
    return type(optimizer) in (Adam, AdamW) and all(group["fused"] for group in optimizer.param_groups)


_SCHEDULERS: dict[str, Callable[..., LRScheduler]] = {
    "constant": partial(ConstantLR, factor=1.0),
    "linear": LinearLR,
    "cosine": CosineAnnealingLR,
    "cosine_with_restarts": CosineAnnealingWarmRestarts,
    "polynomial": PolynomialLR,
    "step": StepLR,
}


def create_scheduler(optimizer: Optimizer, config: OptimizationConfig, *, steps_done: int = 0) -> LRScheduler:
    """The learning rate as a function of the optimizer step, by torch's schedulers.

    The caller steps it once per optimizer step; accelerate would step it once per process.

    Args:
        steps_done: of a run that is resumed. The schedule is computed anew up to there instead of being restored, so
            that a changed `steps` or `learning_rate` counts.
    """
    scheduler = _SCHEDULERS[config.scheduler_type](optimizer, **config.scheduler_arguments())
    with warnings.catch_warnings():
        # torch warns of a schedule that runs ahead of the optimizer, as it has to here.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps_done):
            scheduler.step()
    return scheduler


def clip_gradients(parameters: list[Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients down to a global norm of at most `max_norm` (0 = leave them), and return the norm before.

    Of sharded gradients it is the norm over all shards. It stays on the device. A non-finite norm leaves the
    gradients non-finite: the caller skips that step.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients)
    if max_norm > 0:
        # As torch.nn.utils.clip_grads_with_norm_ does it.
        torch._foreach_mul_(
            [local_part(gradient) for gradient in gradients], torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        )
    return norm
