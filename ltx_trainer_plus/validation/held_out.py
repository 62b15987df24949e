"""The held-out loss: how well the model predicts samples that it is never trained on, at fixed noise and sigmas."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ltx_trainer_plus.data.batch import Sample, TextFeatures, collate
from ltx_trainer_plus.data.order import keyed_generator
from ltx_trainer_plus.flow.timesteps import sample_sigma
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.collectives import gather_from_data_ranks
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.strategies.draws import Draws, StreamDraws
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy
from ltx_trainer_plus.strategies.loss import training_loss

# Draws of the training sampler of which the quantiles are taken.
_DRAWS = 8192


class HeldOutSamples(Protocol):
    """A data set (`PrecomputedDataset`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True)
class HeldOutScore:
    """Means over all held-out samples and noise levels.

    Attributes:
        total: video loss + audio loss.
        video, audio: each stream's part; None where it is not generated.
    """

    total: float
    video: float | None
    audio: float | None

    def as_metrics(self) -> dict[str, float]:
        """As they are logged."""
        parts = {"held_out/video": self.video, "held_out/audio": self.audio}
        return {"held_out": self.total, **{key: value for key, value in parts.items() if value is not None}}


class HeldOutLoss:
    """Scores a model.

    Every sample is scored alone, once at each noise level, so that no number depends on the layout.

    Args:
        context: turns a caption on the device into what the transformer attends to (`TrainStep.context`).
        levels: noise levels: the middles of as many equal parts of what the training sampler draws.
        seed: what the noise of each sample and level is drawn from.
    """

    def __init__(
        self,
        dataset: HeldOutSamples,
        strategy: FlexibleStrategy,
        context: Callable[[TextFeatures], TextContext],
        topology: Topology,
        *,
        levels: int,
        seed: int,
    ) -> None:
        self._dataset = dataset
        self._strategy = strategy
        self._context = context
        self._topology = topology
        self._levels = levels
        self._seed = seed

    @torch.no_grad()
    def score(self, handle: ModelHandle) -> HeldOutScore:
        """Score the model as it is. A collective; draws from no generator but its own, and leaves every flag as it was.

        Returns:
            The same on every rank.
        """
        items = range(len(self._dataset) * self._levels)
        data_ranks = self._topology.data_ranks
        own = items[self._topology.data_rank :: data_ranks]
        with handle.evaluating():
            results = [(item, self._losses(handle, item)) for item in own]
            # Every rank runs the same number of forwards, because a forward of a sharded model needs all ranks.
            for _ in range(-(-len(items) // data_ranks) - len(own)):
                self._losses(handle, 0)
        everyones = sorted(itertools.chain.from_iterable(gather_from_data_ranks(results, self._topology)))
        video = _mean([losses[0] for _, losses in everyones])
        audio = _mean([losses[1] for _, losses in everyones])
        return HeldOutScore((video or 0.0) + (audio or 0.0), video, audio)

    def _losses(self, handle: ModelHandle, item: int) -> tuple[float | None, float | None]:
        index, level = divmod(item, self._levels)
        # As ordinals of an order of their own: noise and conditions depend on nothing else.
        batch = collate([self._dataset[index]], [item])
        draws = self._at_level(self._strategy.draw(batch, self._seed), level)
        batch, draws = batch.to(handle.device), draws.to(handle.device)
        inputs = self._strategy.prepare(batch, draws, self._context(batch.text))
        losses = training_loss(inputs, *handle(**inputs.modalities, perturbations=None))
        return _number(losses.video), _number(losses.audio)

    def _at_level(self, draws: Draws, level: int) -> Draws:
        def at_level(drawn: StreamDraws | None) -> StreamDraws | None:
            return drawn and replace(drawn, sigma=self._sigmas(drawn.noise.shape[1])[level].reshape(1))

        return Draws(at_level(draws.video), at_level(draws.audio))

    def _sigmas(self, tokens: int) -> Tensor:
        """The noise levels of a stream of so many tokens.  # (levels,)"""
        flow = self._strategy.flow_matching
        drawn = sample_sigma(
            flow.timestep_sampling_mode,
            flow.timestep_sampling_params,
            tokens=tokens,
            generator=keyed_generator(self._seed, "held-out sigmas", tokens),
            size=(_DRAWS,),
        )
        return drawn.quantile((torch.arange(self._levels) + 0.5) / self._levels)


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _number(loss: Tensor | None) -> float | None:
    return None if loss is None else loss.double().item()
