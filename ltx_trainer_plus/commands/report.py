"""Make one HTML page of a run."""

import argparse
from pathlib import Path

from ltx_trainer_plus.errors import UserError

HELP = """Make one HTML page of a run: its curves, samples, configuration, and what changed when it was resumed.

  ltx-trainer-plus report outputs/my_run

The page needs no network. It plays the samples from where they are, so move it together with the run folder. A run
that is still going can be looked at too; make the page again to see more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the output_dir of a run")
    parser.add_argument("--output", type=Path, help="the page (default: report.html in the run folder)")


def run(given: argparse.Namespace) -> int:
    # Only now: a mistake in the command line should not wait for torch.
    from ltx_trainer_plus.checkpoints.run_folder import RunFolder
    from ltx_trainer_plus.report.page import write_report
    from ltx_trainer_plus.report.run_files import read_run

    found = read_run(given.run)
    output: Path = given.output or RunFolder(given.run).report
    if output.is_dir():
        raise UserError(f"--output: {output} is a folder. Give a file, such as {output / 'report.html'}.")
    try:
        write_report(found, output)
    except OSError as error:
        raise UserError(
            f"--output: {output} cannot be written ({error.strerror or error}). Give a file in a folder that can."
        ) from error
    print(output)
    return 0
