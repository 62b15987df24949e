"""How many operations a training step takes: torch counts them on a model that has shapes and no memory."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ltx_trainer_plus.measure.workload import Workload, block_layers, shape_inputs, shape_transformer


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one micro-step; a multiplication and its addition are two.

    Matrix products only: norms, RoPE and activations are under 1 % of the operations of a real model.

    Attributes:
        forward: once through the model.
        backward: without recomputation.
        recomputed: the blocks' second forward under gradient checkpointing, else 0.
    """

    forward: int
    backward: int
    recomputed: int

    @property
    def executed(self) -> int:
        """What the device has to do."""
        return self.forward + self.backward + self.recomputed

    @property
    def useful(self) -> int:
        """What the mathematics needs: the numerator of a model FLOP/s utilisation."""
        return self.forward + self.backward

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward, self.recomputed + other.recomputed)

    def __mul__(self, times: int) -> "Flops":
        return Flops(times * self.forward, times * self.backward, times * self.recomputed)

    def __sub__(self, other: "Flops") -> "Flops":
        return self + other * -1


def flops(
    config: Mapping[str, Any], work: Workload, *, lora_targets: Collection[str], rank: int, checkpointing: bool
) -> Flops:
    """Count the operations of a micro-step.

    Args:
        config: of the whole transformer, with its `num_layers`.
        lora_targets: names of the adapted linear layers; empty = full fine-tuning.
    """
    shared: dict[str, Any] = {"lora_targets": lora_targets, "rank": rank, "checkpointing": checkpointing}
    blocks = range(config["num_layers"])
    # The ends differ: nothing before the first adapters needs a gradient, and the loss may not reach all of the last
    # block. Those between are alike, unless the adapters are not: then all are traced, which takes half a minute.
    inner = blocks[1:-1]
    if len(inner) < 2 or not _are_alike(lora_targets, inner):
        return _traced(config, blocks, work, **shared)
    without = _traced(config, [blocks[0], blocks[-1]], work, **shared)
    with_one = _traced(config, [*blocks[:2], blocks[-1]], work, **shared)
    return without + (with_one - without) * len(inner)


def _are_alike(lora_targets: Collection[str], blocks: Sequence[int]) -> bool:
    layers = block_layers(lora_targets)
    adapted = [{layer for number, layer in layers if number == block} for block in blocks]
    return all(names == adapted[0] for names in adapted)


def _traced(
    config: Mapping[str, Any],
    blocks: Sequence[int],
    work: Workload,
    *,
    lora_targets: Collection[str],
    rank: int,
    checkpointing: bool,
) -> Flops:
    transformer = shape_transformer(config, blocks, torch.float32, lora_targets=lora_targets, rank=rank)
    with torch.device("meta"):
        inputs = shape_inputs(transformer, work)

    def step() -> tuple[int, int]:
        # Attention as plain matrix products: a fused kernel's backward is counted with what it recomputes.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            outputs = [velocity for velocity in transformer(**inputs) if velocity is not None]
            forward = counter.get_total_flops()
            torch.stack([velocity.sum() for velocity in outputs]).sum().backward()
            return forward, counter.get_total_flops() - forward

    forward, backward = step()
    if not checkpointing:
        return Flops(forward, backward, 0)
    transformer.gradient_checkpointing = True
    return Flops(forward, backward, step()[1] - backward)
