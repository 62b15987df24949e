#!/usr/bin/env python3
"""Measure the trainer's step in every parallel layout, interleaved, on a small or a real-size random model.

One command: it starts all processes by itself (torchrun), and takes turns among the layouts, so that a machine that
gets slower gets slower for all of them. `bare` is a training loop as one writes it by hand around DDP: the floor.

    .venv/bin/python scripts/benchmark.py                     # bench-cpu: one, two and four gloo processes
    .venv/bin/python scripts/benchmark.py --bench gpu         # bench-gpu: real LTX-2.3 blocks, all GPUs of this machine
    .venv/bin/python scripts/benchmark.py --profile traces/   # also a trace of each for https://ui.perfetto.dev
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ltx_trainer_plus.config.schema import CompileConfig
from ltx_trainer_plus.measure.bench import (
    BENCH_CPU,
    BENCH_CPU_MODEL,
    BENCH_GPU,
    LTX_2_3,
    bare_step,
    bench_config,
    blocks_step,
    random_batch,
    random_handle,
    random_inputs,
    step_seconds,
    trainer_step,
)
from ltx_trainer_plus.measure.bench_report import Measured, Variant, machine, print_report, ratios, summary
from ltx_trainer_plus.measure.costs import Parameters, Workload
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.parallel.collectives import broadcast_object
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.topology import Topology


def variants(processes: Sequence[int], *, checkpointing: bool) -> list[Variant]:
    """Everything that these numbers of processes can run."""
    found = []
    for count in processes:
        shared: dict[str, Any] = {"processes": count, "checkpointing": checkpointing}
        if count == 1:
            found += [
                Variant("single", "single", **shared),
                Variant("single, bare", "single", what="bare", **shared),
                Variant("single + compile", "single", is_compiled=True, **shared),
                Variant("single + checkpointing", "single", **{**shared, "checkpointing": True}),
                Variant("blocks", "single", what="blocks", **shared),
                Variant("blocks + compile", "single", what="blocks", is_compiled=True, **shared),
            ]
            continue
        found += [
            Variant(f"ddp x{count}", "ddp", **shared),
            Variant(f"ddp x{count}, bare", "ddp", what="bare", **shared),
            Variant(f"ddp x{count} + compile", "ddp", is_compiled=True, **shared),
            Variant(f"fsdp2 x{count}", "fsdp2", **shared),
            Variant(f"fsdp2 x{count} + compile", "fsdp2", is_compiled=True, **shared),
        ]
        if count >= 4 and count % 2 == 0:
            found += [
                Variant(f"hsdp x{count}", "hsdp", **shared),
                Variant(f"hsdp x{count} + compile", "hsdp", is_compiled=True, **shared),
            ]
    return found


Start = Callable[[int, Path], contextlib.AbstractContextManager[Connection]]
"""Starts that many processes, with inductor's cache in that folder."""


class Worker:
    """A process of a launch: builds variants when they are first asked for, and runs some of their steps."""

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


@contextlib.contextmanager
def launched(model: dict[str, Any], work: Workload, gpu: bool, processes: int, cache: Path) -> Iterator[Connection]:
    """That many processes, and the connection to the first of them. `cache`: what inductor has compiled already."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = f"{folder}/{'gpu' if gpu else 'cpu'}"
        server.bind(address)
        server.listen()
        server.settimeout(0.5)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        # One process is no group: it runs as `python scripts/train.py` would.
        launcher = torchrun if processes > 1 else [sys.executable]
        surroundings = ["env", f"TORCHINDUCTOR_CACHE_DIR={cache}"]
        worker = subprocess.Popen([*surroundings, *launcher, __file__, "--worker", address])
        try:
            with _accept(server, worker) as connection:
                connection.send((model, work))
                yield connection
            worker.wait(60)
        finally:
            worker.terminate()


def _accept(server: socket.socket, worker: subprocess.Popen[bytes]) -> Connection:
    while worker.poll() is None:
        with contextlib.suppress(TimeoutError):
            return Connection(server.accept()[0].detach())
    sys.exit("The benchmark's processes ended before they had started; their error is above.")


def measure_alone(
    wanted: Sequence[Variant], start: Start, folder: Path, steps: int, *, gpu: bool
) -> dict[str, list[Measured]]:
    """What other variants in the same processes would blur: compiling, and the memory of a process.

    A compiled variant is started twice: with an empty inductor cache, and with what that has left. On a GPU the others
    are left out: its memory is counted by torch.
    """
    found: dict[str, list[Measured]] = {}
    for index, variant in enumerate(wanted):
        if gpu and not variant.is_compiled:
            continue
        for _ in range(2 if variant.is_compiled else 1):
            print(f"alone: {variant.name}", file=sys.stderr)
            with start(variant.processes, folder / str(index)) as worker:
                found.setdefault(variant.name, []).append(_turn(worker, variant, steps, None))
    return found


def _turn(worker: Connection, variant: Variant, steps: int, trace: Path | None) -> Measured:
    worker.send((variant, steps, trace))
    result = worker.recv()
    if isinstance(result, str):
        sys.exit(f"{variant.name}: {result}\n  Give fewer --blocks.")
    return result


def measure_all(
    wanted: Sequence[Variant], start: Start, cache: Path, given: argparse.Namespace
) -> dict[str, list[Measured]]:
    """Every variant in every round, in turn; forwards in one round and backwards in the next."""
    found: dict[str, list[Measured]] = {variant.name: [] for variant in wanted}
    with contextlib.ExitStack() as stack:
        workers = {
            count: stack.enter_context(start(count, cache))
            for count in sorted({variant.processes for variant in wanted})
        }
        for turn in range(given.rounds):
            for variant in wanted if turn % 2 == 0 else reversed(wanted):
                trace = given.profile if turn == given.rounds - 1 else None
                print(f"round {turn + 1} of {given.rounds}: {variant.name}", file=sys.stderr)
                found[variant.name].append(_turn(workers[variant.processes], variant, given.steps, trace))
    return found


def handle_overhead(calls: int = 20_000) -> float:
    """Seconds that `handle(...)` costs over calling the wrapped module: the median of interleaved rounds."""
    transformer = transformer_on_meta({**BENCH_CPU_MODEL, "num_layers": 1})
    transformer.forward = lambda **_: (None, None)  # type: ignore[method-assign]
    handle = ModelHandle.of(transformer)
    inputs = random_inputs(BENCH_CPU_MODEL, BENCH_CPU, torch.device("cpu"))

    def timed(function: Callable[..., Any]) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            function(**inputs, perturbations=None)
        return (time.perf_counter() - started) / calls

    return statistics.median(timed(handle) - timed(transformer) for _ in range(9))


def blocks_that_fit(model: dict[str, Any], work: Workload) -> int:
    """How many blocks fit on the first GPU with everything that a checkpointed LoRA step needs."""
    free, _ = torch.cuda.mem_get_info()
    parameters = Parameters.of(transformer_on_meta({**model, "num_layers": 1}), lora_targets=(), rank=8)
    # Weights in bf16; a block's adapters, their gradients and moments are a few per cent of it; inputs of the block.
    hidden = work.batch * (work.video_tokens * 4096 + work.audio_tokens * 2048)
    return min(int(model["num_layers"]), int((0.9 * free - 12e9) // (2.1 * parameters.block + 2 * hidden)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", choices=("auto", "cpu", "gpu"), default="auto", help="auto: gpu where there is one")
    parser.add_argument("--processes", type=int, nargs="+", help="numbers of processes (default: cpu 1 2 4, gpu all)")
    parser.add_argument("--only", nargs="+", default=[], help="only variants whose name contains one of these")
    parser.add_argument("--skip", nargs="+", default=[], help="no variant whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn (default 10)")
    parser.add_argument("--blocks", type=int, help="transformer blocks (default: cpu 4, gpu as many as fit)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write a Perfetto trace of every variant")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        run_and_exit(lambda: worker_main(sys.argv[2]))
    given = arguments()
    gpu = given.bench == "gpu" or (given.bench == "auto" and torch.cuda.is_available())
    model, work = (LTX_2_3, BENCH_GPU) if gpu else (BENCH_CPU_MODEL, BENCH_CPU)
    blocks = given.blocks or (blocks_that_fit(model, work) if gpu else model["num_layers"])
    model = {**model, "num_layers": blocks}
    counts = given.processes or (sorted({1, torch.cuda.device_count()}) if gpu else [1, 2, 4])
    wanted = variants(counts, checkpointing=gpu)
    if given.only:
        wanted = [variant for variant in wanted if any(part in variant.name for part in given.only)]
    wanted = [variant for variant in wanted if not any(part in variant.name for part in given.skip)]
    if not wanted:
        sys.exit(f"--only and --skip leave no variant of {counts} processes.")
    where = machine()

    start = partial(launched, model, work, gpu)
    with tempfile.TemporaryDirectory() as folder:
        alone = measure_alone(wanted, start, Path(folder), given.steps, gpu=gpu)
        found = measure_all(wanted, start, Path(folder, "rounds"), given)
    rows = summary(wanted, found, alone, work)
    report = {
        "bench": "bench-gpu" if gpu else "bench-cpu",
        "blocks": blocks,
        "rounds": given.rounds,
        "steps": given.steps,
        "machine": where,
        "load_average_after": os.getloadavg(),
        "results": rows,
        "ratios": ratios(rows, found),
        "handle_overhead_seconds": handle_overhead(),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)


if __name__ == "__main__":
    main()
