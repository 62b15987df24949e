"""The whole job on a tiny model."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from ltx_trainer_plus.commands.main import CONFIGS

HELP = """The whole job on a tiny model: clips, prepared data, a LoRA on two CPU processes, validation videos.

  ltx-trainer-plus demo
  ltx-trainer-plus demo --clips path/to/folder optimization.steps=40

Everything is made in a folder of the current directory. It takes two minutes and no network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder to make it in (default: demo)")
    parser.add_argument("--clips", type=Path, help="your own clips: a folder, or a dataset.json/.jsonl/.csv")
    parser.add_argument("--data-only", action="store_true", help="make the model and the data, train nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for the run file")


def run(given: argparse.Namespace) -> int:
    if given.data_only:
        from ltx_trainer_plus.demo.data import make_demo_data

        prepared = make_demo_data(given.output, given.clips)
        if given.clips:
            print(f"To train on them: data.preprocessed_data_root={prepared}")
        return 0
    output = _new_run_folder(given.output / "runs")
    data_root = given.output / ("own/.precomputed" if given.clips else ".precomputed")
    make_data = [
        *(sys.executable, "-m", "ltx_trainer_plus", "demo", "--data-only", "--output", str(given.output)),
        *(("--clips", str(given.clips)) if given.clips else ()),
    ]
    train = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(CONFIGS / "accelerate/cpu_ddp.yaml"), "--num_cpu_threads_per_process", "1"),
        *("-m", "ltx_trainer_plus", "train", str(CONFIGS / "demo.yaml")),
        *(f"model.model_path={given.output / 'model'}", f"data.preprocessed_data_root={data_root}"),
        *(f"output_dir={output}", *given.overrides),
    ]
    return _call(make_data) or _call(train) or _report(output)


def _call(command: list[str]) -> int:
    # Offline also where somebody is logged in: a demo should not turn up on a project page.
    command = ["env", "WANDB_MODE=offline", *command]
    print("$ " + " ".join(command).replace(sys.executable, "python"), flush=True)
    return subprocess.run(command).returncode


def _new_run_folder(parent: Path) -> Path:
    """The next free number: a demo that runs again keeps what the last one made."""
    taken = [int(path.name) for path in parent.glob("*") if path.name.isdigit()]
    return parent / f"{max(taken, default=0) + 1:03d}"


def _report(output: Path) -> int:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    # The smoothed loss is a mean of ten steps: the first full one stands in the tenth line.
    first, last = lines[min(9, len(lines) - 1)]["loss/smoothed"], lines[-1]["loss/smoothed"]
    shown = [
        ("LoRA", sorted(output.glob("checkpoints/lora_weights_*.safetensors"))[-1:]),
        ("validation videos", sorted(output.glob("samples/*.mp4"))),
        ("offline W&B run", sorted(output.glob("wandb/offline-run-*"))),
    ]
    print()
    for what, paths in shown:
        print(f"{what}:")
        for path in paths:
            print(f"  {path}")
        if not paths:
            print("  none: the run did not make any")
    print(f"smoothed loss: {first:.4f} -> {last:.4f}")
    if not all(paths for _, paths in shown):
        return 1
    if last >= first:
        print("The loss did not fall.")
        return 1
    return 0
