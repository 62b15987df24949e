"""Where a run continues from: which files `model.load_checkpoint` means, and what they allow."""

import re
from dataclasses import dataclass
from pathlib import Path

from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.checkpoints.saved_state import read_state_header
from ltx_trainer_plus.checkpoints.state import CheckpointError
from ltx_trainer_plus.checkpoints.store import Checkpoint, CheckpointStore, state_of, weights_steps

# In a file's name, or in that of a part in the folder of a training state.
_STEP = re.compile(r"_step_(\d+)[./]")


@dataclass(frozen=True)
class Found:
    """What a run starts from.

    Attributes:
        weights: the weights file.
        state: the training state, a file or a folder of parts, or None where only the weights are taken.
        step: optimizer steps done: the state's, or 0 without one.
        notes: what the user should know (checkpoints passed over, a state that is not used), one line each.
    """

    weights: Path
    state: Path | None
    step: int
    notes: tuple[str, ...] = ()

    def continues(self, folder: RunFolder) -> bool:
        """Whether this is the next part of the run that `folder` holds, rather than a new run of its own."""
        # Resolved: the same folder may be named through a link or through "..".
        return self.state is not None and self.weights.resolve().parent == folder.checkpoints.resolve()


def find_checkpoint(load_checkpoint: Path | str, folder: RunFolder, *, weights_only: bool = False) -> Found:
    """Resolve `model.load_checkpoint`; checks sums, so only the main process should ask.

    Args:
        load_checkpoint: a weights file of this trainer or the official one, a folder of them, a run folder, or
            `latest`: the newest whole checkpoint of `folder`.
        weights_only: `checkpoints.no_resume`: a training state is left alone.

    Raises:
        CheckpointError: there is none, or the one that was named is damaged.
    """
    if str(load_checkpoint) == "latest":
        checkpoint, notes = _latest(folder.checkpoints, "latest")
    elif (path := Path(load_checkpoint)).name.startswith("training_state_") and path.exists():
        raise CheckpointError(
            f"model.load_checkpoint: {path} is a training state.\n"
            "  Give the weights file beside it (lora_weights_step_... or model_weights_step_...), or their folder."
        )
    elif path.is_dir():
        inside = RunFolder(path).checkpoints
        checkpoint, notes = _latest(inside if inside.is_dir() else path, str(path))
    elif path.is_file():
        checkpoint, notes = _named(path)
    else:
        raise CheckpointError(
            f"model.load_checkpoint: {path} does not exist.\n"
            "  Give a .safetensors file, a folder of checkpoints, a run folder, or `latest`."
        )
    if checkpoint.state is None or weights_only:
        return Found(checkpoint.weights, None, 0, tuple(notes))
    return Found(checkpoint.weights, checkpoint.state, read_state_header(checkpoint.state).step, tuple(notes))


def _latest(folder: Path, given: str) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint of a folder; in one without markers (an official one) the highest step."""
    store = CheckpointStore(folder)
    latest, broken = store.latest(), store.broken()
    if latest is not None:
        newer = [line for line in broken if (match := _STEP.search(line)) and int(match[1]) > latest.step]
        return latest, [f"Passed over: {line}" for line in newer]
    has_markers = any(folder.glob("checkpoint_step_*.json"))
    if not has_markers and given != "latest" and (steps := weights_steps(folder)):
        return _named(next(folder.glob(f"*_weights_step_{steps[-1]:05d}.safetensors")))
    if broken:
        raise CheckpointError(
            f"model.load_checkpoint: {given}: no checkpoint in {folder} is whole:\n"
            + "\n".join(f"  {line}" for line in broken)
            + "\n  Give another checkpoint, or start anew: without model.load_checkpoint and in another output_dir."
        )
    raise CheckpointError(
        f"model.load_checkpoint: {given}: there is no checkpoint in {folder}.\n"
        "  To start anew, leave model.load_checkpoint out (null), and set output_dir to a folder that holds no run."
    )


def _named(path: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that a weights file belongs to; without a marker (copy, official file) it is taken as it is."""
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"model.load_checkpoint: {path} is not a .safetensors file; other formats can run code when read.\n"
            "  Convert it to safetensors, or give a checkpoint of this or the official trainer."
        )
    store = CheckpointStore(path.parent)
    if problem := store.check(path):
        whole = store.latest()
        offer = f"give {whole.weights} (step {whole.step})" if whole else "there is no whole one beside it: start anew"
        raise CheckpointError(f"model.load_checkpoint: {path} is not whole: {problem}.\n  Instead, {offer}.")
    if path.name.startswith("ema_"):
        return Checkpoint(0, path, None), [
            f"{path.name} holds averaged weights, which no training state belongs to: the step counter starts at 0."
        ]
    match = _STEP.search(path.name)
    if match is None:
        return Checkpoint(0, path, None), []
    step = int(match[1])
    if ours := state_of(path.parent, step):
        return Checkpoint(step, path, ours), []
    foreign = sorted(path.parent.glob(f"training_state_step_{match[1]}*"))
    return Checkpoint(step, path, None), [
        f"{other.name} is not used: it is a pickle of another trainer, which could run code when it is read. "
        "Only the weights are loaded; the step counter starts at 0."
        for other in foreign
    ]
