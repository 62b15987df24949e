"""Which process this is, among how many, on which device: the only reader of environment variables."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from accelerate import PartialState

from ltx_trainer_plus.errors import UserError

# A rank that waits this long for the others reports it instead of waiting for ever. Loading a big model on a slow
# disk and validating many samples on one rank both fit well inside.
_COLLECTIVE_TIMEOUT = timedelta(minutes=60)


class LaunchError(UserError, RuntimeError):
    """The way the program was launched cannot work; the message says what to change."""


@dataclass(frozen=True)
class FsdpRequest:
    """accelerate's `fsdp_config`, as far as it decides something here.

    Attributes:
        version: 1 or 2.
        reshards_after_forward: whether a block's weights are freed between forward and backward.
        offloads_to_cpu: whether shards, gradients and optimizer states live in host memory.
        checkpoints_activations: whether blocks are recomputed in the backward.
        wrap_policy: in lower case; None where it was not set.
        ignored_modules: what should be left unsharded; None where it was not set.
    """

    version: int = 2
    reshards_after_forward: bool = True
    offloads_to_cpu: bool = False
    checkpoints_activations: bool = False
    wrap_policy: str | None = None
    ignored_modules: str | None = None


@dataclass(frozen=True)
class DynamoRequest:
    """accelerate's `dynamo_config`. A launcher exports `False` and `default` for what was not set: None here."""

    backend: str
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool | None = None


@dataclass(frozen=True)
class LaunchRequest:
    """What the launcher asked for beyond the number of processes.

    Attributes:
        mixed_precision: accelerate's `mixed_precision` (`fp16`, `bf16`, `fp8`), None where it was not set.
        dynamo: how to compile, None where it was not set.
        fsdp: how to shard, None where it was not set.
        replicas: accelerate's `dp_replicate_size`, None without a `parallelism_config`.
        shards: accelerate's `dp_shard_size`, None without a `parallelism_config`.
        other_parallelism: the names of other dimensions that were asked for (`tp`, `cp`, `sp`).
        engine: `deepspeed` or `megatron` where the launch configures one of them, None otherwise.
    """

    mixed_precision: str | None = None
    dynamo: DynamoRequest | None = None
    fsdp: FsdpRequest | None = None
    replicas: int | None = None
    shards: int | None = None
    other_parallelism: tuple[str, ...] = ()
    engine: Literal["deepspeed", "megatron"] | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> "LaunchRequest":
        """Read accelerate's launch variables.

        A launcher exports `no` where nothing was configured, so `no` means "not set" and never conflicts.
        """
        env = os.environ if environment is None else environment

        def chosen(name: str) -> str | None:
            value = env.get(name, "").strip().lower()
            return value if value not in ("", "no", "none", "false") else None

        fsdp = None
        if chosen("ACCELERATE_USE_FSDP"):
            fsdp = FsdpRequest(
                version=int(env.get("FSDP_VERSION", "1")),
                # Absent means accelerate's default, true.
                reshards_after_forward=env.get("FSDP_RESHARD_AFTER_FORWARD", "true").strip().lower() != "false",
                offloads_to_cpu=bool(chosen("FSDP_OFFLOAD_PARAMS")),
                checkpoints_activations=bool(chosen("FSDP_ACTIVATION_CHECKPOINTING")),
                wrap_policy=chosen("FSDP_AUTO_WRAP_POLICY"),
                ignored_modules=chosen("FSDP_IGNORED_MODULES"),
            )
        dynamo = None
        if backend := chosen("ACCELERATE_DYNAMO_BACKEND"):
            mode = chosen("ACCELERATE_DYNAMO_MODE")
            dynamo = DynamoRequest(
                backend=backend,
                mode=None if mode == "default" else mode,
                dynamic=True if chosen("ACCELERATE_DYNAMO_USE_DYNAMIC") else None,
                fullgraph=True if chosen("ACCELERATE_DYNAMO_USE_FULLGRAPH") else None,
            )
        sizes: dict[str, int] = {}
        if chosen("ACCELERATE_USE_PARALLELISM_CONFIG"):
            for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
                sizes[name] = int(chosen(f"PARALLELISM_CONFIG_{name.upper()}_SIZE") or 1)
        engine: Literal["deepspeed", "megatron"] | None = None
        if chosen("ACCELERATE_USE_DEEPSPEED"):
            engine = "deepspeed"
        elif chosen("ACCELERATE_USE_MEGATRON_LM"):
            engine = "megatron"
        return cls(
            mixed_precision=chosen("ACCELERATE_MIXED_PRECISION"),
            dynamo=dynamo,
            fsdp=fsdp,
            replicas=sizes.get("dp_replicate"),
            shards=sizes.get("dp_shard"),
            other_parallelism=tuple(name for name in ("tp", "cp", "sp") if sizes.get(name, 1) > 1),
            engine=engine,
        )


@dataclass(frozen=True)
class Topology:
    """This process's place in the run.

    Whatever is about samples (which ones, how many, how often they count) asks for the data axis: `data_rank`,
    `data_ranks`, `leads_data_rank`. The processes of one data rank work on the same samples with the same draws.
    Gradients are averaged over all processes, and equal ones of a data rank leave the average as it is.

    Attributes:
        rank: global index, 0 is the main process.
        local_rank: index on this host.
        world_size: number of processes in the run.
        device: where this process computes.
        hosts: number of machines that the processes are spread over.
        processes_per_data_rank: size of all other axes together. These processes are neighbours, because they talk
            most, and a host's connections are the fastest.

    Raises:
        ValueError: the processes cannot be divided so.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    hosts: int = 1
    processes_per_data_rank: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.processes_per_data_rank:
            raise ValueError(
                f"{self.world_size} processes cannot be divided into data ranks of {self.processes_per_data_rank}. "
                f"Launch a multiple of {self.processes_per_data_rank} processes."
            )

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, logs and talks to the user."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        """Number of parts that a global batch is dealt to."""
        return self.world_size // self.processes_per_data_rank

    @property
    def data_rank(self) -> int:
        """Which of them is this process's."""
        return self.rank // self.processes_per_data_rank

    @property
    def leads_data_rank(self) -> bool:
        """Whether this process counts its data rank's samples, and writes what is made of them."""
        return self.rank % self.processes_per_data_rank == 0

    @classmethod
    def start(cls, device: Literal["auto", "cpu"] = "auto") -> "Topology":
        """Join the process group that the launcher prepared, and pick the device.

        Args:
            device: `cpu` keeps a machine with accelerators on the CPU; `auto` takes an accelerator where there is one.

        Raises:
            LaunchError: the launcher started more processes than joined. Going on would be several unrelated runs.
        """
        # Without an accelerator accelerate must be told to use the CPU: left alone it starts every rank as a run of
        # its own, without a word.
        cpu = device == "cpu" or not torch.accelerator.is_available()
        asked = int(os.environ.get("WORLD_SIZE", "1"))
        distributed = asked > 1 or "LOCAL_RANK" in os.environ
        state = PartialState(cpu=cpu, **({"timeout": _COLLECTIVE_TIMEOUT} if distributed else {}))
        if state.num_processes != asked:
            raise LaunchError(
                f"The launcher announced {asked} processes (WORLD_SIZE={asked}) but {state.num_processes} joined: they "
                "would train as unrelated runs.\n  Launch with `accelerate launch --config_file "
                "configs/accelerate/<layout>.yaml scripts/train.py ...` or with `torchrun --nproc_per_node N`."
            )
        return cls(
            rank=state.process_index,
            local_rank=state.local_process_index,
            world_size=state.num_processes,
            # On the CPU accelerate numbers the device by rank, which is an index no other tensor has.
            device=torch.device("cpu") if cpu else state.device,
            hosts=max(1, asked // int(os.environ.get("LOCAL_WORLD_SIZE", asked))),
        )


def started_by_single_process_launcher() -> bool:
    """Whether the parent is `accelerate launch` in its one-process form.

    That launcher dies of a SIGTERM without telling its child, so the child has to watch for it.
    """
    if "LOCAL_RANK" in os.environ or not sys.platform.startswith("linux"):
        return False
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # `accelerate launch`, `accelerate-launch` or `python -m accelerate.commands.launch`.
    names = {Path(part.decode(errors="replace")).name for part in command}
    return {"accelerate", "launch"} <= names or bool(names & {"accelerate-launch", "accelerate.commands.launch"})
