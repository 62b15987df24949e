"""The whole job on a tiny model: clips, prepared data, a LoRA on two CPU processes, validation videos."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = Path("demo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", help="your own clips: a folder, or a dataset.json/.jsonl/.csv")
    parser.add_argument("overrides", nargs="*", help="key.path=value for the run file")
    given = parser.parse_args()

    make_data = [sys.executable, "scripts/make_demo_data.py", "--output", str(DEMO)]
    run([*make_data, *(["--clips", str(Path(given.clips).absolute())] if given.clips else [])])
    data_root = DEMO / ("own/.precomputed" if given.clips else ".precomputed")

    output = new_run_folder(DEMO / "runs")
    run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", "configs/accelerate/cpu_ddp.yaml", "--num_cpu_threads_per_process", "1"),
            *("scripts/train.py", "configs/demo.yaml"),
            *(f"output_dir={output}", f"data.preprocessed_data_root={data_root}", *given.overrides),
        ]
    )
    return report(output)


def run(command: list[str]) -> None:
    # Offline also where somebody is logged in: a demo should not turn up on a project page.
    command = ["env", "WANDB_MODE=offline", *command]
    print("$ " + " ".join(command).replace(sys.executable, "python"), flush=True)
    finished = subprocess.run(command, cwd=ROOT)
    if finished.returncode:
        sys.exit(finished.returncode)


def new_run_folder(parent: Path) -> Path:
    """The next free number: a demo that runs again keeps what the last one made."""
    taken = [int(path.name) for path in (ROOT / parent).glob("*") if path.name.isdigit()]
    return parent / f"{max(taken, default=0) + 1:03d}"


def report(output: Path) -> int:
    folder = ROOT / output
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The smoothed loss is a mean of ten steps: the first full one stands in the tenth line.
    first, last = lines[min(9, len(lines) - 1)]["loss/smoothed"], lines[-1]["loss/smoothed"]
    shown = [
        ("LoRA", sorted((ROOT / output).glob("checkpoints/lora_weights_*.safetensors"))[-1:]),
        ("validation videos", sorted((ROOT / output).glob("samples/*.mp4"))),
        ("offline W&B run", sorted((ROOT / output).glob("wandb/offline-run-*"))),
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


if __name__ == "__main__":
    sys.exit(main())
