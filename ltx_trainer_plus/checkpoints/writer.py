"""Saving a run's checkpoints: what is copied out of the model, and the thread that writes it while training goes on."""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ltx_trainer_plus.checkpoints.adapters import collect_weights, weights_metadata
from ltx_trainer_plus.checkpoints.state import CheckpointError, StateLevel, TrainingState
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.position import DataPosition
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.shards import shard_place
from ltx_trainer_plus.parallel.collectives import from_main
from ltx_trainer_plus.parallel.topology import Topology

logger = logging.getLogger(__name__)


class Saved(Protocol):
    """What is trained (`Trained`)."""

    @property
    def handle(self) -> ModelHandle: ...

    @property
    def average(self) -> object | None: ...

    def averaged(self) -> AbstractContextManager[None]: ...

    def state(self, step: int, *, level: StateLevel, info: Mapping[str, Any]) -> TrainingState: ...


class _Contents(NamedTuple):
    """A checkpoint in memory, which shares nothing with what is trained. Of a sharded training state it is this
    process's part; None where another process has the same."""

    step: int
    weights: dict[str, Tensor]
    averaged: dict[str, Tensor] | None
    metadata: dict[str, str]
    state: TrainingState | None


class CheckpointWriter:
    """Saves the model and the training state; at most one checkpoint is being written at a time.

    The main process writes. Where training is sharded, every process writes its part of the training state.

    Args:
        metadata: header entries of the weights file beside the usual ones.
        data: where in the data order each step begins.
        info: what the state holds beside tensors (configuration, W&B run id, ...): plain JSON types.
    """

    def __init__(
        self,
        config: TrainerConfig,
        topology: Topology,
        store: CheckpointStore,
        trained: Saved,
        metadata: Mapping[str, str],
        data: DataPosition,
        info: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._topology = topology
        self._store = store
        self._trained = trained
        self._metadata = dict(metadata)
        self._data = data
        self._info = dict(info)
        self._place = shard_place(parameter for _, parameter in trained.handle.trainable_parameters())
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._error: CheckpointError | None = None
        self._written: Path | None = None

    def save(self, step: int) -> None:
        """Start writing the checkpoint of `step`; training may go on as soon as this returns. A collective.

        Raises:
            CheckpointError: the one before could not be written (`checkpoints.on_error: raise`); earlier ones are
                whole.
        """
        if not from_main(lambda: self._is_to_be_written(step), self._topology):
            return
        # The main process has waited for the parts of all, so this one's is written.
        self._join()
        # Everybody takes part where weights have to be gathered; what every process has whole, the main one takes.
        collected = self._collect(step) if self._place is not None else None
        from_main(lambda: self._start(collected or self._collect(step)), self._topology)
        state = collected.state if collected is not None else None
        if not self._topology.is_main and state is not None and state.part is not None:
            self._start_thread(lambda: self._store.save_part(state))

    def flush(self) -> Path | None:
        """Wait until everything is written. A collective; errors as `save`.

        Returns:
            The weights file of the last checkpoint that was written, on every rank; None where there is none.
        """
        from_main(self._finish, self._topology)
        self._join()
        return from_main(lambda: self._written, self._topology)

    @property
    def has_failed(self) -> bool:
        """Whether a checkpoint could not be written and the run should end for it. Known to the main process alone."""
        return self._error is not None and self._config.checkpoints.on_error == "raise"

    def set_best(self, step: int, loss: float) -> bool:
        """From now on keep the checkpoint of `step`, the last that was saved, as the best. A collective.

        Returns:
            Whether it could be written.
        """

        def keep() -> bool:
            self._finish()
            if self._written != self._store.path_of(step, self._config.model.training_mode):
                return False
            self._store.set_best(step, loss)
            return True

        return from_main(keep, self._topology)

    def best_loss(self) -> float | None:
        """The held-out loss of the best checkpoint so far. A collective."""

        def read() -> float | None:
            best = self._store.best()
            return best[1] if best is not None else None

        return from_main(read, self._topology)

    def close(self) -> None:
        """Wait for this process's own writing, at the end of a run that failed. An error is only reported."""
        self._given_up.set()
        self._join()
        if self._error is not None:
            logger.error("%s", self._error)
            self._error = None

    def _is_to_be_written(self, step: int) -> bool:
        self._finish()
        existing = self._store.whole_at(step)
        if existing is not None:
            logger.info("Step %d is already saved: %s", step, existing.weights)
            self._written = existing.weights
        return existing is None

    def _finish(self) -> None:
        self._join()
        error, self._error = self._error, None
        if error is not None:
            if self._config.checkpoints.on_error == "raise":
                raise error
            logger.warning("%s\n  Training goes on without it (checkpoints.on_error: warn).", error)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self, contents: _Contents) -> None:
        self._start_thread(lambda: self._write(contents))

    def _start_thread(self, write: Callable[[], None]) -> None:
        # A daemon: a second Ctrl-C ends the process at once, and what is half-written is never taken for a checkpoint.
        self._thread = threading.Thread(target=write, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _write(self, contents: _Contents) -> None:
        try:
            self._written = self._store.save(
                contents.step,
                self._config.model.training_mode,
                contents.weights,
                contents.metadata,
                contents.state,
                contents.averaged,
                self._given_up,
            )
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # nothing else would ever see it
            self._error = CheckpointError(f"The checkpoint of step {contents.step} could not be saved: {error!r}")

    def _collect(self, step: int) -> _Contents:
        keeps = self._topology.is_main
        level = self._config.checkpoints.save_training_state
        state = None
        if level != "off" and not (self._place is not None and self._place.is_copy):
            state = self._trained.state(step, level=level, info={**self._info, "data": self._data.entries(step)})
        lora = self._config.lora if self._config.model.training_mode == "lora" else None
        precision = self._config.checkpoints.precision
        handle = self._trained.handle
        weights = collect_weights(handle, lora, precision, keeps=keeps)
        averaged = None
        if self._trained.average is not None:
            with self._trained.averaged():
                averaged = collect_weights(handle, lora, precision, keeps=keeps)
        metadata = {**self._metadata, **weights_metadata(handle, lora, step)}
        return _Contents(step, weights, averaged, metadata, state)
