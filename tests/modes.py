"""The training modes that tests go through, and a short run of one."""

import json
from pathlib import Path
from typing import Any

MODES = json.loads((Path(__file__).parent / "reference/strategies.json").read_text())
# Modes that the reference numbers do not have, and one with everything at once.
MODES["audio_extension"] = {"audio": {"conditions": [{"type": "prefix", "temporal_boundary": 5}]}}
MODES["audio_inpainting"] = {"audio": {"conditions": [{"type": "mask", "mask_dir": "audio_masks"}]}}
MODES["audio_ic"] = {"audio": {"conditions": [{"type": "reference", "latents_dir": "reference_audio_latents"}]}}
MODES["composition"] = {
    "video": {
        "conditions": [
            {"type": "reference", "latents_dir": "reference_latents", "probability": 0.5},
            {"type": "first_frame", "probability": 0.5},
            {"type": "mask", "mask_dir": "video_masks", "probability": 0.5},
        ]
    },
    "audio": {
        "conditions": [
            {"type": "suffix", "temporal_boundary": 3, "probability": 0.5},
            {"type": "reference", "latents_dir": "reference_audio_latents", "probability": 0.5},
        ]
    },
}


def mode_run(reference: Path, output: Path, strategy: dict[str, Any]) -> dict[str, Any]:
    """A short LoRA run in float32 on the official data for the tiny LTX-2.3."""
    return {
        "model": {"model_path": str(reference / "ltx-2.3-tiny-monolith.safetensors")},
        "lora": {"rank": 4, "alpha": 4},
        "training_strategy": strategy,
        "optimization": {"steps": 2, "batch_size": 2, "learning_rate": 1e-3},
        "acceleration": {"mixed_precision_mode": "no"},
        "data": {"preprocessed_data_root": str(reference / "official-precomputed"), "num_dataloader_workers": 0},
        "validation": {"interval": None},
        "checkpoints": {"precision": "float32", "save_training_state": "off"},
        "device": "cpu",
        "output_dir": str(output),
    }
