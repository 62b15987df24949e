"""What each launched rank of test_modes.py runs: the runs of JOB.json, a list of settings, one after the other."""

import json
import sys
from pathlib import Path

from ltx_trainer_plus.parallel.ending import run_and_exit
from tests.runs import train


def main() -> None:
    for settings in json.loads(Path(sys.argv[1]).read_text()):
        train(settings)


if __name__ == "__main__":
    run_and_exit(main)
