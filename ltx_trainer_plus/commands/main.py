"""Choose a sub-command, read its command line, run it, and say what the user can mend."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from ltx_trainer_plus import __version__
from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.parallel.ending import run_and_exit, say_once

CONFIGS = Path(__file__).parents[1] / "configs"
COMMANDS = ("train", "prepare", "sample", "plan", "benchmark", "report", "demo")


def run_command(name: str, arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Run one sub-command and return its exit status: 2 where something was given that cannot work.

    Args:
        arguments: what stands behind the sub-command; by default this process's command line.
        prog: how `--help` calls the program; by default as it was started.
    """
    given = parse_command(name, arguments, prog=prog)
    try:
        return _module(name).run(given)
    except UserError as error:
        say_once(error)
        return 2


def parse_command(name: str, arguments: Sequence[str] | None = None, *, prog: str | None = None) -> argparse.Namespace:
    """Read the command line of one sub-command. Ends the program where it is wrong, or asks for help."""
    command = _module(name)
    parser = argparse.ArgumentParser(
        prog=prog, description=command.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    # Options may stand between run files and overrides.
    return parser.parse_intermixed_args(arguments)


def script(name: str) -> Callable[..., int]:
    """The `main` of a script that is one sub-command."""
    return partial(run_command, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """`ltx-trainer-plus SUB-COMMAND ...`; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in COMMANDS:
        return run_command(arguments[0], arguments[1:], prog=f"ltx-trainer-plus {arguments[0]}")
    parser = argparse.ArgumentParser(
        prog="ltx-trainer-plus",
        description="Train LTX-2-family audio-video models. `ltx-trainer-plus COMMAND --help` explains each command.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--configs",
        action="version",
        version=str(CONFIGS),
        help="print the folder of the example run files and of accelerate's files, and exit",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        commands.add_parser(name, help=_module(name).HELP.partition("\n")[0])
    parser.parse_args(arguments)
    raise AssertionError("argparse ends the program where there is no known command")


def entry_point() -> NoReturn:
    """The installed command."""
    run_and_exit(main)


def _module(name: str) -> ModuleType:
    return import_module(f"ltx_trainer_plus.commands.{name}")
