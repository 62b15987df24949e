"""The decision how the model is spread: read once from the launch and the run file, then handed down as a value."""

from dataclasses import dataclass
from typing import Literal

import torch

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.parallel.topology import LaunchError, LaunchRequest, Topology

Layout = Literal["single", "ddp"]


@dataclass(frozen=True)
class ParallelPlan:
    """How this run computes.

    Attributes:
        layout: what wraps the model.
        compute_dtype: dtype of activations and of frozen weights; what is trained is float32.
        gradient_checkpointing: whether blocks are recomputed in the backward.
    """

    topology: Topology
    layout: Layout
    compute_dtype: torch.dtype
    gradient_checkpointing: bool

    @classmethod
    def decide(cls, config: TrainerConfig, topology: Topology, request: LaunchRequest) -> "ParallelPlan":
        """Combine the run file and the launch.

        Raises:
            LaunchError: they contradict each other, or the launch asks for what this trainer does not do; every
                contradiction is listed with its remedy.
        """
        problems = _refusals(request) + _conflicts(config, request)
        if problems:
            raise LaunchError("This launch cannot work:\n" + "\n".join(f"- {problem}" for problem in problems))
        return cls(
            topology=topology,
            layout="single" if topology.world_size == 1 else "ddp",
            compute_dtype=torch.bfloat16 if config.acceleration.mixed_precision_mode == "bf16" else torch.float32,
            gradient_checkpointing=config.optimization.enable_gradient_checkpointing,
        )


def _refusals(request: LaunchRequest) -> list[str]:
    problems = []
    if request.engine is not None:
        problems.append(
            f"The launch configures {request.engine}, which this trainer does not drive. Choose one of "
            "configs/accelerate/*.yaml instead."
        )
    if request.fsdp_version is not None:
        problems.append(
            f"The launch configures FSDP (version {request.fsdp_version}), which is not available yet. Use "
            "configs/accelerate/ddp.yaml."
        )
    if request.dynamo_backend is not None:
        problems.append(
            f"The launch configures torch.compile (dynamo backend {request.dynamo_backend}), which is not available "
            "yet. Remove `dynamo_config` from the accelerate config."
        )
    return problems


def _conflicts(config: TrainerConfig, request: LaunchRequest) -> list[str]:
    chosen = config.acceleration.mixed_precision_mode or "no"
    if request.mixed_precision is not None and request.mixed_precision != chosen:
        return [
            f"The launch says mixed_precision: {request.mixed_precision}, the run file says "
            f"acceleration.mixed_precision_mode: {chosen}. Set `mixed_precision: 'no'` in the accelerate config (it "
            "then leaves the choice to the run file), or make both the same."
        ]
    return []
