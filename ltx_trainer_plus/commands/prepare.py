"""Prepare a data set for training: clips to latents, captions to text contexts."""

import argparse
from pathlib import Path

from rich.console import Console

from ltx_trainer_plus.errors import UsageError

HELP = "Prepare a data set for training: encode video clips, their sound and their captions."
EXAMPLE = """
example:
  ltx-trainer-plus prepare clips/dataset.json \\
      --model-path models/LTX-2.3 --resolution-buckets "960x544x49;544x960x49"

A clip goes to the bucket with the nearest aspect ratio among those that it has enough frames for, then to the one with
the most frames. Finished files are skipped by the next run, unless what made them has changed.

Exit status: 0 when every clip is prepared, 3 when some were left out (the summary names them), 2 when nothing could be
done. A launcher of several processes turns either into a failure report of its own, and status 1.
"""
SOME_SKIPPED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add = parser.add_argument
    add("dataset", type=Path, help=".json, .jsonl or .csv file, or a folder of clips with .txt captions beside them")
    add("--model-path", type=Path, required=True, help="diffusers pipeline folder of the model to train")
    add("--resolution-buckets", required=True, metavar="WxHxF;...", help='sizes, e.g. "960x544x49;544x960x49"')
    add("--text-encoder-path", type=Path, help="Gemma folder (default: the text encoder in the model's folder)")
    add("--output-dir", type=Path, help="default: .precomputed in the data set's folder")
    add("--video-column", help="column with the media path (default: media_path or video)")
    add("--caption-column", default="caption", help="column with the caption (default: caption)")
    add("--lora-trigger", help="word to put before every caption")
    add("--skip-audio", action="store_true", help="prepare no sound (clips without a sound track are then welcome)")
    add("--vae-tiling", action="store_true", help="encode big videos piece by piece: less memory, slower")
    add("--overwrite", action="store_true", help="make everything again")
    add("--batch-size", type=int, default=1, help="captions per forward of the text encoder (default: 1)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: the accelerator where there is one")


def run(options: argparse.Namespace) -> int:
    if options.batch_size < 1:
        raise UsageError(f"--batch-size {options.batch_size}: at least 1 is needed")
    # After the command line is understood: importing torch and the models takes seconds.
    from ltx_trainer_plus.parallel.topology import Topology
    from ltx_trainer_plus.preparation.prepare import PreparationSettings, prepare_dataset

    topology = Topology.start("cpu" if options.device == "cpu" else "auto")
    if options.device == "cuda" and topology.device.type != "cuda":
        raise UsageError(f"--device cuda: torch finds no CUDA device here (but {topology.device}). Use auto or cpu.")
    console = Console()
    report = prepare_dataset(
        PreparationSettings(
            dataset=options.dataset,
            model_path=options.model_path,
            resolution_buckets=options.resolution_buckets,
            text_encoder_path=options.text_encoder_path,
            output_dir=options.output_dir,
            video_column=options.video_column,
            caption_column=options.caption_column,
            lora_trigger=options.lora_trigger,
            with_audio=not options.skip_audio,
            vae_tiling=options.vae_tiling,
            overwrite=options.overwrite,
            batch_size=options.batch_size,
        ),
        topology,
        console,
    )
    if not topology.is_main:
        return 0
    report.print(console)
    if report.skipped and topology.world_size > 1:
        console.print("The launcher reports them as a failure; all other clips are prepared.", soft_wrap=True)
    return SOME_SKIPPED if report.skipped else 0
