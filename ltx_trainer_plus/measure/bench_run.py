"""The benchmark's driver: starts processes for each layout and takes turns among what they measure."""

import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ltx_trainer_plus.errors import UsageError
from ltx_trainer_plus.measure.bench import BENCH_CPU, BENCH_CPU_MODEL, random_inputs
from ltx_trainer_plus.measure.bench_report import Measured, Variant
from ltx_trainer_plus.measure.costs import Parameters
from ltx_trainer_plus.measure.workload import Workload
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import transformer_on_meta


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


@contextlib.contextmanager
def launched(model: dict[str, Any], work: Workload, gpu: bool, processes: int, cache: Path) -> Iterator[Connection]:
    """That many processes, and the connection to the first of them. `cache`: what inductor has compiled already."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = f"{folder}/{'gpu' if gpu else 'cpu'}"
        server.bind(address)
        server.listen()
        server.settimeout(0.5)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        # One process is no group: it runs as `ltx-trainer-plus train` would.
        launcher = torchrun if processes > 1 else [sys.executable]
        surroundings = ["env", f"TORCHINDUCTOR_CACHE_DIR={cache}"]
        worker = subprocess.Popen([*surroundings, *launcher, "-m", "ltx_trainer_plus.measure.bench_worker", address])
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
        raise UsageError(f"{variant.name}: {result}\n  Give fewer --blocks.")
    return result


def measure_all(
    wanted: Sequence[Variant], start: Start, cache: Path, *, rounds: int, steps: int, profile: Path | None
) -> dict[str, list[Measured]]:
    """Every variant in every round, in turn; forwards in one round and backwards in the next."""
    found: dict[str, list[Measured]] = {variant.name: [] for variant in wanted}
    with contextlib.ExitStack() as stack:
        workers = {
            count: stack.enter_context(start(count, cache))
            for count in sorted({variant.processes for variant in wanted})
        }
        for turn in range(rounds):
            for variant in wanted if turn % 2 == 0 else reversed(wanted):
                trace = profile if turn == rounds - 1 else None
                print(f"round {turn + 1} of {rounds}: {variant.name}", file=sys.stderr)
                found[variant.name].append(_turn(workers[variant.processes], variant, steps, trace))
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
