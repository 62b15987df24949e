"""What a run would cost on each rank in each layout: memory, traffic, operations and time, by arithmetic alone."""

import dataclasses
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.measure.activations import Activations, activations
from ltx_trainer_plus.measure.costs import Layout, LayoutCost, Machine, Parameters, layout_cost
from ltx_trainer_plus.measure.operations import Flops, flops
from ltx_trainer_plus.measure.workload import Workload
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.models.lora import lora_target_names
from ltx_trainer_plus.models.reach import reachable_parameters


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Everything that is printed."""

    parameters: Parameters
    work: Workload
    operations: Flops
    activations: Activations
    activation_bytes: int
    layouts: tuple[LayoutCost, ...]


def estimate(model: dict[str, Any], config: TrainerConfig, work: Workload, gpus: int, machine: Machine) -> Estimate:
    """Do the arithmetic.

    Raises:
        ValueError: LoRA patterns that match nothing.
    """
    transformer = transformer_on_meta(model)
    strategy, optimization = config.training_strategy, config.optimization
    is_full = config.model.training_mode == "full"
    targets: list[str] = []
    if not is_full:
        reachable = reachable_parameters(model, video=strategy.video_role, audio=strategy.audio_role)
        targets = lora_target_names(transformer, config.lora.target_modules, reachable)
    parameters = Parameters.of(transformer, lora_targets=targets, rank=config.lora.rank)
    checkpointing = optimization.enable_gradient_checkpointing
    operations = flops(
        transformer.config, work, lora_targets=targets, rank=config.lora.rank, checkpointing=checkpointing
    )
    dtype = torch.bfloat16 if config.acceleration.mixed_precision_mode == "bf16" else torch.float32

    def kept(weights: torch.dtype) -> Activations:
        return activations(
            model,
            work,
            dtype=dtype,
            weights=weights,
            lora_targets=targets,
            rank=config.lora.rank,
            checkpointing=checkpointing,
        )

    layouts: list[Layout] = ["single"]
    if gpus > 1:
        layouts = ["ddp", "fsdp2", *(["hsdp"] if gpus % 2 == 0 and gpus > 2 else [])]  # type: ignore[list-item]
    # Trained float32 weights are cast for every forward, and autograd keeps the copies. FSDP2 gathers them cast.
    whole, sharded = kept(torch.float32 if is_full else dtype), kept(dtype)
    costs = [
        layout_cost(
            layout,
            gpus,
            parameters,
            operations,
            (sharded if layout in ("fsdp2", "hsdp") else whole).total(parameters.blocks),
            machine,
            compute_bytes=dtype.itemsize,
            replicas=config.acceleration.hsdp_replicas or 2,
            accumulation=optimization.gradient_accumulation_steps,
        )
        for layout in layouts
    ]
    return Estimate(parameters, work, operations, sharded, sharded.total(parameters.blocks), tuple(costs))


def print_estimate(plan: Estimate, config: TrainerConfig, gpus: int, machine: Machine) -> None:
    console, work, parameters = Console(), plan.work, plan.parameters
    optimization = config.optimization
    accumulation = optimization.gradient_accumulation_steps
    console.print(
        f"Model: {parameters.blocks} blocks of {parameters.block / 1e6:,.1f} M parameters and "
        f"{parameters.root / 1e6:,.1f} M around them; {parameters.trained / 1e6:,.1f} M are trained "
        f"({config.model.training_mode}).\n"
        f"Batch: {work.batch} x ({work.video_tokens:,} video + {work.audio_tokens:,} audio + {work.text_tokens:,} text "
        f"tokens) per GPU, {accumulation} micro-step{'s' * (accumulation > 1)}, gradient checkpointing "
        f"{'on' if optimization.enable_gradient_checkpointing else 'off'}.\n"
        f"Operations of a micro-step: forward {plan.operations.forward / 1e12:,.1f}, backward "
        f"{plan.operations.backward / 1e12:,.1f}, recomputed {plan.operations.recomputed / 1e12:,.1f}, together "
        f"{plan.operations.executed / 1e12:,.1f} TFLOP.",
        soft_wrap=True,
        highlight=False,
    )
    table = Table("per rank", *(f"{cost.layout} x{gpus}" for cost in plan.layouts), title_justify="left")
    rows = [
        ("weights, GB", lambda c: f"{c.weights / 1e9:,.2f}"),
        ("gradients, GB", lambda c: f"{c.gradients / 1e9:,.2f}"),
        ("optimizer, GB", lambda c: f"{c.optimizer / 1e9:,.2f}"),
        ("gathered at a time, GB", lambda c: f"{c.gathered / 1e9:,.2f}"),
        ("activations (estimate), GB", lambda c: f"{c.activations / 1e9:,.2f}"),
        ("together, GB", lambda c: f"{c.memory / 1e9:,.2f}"),
        (f"fits {machine.memory:g} GB less 10 %", lambda c: "yes" if c.memory < 0.9e9 * machine.memory else "no"),
        ("received in forward, GB", lambda c: f"{c.received_forward / 1e9:,.2f}"),
        ("received in backward, GB", lambda c: f"{c.received_backward / 1e9:,.2f}"),
        ("received for gradients, GB", lambda c: f"{c.reduced / 1e9:,.2f}"),
        ("arithmetic, s", lambda c: f"{c.compute:,.3f}"),
        ("step, traffic overlapped, s", lambda c: f"{c.step:,.3f}"),
        ("step, nothing overlapped, s", lambda c: f"{c.exposed_step:,.3f}"),
        ("tokens/s of all GPUs", lambda c: f"{accumulation * gpus * work.target_tokens / c.step:,.0f}"),
    ]
    for name, text in rows:
        table.add_row(name, *(text(cost) for cost in plan.layouts))
    console.print(table)
    console.print(
        f"Assumed: {machine.tflops:g} TFLOP/s bf16 peak, of which {machine.efficiency:.0%} are reached; each GPU "
        f"receives {machine.link:g} GB/s. Left out: temporary results, the CUDA context, fragmentation (plan 10 % "
        "for them), loading of data, the optimizer's own time. docs/throughput.md explains the arithmetic.",
        soft_wrap=True,
        highlight=False,
    )


def workload(
    config: TrainerConfig, geometry: LatentGeometry, video: tuple[int, int, int] | None, text_tokens: int
) -> Workload:
    """The sample that a step trains on: `video` is its width, height and frames, by default what validation makes."""
    width, height, frames = video or config.validation.video_dims
    strategy = config.training_strategy
    latent_frames, rows, columns = geometry.video_size(frames, height, width)
    return Workload(
        frames=latent_frames if strategy.video else 0,
        height=rows,
        width=columns,
        audio_tokens=geometry.audio_steps(frames / config.validation.frame_rate) if strategy.audio else 0,
        text_tokens=text_tokens,
        batch=config.optimization.batch_size,
    )
