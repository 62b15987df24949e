"""`ltx-trainer-plus demo --data-only`, as a script."""

import sys
from collections.abc import Sequence

from ltx_trainer_plus.commands.main import run_command
from ltx_trainer_plus.parallel.ending import run_and_exit


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("demo", ["--data-only", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    run_and_exit(main)
