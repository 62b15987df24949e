"""The plan applied to a model, always in the same order: freeze, adapt, checkpoint, replicate, handle."""

from collections.abc import Collection

import torch
from torch.nn.parallel import DistributedDataParallel

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.lora import add_lora
from ltx_trainer_plus.models.transformer import LTXTransformer
from ltx_trainer_plus.parallel.plan import ParallelPlan


def prepare_model(
    transformer: LTXTransformer,
    config: TrainerConfig,
    plan: ParallelPlan,
    *,
    lora_targets: Collection[str],
    reachable: Collection[str],
) -> ModelHandle:
    """Make a bare transformer trainable and spread it over the processes of the plan.

    Args:
        transformer: on its device, its weights in the dtype that the plan gives them.
        lora_targets: names of the linear layers that get an adapter (LoRA only).
        reachable: names of the parameters that this run's loss reaches (full fine-tuning only).
    """
    transformer.requires_grad_(False)
    transformer.compute_dtype = plan.compute_dtype
    if config.model.training_mode == "lora":
        add_lora(
            transformer,
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            dropout=config.lora.dropout,
            target_names=list(lora_targets),
            seed=config.seed,
        )
    else:
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(name in reachable)
    transformer.gradient_checkpointing = plan.gradient_checkpointing
    transformer.train()
    return ModelHandle.of(_replicate(transformer, plan) if plan.layout == "ddp" else transformer)


def _replicate(transformer: LTXTransformer, plan: ParallelPlan) -> DistributedDataParallel:
    device = plan.topology.device
    return DistributedDataParallel(
        transformer,
        device_ids=[device] if device.type == "cuda" else None,
        # Everything trainable gets a gradient, so there is nothing to search for in every step.
        find_unused_parameters=False,
        gradient_as_bucket_view=True,
        # Buffers are constants here; broadcasting them in a forward would make validation, where ranks run different
        # numbers of forwards, wait for ever.
        forward_sync_buffers=False,
    )


def weight_dtype(config: TrainerConfig, plan: ParallelPlan) -> torch.dtype:
    """The dtype in which the checkpoint's weights are loaded.

    A frozen base stays as small as it computes. Weights that are trained are float32 masters: an AdamW update is
    often smaller than a bfloat16 step.
    """
    return plan.compute_dtype if config.model.training_mode == "lora" else torch.float32
