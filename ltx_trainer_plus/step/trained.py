"""What a run trains and everything that changes with it: saved as one, restored as one."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from ltx_trainer_plus.checkpoints.state import (
    StateLevel,
    TrainingState,
    check_same_parameters,
    copied_state,
)
from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.shards import copy_into
from ltx_trainer_plus.step.ema import WeightAverage
from ltx_trainer_plus.step.optimizer_state import check_same_optimizer, put_back, take_apart
from ltx_trainer_plus.step.optimizers import create_optimizer, create_scheduler, update_weights

_MASTER, _AVERAGE = "parameter.", "average."


class Trained:
    """The model's trained weights, their optimizer, its schedule, and the weights' moving average.

    Attributes:
        parameters: everything that is trained, by its clean name.
        average: None where the run keeps none.
    """

    def __init__(
        self,
        handle: ModelHandle,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        average: WeightAverage | None = None,
    ) -> None:
        self.handle = handle
        self.parameters = dict(handle.trainable_parameters())
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.average = average

    @classmethod
    def start(cls, handle: ModelHandle, config: TrainerConfig, state: TrainingState | None = None) -> "Trained":
        """What the configuration asks for, as it begins or as a training state left it.

        Raises:
            CheckpointError: see `restore`.
        """
        optimizer = create_optimizer((parameter for _, parameter in handle.trainable_parameters()), config.optimization)
        steps_done = state.step if state is not None else 0
        decay = config.checkpoints.ema_decay
        trained = cls(
            handle,
            optimizer,
            create_scheduler(optimizer, config.optimization, steps_done=steps_done),
            WeightAverage(handle, decay) if decay is not None else None,
        )
        if state is not None:
            trained.restore(state)
        return trained

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(self.scheduler.get_last_lr()[0])

    def update(self, norm: Tensor) -> Tensor:
        """One step with the gradients that are there, which are used up. A step whose norm is not finite changes
        nothing but the place in the schedule.

        Args:
            norm: () of the gradients averaged over the ranks.

        Returns:
            () 1 where the step was left out, else 0; equal on all ranks.
        """
        skipped = update_weights(self.optimizer, norm, self.handle.device)
        self.scheduler.step()
        if self.average is not None:
            self.average.update(skipped)
        self.optimizer.zero_grad(set_to_none=True)
        return skipped

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights that are validated: their average, where there is one."""
        return self.average.applied() if self.average is not None else nullcontext()

    def state(self, step: int, *, level: StateLevel = "full", info: Mapping[str, Any] | None = None) -> TrainingState:
        """Copy everything out that training will change next, so that the result can be written at leisure.

        Of what is spread over processes each copies its own part, without communication; what every process has whole
        is in the first part.

        Args:
            step: optimizer steps done.
            level: `minimal` leaves out the optimizer's state, the masters and the average.
            info: the trainer's own entries (data position, resolved configuration, W&B run id, ...): JSON types.

        Raises:
            CheckpointError: the optimizer's state has a form that cannot be saved, or an entry is not a plain type.
        """
        optimizer = take_apart(self.optimizer, self.parameters)
        sources: dict[str, Tensor] = {}
        if level == "full":
            sources |= {f"{_MASTER}{name}": parameter for name, parameter in self.parameters.items()}
            sources |= optimizer.tensors
            if self.average is not None:
                sources |= {f"{_AVERAGE}{name}": tensor for name, tensor in self.average.tensors().items()}
        entries = {
            **(info or {}),
            "level": level,
            "optimizer": optimizer.info if level == "full" else {**optimizer.info, "state": {}},
            "scheduler": tree_map_only(Tensor, Tensor.tolist, self.scheduler.state_dict()),
            "average_updates": self.average.updates if self.average is not None else None,
        }
        return copied_state(step, sources, entries)

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        """Put a training state back, in place: masters, optimizer and average; nothing of a `minimal` state.

        Settings of the optimizer and the schedule stay as the present configuration made them. An average of which
        the state holds none begins at the weights.

        Raises:
            CheckpointError: names, shapes or the kind of optimizer differ; nothing has been changed then.
        """
        averages = _with_prefix(_AVERAGE, state.tensors)
        if state.level == "full":
            masters, info = _with_prefix(_MASTER, state.tensors), state.info["optimizer"]
            check_same_parameters(masters, self.parameters)
            check_same_optimizer(self.optimizer, info)
            put_back(self.optimizer, self.parameters, state.tensors, info)
            for name, parameter in self.parameters.items():
                copy_into(parameter, masters[name])
        if self.average is not None and averages:
            self.average.restore(averages, state.info["average_updates"])
        elif self.average is not None:
            self.average.restart()


def _with_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
