"""What each launched rank of test_layouts.py runs: JOB.json, whose runs are trained one after the other.

A job: {"output": folder, "runs": {name: {"settings": ..., "environment": {...}}}}; the environment is that of the run
alone. For each run the folder gets the run folder `<name>` itself and `<name>.json`, a list with one entry of facts per
rank; the second step's gradients go to `<name>.gradients.<rank>.safetensors`, as this rank holds them, and validation
latents to `<name>.latents.<rank>.safetensors`.
"""

import json
import sys
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ltx_trainer_plus.step.train_step as step_module
import ltx_trainer_plus.trainer as trainer_module
import ltx_trainer_plus.validation.runner as runner_module
from ltx_trainer_plus.measure.bench import bench_config, random_batch, trainer_step
from ltx_trainer_plus.measure.workload import Workload
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.collectives import gather_objects
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.step.sums import PendingMetrics
from ltx_trainer_plus.step.train_step import TrainStep
from tests.runs import train
from tests.waits import Waits

GATHER = "c10d::_allgather_base_"
handles: list[ModelHandle] = []
latents: dict[str, torch.Tensor] = {}
steps: list["CollectiveCounter"] = []
gradients: dict[str, torch.Tensor] = {}
first_sums: list[float] = []
compiles = False
real_load_model, real_denoise, real_call = trainer_module.load_model, runner_module.denoise, TrainStep.__call__
real_clip = step_module.clip_gradients


class CollectiveCounter(TorchDispatchMode):
    """Counts what really goes to the process group, from C++ too (DDP); a CPU backward runs in this thread.

    Attributes:
        seen: how often, by the operation's name.
        dtypes: of what travelled, by the operation's name.
        gathered_at: for each time that a block computed, how often weights had been gathered until then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.dtypes: defaultdict[str, set[str]] = defaultdict(set)
        self.gathered_at: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen[func.name()] += 1
            self.dtypes[func.name()].update(str(arg.dtype) for arg in args if isinstance(arg, torch.Tensor))
        return func(*args, **(kwargs or {}))


def load_model(config: Any, plan: Any, **kwargs: Any) -> ModelHandle:
    global compiles
    compiles = plan.compile is not None
    handle = real_load_model(config, plan, **kwargs)
    handles.append(handle)
    first_sums.append(trained_sum(handle))
    if not compiles:  # dynamo would trace it
        for block in handle.meta_module.transformer_blocks:
            block.attn1.register_forward_pre_hook(note_gathers)
    return handle


def note_gathers(*_: Any) -> None:
    if steps:
        steps[-1].gathered_at.append(steps[-1].seen[GATHER])


def denoise(*args: Any, **kwargs: Any) -> Any:
    results = real_denoise(*args, **kwargs)
    for stream, value in zip(("video", "audio"), results, strict=True):
        latents[f"{len(latents):03d}.{stream}"] = value.contiguous()
    return results


def counted_step(self: TrainStep, batches: Any) -> Any:
    steps.append(CollectiveCounter())
    # Dynamo compiles nothing under a dispatch mode.
    with nullcontext() if compiles else steps[-1]:
        return real_call(self, batches)


def clip_gradients(*args: Any) -> torch.Tensor:
    if len(steps) == 2:  # in the first step, one half of every adapter is zero, and with it the other's gradient
        for name, parameter in handles[0].trainable_parameters():
            assert parameter.grad is not None
            gradients[name] = local(parameter.grad).clone()
    return real_clip(*args)


def waits_of_a_step(accumulation: int) -> dict[str, int]:
    """What the last run's model makes this process wait for in two steps that read no metrics."""
    handle = handles[0]
    config = bench_config(optimization={"gradient_accumulation_steps": accumulation})
    batch = random_batch(handle.config, Workload(frames=2, height=2, width=2, audio_tokens=4, text_tokens=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingMetrics, "read", lambda self: None)
        step = trainer_step(handle, config, batch)
        step()  # the optimizer makes its state
        with Waits(patch) as waits:
            step()
            step()
    return dict(+waits.seen)


def trained_sum(handle: ModelHandle) -> float:
    """One number that changes when what this rank holds of the trained parameters changes."""
    return sum(float(local(p).detach().double().abs().sum()) for _, p in handle.trainable_parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def facts(handle: ModelHandle) -> dict[str, Any]:
    """What a rank holds of the model."""
    named = dict(handle.meta_module.named_parameters())
    frozen = [p for p in named.values() if not p.requires_grad]
    return {
        "blocks_are_units": all(isinstance(block, FSDPModule) for block in handle.meta_module.transformer_blocks),
        "is_unit": isinstance(handle.forward_module, FSDPModule),
        "offloads": [
            isinstance(module._get_fsdp_state()._fsdp_param_group.offload_policy, CPUOffloadPolicy)
            for module in handle.meta_module.modules()
            if isinstance(module, FSDPModule)
        ],
        "local_frozen": sum(local(p).numel() for p in frozen),
        "frozen": sum(p.numel() for p in frozen),
        "frozen_dtypes": sorted({str(p.dtype) for p in frozen}),
        "trained_dtypes": sorted({str(p.dtype) for p in named.values() if p.requires_grad}),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    trainer_module.load_model, runner_module.denoise = load_model, denoise
    step_module.clip_gradients = clip_gradients
    TrainStep.__call__ = counted_step  # type: ignore[method-assign]
    for name, run in job["runs"].items():
        for record in (handles, latents, steps, gradients, first_sums):
            record.clear()
        torch._dynamo.reset()
        counters.clear()
        output = Path(job["output"]) / name
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in run["environment"].items():
                patch.setenv(variable, value)
            result = train({**run["settings"], "output_dir": str(output)})
        topology = trainer_module.Topology.start("cpu")
        mine = {
            **facts(handles[0]),
            "weights": str(result.weights),
            # In the first step, DDP is still finding its buckets.
            "collectives": dict(steps[1].seen),
            "dtypes": {operation: sorted(dtypes) for operation, dtypes in steps[1].dtypes.items()},
            "gathered_at": steps[1].gathered_at,
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "first_trained_sum": first_sums[0],
            "trained_sum": trained_sum(handles[0]),
        }
        save_file(gradients, f"{output}.gradients.{topology.rank}.safetensors")
        if latents:
            save_file(latents, f"{output}.latents.{topology.rank}.safetensors")
        if not compiles:
            mine["waits"] = {count: waits_of_a_step(count) for count in (1, 2)}
        everyones = gather_objects(mine, topology)
        if topology.is_main:
            output.with_name(f"{name}.json").write_text(json.dumps(everyones))


if __name__ == "__main__":
    run_and_exit(main)
