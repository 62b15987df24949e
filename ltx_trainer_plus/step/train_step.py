"""One optimizer step: micro-batches in, updated weights and sums for the metrics out."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from ltx_trainer_plus.data.batch import Batch, TextFeatures
from ltx_trainer_plus.data.order import keyed_generator
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models.text import TextConnectors
from ltx_trainer_plus.step.bad_steps import StepTrace
from ltx_trainer_plus.step.optimizers import clip_gradients
from ltx_trainer_plus.step.sums import MetricWindow
from ltx_trainer_plus.step.trained import Trained
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy
from ltx_trainer_plus.strategies.loss import training_loss


class TrainStep:
    """Forward, backward and update over the micro-batches of one step.

    Args:
        connectors: for prepared data that holds text features before the connectors; None where all of it holds
            contexts already.
        seed: with a sample's ordinal in the data order, the key of its noise and sigmas.
        has_dropout: the model draws from the device's generator.
        samples: of this data rank in a step, over all its micro-batches.
    """

    def __init__(
        self,
        trained: Trained,
        strategy: FlexibleStrategy,
        *,
        connectors: TextConnectors | None,
        seed: int,
        samples: int,
        max_grad_norm: float,
        has_dropout: bool = False,
    ) -> None:
        self._trained = trained
        self._handle = trained.handle
        self._strategy = strategy
        self._connectors = connectors
        self._seed = seed
        self._samples = samples
        self._max_grad_norm = max_grad_norm
        self._has_dropout = has_dropout
        self.trace = StepTrace()
        """What the last step trained on."""
        self._parameters = list(trained.parameters.values())

    def __call__(self, batches: Iterator[Batch]) -> MetricWindow:
        """Take the next step's micro-batches (on the CPU) and train on their average gradient.

        A step whose gradient norm is not finite changes neither weights nor optimizer nor average. Gradients are
        averaged over the ranks before, so every rank decides alike.
        """
        window = MetricWindow(self._handle.device)
        self.trace = StepTrace()
        for batch in batches:
            # Gradients are exchanged once per step, with the last micro-batch.
            with nullcontext() if batch.ends_step else self._handle.no_sync():
                self._accumulate(batch, window)
            if batch.ends_step:
                break
        norm = clip_gradients(self._parameters, self._max_grad_norm)
        window.set_step(grad_norm=norm, skipped=self._trained.update(norm))
        return window

    def _accumulate(self, batch: Batch, window: MetricWindow) -> None:
        draws = self._strategy.draw(batch, self._seed)
        if self._has_dropout:
            # Keyed like everything random, so that a resumed run drops what it would have dropped.
            torch.manual_seed(keyed_generator(self._seed, "dropout", batch.ordinals[0]).initial_seed())
        device, sigmas = self._handle.device, draws.sigmas()
        batch, draws = batch.to(device, non_blocking=True), draws.to(device, non_blocking=True)
        inputs = self._strategy.prepare(batch, draws, self.context(batch.text))
        losses = training_loss(inputs, *self._handle(**inputs.modalities, perturbations=None))
        # Micro-batches may differ in size, where their samples differ in shape.
        loss = losses.total.sum() / self._samples
        # Multiplied by one, or by NaN where the loss is infinite: its gradients alone might still be finite, and only
        # they tell the other ranks.
        (loss * (1 + 0 * loss.detach())).backward()
        window.add(inputs, losses, replaced=len(batch.replaced))
        self.trace.add(batch.names, batch.ordinals, sigmas, losses.total)

    @torch.no_grad()
    def context(self, text: TextFeatures) -> TextContext:
        """What the transformer attends to, from a caption on the device."""
        if text.kind == "context":
            return TextContext(video=text.video, audio=text.audio, mask=text.mask)
        if self._connectors is None:
            raise RuntimeError(
                "A sample holds text features before the connectors, but the run was started without connectors.\n"
                "  All samples of a data set should be prepared alike: prepare them again with --overwrite."
            )
        return self._connectors.from_features(text.video, text.audio, text.mask)
