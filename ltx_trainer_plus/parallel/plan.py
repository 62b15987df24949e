"""The decision how the model is spread: read once from the launch and the run file, then handed down as a value."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.config.schema import CompileConfig
from ltx_trainer_plus.parallel.topology import LaunchError, LaunchRequest, Topology

Layout = Literal["single", "ddp", "fsdp2", "hsdp"]

_CONFIGS = "configs/accelerate"
_SHARDED = ("fsdp2", "hsdp")


@dataclass(frozen=True)
class ParallelPlan:
    """How this run computes.

    Attributes:
        layout: what wraps the model.
        compute_dtype: dtype of activations and of frozen weights; what is trained is float32.
        gradient_checkpointing: whether blocks are recomputed in the backward.
        compile: how blocks are compiled; None = they are not.
        replicas: copies of the model in the run; each is sharded over `shards` processes.
        reshards_after_forward: whether a sharded block's weights are freed between forward and backward.
        offloads_to_cpu: whether shards, gradients and optimizer states live in host memory.
        reduces_each_backward: whether gradients are reduced in every micro-step, instead of once in a step.
    """

    topology: Topology
    layout: Layout
    compute_dtype: torch.dtype
    gradient_checkpointing: bool
    compile: CompileConfig | None = None
    replicas: int = 1
    reshards_after_forward: bool = True
    offloads_to_cpu: bool = False
    reduces_each_backward: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds a part of the model only."""
        return self.layout in _SHARDED

    @property
    def shards(self) -> int:
        """Parts that a copy of the model is cut into."""
        return self.topology.world_size // self.replicas if self.is_sharded else 1

    @classmethod
    def decide(cls, config: TrainerConfig, topology: Topology, request: LaunchRequest) -> "ParallelPlan":
        """Combine the run file and the launch.

        Raises:
            LaunchError: they contradict each other, or the launch asks for what this trainer does not do; every
                contradiction is listed with its remedy.
        """
        layout = _layout(config, topology, request)
        replicas = {"hsdp": _replicas(config, topology, request), "fsdp2": 1}.get(layout, topology.world_size)
        problems = [
            *_refusals(request),
            *_conflicts(config, request),
            *(_mesh_problems(replicas, topology, request) if layout == "hsdp" else ()),
        ]
        if problems:
            raise LaunchError("This launch cannot work:\n" + "\n".join(f"- {problem}" for problem in problems))
        fsdp = request.fsdp
        return cls(
            topology=topology,
            layout=layout,
            compute_dtype=torch.bfloat16 if config.acceleration.mixed_precision_mode == "bf16" else torch.float32,
            gradient_checkpointing=config.optimization.enable_gradient_checkpointing
            or (fsdp is not None and fsdp.checkpoints_activations),
            compile=config.acceleration.compile or _launch_compile(request),
            replicas=replicas,
            reshards_after_forward=fsdp is None or fsdp.reshards_after_forward,
            offloads_to_cpu=fsdp is not None and fsdp.offloads_to_cpu,
            # Unreduced gradients of the whole model would cost the memory that sharding saves; adapters' are small.
            reduces_each_backward=layout in _SHARDED and config.model.training_mode == "full",
        )


def _layout(config: TrainerConfig, topology: Topology, request: LaunchRequest) -> Layout:
    if topology.world_size == 1:  # nothing to replicate, nothing to shard: the numbers are the same
        return "single"
    if config.acceleration.parallel != "auto":
        return config.acceleration.parallel
    if request.fsdp is None:
        return "ddp"
    return "hsdp" if (request.replicas or 1) > 1 else "fsdp2"


def _replicas(config: TrainerConfig, topology: Topology, request: LaunchRequest) -> int:
    chosen = config.acceleration.hsdp_replicas or request.replicas
    # Sharding inside a host, where the connection is fast, and copies on the others.
    return chosen or (topology.hosts if topology.hosts > 1 else 2)


def _launch_compile(request: LaunchRequest) -> CompileConfig | None:
    if request.dynamo is None:
        return None
    given = {name: value for name, value in vars(request.dynamo).items() if value is not None}
    return CompileConfig.model_validate(given)


def _refusals(request: LaunchRequest) -> Iterator[str]:
    if request.engine is not None:
        yield (
            f"The launch configures {request.engine}, which this trainer does not drive. Choose one of "
            f"{_CONFIGS}/*.yaml instead."
        )
    if request.fsdp is not None and request.fsdp.version != 2:
        yield (
            f"The launch configures FSDP version {request.fsdp.version}; only version 2 keeps a frozen bf16 base and "
            "float32 adapters in one model. Use "
            f"{_CONFIGS}/fsdp2.yaml, or convert your file: `accelerate to-fsdp2 --config_file OLD --output_file NEW`."
        )
    if request.fsdp is not None and request.fsdp.wrap_policy in ("size_based_wrap", "no_wrap"):
        yield (
            f"The launch says fsdp_auto_wrap_policy: {request.fsdp.wrap_policy.upper()}; here every transformer block "
            "is one unit, and the rest of the model another. Write TRANSFORMER_BASED_WRAP, or leave the line out."
        )
    if request.fsdp is not None and request.fsdp.ignored_modules is not None:
        yield (
            f"The launch says fsdp_ignored_modules: {request.fsdp.ignored_modules}; here everything is sharded. Leave "
            "the line out."
        )
    if request.other_parallelism:
        names = ", ".join(f"parallelism_config_{name}_size" for name in request.other_parallelism)
        yield (
            f"The launch sets {names}; of accelerate's parallelism only dp_replicate and dp_shard are available here. "
            f"Set {'it' if len(request.other_parallelism) == 1 else 'them'} to 1."
        )


def _conflicts(config: TrainerConfig, request: LaunchRequest) -> Iterator[str]:
    chosen = config.acceleration.mixed_precision_mode or "no"
    if request.mixed_precision is not None and request.mixed_precision != chosen:
        yield (
            f"The launch says mixed_precision: {request.mixed_precision}, the run file says "
            f"acceleration.mixed_precision_mode: {chosen}. Set `mixed_precision: 'no'` in the accelerate config (it "
            "then leaves the choice to the run file), or make both the same."
        )
    parallel = config.acceleration.parallel
    launched = None
    if request.fsdp is not None:
        launched = "hsdp" if (request.replicas or 1) > 1 else "fsdp2"
    # A launch for DDP says nothing but the number of processes, so the run file may choose.
    if launched is not None and parallel not in ("auto", launched) and (launched, parallel) != ("fsdp2", "hsdp"):
        yield (
            f"The launch configures {launched} (fsdp_config{' and parallelism_config' * (launched == 'hsdp')}), the "
            f"run file says acceleration.parallel: {parallel}. Set it to auto, or launch with "
            f"{_CONFIGS}/{parallel}.yaml."
        )
    replicas = config.acceleration.hsdp_replicas
    if replicas is not None and (request.replicas or 1) > 1 and replicas != request.replicas:
        yield (
            f"The launch says parallelism_config_dp_replicate_size: {request.replicas}, the run file says "
            f"acceleration.hsdp_replicas: {replicas}. Set the latter to null, or make both the same."
        )
    ours, theirs = config.acceleration.compile, _launch_compile(request)
    if ours is not None and theirs is not None and ours != theirs:
        yield (
            f"The launch says dynamo_config: {theirs.model_dump()}, the run file says acceleration.compile: "
            f"{ours.model_dump()}. Set acceleration.compile: null, or remove dynamo_config from the accelerate config."
        )


def _mesh_problems(replicas: int, topology: Topology, request: LaunchRequest) -> Iterator[str]:
    world = topology.world_size
    if world % replicas or world == replicas:
        yield (
            f"hsdp with {replicas} copies of the model needs a multiple of {replicas} processes, and at least "
            f"{2 * replicas}; this launch has {world}. Change num_processes or acceleration.hsdp_replicas, or use "
            "acceleration.parallel: fsdp2."
        )
    elif request.shards is not None and request.shards not in (1, world // replicas):
        yield (
            f"The launch says dp_replicate_size {replicas} and dp_shard_size {request.shards} for {world} processes. "
            f"Their product must be the number of processes: set dp_shard_size to {world // replicas}."
        )
