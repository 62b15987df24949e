"""The optimizer and the learning-rate schedule of a run."""

from collections.abc import Iterable

import torch
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    LRScheduler,
    PolynomialLR,
    StepLR,
)

from ltx_trainer_plus.config import OptimizationConfig


def create_optimizer(parameters: Iterable[Parameter], config: OptimizationConfig) -> AdamW:
    """AdamW over the prepared (replicated or sharded) parameters, fused: one kernel per step, and the only
    implementation that takes `found_inf`, by which a non-finite step is skipped without asking the device."""
    return AdamW(
        parameters,
        # A tensor, so that a changed rate is data: the step does not recompile or synchronise.
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def create_scheduler(optimizer: Optimizer, config: OptimizationConfig) -> LRScheduler:
    """The learning rate as a function of the optimizer step, by torch's schedulers.

    Parameters that `scheduler_params` leaves out take the official trainer's values, which depend on `steps`.
    The caller steps it once per optimizer step (rows 41 and 46 of the known faults: accelerate would step it once per
    process).
    """
    steps = config.steps
    params = dict(config.scheduler_params)
    match config.scheduler_type:
        case "constant":
            return ConstantLR(optimizer, factor=1.0, total_iters=0)
        case "linear":
            return LinearLR(optimizer, **({"start_factor": 1.0, "end_factor": 0.1, "total_iters": steps} | params))
        case "cosine":
            return CosineAnnealingLR(optimizer, **({"T_max": steps, "eta_min": 0.0} | params))
        case "cosine_with_restarts":
            defaults = {"T_0": max(1, steps // 4), "T_mult": 1, "eta_min": 5e-5}
            return CosineAnnealingWarmRestarts(optimizer, **(defaults | params))
        case "polynomial":
            return PolynomialLR(optimizer, **({"total_iters": steps, "power": 1.0} | params))
        case "step":
            return StepLR(optimizer, **({"step_size": max(1, steps // 2), "gamma": 0.1} | params))
    raise ValueError(f"optimization.scheduler_type: {config.scheduler_type!r} is not a schedule of this trainer.")


def clip_gradients(parameters: list[Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients down to a global norm of at most `max_norm` (0 = leave them), and return the norm before.

    The norm stays on the device. A non-finite norm leaves the gradients non-finite: the caller skips that step.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
