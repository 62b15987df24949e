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
        device = local_part(next(iter(self._averages.values()))).device
        # On the device, since the host does not know which steps were skipped. Double: as exact as Python's numbers.
        self._updates = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def updates(self) -> int:
        """Steps that were taken in. Waits for the device."""
        return int(self._updates.item())

    @torch.no_grad()
    def update(self, skipped: Tensor | float = 0.0) -> None:
        """Take in the weights as they are after an optimizer step. Nothing here waits for the device.

        Args:
            skipped: () non-zero where the step was left out: nothing changes then.
        """
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self._decay)
        taken = self._updates.new_ones(()) - skipped
        averages = [local_part(average) for average in self._averages.values()]
        weights = [local_part(parameter.detach()) for parameter in self._parameters.values()]
        amount = ((1 - decay) * taken).to(weights[0].dtype)
        torch._foreach_lerp_(averages, weights, [amount] * len(weights))
        self._updates += taken

    def tensors(self) -> Mapping[str, Tensor]:
        """The average by parameter name; not copied."""
        return self._averages

    @torch.no_grad()
    def restore(self, averages: Mapping[str, Tensor], updates: int) -> None:
        """Put back what `tensors` and `updates` were."""
        for name, average in self._averages.items():
            copy_into(average, averages[name])
        self._updates.fill_(updates)

    def restart(self) -> None:
        """Begin anew at the weights as they are."""
        self.restore({name: parameter.detach() for name, parameter in self._parameters.items()}, 0)

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
