"""`python -m ltx_trainer_plus`, and `accelerate launch -m ltx_trainer_plus`: the command `ltx-trainer-plus`."""

from ltx_trainer_plus.commands.main import entry_point

if __name__ == "__main__":
    entry_point()
