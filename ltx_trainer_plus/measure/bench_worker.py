"""A process of the benchmark: builds what its driver names and runs some of its steps."""

import contextlib
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ltx_trainer_plus.config.schema import CompileConfig
from ltx_trainer_plus.measure.bench import (
    bare_step,
    bench_config,
    blocks_step,
    random_batch,
    random_handle,
    random_inputs,
    step_seconds,
    trainer_step,
)
from ltx_trainer_plus.measure.bench_report import Measured, Variant
from ltx_trainer_plus.measure.workload import Workload
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.collectives import broadcast_object
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.topology import Topology


class Worker:
    """Builds variants when they are first asked for, and runs some of their steps."""

    def __init__(self, topology: Topology, model: dict[str, Any], work: Workload) -> None:
        self._topology, self._model, self._work = topology, model, work
        self._steps: dict[str, Callable[[], None]] = {}
        self._is_gpu = topology.device.type == "cuda"
        if not self._is_gpu:
            torch.set_num_threads(1)

    def measure(self, variant: Variant, steps: int, trace: Path | None) -> Measured:
        memory, first, before_building = None, None, None
        if variant.name not in self._steps:
            if self._is_gpu:
                self._steps.clear()  # one real-size model at a time
                torch.cuda.empty_cache()
            before_building = None if self._is_gpu else _resident("VmRSS")
            self._steps[variant.name] = self._build(variant)
            started = time.perf_counter()
            self._run(variant, 1)
            first = time.perf_counter() - started
            self._run(variant, 2)
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()
        elif before_building is not None:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew
        before = time.process_time()
        seconds = self._run(variant, steps)
        cpu = (time.process_time() - before) / steps
        if self._is_gpu:
            memory = torch.cuda.max_memory_allocated()
        elif before_building is not None:
            memory = _resident("VmHWM") - before_building
        if trace is not None:
            self._profile(variant, trace)
        return Measured(tuple(seconds), cpu, first, memory)

    def _run(self, variant: Variant, steps: int) -> list[float]:
        return step_seconds(self._steps[variant.name], steps, self._topology.device)

    def _build(self, variant: Variant) -> Callable[[], None]:
        config = bench_config(acceleration={"compile": "blocks"} if variant.is_compiled else {})
        plan = ParallelPlan(
            topology=self._topology,
            layout=variant.layout,
            compute_dtype=torch.bfloat16,
            gradient_checkpointing=variant.checkpointing,
            compile=CompileConfig() if variant.is_compiled else None,
            replicas={"hsdp": 2, "fsdp2": 1}.get(variant.layout, variant.processes),
        )
        handle = random_handle(self._model, config, plan)
        if variant.what == "trainer":
            return trainer_step(handle, config, random_batch(self._model, self._work))
        inputs = random_inputs(self._model, self._work, self._topology.device)
        return (bare_step if variant.what == "bare" else _blocks_step)(handle, config, inputs)

    def _profile(self, variant: Variant, folder: Path) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_gpu else [])]
        with profile(activities=activities) as profiler:
            self._run(variant, 3)
            # A communication thread still notes the end of its last collective, which it must not do in a profile
            # that is gone.
            time.sleep(0.1)
        if self._topology.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            name = "".join(letter if letter.isalnum() else "_" for letter in variant.name)
            profiler.export_chrome_trace(str(folder / f"{name}.json"))


def _resident(field: str) -> int:
    """Bytes of this process by its name in /proc (`VmRSS`: now, `VmHWM`: at most)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def _blocks_step(handle: ModelHandle, _: Any, inputs: Any) -> Callable[[], None]:
    return blocks_step(handle, inputs)


def worker_main(address: str) -> None:
    """What every launched process runs: obey the driver at this socket until it hangs up."""
    topology = Topology.start("cpu" if address.endswith("cpu") else "auto")
    driver: Connection | None = Client(address) if topology.is_main else None
    model, work = broadcast_object(driver.recv() if driver else None, topology)
    worker = Worker(topology, model, work)
    while True:
        order: Any = None
        if driver is not None:
            with contextlib.suppress(EOFError):
                order = driver.recv()
        order = broadcast_object([order], topology)[0]
        if order is None:
            return
        try:
            result: Measured | str = worker.measure(*order)
        except torch.OutOfMemoryError as error:
            result = f"out of memory: {error}"
        if driver is not None:
            driver.send(result)


if __name__ == "__main__":
    run_and_exit(lambda: worker_main(sys.argv[1]))
