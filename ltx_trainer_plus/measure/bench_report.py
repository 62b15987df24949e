"""What the benchmark found: rows, ratios and tables from the turns of its variants."""

import contextlib
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from ltx_trainer_plus.measure.workload import Workload
from ltx_trainer_plus.parallel.plan import Layout


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
        memory: bytes. On a GPU what was allocated there at most during the steps; on a CPU how far this process's
            resident memory was at most, during the steps, above what it was before the variant was built; None in
            later turns there.
    """

    seconds: tuple[float, ...]
    cpu_seconds: float
    first: float | None
    memory: int | None


def summary(
    wanted: Sequence[Variant],
    found: Mapping[str, Sequence[Measured]],
    alone: Mapping[str, Sequence[Measured]],
    work: Workload,
) -> list[dict[str, Any]]:
    """One row for each variant, with numbers in seconds and bytes.

    Args:
        found: the turns that variants took side by side.
        alone: what was measured with processes of its own: memory, and the first steps of a compiled variant with an
            empty and with a filled cache.
    """
    rows = []
    for variant in wanted:
        turns = found[variant.name]
        seconds = sorted(second for turn in turns for second in turn.seconds)
        median = statistics.median(seconds)
        own = alone.get(variant.name, turns)
        memory = [turn.memory for turn in own[-1:] if turn.memory is not None]
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
                "compile_seconds": {"cold": own[0].first, "warm": own[1].first} if variant.is_compiled else None,
                "memory_bytes": max(memory) if memory else None,
            }
        )
    return rows


def ratios(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    """What the project promises, each from the medians of rounds that ran side by side."""
    pairs = [("single", "single, bare", 1.1), ("blocks", "blocks + compile", None)]
    pairs += [(row["name"], f"{row['name']} + compile", None) for row in rows if row["name"] != "blocks"]
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


def print_report(report: Mapping[str, Any]) -> None:
    """Tables of what `scripts/benchmark.py` writes as JSON."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    where = report["machine"]
    gpus = f", {len(where['gpus'])} x {where['gpus'][0]}" if where["gpus"] else ""
    load = where["load_average"][0]
    console.print(
        f"{report['bench']}: {report['blocks']} blocks, {report['rounds']} rounds of {report['steps']} steps. "
        f"{where['cpu']}, {where['cores']} cores{gpus}, torch {where['torch']}. "
        f"Load average {load:.1f} at the start, {report['load_average_after'][0]:.1f} at the end."
    )
    table = Table("", "step, ms", "quartiles", "fastest", "CPU time, ms", "tokens/s", "memory, MiB", "compile, s")
    for row in report["results"]:
        low, high = row["quartiles"]
        tokens, memory, compiling = row["tokens_per_second"], row["memory_bytes"], row["compile_seconds"]
        table.add_row(
            row["name"],
            f"{1e3 * row['step_seconds']:.1f}",
            f"{1e3 * low:.1f} - {1e3 * high:.1f}",
            f"{1e3 * row['fastest']:.1f}",
            f"{1e3 * row['cpu_seconds']:.1f}",
            "" if tokens is None else f"{tokens:,.0f}",
            "" if memory is None else f"{memory / 2**20:,.0f}",
            "" if compiling is None else f"{compiling['cold']:.1f} cold, {compiling['warm']:.1f} warm",
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
