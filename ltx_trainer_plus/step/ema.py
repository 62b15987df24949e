"""The moving average of the trained weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.shards import copy_into, local_part


class WeightAverage:
    """An exponential moving average of everything that is trained, where the weights are and sharded as they are.

    Args:
        decay: of the average. In the first updates it is lower, `(1 + n) / (10 + n)`, so that the initial weights do
            not linger.
    """

    def __init__(self, handle: ModelHandle, decay: float) -> None:
        self._handle = handle
        self._decay = decay
        self._parameters: dict[str, Parameter] = dict(handle.trainable_parameters())
        self._averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are after an optimizer step. Nothing here waits for the device."""
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        averages = [local_part(average) for average in self._averages.values()]
        weights = [local_part(parameter.detach()) for parameter in self._parameters.values()]
        torch._foreach_lerp_(averages, weights, 1 - decay)
        self.updates += 1

    def tensors(self) -> Mapping[str, Tensor]:
        """The average by parameter name; not copied."""
        return self._averages

    @torch.no_grad()
    def restore(self, averages: Mapping[str, Tensor], updates: int) -> None:
        """Put back what `tensors` and `updates` were."""
        for name, average in self._averages.items():
            copy_into(average, averages[name])
        self.updates = updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averaged weights; its own come back bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._handle.reshard()
        for name, parameter in self._parameters.items():
            weights = parameter.detach().clone()
            parameter.copy_(self._averages[name])
            self._averages[name].copy_(weights)
