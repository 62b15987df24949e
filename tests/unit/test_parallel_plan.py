"""What the launch and the run file decide together, and what they cannot."""

from typing import Any

import pytest
import torch
import yaml

from ltx_trainer_plus.config.schema import CompileConfig, TrainerConfig
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.topology import FsdpRequest, LaunchError, LaunchRequest, Topology
from tests.launch import ROOT

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
MESH = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
}
# As a launcher exports them when nothing was configured.
NOTHING = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
}


def decide(
    environment: dict[str, str], world: int = 4, hosts: int = 1, mode: str = "lora", **acceleration: Any
) -> ParallelPlan:
    config = TrainerConfig.model_validate(
        {
            "model": {"model_path": ".", "training_mode": mode},
            "data": {"preprocessed_data_root": "."},
            "acceleration": acceleration,
        }
    )
    topology = Topology(rank=0, local_rank=0, world_size=world, device=torch.device("cpu"), hosts=hosts)
    return ParallelPlan.decide(config, topology, LaunchRequest.read({**NOTHING, **environment}))


def refusal(environment: dict[str, str], **options: Any) -> str:
    with pytest.raises(LaunchError) as error:
        decide(environment, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("environment", "parallel", "world", "layout", "replicas", "shards"),
    [
        ({}, "auto", 1, "single", 1, 1),
        (FSDP, "auto", 1, "single", 1, 1),
        ({}, "auto", 4, "ddp", 4, 1),
        ({}, "fsdp2", 4, "fsdp2", 1, 4),
        ({}, "hsdp", 4, "hsdp", 2, 2),
        (FSDP, "auto", 4, "fsdp2", 1, 4),
        (FSDP, "fsdp2", 2, "fsdp2", 1, 2),
        (FSDP, "hsdp", 8, "hsdp", 2, 4),
        ({**FSDP, **MESH}, "auto", 4, "hsdp", 2, 2),
    ],
)
def test_the_layout_comes_from_the_launch_or_the_run_file(environment, parallel, world, layout, replicas, shards):
    plan = decide(environment, world=world, parallel=parallel)
    assert (plan.layout, plan.replicas, plan.shards) == (layout, replicas, shards)
    assert plan.compile is None


@pytest.mark.parametrize(
    ("parallel", "mode", "answer"),
    [("fsdp2", "full", True), ("hsdp", "full", True), ("fsdp2", "lora", False), ("ddp", "full", False)],
)
def test_only_gradients_of_a_whole_sharded_model_are_reduced_in_every_micro_step(parallel, mode, answer):
    """Unreduced, they would cost the memory that sharding saves."""
    assert decide({}, mode=mode, parallel=parallel).reduces_each_backward is answer


def test_processes_of_a_data_rank_are_neighbours_with_one_leader() -> None:
    processes = [
        Topology(rank, rank, world_size=6, device=torch.device("cpu"), processes_per_data_rank=2) for rank in range(6)
    ]
    assert [topology.data_rank for topology in processes] == [0, 0, 1, 1, 2, 2]
    assert [topology.leads_data_rank for topology in processes] == [True, False] * 3
    assert {topology.data_ranks for topology in processes} == {3}
    with pytest.raises(ValueError, match="4 processes cannot be divided into data ranks of 3"):
        Topology(0, 0, world_size=4, device=torch.device("cpu"), processes_per_data_rank=3)


def test_hsdp_shards_inside_a_host_and_keeps_a_copy_on_each() -> None:
    plan = decide({}, world=16, hosts=4, parallel="hsdp")
    assert (plan.replicas, plan.shards) == (4, 4)
    assert decide({}, world=16, hosts=4, parallel="hsdp", hsdp_replicas=2).shards == 8


def test_fsdp_options_are_honoured() -> None:
    plan = decide(
        {
            **FSDP,
            "FSDP_RESHARD_AFTER_FORWARD": "false",
            "FSDP_OFFLOAD_PARAMS": "true",
            "FSDP_ACTIVATION_CHECKPOINTING": "true",
        }
    )
    assert not plan.reshards_after_forward
    assert plan.offloads_to_cpu
    assert plan.gradient_checkpointing
    plain = decide(FSDP)
    assert (plain.reshards_after_forward, plain.offloads_to_cpu, plain.gradient_checkpointing) == (True, False, False)


def test_accelerates_dynamo_config_is_our_blockwise_compile() -> None:
    launched = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "max-autotune"}
    assert decide(launched).compile == CompileConfig(backend="inductor", mode="max-autotune")
    # What the launcher exports for "not set" does not overrule our default.
    assert decide({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}).compile == CompileConfig(fullgraph=True, dynamic=None)
    assert decide({}, compile="blocks").compile == CompileConfig()
    assert decide({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, compile="blocks").compile == CompileConfig()
    assert decide({}, compile={"backend": "eager", "dynamic": True}).compile == CompileConfig(
        backend="eager", dynamic=True
    )


@pytest.mark.parametrize(
    ("environment", "options", "parts"),
    [
        ({**FSDP, "FSDP_VERSION": "1"}, {}, ["FSDP version 1", "accelerate to-fsdp2"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, ["deepspeed", "configs/accelerate/*.yaml"]),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, ["megatron", "configs/accelerate/*.yaml"]),
        ({**FSDP, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {}, ["SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"]),
        ({**FSDP, "FSDP_IGNORED_MODULES": "proj_in"}, {}, ["fsdp_ignored_modules: proj_in"]),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_TP_SIZE": "2"}, {}, ["parallelism_config_tp_size", "Set it to 1"]),
        (FSDP, {"parallel": "ddp"}, ["fsdp2", "acceleration.parallel: ddp", "configs/accelerate/ddp.yaml"]),
        ({**FSDP, **MESH}, {"parallel": "fsdp2"}, ["hsdp", "acceleration.parallel: fsdp2"]),
        ({**FSDP, **MESH}, {"hsdp_replicas": 4, "world": 8}, ["dp_replicate_size: 2", "hsdp_replicas: 4"]),
        ({**FSDP, **MESH}, {"world": 8}, ["dp_shard_size to 4"]),
        ({}, {"parallel": "hsdp", "world": 3}, ["hsdp with 2 copies", "this launch has 3"]),
        ({}, {"parallel": "hsdp", "world": 2}, ["at least 4; this launch has 2"]),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
            {"compile": {"backend": "eager"}},
            ["'backend': 'inductor'", "'backend': 'eager'", "acceleration.compile: null"],
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, ["mixed_precision: fp16", "mixed_precision_mode: bf16"]),
    ],
)
def test_a_launch_that_cannot_work_is_refused_with_its_remedy(environment, options, parts):
    message = refusal(environment, **options)
    for part in parts:
        assert part in message


def test_all_contradictions_are_listed_together() -> None:
    message = refusal({**FSDP, "FSDP_VERSION": "1", "ACCELERATE_MIXED_PRECISION": "fp16"}, parallel="ddp")
    assert message.count("\n- ") == 3


@pytest.mark.parametrize("name", ["ddp", "ddp_compile", "fsdp2", "fsdp2_compile", "hsdp"])
def test_every_layout_has_a_launch_file_for_gpus_and_one_for_the_cpu(name: str) -> None:
    files = {
        prefix: yaml.safe_load((ROOT / f"configs/accelerate/{prefix}{name}.yaml").read_text())
        for prefix in ("", "cpu_")
    }
    assert files[""]["num_processes"] == 4
    assert files["cpu_"]["num_processes"] == (4 if name == "hsdp" else 2)
    assert files["cpu_"].pop("use_cpu")
    assert {**files[""], "num_processes": 0} == {**files["cpu_"], "num_processes": 0}


def test_a_request_reads_nothing_where_nothing_was_configured() -> None:
    assert LaunchRequest.read(NOTHING) == LaunchRequest()
    assert LaunchRequest.read(FSDP).fsdp == FsdpRequest()
    assert LaunchRequest.read({"ACCELERATE_USE_FSDP": "true"}).fsdp == FsdpRequest(version=1)
