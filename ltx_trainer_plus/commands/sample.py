"""Generate samples from a base model and trained weights, with the sampler and the conditions of validation."""

import argparse
import json
import re
import sys
import warnings
from pathlib import Path

from ltx_trainer_plus.config import TrainerConfig, load_config
from ltx_trainer_plus.config.old_names import OldNameWarning
from ltx_trainer_plus.config.overrides import split_arguments
from ltx_trainer_plus.errors import UsageError

HELP = "Generate samples from a base model and trained weights, with the sampler and the conditions of validation."
EXAMPLES = """
examples:
  # the validation samples of a run, with its newest checkpoint
  ltx-trainer-plus sample outputs/run/training_config.yaml --lora latest --output samples

  # prompts of your own; several processes share them
  ltx-trainer-plus sample --model-path models/LTX-2.3 \\
      --lora lora_weights_step_03000.safetensors --prompt "a ginger cat jumps onto a table" \\
      --size 960x544x89 --seed 7 --output cat.mp4

  # image to video: any of the conditions that validation takes
  ltx-trainer-plus sample --model-path models/LTX-2.3 --prompt "it starts to rain" \\
      --condition "{type: first_frame, image_or_video: street.png}" --output rain.mp4

Everything else (guidance, steps, frame rate, ...) is set as in a run file: validation.inference_steps=40
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "arguments",
        nargs="*",
        metavar="CONFIG.yaml | key.path=value",
        help="run files, then overrides, as for training",
    )
    add("--model-path", help="diffusers pipeline folder of the base model (default: the run file's)")
    add("--text-encoder-path", help="Gemma folder (default: the run file's, or the text encoder in the model's folder)")
    add("--lora", help="weights that training made: a file, a folder of checkpoints, a run folder, or `latest`")
    add("--lora-strength", type=float, default=1.0, help="factor on what a LoRA adds (default: 1)")
    add("--prompt", action="append", help="instead of the run file's samples; may be given several times")
    add("--negative-prompt")
    add("--condition", action="append", help='a condition of every --prompt, e.g. "{type: prefix, video: a.mp4, ...}"')
    add("--size", metavar="WxHxF", help="width, height and frames, e.g. 960x544x89")
    add("--seed", type=int)
    add("--output", type=Path, default=Path("samples"), help="a folder, or a file for one sample (default: samples)")
    add("--device", choices=("auto", "cpu"), help="default: the accelerator where there is one")


def read_config(given: argparse.Namespace) -> TrainerConfig:
    """The run file with what the flags change; what only training needs is left out.

    Raises:
        ConfigError: lists everything that is wrong.
        UsageError: flags that do not go together.
    """
    files, own_overrides = split_arguments(given.arguments)
    if given.size is not None and not re.fullmatch(r"\d+x\d+x\d+", given.size):
        raise UsageError(f"--size {given.size}: write width, height and frames, such as 960x544x89")
    if given.condition and not given.prompt:
        raise UsageError("--condition belongs to --prompt; in a run file, write conditions into validation.samples")
    if not files and not (given.model_path and given.prompt):
        raise UsageError("Give a run file, or --model-path and --prompt.")
    if given.lora == "latest" and not files:
        raise UsageError(
            "--lora latest is the newest checkpoint of a run file's output_dir, and there is no run file; "
            "give the run folder instead, e.g. --lora outputs/my_run"
        )
    flags = {
        "model.model_path": given.model_path,
        "model.text_encoder_path": given.text_encoder_path,
        "validation.negative_prompt": given.negative_prompt,
        "validation.video_dims": given.size and [int(part) for part in given.size.split("x")],
        "validation.seed": given.seed,
        "device": given.device,
    }
    overrides = [f"{key}={_value(value)}" for key, value in flags.items() if value is not None]
    if given.prompt:
        samples = [
            f"{{prompt: {_value(prompt)}, conditions: [{', '.join(given.condition or ())}]}}" for prompt in given.prompt
        ]
        overrides.append(f"validation.samples=[{', '.join(samples)}]")
    # Neither data nor a training state is read here, and they may be on another machine.
    fixed = ["data.preprocessed_data_root=.", "model.load_checkpoint=null", "validation.interval=1"]
    config = load_config(files, [*overrides, *own_overrides, *fixed])
    # A flag is meant for every sample, also for those that say otherwise in the run file.
    own = [name for name, flag in (("video_dims", given.size), ("seed", given.seed)) if flag is not None]
    own = [f"validation.samples.{index}.{name}=null" for index in range(len(config.validation.samples)) for name in own]
    return load_config(files, [*overrides, *own, *own_overrides, *fixed]) if own else config


def _value(value: object) -> str:
    """As YAML, and without interpolation: a prompt may hold `${`."""
    return json.dumps(value, ensure_ascii=False).replace("${", r"\\${")


def run(given: argparse.Namespace) -> int:
    has_run_file = bool(split_arguments(given.arguments)[0])
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", OldNameWarning)
        config = read_config(given)
    samples = len(config.validation.samples)
    is_file = given.output.suffix in (".mp4", ".wav", ".png")
    if samples == 0 or (is_file and samples > 1):
        what = "has no validation.samples" if samples == 0 else f"makes {samples} samples, and --output is one file"
        raise UsageError(f"The run {what}. Give --prompt" + (", or a folder as --output." if samples else "."))

    # Only now: a mistake in the command line should not wait for torch and diffusers.
    import torch
    from rich.console import Console

    from ltx_trainer_plus.checkpoints.resume import find_checkpoint
    from ltx_trainer_plus.checkpoints.run_folder import RunFolder
    from ltx_trainer_plus.checkpoints.state import CheckpointError
    from ltx_trainer_plus.parallel.collectives import from_main
    from ltx_trainer_plus.parallel.topology import Topology
    from ltx_trainer_plus.sampling import TrainedWeights, generate_samples

    topology = Topology.start(config.device)
    for note in notes if topology.is_main else ():
        print(f"warning: {note.message}", file=sys.stderr)
    weights = None
    if given.lora:
        folder = RunFolder(config.output_dir)
        try:
            # The main process alone looks: reading checksums takes time, and two could find different files.
            found = from_main(lambda: find_checkpoint(given.lora, folder, weights_only=True), topology)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace("model.load_checkpoint", "--lora")) from error
        weights = TrainedWeights(found.weights, given.lora_strength)
    low_precision = config.acceleration.mixed_precision_mode == "bf16" and (
        has_run_file or topology.device.type != "cpu"
    )
    files = generate_samples(
        config,
        weights,
        stem=lambda request: given.output.with_suffix("") if is_file else given.output / f"sample_{request.index + 1}",
        dtype=torch.bfloat16 if low_precision else torch.float32,
        topology=topology,
        console=Console(),
    )
    for file in files if topology.is_main else ():
        print(file.path)
    return 0
