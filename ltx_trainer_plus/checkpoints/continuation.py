"""A resumed run against the run that saved its state: what has changed, and what cannot be changed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx_trainer_plus.checkpoints.state import CheckpointError

# How a run is started again, and where: not what it computes.
_NOT_SHOWN = ("model.load_checkpoint", "checkpoints.no_resume", "output_dir")
# What the saved masters and moments are of. The weights fit no other value either.
_SHAPE = ("model.training_mode", "lora.rank", "lora.target_modules")
# The saved optimizer state fits no other value; the weights file does.
_STATE_ONLY = ("optimization.optimizer_type", "lora.alpha")


@dataclass(frozen=True)
class Change:
    """One field that differs between the saved and the present configuration."""

    path: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.saved)} -> {_shown(self.now)}"


def config_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every field whose value differs; both as `config_as_dict` gives them. Fields that one side lacks are left out
    where the other release simply did not know them (whole sections are compared field by field)."""
    unread = "" if now["model"]["training_mode"] == "lora" else "lora."
    return [
        change
        for change in _differences("", saved, now)
        if change.path not in _NOT_SHOWN and not (unread and change.path.startswith(unread))
    ]


def check_continuation(changes: list[Change], weights: Path) -> None:
    """Refuse what cannot go together with the saved state.

    Args:
        weights: the checkpoint's weights file, for the remedy.

    Raises:
        CheckpointError: names each such field, what it was, and how to start fresh.
    """
    training_mode = next((change for change in changes if change.path == "model.training_mode"), None)
    lora = [] if training_mode else [c for c in changes if c.path in _SHAPE]
    shape = [training_mode] if training_mode else lora
    state_only = [change for change in changes if change.path in _STATE_ONLY]
    if not shape and not state_only:
        return
    lines = "\n".join(f"  {change}" for change in [*shape, *state_only])
    back = " ".join(f"{change.path}={_as_override(change.saved)}" for change in [*shape, *state_only])
    if shape:
        fresh = (
            "These weights fit nothing else either: to train with the new values, start a run without "
            "model.load_checkpoint, in another output_dir."
        )
    else:
        fresh = (
            "To start fresh from these weights (new optimizer, step 0): "
            f"model.load_checkpoint={weights} checkpoints.no_resume=true, and another output_dir."
        )
    raise CheckpointError(
        f"model.load_checkpoint: the training state was saved with other settings that it depends on:\n{lines}\n"
        f"  To continue the run, set back: {back}\n  {fresh}"
    )


def _differences(path: str, saved: Any, now: Any) -> Iterator[Change]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping) and path not in _CHOICES:
        for key in [*saved, *(key for key in now if key not in saved)]:
            below = f"{path}.{key}" if path else key
            if key in saved and key in now:
                yield from _differences(below, saved[key], now[key])
    elif saved != now:
        yield Change(path, saved, now)


# Free-form: a key that is missing on one side is a change.
_CHOICES = (
    "training_strategy",
    "optimization.optimizer_params",
    "optimization.scheduler_params",
    "flow_matching.timestep_sampling_params",
)


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _as_override(value: Any) -> str:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
