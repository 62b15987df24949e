"""Prepare a data set for training: clips to latents, captions to text contexts.

Exit status: 0 when every clip is prepared, 2 when some were skipped (the summary names them), 1 when nothing could be
done. With several processes only the main one reports; a launcher turns its 2 into a failure report of its own (and
status 1), after the summary.
"""

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
"""


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
    from ltx_trainer_plus.parallel.topology import LaunchError, Topology
    from ltx_trainer_plus.preparation.clips import DatasetError
    from ltx_trainer_plus.preparation.prepare import PreparationSettings, prepare_dataset

    console = Console()
    try:
        topology = Topology.start("cpu" if options.device == "cpu" else "auto")
    except LaunchError as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        return 1
    try:
        if options.device == "cuda" and topology.device.type != "cuda":
            raise DatasetError(
                f"--device cuda: torch finds no CUDA device here (but {topology.device}). Use auto or cpu."
            )
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
    except DatasetError as error:
        if topology.is_main:
            console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        return 1
    if not topology.is_main:
        return 0
    report.print(console)
    if report.skipped and topology.world_size > 1:
        console.print("The launcher reports them as a failure; all other clips are prepared.", soft_wrap=True)
    return 2 if report.skipped else 0
