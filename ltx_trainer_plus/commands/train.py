"""Train, or check everything that a training needs."""

import argparse
import sys
import warnings

from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.config.old_names import OldNameWarning
from ltx_trainer_plus.config.overrides import split_arguments
from ltx_trainer_plus.errors import UsageError

HELP = """Train an LTX-2-family model on prepared data, in one process or in all that a launcher starts.

  ltx-trainer-plus train run.yaml optimization.steps=500
  accelerate launch --config_file "$(ltx-trainer-plus --configs)/accelerate/ddp.yaml" -m ltx_trainer_plus train run.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="CONFIG.yaml | key.path=value",
        help="run files, merged from left to right, and overrides, which come last",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, train nothing")


def run(given: argparse.Namespace) -> int:
    files, overrides = split_arguments(given.arguments)
    if not files:
        raise UsageError("There is no run file, only overrides. Give one, such as configs/ltx2.3_lora.yaml.")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", OldNameWarning)
        config = load_config(files, overrides)

    # Only now: a mistake in the run file should not wait for torch and diffusers.
    from ltx_trainer_plus.run.plan_report import print_plan
    from ltx_trainer_plus.trainer import Trainer

    trainer = Trainer(config)
    is_main = trainer.topology.is_main
    for note in notes if is_main else ():
        print(f"warning: {note.message}", file=sys.stderr)
    if not given.dry_run:
        trainer.train()
    elif is_main:
        print_plan(config, trainer.plan, trainer.check())
    return 0
