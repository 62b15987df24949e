"""Train, or check everything that a training needs."""

import argparse
import sys
import warnings

from ltx_trainer_plus.config import ConfigError, load_config
from ltx_trainer_plus.config.old_names import OldNameWarning
from ltx_trainer_plus.config.overrides import split_arguments
from ltx_trainer_plus.errors import UsageError

HELP = """Train an LTX-2-family model on prepared data, in one process or in all that a launcher starts.

  ltx-trainer-plus train run.yaml optimization.steps=500
  accelerate launch --config_file ddp.yaml -m ltx_trainer_plus train run.yaml"""


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
        try:
            config = load_config(files, overrides)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2

    # Only now: a mistake in the run file should not wait for torch and diffusers.
    from ltx_trainer_plus.checkpoints.run_folder import RunFolderError
    from ltx_trainer_plus.checkpoints.state import CheckpointError
    from ltx_trainer_plus.data.sample_files import DataError
    from ltx_trainer_plus.parallel.topology import LaunchError
    from ltx_trainer_plus.run.plan_report import print_plan
    from ltx_trainer_plus.step.bad_steps import BadStepsError
    from ltx_trainer_plus.trainer import Trainer

    is_main = True
    try:
        trainer = Trainer(config)
        is_main = trainer.topology.is_main
        for note in notes if is_main else ():
            print(f"warning: {note.message}", file=sys.stderr)
        if not given.dry_run:
            trainer.train()
        elif is_main:
            print_plan(config, trainer.plan, trainer.check())
    except DataError as error:
        # A sample that cannot be read is met by one process alone.
        print(error, file=sys.stderr)
        return 1
    except (ConfigError, LaunchError, CheckpointError, RunFolderError, BadStepsError) as error:
        # Every process finds the same fault; one tells.
        if is_main:
            print(error, file=sys.stderr)
        return 2
    return 0
