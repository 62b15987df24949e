"""Where in the data order each step of a run begins, across resumes and layouts."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class DataPosition:
    """How a run takes samples from the data order.

    Attributes:
        batch_size: samples in a micro-batch of one data rank.
        accumulation: micro-batches in an optimizer step.
        data_ranks: parts that a global batch is dealt to.
        shape_group: samples of one shape that stay together in the order.
        data_set: what tells one data set from another (`data_set_key`).
        step: optimizer steps done when the run (or its last resume) began.
        position: ordinal of the sample that comes next there.
    """

    batch_size: int
    accumulation: int
    data_ranks: int
    shape_group: int
    data_set: str
    step: int = 0
    position: int = 0

    @property
    def global_batch(self) -> int:
        """Samples in an optimizer step."""
        return self.batch_size * self.accumulation * self.data_ranks

    def repeats(self, samples: int) -> str | None:
        """A note where a data set of so many samples does not fill a step."""
        if samples >= self.global_batch:
            return None
        return (
            f"The data set has {samples} samples and a step takes {self.global_batch}: samples come round again within "
            "a step, each time with noise of their own."
        )

    def at(self, step: int) -> int:
        """Ordinal of the first sample after `step` optimizer steps."""
        return self.position + (step - self.step) * self.global_batch

    def entries(self, step: int) -> dict[str, Any]:
        """What a training state of `step` keeps of it: plain types, for `continued`."""
        return {
            "position": self.at(step),
            "batch_size": self.batch_size,
            "accumulation": self.accumulation,
            # The format is older than the difference between the two.
            "world_size": self.data_ranks,
            "shape_group": self.shape_group,
            "data_set": self.data_set,
        }

    def continued(self, step: int, saved: Mapping[str, Any], *, may_regroup: bool) -> tuple["DataPosition", list[str]]:
        """The same way of taking samples, from where a saved run stopped.

        Args:
            step: optimizer steps that the saved run has done.
            saved: its `entries`.
            may_regroup: the configuration leaves `shape_group` open, so that the saved one may be kept.

        Returns:
            The position, and what of the loss curve will not be as it would have been: a line each.
        """
        names = {"world_size": "data_ranks"}
        earlier = DataPosition(**{names.get(key, key): value for key, value in saved.items() if key != "position"})
        result = replace(self, step=step, position=int(saved["position"]))
        if may_regroup and _aligned(self.batch_size, earlier.shape_group):
            result = replace(result, shape_group=earlier.shape_group)
        notes = []
        if result.data_set != earlier.data_set:
            notes.append("The data set has changed: the order of samples from here on is another one.")
        elif result.shape_group != earlier.shape_group:
            notes.append(
                f"data.shape_group was {earlier.shape_group} and is {result.shape_group}: the order of samples from "
                f"here on is another one. data.shape_group={earlier.shape_group} would keep it."
            )
        if result.global_batch != earlier.global_batch:
            notes.append(
                f"The global batch was {earlier._described()} and is {result._described()}: the loss curve will not "
                f"continue as it was. {_restoring(result, earlier.global_batch)}"
            )
        return result, notes

    def _described(self) -> str:
        return (
            f"{self.global_batch} ({self.batch_size} per process x {self.accumulation} micro-batches x "
            f"{self.data_ranks} processes)"
        )


def data_set_key(names: Iterable[str]) -> str:
    """A short text that is the same for data sets of the same samples."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _aligned(batch_size: int, group: int) -> bool:
    return batch_size % group == 0 or group % batch_size == 0


def _restoring(now: DataPosition, wanted: int) -> str:
    """What would make the global batch `wanted` again."""
    accumulation, rest = divmod(wanted, now.batch_size * now.data_ranks)
    if not rest:
        return f"optimization.gradient_accumulation_steps={accumulation} would restore it."
    per_data_rank, rest = divmod(wanted, now.data_ranks)
    if rest:
        return f"No accumulation restores it on {now.data_ranks} processes: use a number that divides {wanted}."
    batch_size = max(size for size in range(1, min(now.batch_size, per_data_rank) + 1) if per_data_rank % size == 0)
    return (
        f"optimization.batch_size={batch_size} with optimization.gradient_accumulation_steps="
        f"{per_data_rank // batch_size} would restore it."
    )
