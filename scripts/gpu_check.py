#!/usr/bin/env python3
"""Check one GPU in under eight minutes: precision, step times on a real-size random model, share of the card's peak.

    .venv/bin/python scripts/gpu_check.py --json gpu_check.json
    .venv/bin/python scripts/gpu_check.py --tiny                # the same path on a CPU, with a tiny model

The operations of a step are counted by `ltx_trainer_plus.measure.operations.flops`: matrix products only, a
multiplication and its addition are two. "executed" has the second forward of gradient checkpointing in it (what the
card really does), "useful" has not (what a step without checkpointing would need).
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.flow.schedule import inference_sigmas
from ltx_trainer_plus.flow.tokens import Tokens
from ltx_trainer_plus.measure.activations import activations
from ltx_trainer_plus.measure.bench import (
    BENCH_CPU,
    BENCH_CPU_MODEL,
    BENCH_GPU,
    LTX_2_3,
    bench_config,
    random_batch,
    random_handle,
    random_inputs,
    step_seconds,
    trainer_step,
)
from ltx_trainer_plus.measure.cards import peak_tflops
from ltx_trainer_plus.measure.costs import Parameters
from ltx_trainer_plus.measure.operations import flops
from ltx_trainer_plus.measure.workload import Workload
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.models.compile import compile_blocks
from ltx_trainer_plus.models.lora import lora_target_names
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation.denoise import Guidance, StreamGuidance, denoise
from ltx_trainer_plus.validation.states import SampleState

PRECISION = 2e-2  # bf16 rounds to 3 decimal digits; two blocks add up a few roundings


@dataclass(frozen=True)
class Setting:
    """What is checked, and how long it may take."""

    model: dict[str, Any]
    work: Workload
    device: torch.device
    compile_backend: str
    steps: int
    deadline: float

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline


def handle_for(setting: Setting, config: TrainerConfig, *, blocks: int, dtype: torch.dtype) -> ModelHandle:
    plan = ParallelPlan(Topology(0, 0, 1, setting.device), "single", dtype, gradient_checkpointing=True)
    return random_handle({**setting.model, "num_layers": blocks}, config, plan)


def precision(setting: Setting) -> dict[str, float]:
    """Relative error of the velocities in bfloat16 against float32, of two blocks of the model on the same weights."""
    config, found = bench_config(), {}
    inputs = random_inputs(setting.model, setting.work, setting.device)
    exact = handle_for(setting, config, blocks=2, dtype=torch.float32)
    rounded = handle_for(setting, config, blocks=2, dtype=torch.bfloat16)
    with torch.no_grad():
        # The reference computes with the very weights that bfloat16 has.
        own = dict(rounded.meta_module.named_parameters())
        for name, parameter in exact.meta_module.named_parameters():
            parameter.copy_(own[name])
        outputs = [handle(video=inputs["video"], audio=inputs["audio"]) for handle in (exact, rounded)]
        pairs = zip(("video", "audio"), *outputs, strict=True)
        for stream, reference, value in pairs:
            assert reference is not None
            assert value is not None
            found[stream] = float((value.float() - reference).norm() / reference.norm())
    return found


def matmul_tflops(device: torch.device, size: int) -> float:
    """What a plain bfloat16 matrix product reaches, in 10^12 operations per second: the practical ceiling."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def product() -> None:
        torch.mm(left, right)

    step_seconds(product, 3, device)
    return 2 * size**3 / statistics.median(step_seconds(product, 20, device)) / 1e12


def blocks_that_fit(setting: Setting) -> int:
    """How many of the model's blocks a checkpointed LoRA step has room for."""
    wanted = int(setting.model["num_layers"])
    if setting.device.type != "cuda":
        return wanted
    free, _ = torch.cuda.mem_get_info()
    parameters = Parameters.of(transformer_on_meta({**setting.model, "num_layers": 1}), lora_targets=(), rank=8)
    # bf16 weights and a little for adapters and block inputs; 12 GB for everything else.
    return max(1, min(wanted, int((0.95 * free - 12e9) / (2.2 * parameters.block))))


def training(setting: Setting, handle: ModelHandle, config: TrainerConfig) -> list[dict[str, Any]]:
    """Step time, memory and rate of a LoRA step: eager and compiled, with and without checkpointing."""
    model = {**setting.model, "num_layers": handle.num_blocks}
    bare = transformer_on_meta(model)
    targets = lora_target_names(bare, config.lora.target_modules, {name for name, _ in bare.named_parameters()})
    step = trainer_step(handle, config, random_batch(model, setting.work))
    rows: list[dict[str, Any]] = []
    for is_compiled in (False, True):
        if is_compiled:
            compile_blocks(handle.meta_module, backend=setting.compile_backend)
        for checkpointing in (True, False):
            name = f"{'compiled' if is_compiled else 'eager'}{' + checkpointing' * checkpointing}"
            if setting.is_late:
                rows.append({"name": name, "skipped": "no time left"})
                continue
            handle.meta_module.gradient_checkpointing = checkpointing
            operations = flops(
                model, setting.work, lora_targets=targets, rank=config.lora.rank, checkpointing=checkpointing
            )
            try:
                rows.append({"name": name, **_measured(setting, step)})
            except torch.OutOfMemoryError:
                rows.append({"name": name, "skipped": "does not fit"})
                torch.cuda.empty_cache()
                continue
            kept = activations(
                model,
                setting.work,
                dtype=torch.bfloat16,
                weights=torch.bfloat16,
                lora_targets=targets,
                rank=config.lora.rank,
                checkpointing=checkpointing,
            )
            seconds = rows[-1]["step_seconds"]
            rows[-1] |= {
                "executed_tflop": operations.executed / 1e12,
                "executed_tflops": operations.executed / seconds / 1e12,
                "useful_tflops": operations.useful / seconds / 1e12,
                "tokens_per_second": setting.work.target_tokens / seconds,
                "planned_activation_bytes": kept.total(handle.num_blocks),
            }
    return rows


def _measured(setting: Setting, step: Callable[[], None]) -> dict[str, Any]:
    is_gpu = setting.device.type == "cuda"
    started = time.perf_counter()
    step()
    step()
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    first = time.perf_counter() - started
    seconds = step_seconds(step, setting.steps, setting.device)
    return {
        "first_two_steps_seconds": first,
        "step_seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        "waits": _waits(step) if is_gpu else None,
    }


def _waits(step: Callable[[], None]) -> int:
    """How often one step makes the host wait for the device, as CUDA's own debug mode sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


def validation(setting: Setting, handle: ModelHandle, steps: int = 2) -> dict[str, Any]:
    """Time of a guided denoising step (CFG, STG and modality: four forwards), and of a sample of 30 steps."""
    inputs = random_inputs(setting.model, replace(setting.work, batch=1), setting.device)
    text = TextContext(video=inputs["video"].context, audio=inputs["audio"].context)
    state = SampleState(
        video=Tokens(inputs["video"].latent, inputs["video"].positions),
        audio=Tokens(inputs["audio"].latent, inputs["audio"].positions),
        positive=text,
        negative=text,
    )
    guidance = Guidance(
        video=StreamGuidance(3.0, 1.0, 3.0), audio=StreamGuidance(7.0, 1.0, 3.0), stg_blocks=(0,), rescale=0.7
    )

    def sample() -> None:
        with handle.evaluating():
            denoise(handle, state, guidance, inference_sigmas(steps))

    # Compiled blocks would be compiled anew for forwards without gradients; the eager ones are what is timed.
    with torch.compiler.set_stance("force_eager"):
        step_seconds(sample, 1, setting.device)
        seconds = statistics.median(step_seconds(sample, 3, setting.device)) / steps
    return {"forwards_per_step": 4, "denoising_step_seconds": seconds, "sample_of_30_steps_seconds": 30 * seconds}


def check(setting: Setting) -> dict[str, Any]:
    """Everything, as one report."""
    report: dict[str, Any] = {"torch": torch.__version__, "device": setting.device.type}
    if setting.device.type == "cuda":
        name = torch.cuda.get_device_name()
        report["device"] = name
        report["peak_tflops"] = peak_tflops(name)
        report["matmul_tflops"] = matmul_tflops(setting.device, 8192)
        # The reference of the precision check.
        torch.backends.cuda.matmul.allow_tf32 = False
    report["bf16_relative_error"] = precision(setting)
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    config, blocks = bench_config(), blocks_that_fit(setting)
    handle = handle_for(setting, config, blocks=blocks, dtype=torch.bfloat16)
    report |= {"blocks": blocks, "of_blocks": setting.model["num_layers"]}
    report["parameters"] = sum(parameter.numel() for parameter in handle.meta_module.parameters())
    # Before anything is compiled; the training rows come next.
    report["validation"] = validation(setting, handle)
    report["training"] = training(setting, handle, config)
    worst = max(report["bf16_relative_error"].values())
    measured = [row["step_seconds"] for row in report["training"] if "step_seconds" in row]
    report["is_right"] = worst < PRECISION and bool(measured)
    return report


def print_report(report: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    errors = ", ".join(f"{stream} {value:.1e}" for stream, value in report["bf16_relative_error"].items())
    console.print(f"{report['device']}, torch {report['torch']}; relative error of bf16: {errors} (below {PRECISION})")
    peak = report.get("peak_tflops")
    if "matmul_tflops" in report:
        console.print(f"bf16 matrix product: {report['matmul_tflops']:.0f} TFLOP/s; peak by the data sheet: {peak}")
    console.print(f"{report['blocks']} of {report['of_blocks']} blocks, {report['parameters'] / 1e9:.2f} G parameters")
    table = Table("LoRA step", "ms", "first two, s", "executed TFLOP/s", "of peak", "useful", "peak GiB", "waits")
    for row in report["training"]:
        if "skipped" in row:
            table.add_row(row["name"], row["skipped"])
            continue
        memory = row["peak_memory_bytes"]
        table.add_row(
            row["name"],
            f"{1e3 * row['step_seconds']:.1f}",
            f"{row['first_two_steps_seconds']:.1f}",
            f"{row['executed_tflops']:.3g}",
            f"{row['executed_tflops'] / peak:.0%}" if peak else "",
            f"{row['useful_tflops'] / peak:.0%}" if peak else "",
            f"{memory / 2**30:.1f}" if memory is not None else "",
            "" if row["waits"] is None else str(row["waits"]),
        )
    console.print(table)
    times = report["validation"]
    console.print(
        f"validation: {times['denoising_step_seconds']:.3f} s per denoising step of {times['forwards_per_step']} "
        f"forwards, {times['sample_of_30_steps_seconds']:.1f} s per sample of 30 steps (without decoding)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: checks this script, not a card")
    parser.add_argument("--blocks", type=int, default=48, help="at most this many blocks (default 48)")
    parser.add_argument("--seconds", type=float, default=420, help="start nothing new after this time (default 420)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    if given.tiny:
        torch.set_num_threads(1)
        model = {**BENCH_CPU_MODEL, "num_layers": 2}
        # Inductor takes minutes on a slow CPU; here only the path counts.
        setting = Setting(model, BENCH_CPU, torch.device("cpu"), "eager", steps=2, deadline=deadline)
    elif torch.cuda.is_available():
        model = {**LTX_2_3, "num_layers": given.blocks}
        setting = Setting(model, BENCH_GPU, torch.device("cuda", 0), "inductor", steps=6, deadline=deadline)
    else:
        print("There is no GPU. `--tiny` runs the same checks on the CPU with a tiny model.", file=sys.stderr)
        return 2
    report = check(setting)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)
    return 0 if report["is_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
