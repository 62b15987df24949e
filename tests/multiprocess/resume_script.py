"""What the launched ranks of test_resume.py run: one run after the other, `FILE.yaml key=value ... --` each."""

import sys

from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.trainer import Trainer


def main() -> None:
    run: list[str] = []
    for argument in sys.argv[1:]:
        if argument != "--":
            run.append(argument)
            continue
        Trainer(load_config(run[0], run[1:])).train()
        run = []


run_and_exit(main)
