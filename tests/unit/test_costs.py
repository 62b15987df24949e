"""The arithmetic of a step's costs, against what really happens on a small model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ltx_trainer_plus.errors import UsageError
from ltx_trainer_plus.measure.activations import activations
from ltx_trainer_plus.measure.bench import BENCH_CPU, BENCH_CPU_MODEL, BENCH_GPU, LTX_2_3, bench_config, random_handle
from ltx_trainer_plus.measure.bench import random_inputs as inputs_of
from ltx_trainer_plus.measure.cards import peak_tflops
from ltx_trainer_plus.measure.costs import Machine, Parameters, layout_cost
from ltx_trainer_plus.measure.operations import Flops, flops
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.models.lora import lora_target_names
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.topology import Topology

CPU = torch.device("cpu")
LORA = {"lora": {"rank": 8, "alpha": 8}}
FULL = {"model": {"training_mode": "full"}}
# Twice the batch, and no two kinds of token equally many: a mistaken factor would show.
WORK = replace(BENCH_CPU, batch=2)
OPERATIONS = Flops(forward=10**12, backward=10**12, recomputed=10**12)
MACHINE = Machine(tflops=989, efficiency=0.5, link=300, memory=80)


def prepared(
    settings: dict[str, Any], *, checkpointing: bool = False, dtype: torch.dtype = torch.float32
) -> ModelHandle:
    plan = ParallelPlan(Topology(0, 0, 1, CPU), "single", dtype, checkpointing)
    return random_handle(BENCH_CPU_MODEL, bench_config(**settings), plan)


def targets_of(settings: dict[str, Any]) -> list[str]:
    if settings is FULL:
        return []
    transformer = transformer_on_meta(BENCH_CPU_MODEL)
    every = frozenset(name for name, _ in transformer.named_parameters())
    return lora_target_names(transformer, bench_config().lora.target_modules, every)


def step(handle: ModelHandle) -> None:
    video, audio = handle(**inputs_of(BENCH_CPU_MODEL, WORK, CPU))
    assert video is not None
    assert audio is not None
    (video.float().sum() + audio.float().sum()).backward()


@pytest.fixture
def countable_attention() -> Iterator[None]:
    """Attention as plain matrix products: torch counts no operations of the CPU's fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.usefixtures("countable_attention")
@pytest.mark.parametrize("settings", [LORA, FULL], ids=["lora", "full"])
def test_operations_are_those_that_torch_counts(settings: dict[str, Any]) -> None:
    counts = flops(BENCH_CPU_MODEL, WORK, lora_targets=targets_of(settings), rank=8, checkpointing=True)
    handle, checkpointed = prepared(settings), prepared(settings, checkpointing=True)
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        handle(**inputs_of(BENCH_CPU_MODEL, WORK, CPU))
    assert counts.forward == forward.get_total_flops()
    with FlopCounterMode(display=False) as useful:
        step(handle)
    assert counts.useful == useful.get_total_flops()
    with FlopCounterMode(display=False) as executed:
        step(checkpointed)
    assert counts.executed == executed.get_total_flops()


@pytest.mark.parametrize("last", [4, 3], ids=["all blocks", "all but the last"])
def test_a_linear_layer_more_in_each_block_is_counted_by_its_arithmetic(last: int) -> None:
    """By hand, to the operation: what an adapter of rank 8 on 128 x 128 weights adds to a step, block by block."""
    queries, keys = ([f"transformer_blocks.{block}.attn1.{name}" for block in range(last)] for name in ("to_q", "to_k"))
    one = flops(BENCH_CPU_MODEL, WORK, lora_targets=queries, rank=8, checkpointing=True)
    both = flops(BENCH_CPU_MODEL, WORK, lora_targets=[*queries, *keys], rank=8, checkpointing=True)
    thin = 2 * 2 * 72 * 8 * (128 + 128)  # a multiplication and an addition, 2 samples of 72 video tokens
    assert both.forward - one.forward == last * thin
    # Gradients of weights and inputs. Nothing before the first block is trained: no gradient of its inputs, and none
    # of its keys, 72 x 72 pairs at width 128, before they had an adapter.
    keys_of_the_first = 2 * 2 * 72 * 72 * 128
    assert both.backward - one.backward == last * 2 * thin - thin // 2 + keys_of_the_first
    assert both.recomputed - one.recomputed == last * thin


def test_blocks_without_adapters_take_no_backward_before_the_first_adapter() -> None:
    """Adapters in some blocks only: no block stands for the others."""
    names = targets_of(LORA)
    late = [name for name in names if name.startswith(("transformer_blocks.2.", "transformer_blocks.3."))]
    every, some = (flops(BENCH_CPU_MODEL, WORK, lora_targets=t, rank=8, checkpointing=False) for t in (names, late))
    assert some.backward == pytest.approx(every.backward / 2, rel=0.1)


@pytest.mark.parametrize("settings", [LORA, FULL], ids=["lora", "full"])
def test_parameters_and_their_bytes_are_those_of_the_prepared_model(settings: dict[str, Any]) -> None:
    handle = prepared(settings, dtype=torch.bfloat16)
    counted = Parameters.of(transformer_on_meta(BENCH_CPU_MODEL), lora_targets=targets_of(settings), rank=8)
    trained = [parameter for _, parameter in handle.trainable_parameters()]
    assert counted.trained == sum(parameter.numel() for parameter in trained)
    operations = flops(BENCH_CPU_MODEL, WORK, lora_targets=targets_of(settings), rank=8, checkpointing=False)
    cost = layout_cost("single", 1, counted, operations, 0, MACHINE)
    assert cost.weights == sum(p.numel() * p.element_size() for p in handle.meta_module.parameters())

    step(handle)
    assert cost.gradients == sum(p.grad.numel() * p.grad.element_size() for p in trained if p.grad is not None)
    optimizer = torch.optim.AdamW(trained, fused=True)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert cost.optimizer == sum(moment.numel() * moment.element_size() for moment in moments)


@pytest.mark.parametrize("settings", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_activations_are_those_that_autograd_keeps(settings: dict[str, Any], dtype: torch.dtype) -> None:
    handle = prepared(settings, dtype=dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in handle.meta_module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        handle(**inputs_of(BENCH_CPU_MODEL, WORK, CPU))
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimate = activations(
        BENCH_CPU_MODEL,
        WORK,
        dtype=dtype,
        weights=dtype if settings is LORA else torch.float32,
        lora_targets=targets_of(settings),
        rank=8,
        checkpointing=False,
    ).total(BENCH_CPU_MODEL["num_layers"])
    # Under LoRA the first block keeps a quarter less than the others, which have trained layers before them.
    assert 0.97 * real < estimate < 1.08 * real


def test_checkpointing_keeps_the_inputs_of_the_blocks_and_one_block_as_a_whole() -> None:
    shared: dict[str, Any] = {"dtype": torch.bfloat16, "weights": torch.bfloat16, "rank": 8}
    plain, checkpointed = (
        activations(BENCH_CPU_MODEL, WORK, lora_targets=targets_of(LORA), checkpointing=flag, **shared)
        for flag in (False, True)
    )
    # 72 video tokens of width 128 and 17 audio tokens of width 64, two samples, two bytes.
    assert checkpointed.per_block == 2 * 2 * (72 * 128 + 17 * 64)
    assert checkpointed.recomputed == plain.per_block
    assert checkpointed.total(4) < plain.total(4)


def test_the_real_model_has_the_known_size_and_cost() -> None:
    transformer = transformer_on_meta(LTX_2_3)
    every = frozenset(name for name, _ in transformer.named_parameters())
    targets = lora_target_names(transformer, bench_config().lora.target_modules, every)
    parameters = Parameters.of(transformer, lora_targets=targets, rank=32)
    assert parameters.base * 2 == pytest.approx(38e9, rel=0.01)  # the published bf16 file
    operations = flops(LTX_2_3, BENCH_GPU, lora_targets=targets, rank=32, checkpointing=True)
    assert 300e12 < operations.executed < 360e12

    fsdp = layout_cost("fsdp2", 4, parameters, operations, 0, MACHINE)
    ddp = layout_cost("ddp", 4, parameters, operations, 0, MACHINE)
    assert fsdp.received_forward == pytest.approx(0.75 * 38e9, rel=0.03)
    assert fsdp.step <= 1.05 * ddp.step
    assert fsdp.exposed_step > 1.2 * ddp.step  # what is lost where nothing overlaps


@pytest.mark.parametrize(("layout", "shards"), [("fsdp2", 8), ("hsdp", 4), ("ddp", 1)])
def test_what_a_rank_keeps_is_its_shard(layout: Any, shards: int) -> None:
    parameters = Parameters(block=1000, blocks=4, root=500, adapters=80)
    cost = layout_cost(layout, 8, parameters, OPERATIONS, 0, MACHINE)
    assert cost.weights == (4500 * 2 + 80 * 4) / shards
    assert cost.gradients == 80 * 4 / shards
    assert cost.optimizer == 80 * 8 / shards
    assert (cost.gathered > 0) == (shards > 1)
    assert cost.reduced == pytest.approx(
        80 * 4 * {"fsdp2": 7 / 8, "hsdp": 3 / 4 + 2 / 4 * 1 / 2, "ddp": 2 * 7 / 8}[layout]
    )


def test_micro_steps_gather_each_time_and_reduce_once() -> None:
    parameters = Parameters(block=1000, blocks=4, root=500, adapters=80)
    one, four = (layout_cost("fsdp2", 4, parameters, OPERATIONS, 0, MACHINE, accumulation=steps) for steps in (1, 4))
    assert four.received_forward == 4 * one.received_forward
    assert four.reduced == one.reduced
    assert four.compute == pytest.approx(4 * one.compute)


def test_hsdp_needs_gpus_that_its_copies_divide() -> None:
    parameters = Parameters(block=1000, blocks=4, root=500, adapters=80)
    with pytest.raises(UsageError, match="hsdp: 2 GPUs"):
        layout_cost("hsdp", 2, parameters, OPERATIONS, 0, MACHINE)


def test_a_card_is_known_by_the_name_that_its_driver_gives() -> None:
    names = ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S")
    assert [peak_tflops(name) for name in names] == [989, 989, 989, 312, 362]
    assert peak_tflops("NVIDIA GeForce RTX 4090") is None
