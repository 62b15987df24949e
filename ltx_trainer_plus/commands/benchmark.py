"""Measure the trainer's step."""

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path

from ltx_trainer_plus.errors import UsageError

HELP = """Measure the trainer's step in every parallel layout, interleaved, on a small or a real-size random model.

  ltx-trainer-plus benchmark                     # bench-cpu: one, two and four gloo processes
  ltx-trainer-plus benchmark --bench gpu         # bench-gpu: real LTX-2.3 blocks, all GPUs of this machine
  ltx-trainer-plus benchmark --profile traces/   # also a trace of each for https://ui.perfetto.dev

It starts all processes by itself and takes turns among the layouts, so that a machine that gets slower gets slower for
all of them. `bare` is a training loop as one writes it by hand around DDP: the floor."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bench", choices=("auto", "cpu", "gpu"), default="auto", help="auto: gpu where there is one")
    parser.add_argument("--processes", type=int, nargs="+", help="numbers of processes (default: cpu 1 2 4, gpu all)")
    parser.add_argument("--only", nargs="+", default=[], help="only variants whose name contains one of these")
    parser.add_argument("--skip", nargs="+", default=[], help="no variant whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn (default 10)")
    parser.add_argument("--blocks", type=int, help="transformer blocks (default: cpu 4, gpu as many as fit)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write a Perfetto trace of every variant")


def run(given: argparse.Namespace) -> int:
    # Only now: a mistake in the command line should not wait for torch.
    import torch

    from ltx_trainer_plus.measure.bench import BENCH_CPU, BENCH_CPU_MODEL, BENCH_GPU, LTX_2_3
    from ltx_trainer_plus.measure.bench_report import machine, print_report, ratios, summary
    from ltx_trainer_plus.measure.bench_run import (
        blocks_that_fit,
        handle_overhead,
        launched,
        measure_all,
        measure_alone,
        variants,
    )

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
        raise UsageError(f"--only and --skip leave no variant of {counts} processes.")
    where = machine()

    start = partial(launched, model, work, gpu)
    with tempfile.TemporaryDirectory() as folder:
        alone = measure_alone(wanted, start, Path(folder), given.steps, gpu=gpu)
        found = measure_all(
            wanted, start, Path(folder, "rounds"), rounds=given.rounds, steps=given.steps, profile=given.profile
        )
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
    return 0
