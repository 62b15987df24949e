"""What each launched rank of test_modes.py runs: the runs of JOB.json, a list of settings, one after the other."""

import json
import sys
from pathlib import Path

from ltx_trainer_plus.parallel.topology import leave_process_group
from tests.runs import train

if __name__ == "__main__":
    for settings in json.loads(Path(sys.argv[1]).read_text()):
        train(settings)
    leave_process_group()
