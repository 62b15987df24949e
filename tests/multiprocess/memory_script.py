"""What each launched rank of test_loading_memory.py runs: JOB.json, whose models are loaded one after the other.

A job: {"output": file, "loads": {name: settings}}. The file gets, for each load, one entry per rank with bytes: the
greatest growth of private memory (`RssAnon`) and of mapped file pages (`RssFile`, which the kernel shares and may drop)
while it loaded, and what it holds afterwards.
"""

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.models import read_transformer_config, transformer_on_meta
from ltx_trainer_plus.models.lora import lora_target_names
from ltx_trainer_plus.models.reach import reachable_parameters
from ltx_trainer_plus.models.shards import local_part
from ltx_trainer_plus.parallel.collectives import gather_objects
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.prepare import load_model
from ltx_trainer_plus.parallel.topology import LaunchRequest, Topology


def resident() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if "Rss" in name
    }
    return {"private": found["RssAnon"], "file": found["RssFile"]}


class PeakMemory:
    """Samples this process's resident memory every millisecond, from a thread of its own."""

    def __init__(self) -> None:
        self.peak = self._start = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self._look()

    def _look(self) -> None:
        now = resident()
        self.peak = {name: max(value, now[name]) for name, value in self.peak.items()}

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    @property
    def growth(self) -> dict[str, int]:
        return {name: self.peak[name] - self._start[name] for name in self.peak}


def loaded(settings: dict[str, Any], topology: Topology) -> dict[str, int]:
    config = TrainerConfig.model_validate(settings)
    plan = ParallelPlan.decide(config, topology, LaunchRequest.read())
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the model before has left
    gather_objects(None, topology)  # waits for all
    with PeakMemory() as memory:
        model = read_transformer_config(config.model.model_path)
        reachable = reachable_parameters(model, video="generated", audio="generated")
        targets: list[str] = []
        if config.model.training_mode == "lora":
            targets = lora_target_names(transformer_on_meta(model), config.lora.target_modules, reachable)
        handle = load_model(config, plan, lora_targets=targets, reachable=reachable)
    parts = [local_part(parameter) for parameter in handle.meta_module.parameters()]
    return {**memory.growth, "held": sum(part.numel() * part.element_size() for part in parts)}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    topology = Topology.start("cpu")
    found = {}
    for name, settings in job["loads"].items():
        found[name] = gather_objects(loaded(settings, topology), topology)
    if topology.is_main:
        Path(job["output"]).write_text(json.dumps(found))


if __name__ == "__main__":
    run_and_exit(main)
