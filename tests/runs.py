"""Small real runs for tests: prepared data, run files, and what a run left behind."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.run.loop import TrainingResult
from ltx_trainer_plus.trainer import Trainer


def write_prepared_data(root: Path, *, samples: int = 8, frames: int = 2, seed: int = 0) -> Path:
    """Prepared samples that fit the tiny pipeline: `frames` x 2 x 2 video latents, 4 audio steps, 8 text tokens."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(samples):
        name = f"clip_{index:02d}.safetensors"
        contents: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {
            "latents": (
                {"latents": torch.randn(128, frames, 2, 2, generator=generator)},
                {"num_frames": str(frames), "height": "2", "width": "2", "fps": "24.0"},
            ),
            "audio_latents": (
                {"latents": torch.randn(8, 4, 16, generator=generator)},
                {"num_time_steps": "4", "frequency_bins": "16", "duration": "0.16"},
            ),
            "conditions": (
                {
                    "video_context": torch.randn(8, 64, generator=generator),
                    "audio_context": torch.randn(8, 32, generator=generator),
                },
                {"caption": f"clip {index}"},
            ),
        }
        for folder, (tensors, metadata) in contents.items():
            path = root / ".precomputed" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, {**metadata, "fingerprint": "test"})
    return root


def joint_run(model: Path, data: Path, output: Path) -> dict[str, Any]:
    """The settings of a short joint audio-video LoRA run in float32, without validation."""
    return {
        "model": {"model_path": str(model)},
        "lora": {"rank": 4, "alpha": 4},
        "training_strategy": {"name": "flexible", "video": {}, "audio": {}},
        "optimization": {"steps": 4, "batch_size": 2, "learning_rate": 1e-3},
        "acceleration": {"mixed_precision_mode": "no"},
        "data": {"preprocessed_data_root": str(data), "num_dataloader_workers": 0},
        "validation": {"interval": None},
        "device": "cpu",
        "output_dir": str(output),
    }


VALIDATION = {
    "samples": [{"prompt": "a ball"}, {"prompt": "a square", "seed": 0}],
    "video_dims": [64, 64, 9],
    "inference_steps": 2,
    "stg_blocks": [1],
    "interval": 2,
}
"""Validation settings with all guidance on, small enough for tests."""


def write_run_file(path: Path, settings: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several ranks may write the same file: none must read it half written.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(yaml.safe_dump(settings))
    unfinished.replace(path)
    return path


def train(settings: dict[str, Any], *overrides: str) -> TrainingResult:
    """Run in this process."""
    output = Path(settings["output_dir"])
    run_file = write_run_file(output.with_name(f"{output.name}.yaml"), settings)
    return Trainer(load_config(run_file, overrides)).train()


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metrics(output)]
