"""Estimate what a run would cost."""

import argparse
import dataclasses
import json
from pathlib import Path

from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.config.overrides import split_arguments
from ltx_trainer_plus.measure.cards import CARDS

HELP = """Estimate memory, traffic and time of a run in each layout, by arithmetic alone.

  ltx-trainer-plus plan MODEL CONFIG.yaml [key.path=value ...] --gpus 4

MODEL is a checkpoint or a pipeline folder, of which only metadata is read, or `ltx-2.3` for its published sizes. Of the
run file only the settings count: nothing that it names has to exist yet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a checkpoint, a pipeline folder, or ltx-2.3")
    parser.add_argument("config", nargs="+", help="run files, then key.path=value overrides")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--video", type=_video_size, help="of a sample, WIDTHxHEIGHTxFRAMES (default: validation's)")
    parser.add_argument("--text-tokens", type=int, default=1024)
    parser.add_argument("--card", choices=CARDS, default="h100")
    parser.add_argument("--efficiency", type=float, default=0.5, help="share of the peak that a step reaches")
    parser.add_argument("--link", type=float, default=300, help="GB/s that a GPU receives (NVLink 300, PCIe 4.0 20)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")


def run(given: argparse.Namespace) -> int:
    files, overrides = split_arguments(given.config)
    # Nothing is read from these, so they need not exist.
    ignored = ["model.model_path=.", "model.text_encoder_path=null", "model.load_checkpoint=null"]
    config = load_config(files, [*overrides, *ignored, "data.preprocessed_data_root=."])
    # Only now: a mistake in the run file should not wait for torch and diffusers.
    from ltx_trainer_plus.flow.positions import LatentGeometry
    from ltx_trainer_plus.measure.bench import LTX_2_3
    from ltx_trainer_plus.measure.costs import Machine
    from ltx_trainer_plus.measure.estimate import estimate, print_estimate, workload
    from ltx_trainer_plus.models import read_transformer_config, transformer_on_meta

    model = LTX_2_3 if given.model == "ltx-2.3" else read_transformer_config(given.model)
    tflops, memory = CARDS[given.card]
    machine = Machine(tflops=tflops, efficiency=given.efficiency, link=given.link, memory=memory)
    geometry = LatentGeometry.of(transformer_on_meta({**model, "num_layers": 1}).config)
    work = workload(config, geometry, given.video, given.text_tokens)
    plan = estimate(model, config, work, given.gpus, machine)
    if given.json is not None:
        given.json.write_text(json.dumps(dataclasses.asdict(plan), indent=2) + "\n")
    print_estimate(plan, config, given.gpus, machine)
    return 0


def _video_size(text: str) -> tuple[int, int, int]:
    try:
        width, height, frames = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no WIDTHxHEIGHTxFRAMES, such as 960x544x49") from None
    return width, height, frames
