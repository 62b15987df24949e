"""What a training step must not do: wait for the device, wait for other ranks, or look through wrappers again."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ltx_trainer_plus.model_handle as model_handle_module
from ltx_trainer_plus.measure.bench import (
    BENCH_CPU,
    BENCH_CPU_MODEL,
    bench_config,
    random_batch,
    random_handle,
    random_inputs,
    trainer_step,
)
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.step.sums import PendingMetrics
from tests.waits import Waits

CPU = torch.device("cpu")
SMALL = {**BENCH_CPU_MODEL, "num_layers": 2}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def handle_under(layout: str, **settings: dict[str, Any]) -> ModelHandle:
    plan = ParallelPlan(Topology(0, 0, 1, CPU), "single", torch.bfloat16, gradient_checkpointing=True)
    handle = random_handle(SMALL, bench_config(**settings), plan)
    return handle if layout == "single" else ModelHandle.of(DistributedDataParallel(handle.forward_module))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_a_step_that_logs_nothing_waits_for_nobody(
    layout: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"optimization": {"gradient_accumulation_steps": accumulation}}
    handle = handle_under(layout, **settings)
    reads: list[PendingMetrics] = []
    monkeypatch.setattr(PendingMetrics, "read", lambda self: reads.append(self))
    step = trainer_step(handle, bench_config(**settings), random_batch(SMALL, BENCH_CPU))
    step()  # DDP finds its buckets, the optimizer makes its state
    step()
    with Waits(monkeypatch) as waits:
        step()
        step()
    assert not +waits.seen
    assert len(reads) == 3  # of the step before, never of the one that has just been started


@pytest.mark.parametrize(
    "wait",
    [
        lambda: torch.ones(1).item(),
        lambda: bool(torch.ones(1) > 0),
        lambda: torch.ones(2).tolist(),
        lambda: torch.ones(2).nonzero(),
        lambda: torch.ones(2)[torch.ones(2) > 0],
        lambda: dist.barrier(),
    ],
    ids=["item", "bool", "tolist", "nonzero", "mask", "barrier"],
)
def test_the_count_would_see_it(wait: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with Waits(monkeypatch) as waits:
        wait()
    assert +waits.seen


def test_the_loop_reads_a_step_when_the_next_has_been_started(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ltx_trainer_plus.step.sums import MetricWindow
    from tests.runs import joint_run, train, write_prepared_data

    order: list[str] = []
    real_read, real_reduce = PendingMetrics.read, MetricWindow.reduce_async

    def read(self: PendingMetrics) -> Any:
        order.append("read")
        return real_read(self)

    def reduce_async(self: MetricWindow, **options: Any) -> PendingMetrics:
        order.append("start")
        return real_reduce(self, **options)

    monkeypatch.setattr(PendingMetrics, "read", read)
    monkeypatch.setattr(MetricWindow, "reduce_async", reduce_async)
    settings = joint_run(tiny_pipeline, write_prepared_data(tmp_path / "data"), tmp_path / "run")
    train({**settings, "tracking": {"log_every": 4}}, "optimization.steps=4")
    assert order == ["start", "start", "read", "start", "read", "start", "read", "read"]


def test_a_call_of_the_handle_looks_through_no_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = handle_under("ddp")
    inputs = random_inputs(SMALL, BENCH_CPU, CPU)

    def fail(*_: Any) -> Any:
        raise AssertionError("the handle resolved its wrappers again")

    monkeypatch.setattr(model_handle_module, "_layers", fail)
    monkeypatch.setattr(model_handle_module, "_unwrapped", fail)
    monkeypatch.setattr(ModelHandle, "__getattr__", fail)
    for part in ("named_parameters", "parameters", "named_modules", "modules"):
        monkeypatch.setattr(type(handle.meta_module), part, fail)
    calls: list[Any] = []
    forward = handle.forward_module.forward
    monkeypatch.setattr(handle.forward_module, "forward", lambda **given: calls.append(given) or forward(**given))
    with torch.no_grad():
        handle(**inputs)
    assert len(calls) == 1
    assert calls[0]["video"] is inputs["video"]


def test_a_call_of_the_handle_costs_at_most_five_microseconds() -> None:
    transformer = transformer_on_meta({**SMALL, "num_layers": 1})
    transformer.forward = lambda **_: (None, None)  # type: ignore[method-assign]
    handle = ModelHandle.of(transformer)

    def timed(function: Callable[..., Any], calls: int = 2000) -> float:
        started = time.process_time()  # not the wall clock: others may take the processor away
        for _ in range(calls):
            function(video=None, audio=None, perturbations=None)
        return (time.process_time() - started) / calls

    assert statistics.median(timed(handle) - timed(transformer) for _ in range(11)) < 5e-6
