"""Training states on disk, read whole, for comparisons."""

from dataclasses import replace
from pathlib import Path

from ltx_trainer_plus.checkpoints import saved_state
from ltx_trainer_plus.checkpoints.state import TrainingState


def read_state(path: Path) -> TrainingState:
    """The state of a file or a folder of parts, with tensors in memory."""
    state = saved_state.read_state(path)
    return replace(state, tensors={name: tensor[...].clone() for name, tensor in state.tensors.items()})
