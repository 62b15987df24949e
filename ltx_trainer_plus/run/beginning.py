"""Where a run starts: its folder taken, its checkpoint found, and what has changed since that was saved."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ltx_trainer_plus.checkpoints.continuation import Change, check_continuation, config_changes
from ltx_trainer_plus.checkpoints.resume import Found, find_checkpoint
from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.checkpoints.saved_state import read_state, read_state_header
from ltx_trainer_plus.checkpoints.state import TrainingState
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config import TrainerConfig, config_as_dict, save_config
from ltx_trainer_plus.data.position import DataPosition, data_set_key
from ltx_trainer_plus.parallel.collectives import from_main
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.run.starts import record_start

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """What the run starts from; of a fresh run, neither `found` nor `state`.

    Attributes:
        store: of the run folder's checkpoints.
        tracker_ids: the recorded runs to continue, by backend.
    """

    folder: RunFolder
    store: CheckpointStore
    found: Found | None
    state: TrainingState | None
    data: DataPosition
    tracker_ids: dict[str, str]


def find_beginning(config: TrainerConfig, topology: Topology, samples: Sequence[str], stack: ExitStack) -> Beginning:
    """Take hold of the run folder, and find out where the run starts from. Decided once, by the main process.

    Args:
        samples: names of the data set's samples.
        stack: lets go of the run folder when it closes.

    Raises:
        CheckpointError: the checkpoint is not there, not whole, or cannot be continued with this configuration.
        RunFolderError: the run folder cannot be used.
    """
    optimization = config.optimization
    folder = RunFolder(config.output_dir)
    store = CheckpointStore(folder.checkpoints, config.checkpoints.keep_last_n)
    fresh = DataPosition(
        batch_size=optimization.batch_size,
        accumulation=optimization.gradient_accumulation_steps,
        data_ranks=topology.data_ranks,
        shape_group=config.shape_group,
        data_set=data_set_key(samples),
    )

    def prepare_folder() -> tuple[Found | None, DataPosition, dict[str, str]]:
        found, data = None, fresh
        tracker_ids: dict[str, str] = {}
        notes: list[str] = []
        changes: list[Change] = []
        if config.model.load_checkpoint is not None:
            found = find_checkpoint(config.model.load_checkpoint, folder, weights_only=config.checkpoints.no_resume)
            notes += found.notes
        resuming = found is not None and found.continues(folder)
        if found is not None and found.state is not None:
            info = read_state_header(found.state).info
            changes = config_changes(info["config"], config_as_dict(config))
            check_continuation(changes, found.weights)
            notes.append(f"Continuing after step {found.step} of {found.weights}.")
            if changes:
                notes.append("Changed since it was saved:\n" + "\n".join(f"  {change}" for change in changes))
            data, data_notes = fresh.continued(found.step, info["data"], may_regroup=config.data.shape_group is None)
            notes += data_notes
            # A branch into another folder is another run.
            if resuming:
                tracker_ids = {name: saved for name in config.trackers if (saved := info.get(f"{name}_id"))}
        if repeats := data.repeats(len(samples)):
            notes.append(repeats)
        stack.callback(RunFolder.open(config.output_dir, resuming=resuming).close)
        notes += [f"Removed {name}, left by a killed save" for name in store.clean()]
        if found is not None and resuming and (aside := store.set_aside_after(found.step)):
            notes.append(f"Checkpoints after step {found.step} were moved to {aside}")
        save_config(config, folder.config)
        record_start(folder.starts, config_as_dict(config), data.step, found.weights if found else None, changes)
        for note in notes:
            logger.warning(note)
        return found, data, tracker_ids

    found, data, tracker_ids = from_main(prepare_folder, topology)
    state = read_state(found.state) if found is not None and found.state is not None else None
    return Beginning(folder, store, found, state, data, tracker_ids)
