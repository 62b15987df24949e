"""`ltx-trainer-plus benchmark`, as a script."""

from ltx_trainer_plus.commands.main import script
from ltx_trainer_plus.parallel.ending import run_and_exit

main = script("benchmark")

if __name__ == "__main__":
    run_and_exit(main)
