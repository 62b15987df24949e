"""The optimizer and the learning-rate schedule of a run."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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

from ltx_trainer_plus.config.optimization import OptimizationConfig
from ltx_trainer_plus.models.shards import local_part


def create_optimizer(parameters: Iterable[Parameter], config: OptimizationConfig) -> AdamW:
    """AdamW over the prepared (replicated or sharded) parameters, fused: one kernel per step, and the only
    implementation that takes `found_inf`, by which a non-finite step is skipped without asking the device."""
    return AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


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
    parts = [local_part(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(parts)
    if gradients and isinstance(gradients[0], DTensor):
        norm = _over_shards(norm, gradients[0])
    if max_norm > 0:
        # As torch.nn.utils.clip_grads_with_norm_ does it.
        torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _over_shards(norm: Tensor, like: DTensor) -> Tensor:
    """The norm over all shards from that of this process's: one small reduction, whatever the number of parameters."""
    squares = norm.square().to(like.device_mesh.device_type)
    for dimension, placement in enumerate(like.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(squares, group=like.device_mesh.get_group(dimension))
    return squares.sqrt().to(norm.device)
