"""The plan applied to a model, always in the same order: freeze, adapt, checkpoint, compile, spread, handle."""

import itertools
import warnings
from collections.abc import Collection
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import load_transformer, transformer_on_meta
from ltx_trainer_plus.models.compile import compile_blocks
from ltx_trainer_plus.models.loading import read_into
from ltx_trainer_plus.models.lora import add_lora, initialise_lora
from ltx_trainer_plus.models.transformer import LTXTransformer
from ltx_trainer_plus.parallel.plan import ParallelPlan


def load_model(
    config: TrainerConfig, plan: ParallelPlan, *, lora_targets: Collection[str], reachable: Collection[str]
) -> ModelHandle:
    """Load the run's model, make it trainable, and spread it over the processes.

    Where it is sharded, it never exists as a whole: its structure is sharded without weights, and every process then
    reads its own part of every tensor from the file.

    Args:
        lora_targets: names of the linear layers that get an adapter (LoRA only).
        reachable: names of the parameters that this run's loss reaches (full fine-tuning only).
    """
    path, dtype = config.model.model_path, weight_dtype(config, plan)
    if not plan.is_sharded:
        transformer = load_transformer(path, dtype, plan.topology.device)
        return prepare_model(transformer, config, plan, lora_targets=lora_targets, reachable=reachable)
    transformer = transformer_on_meta(path, dtype)
    handle = prepare_model(transformer, config, plan, lora_targets=lora_targets, reachable=reachable)
    transformer.to_empty(device="cpu" if plan.offloads_to_cpu else plan.topology.device)
    read_into(transformer, path)
    if config.model.training_mode == "lora":
        initialise_lora(transformer, config.seed)
    return handle


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
        transformer: on its device, its weights in the dtype that the plan gives them. One that gets sharded may be
            on the meta device.
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
    if plan.compile is not None:
        compile_blocks(transformer, **plan.compile.model_dump())
    if plan.is_sharded:
        _shard(transformer, plan)
    prepared = _replicate(transformer, plan) if plan.layout == "ddp" else transformer
    return ModelHandle.of(prepared, reduces_each_backward=plan.reduces_each_backward)


def _shard(transformer: LTXTransformer, plan: ParallelPlan) -> None:
    """FSDP2, block by block, then the rest. We call it ourselves: accelerate would not on a CPU."""
    kind = plan.topology.device.type
    if plan.layout == "hsdp":
        mesh = init_device_mesh(kind, (plan.replicas, plan.shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh(kind, (plan.shards,), mesh_dim_names=("dp_shard",))
    precision = MixedPrecisionPolicy(
        param_dtype=plan.compute_dtype,
        # Gradients of different ranks are added up in the masters' precision.
        reduce_dtype=torch.float32,
        # The default would round the RoPE tables, which the blocks get as inputs, to bfloat16.
        cast_forward_inputs=False,
    )
    offload: OffloadPolicy = OffloadPolicy()
    if plan.offloads_to_cpu:
        offload = CPUOffloadPolicy(pin_memory=kind != "cpu")
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    *others, last = transformer.transformer_blocks
    units = [shard(block, reshard_after_forward=plan.reshards_after_forward) for block in others]
    # The last block and what is around the blocks keep their weights after the forward: the backward begins with
    # them, so freeing them would only gather them again.
    units.append(shard(last, reshard_after_forward=False))
    units.insert(0, shard(transformer, reshard_after_forward=False))
    for unit, following in itertools.pairwise(units):
        # The next weights are asked for before a block computes, not when the host comes to the next block: the small
        # operations of adapters can keep the host too busy to be ahead. In the backward FSDP2 does so by itself.
        unit.set_modules_to_forward_prefetch([following])
    # The velocities are views, as every linear layer's output is. Nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


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
