"""Steps that were skipped because something was not finite: which samples they held, and when it is enough."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.parallel.collectives import gather_from_data_ranks
from ltx_trainer_plus.parallel.topology import Topology

logger = logging.getLogger(__name__)

_MOST_NAMED = 8


class BadStepsError(UserError, RuntimeError):
    """Too many steps in a row were not finite; the message names their samples."""


@dataclass(frozen=True)
class TracedSample:
    """A sample of a step, on the host.

    Attributes:
        ordinal: in the data order.
        sigmas: noise level by stream.
        loss: NaN or infinite where this sample spoilt the step.
    """

    name: str
    ordinal: int
    sigmas: dict[str, float]
    loss: float

    def __str__(self) -> str:
        sigmas = ", ".join(f"{stream} sigma {sigma:.4f}" for stream, sigma in self.sigmas.items())
        return f"{self.name} ({sigmas}; position {self.ordinal}): loss {self.loss:g}"


@dataclass
class StepTrace:
    """What one data rank trained on in a step, kept until the step is known to be good."""

    _parts: list[tuple[Sequence[str], Sequence[int], dict[str, Tensor], Tensor]] = field(default_factory=list)

    def add(self, names: Sequence[str], ordinals: Sequence[int], sigmas: dict[str, Tensor], losses: Tensor) -> None:
        """Note a micro-batch. sigmas: (B,) on the CPU by stream; losses: (B,) on the device, read only if needed."""
        self._parts.append((names, ordinals, sigmas, losses.detach()))

    def samples(self) -> list[TracedSample]:
        """Every sample of the step. Waits for the device."""
        return [
            TracedSample(name, ordinal, {stream: sigma[i].item() for stream, sigma in sigmas.items()}, loss)
            for names, ordinals, sigmas, losses in self._parts
            for i, (name, ordinal, loss) in enumerate(zip(names, ordinals, losses.tolist(), strict=True))
        ]


class BadSteps:
    """Counts skipped steps in a row.

    Args:
        limit: how many end the run; None = never.
    """

    def __init__(self, limit: int | None, topology: Topology) -> None:
        self._limit = limit
        self._topology = topology
        self.in_a_row = 0

    def observe(self, step: int, trace: StepTrace, *, skipped: bool) -> None:
        """Take in a step that was done. A collective where it was skipped, which every rank knows alike.

        Raises:
            BadStepsError: on every rank, with the samples and noise levels of the last skipped step.
        """
        if not skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        everyones = gather_from_data_ranks(trace.samples(), self._topology)
        samples = [sample for rank in everyones for sample in rank]
        guilty = [sample for sample in samples if not math.isfinite(sample.loss)]
        what = (
            "The loss was not finite"
            if guilty
            else "Every loss was finite, a gradient was not (the weights may be about to diverge)"
        )
        shown = sorted(guilty or samples, key=lambda sample: sample.ordinal)
        lines = [f"  {sample}" for sample in shown[:_MOST_NAMED]]
        if len(shown) > _MOST_NAMED:
            lines.append(f"  and {len(shown) - _MOST_NAMED} more")
        text = f"Step {step} was skipped; the weights are as before. {what}:\n" + "\n".join(lines)
        if self._limit is not None and self.in_a_row >= self._limit:
            raise BadStepsError(
                f"{self.in_a_row} steps in a row were not finite (optimization.max_bad_steps: {self._limit}). "
                f"Nothing was saved after them.\n{text}\n"
                "  If it is always the same samples, prepare them again or remove them. If not, continue with "
                "model.load_checkpoint=latest and a lower optimization.learning_rate."
            )
        if self._topology.is_main:
            logger.warning("%s", text)
