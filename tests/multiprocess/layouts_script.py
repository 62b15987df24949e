"""What each launched rank of test_layouts.py runs: JOB.json, whose runs are trained one after the other.

A job: {"output": folder, "runs": {name: settings}}. For each run the folder gets the run folder `<name>` itself and
`<name>.json`, a list with one entry of facts per rank; validation latents go to `<name>.latents.<rank>.safetensors`.
"""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ltx_trainer_plus.trainer as trainer_module
import ltx_trainer_plus.validation.runner as runner_module
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.collectives import gather_objects
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.train_step import TrainStep
from tests.runs import train

handles: list[ModelHandle] = []
latents: dict[str, torch.Tensor] = {}
collectives: list[Counter[str]] = []
first_sums: list[float] = []
compiles = False
real_load_model, real_denoise, real_call = trainer_module.load_model, runner_module.denoise, TrainStep.__call__


class CollectiveCounter(TorchDispatchMode):
    """Counts what really goes to the process group, from C++ too (DDP); a CPU backward runs in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


def load_model(config: Any, plan: Any, **kwargs: Any) -> ModelHandle:
    global compiles
    compiles = plan.compile is not None
    handles.append(real_load_model(config, plan, **kwargs))
    first_sums.append(trained_sum(handles[-1]))
    return handles[-1]


def denoise(*args: Any, **kwargs: Any) -> Any:
    results = real_denoise(*args, **kwargs)
    for stream, value in zip(("video", "audio"), results, strict=True):
        latents[f"{len(latents):03d}.{stream}"] = value.contiguous()
    return results


def counted_step(self: TrainStep, batches: Any) -> Any:
    counter = CollectiveCounter()
    # Dynamo compiles nothing under a dispatch mode.
    with nullcontext() if compiles else counter:
        window = real_call(self, batches)
    collectives.append(counter.seen)
    return window


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
        "local_frozen": sum(local(p).numel() for p in frozen),
        "frozen": sum(p.numel() for p in frozen),
        "frozen_dtypes": sorted({str(p.dtype) for p in frozen}),
        "trained_dtypes": sorted({str(p.dtype) for p in named.values() if p.requires_grad}),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    trainer_module.load_model, runner_module.denoise = load_model, denoise
    TrainStep.__call__ = counted_step  # type: ignore[method-assign]
    for name, settings in job["runs"].items():
        for record in (handles, latents, collectives, first_sums):
            record.clear()
        torch._dynamo.reset()
        counters.clear()
        output = Path(job["output"]) / name
        result = train({**settings, "output_dir": str(output)})
        topology = trainer_module.Topology.start("cpu")
        mine = {
            **facts(handles[0]),
            "weights": str(result.weights),
            "collectives": dict(collectives[1]),  # in the first step, DDP is still finding its buckets
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "first_trained_sum": first_sums[0],
            "trained_sum": trained_sum(handles[0]),
        }
        if latents:
            save_file(latents, f"{output}.latents.{topology.rank}.safetensors")
        everyones = gather_objects(mine, topology)
        if topology.is_main:
            output.with_name(f"{name}.json").write_text(json.dumps(everyones))


if __name__ == "__main__":
    run_and_exit(main)
