"""Saving a run's checkpoints: what every rank gives, what the main one writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ltx_trainer_plus.checkpoints.adapters import collect_weights, weights_metadata
from ltx_trainer_plus.checkpoints.state import TrainingState, collect_state
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.position import DataPosition
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.shards import is_spread
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
        # Shards are gathered by all processes; what every process has whole, the main one takes alone.
        is_gathered = any(is_spread(parameter) for _, parameter in self._handle.trainable_parameters())
        collected = self._collect(step) if is_gathered else None

        def write() -> Path:
            weights, metadata, state = collected or self._collect(step)
            return self._store.save(step, self._config.model.training_mode, weights, metadata, state)

        return from_main(write, self._topology)

    def _collect(self, step: int) -> tuple[dict[str, Tensor], dict[str, str], TrainingState | None]:
        keeps = self._topology.is_main
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
                keeps=keeps,
            )
        lora = self._config.lora if self._config.model.training_mode == "lora" else None
        weights = collect_weights(self._handle, lora, self._config.checkpoints.precision, keeps=keeps)
        return weights, {**self._metadata, **weights_metadata(self._handle, lora, step)}, state
