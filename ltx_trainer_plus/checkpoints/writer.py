"""Saving a run's checkpoints: what every rank gives, what the main one writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ltx_trainer_plus.checkpoints.adapters import collect_weights, weights_metadata
from ltx_trainer_plus.checkpoints.state import collect_state
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.position import DataPosition
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.collectives import from_main
from ltx_trainer_plus.parallel.topology import Topology


class CheckpointWriter:
    """Saves the model and the training state.

    Args:
        metadata: header entries of the weights file beside the usual ones.
        data: where in the data stream each step begins.
        info: what the state holds beside tensors (configuration, W&B run id, ...): plain JSON types.
    """

    def __init__(
        self,
        config: TrainerConfig,
        topology: Topology,
        store: CheckpointStore,
        handle: ModelHandle,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        metadata: Mapping[str, str],
        data: DataPosition,
        info: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._topology = topology
        self._store = store
        self._handle = handle
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._metadata = dict(metadata)
        self._data = data
        self._info = dict(info)

    def save(self, step: int) -> Path:
        """Write the checkpoint of `step`. A collective; returns the path of the weights file on every rank.

        Raises:
            CheckpointError: it could not be written; earlier ones are whole.
        """
        return from_main(lambda: self._write(step), self._topology)

    def _write(self, step: int) -> Path:
        level = self._config.checkpoints.save_training_state
        state = None
        if level != "off":
            state = collect_state(
                step=step,
                named_parameters=self._handle.trainable_parameters(),
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                level=level,
                info={**self._info, "data": self._data.entries(step)},
            )
        kind = self._config.model.training_mode
        lora = self._config.lora if kind == "lora" else None
        weights = collect_weights(self._handle, lora, self._config.checkpoints.precision)
        metadata = {**self._metadata, **weights_metadata(self._handle, lora, step)}
        return self._store.save(step, kind, weights, metadata, state)
