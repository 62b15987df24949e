#!/usr/bin/env python3
"""Measure the trainer's step in every parallel layout, interleaved, on a small or a real-size random model.

One command: it starts all processes by itself (torchrun), and takes turns among the layouts, so that a machine that
gets slower gets slower for all of them. `bare` is a training loop as one writes it by hand around DDP: the floor.

    python scripts/benchmark.py                        # bench-cpu: one, two and four gloo processes
    python scripts/benchmark.py --bench gpu            # bench-gpu: real LTX-2.3 blocks, all GPUs of this machine
    python scripts/benchmark.py --profile traces/      # also a trace of each for https://ui.perfetto.dev
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from ltx_trainer_plus.bench import (
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
from ltx_trainer_plus.config.schema import CompileConfig
from ltx_trainer_plus.costs import Parameters, Workload
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.parallel.collectives import broadcast_object
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.parallel.plan import Layout, ParallelPlan
from ltx_trainer_plus.parallel.topology import Topology


@dataclass(frozen=True)
class Variant:
    """One thing to measure.

    Attributes:
        layout: what wraps the model.
        processes: how many take part.
        what: the trainer's step, the bare loop, or forward and backward of the blocks alone.
    """

    name: str
    layout: Layout
    processes: int
    what: Literal["trainer", "bare", "blocks"] = "trainer"
    is_compiled: bool = False
    checkpointing: bool = False


@dataclass(frozen=True)
class Measured:
    """One turn of a variant, on the main process.

    Attributes:
        seconds: of each step.
        cpu_seconds: of each step, of this process: what is left when others take the processor away.
        first: seconds of the very first step, which compiles; None in later turns.
        memory: bytes that the step needed at most (GPU only).
    """

    seconds: tuple[float, ...]
    cpu_seconds: float
    first: float | None
    memory: int | None


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
            found.append(Variant(f"hsdp x{count}", "hsdp", **shared))
    return found


class Worker:
    """A process of a launch: builds variants when they are first asked for, and runs some of their steps."""

    def __init__(self, topology: Topology, model: dict[str, Any], work: Workload) -> None:
        self._topology, self._model, self._work = topology, model, work
        self._steps: dict[str, Callable[[], None]] = {}
        self._is_gpu = topology.device.type == "cuda"
        if not self._is_gpu:
            torch.set_num_threads(1)

    def measure(self, variant: Variant, steps: int, trace: Path | None) -> Measured:
        memory, first = None, None
        if variant.name not in self._steps:
            if self._is_gpu:
                self._steps.clear()  # one real-size model at a time
                torch.cuda.empty_cache()
            self._steps[variant.name] = self._build(variant)
            started = time.perf_counter()
            self._run(variant, 1)
            first = time.perf_counter() - started
            self._run(variant, 2)
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = time.process_time()
        seconds = self._run(variant, steps)
        cpu = (time.process_time() - before) / steps
        if self._is_gpu:
            memory = torch.cuda.max_memory_allocated()
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
def launched(processes: int, model: dict[str, Any], work: Workload, *, gpu: bool) -> Iterator[Connection]:
    """That many processes, and the connection to the first of them."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = f"{folder}/{'gpu' if gpu else 'cpu'}"
        server.bind(address)
        server.listen()
        server.settimeout(0.5)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        # One process is no group: it runs as `python scripts/train.py` would.
        launcher = torchrun if processes > 1 else [sys.executable]
        worker = subprocess.Popen([*launcher, __file__, "--worker", address])
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


def measure_all(
    wanted: Sequence[Variant], model: dict[str, Any], work: Workload, given: argparse.Namespace, *, gpu: bool
) -> dict[str, list[Measured]]:
    """Every variant in every round, in turn; forwards in one round and backwards in the next."""
    found: dict[str, list[Measured]] = {variant.name: [] for variant in wanted}
    with contextlib.ExitStack() as stack:
        workers = {
            count: stack.enter_context(launched(count, model, work, gpu=gpu))
            for count in sorted({variant.processes for variant in wanted})
        }
        for turn in range(given.rounds):
            for variant in wanted if turn % 2 == 0 else reversed(wanted):
                trace = given.profile if turn == given.rounds - 1 else None
                print(f"round {turn + 1} of {given.rounds}: {variant.name}", file=sys.stderr)
                workers[variant.processes].send((variant, given.steps, trace))
                result = workers[variant.processes].recv()
                if isinstance(result, str):
                    sys.exit(f"{variant.name}: {result}\n  Give fewer --blocks.")
                found[variant.name].append(result)
    return found


def summary(wanted: Sequence[Variant], found: dict[str, list[Measured]], work: Workload) -> list[dict[str, Any]]:
    """One row for each variant, with numbers in seconds and bytes."""
    rows = []
    for variant in wanted:
        turns = found[variant.name]
        seconds = sorted(second for turn in turns for second in turn.seconds)
        median = statistics.median(seconds)
        memory = [turn.memory for turn in turns if turn.memory is not None]
        rows.append(
            {
                "name": variant.name,
                "processes": variant.processes,
                "step_seconds": median,
                "quartiles": [seconds[len(seconds) // 4], seconds[len(seconds) * 3 // 4]],
                "fastest": seconds[0],
                "cpu_seconds": statistics.median(turn.cpu_seconds for turn in turns),
                "tokens_per_second": None
                if variant.what == "blocks"
                else work.target_tokens * variant.processes / median,
                "first_step_seconds": next(turn.first for turn in turns if turn.first is not None),
                "memory_bytes": max(memory) if memory else None,
            }
        )
    return rows


def ratios(rows: Sequence[dict[str, Any]], found: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    """What the project promises, each from the medians of rounds that ran side by side."""
    pairs = [("single", "single, bare", 1.1), ("blocks", "blocks + compile", None)]
    for row in rows:
        name, count = row["name"], row["processes"]
        if name == f"ddp x{count}":
            pairs += [(name, "single", 1.35 if count == 2 else None), (name, f"{name}, bare", 1.1)]
        elif name.startswith(("fsdp2", "hsdp")) and "compile" not in name:
            pairs.append((name, f"ddp x{count}", None))
    result = []
    for above, below, limit in pairs:
        if above not in found or below not in found:
            continue

        def each(get: Callable[[Measured], float], above: str = above, below: str = below) -> list[float]:
            return sorted(get(a) / get(b) for a, b in zip(found[above], found[below], strict=True))

        wall, cpu = each(lambda turn: statistics.median(turn.seconds)), each(lambda turn: turn.cpu_seconds)
        result.append(
            {
                "what": f"{above} / {below}",
                "ratio": statistics.median(wall),
                "range": [wall[0], wall[-1]],
                "cpu_ratio": statistics.median(cpu),
                "fastest_ratio": min(min(t.seconds) for t in found[above]) / min(min(t.seconds) for t in found[below]),
                "at_most": limit,
                "at_least": 1.5 if above == "blocks" else None,
            }
        )
    return result


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


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def blocks_that_fit(model: dict[str, Any], work: Workload) -> int:
    """How many blocks fit on the first GPU with everything that a checkpointed LoRA step needs."""
    free, _ = torch.cuda.mem_get_info()
    parameters = Parameters.of(transformer_on_meta({**model, "num_layers": 1}), lora_targets=(), rank=8)
    # Weights in bf16; a block's adapters, their gradients and moments are a few per cent of it; inputs of the block.
    hidden = work.batch * (work.video_tokens * 4096 + work.audio_tokens * 2048)
    return min(int(model["num_layers"]), int((0.9 * free - 12e9) // (2.1 * parameters.block + 2 * hidden)))


def print_report(report: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    where = report["machine"]
    gpus = f", {len(where['gpus'])} x {where['gpus'][0]}" if where["gpus"] else ""
    load = where["load_average"][0]
    console.print(
        f"{report['bench']}: {report['blocks']} blocks, {report['rounds']} rounds of {report['steps']} steps. "
        f"{where['cpu']}, {where['cores']} cores{gpus}, torch {where['torch']}. "
        f"Load average {load:.1f} at the start, {report['load_average_after'][0]:.1f} at the end."
    )
    table = Table("", "step, ms", "quartiles", "fastest", "CPU time, ms", "tokens/s", "first step, s", "memory, GiB")
    for row in report["results"]:
        low, high = row["quartiles"]
        tokens, memory = row["tokens_per_second"], row["memory_bytes"]
        table.add_row(
            row["name"],
            f"{1e3 * row['step_seconds']:.1f}",
            f"{1e3 * low:.1f} - {1e3 * high:.1f}",
            f"{1e3 * row['fastest']:.1f}",
            f"{1e3 * row['cpu_seconds']:.1f}",
            "" if tokens is None else f"{tokens:,.0f}",
            f"{row['first_step_seconds']:.1f}",
            "" if memory is None else f"{memory / 2**30:.1f}",
        )
    console.print(table)
    table = Table("", "ratio", "rounds", "of the fastest", "of CPU time", "goal")
    for row in report["ratios"]:
        goal = f"<= {row['at_most']}" if row["at_most"] else f">= {row['at_least']}" if row["at_least"] else ""
        low, high = row["range"]
        table.add_row(
            row["what"],
            f"{row['ratio']:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{row['fastest_ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
            goal,
        )
    console.print(table)
    console.print(f"handle(...) over calling the module: {1e6 * report['handle_overhead_seconds']:.2f} us (goal <= 5)")


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
    found = measure_all(wanted, model, work, given, gpu=gpu)
    rows = summary(wanted, found, work)
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
