"""The command `ltx-trainer-plus`: each sub-command is a module with `HELP`, `add_arguments(parser)`, `run(given)`."""
