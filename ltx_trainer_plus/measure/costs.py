"""What a training step costs in each layout by arithmetic: bytes held, bytes moved, and time.

Everything is per process (rank) and optimizer step; nothing is computed with a model.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from ltx_trainer_plus.errors import UsageError
from ltx_trainer_plus.measure.operations import Flops
from ltx_trainer_plus.models import LTXTransformer

Layout = Literal["single", "ddp", "fsdp2", "hsdp"]
_MASTER = 4  # bytes of a float32 master weight, of its gradient, and of each of AdamW's two moments


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        block: frozen or trained base parameters of one transformer block.
        blocks: how many blocks there are.
        root: base parameters outside of the blocks.
        adapters: LoRA parameters, all inside blocks; 0 in full fine-tuning.
    """

    block: int
    blocks: int
    root: int
    adapters: int

    @property
    def base(self) -> int:
        return self.block * self.blocks + self.root

    @property
    def trained(self) -> int:
        return self.adapters or self.base

    @classmethod
    def of(cls, transformer: LTXTransformer, *, lora_targets: Collection[str], rank: int) -> "Parameters":
        """Args: transformer: without adapters, also on the meta device."""
        total = sum(parameter.numel() for parameter in transformer.parameters())
        blocks: Any = transformer.transformer_blocks
        block = sum(parameter.numel() for parameter in blocks[0].parameters())
        # A weight is (out, in); its adapter is (rank, in) and (out, rank).
        adapters = sum(rank * sum(transformer.get_parameter(f"{name}.weight").shape) for name in lora_targets)
        return cls(block, len(blocks), total - block * len(blocks), adapters)


@dataclass(frozen=True)
class Machine:
    """What times are estimated with.

    Attributes:
        tflops: peak of dense bf16 matrix products, 10^12 operations per second.
        efficiency: share of that peak which a step reaches.
        link: what a GPU receives from the others in a collective, 10^9 bytes per second.
        memory: of a GPU, 10^9 bytes.
    """

    tflops: float
    efficiency: float
    link: float
    memory: float


@dataclass(frozen=True)
class LayoutCost:
    """One rank's bytes and seconds in one layout.

    Attributes:
        weights: base and adapters, as they are kept between steps.
        gradients, optimizer: of what is trained.
        gathered: weights of other ranks that are there at most at a time (FSDP2).
        activations: see `Activations`.
        received_forward, received_backward: weights that arrive in each micro-step's forward and backward.
        reduced: what arrives while gradients are averaged, once per step.
        compute: seconds of arithmetic.
        step: seconds of the step, communication hidden behind arithmetic where it can be.
        exposed_step: seconds of the step with nothing hidden: the worst case.
    """

    layout: str
    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    received_forward: float
    received_backward: float
    reduced: float
    compute: float
    step: float
    exposed_step: float

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations


def layout_cost(
    layout: Layout,
    gpus: int,
    parameters: Parameters,
    operations: Flops,
    activation_bytes: float,
    machine: Machine,
    *,
    compute_bytes: int = 2,
    replicas: int = 2,
    reshards: bool = True,
    accumulation: int = 1,
) -> LayoutCost:
    """Bytes and time of one layout.

    Args:
        compute_bytes: of a number in the dtype that is computed in.
        replicas: copies of the model under HSDP.
        reshards: FSDP2 frees a block's weights after the forward and gathers them again for the backward.

    Raises:
        ValueError: HSDP with a number of GPUs that its replicas do not divide.
    """
    if layout == "hsdp" and (gpus % replicas or gpus == replicas):
        raise UsageError(f"hsdp: {gpus} GPUs cannot hold {replicas} sharded copies of the model.")
    shards = {"fsdp2": gpus, "hsdp": gpus // replicas}.get(layout, 1)
    copies = {"ddp": gpus, "hsdp": replicas}.get(layout, 1)
    trained, is_full = parameters.trained, not parameters.adapters
    base_bytes = _MASTER if is_full else compute_bytes
    weights = (parameters.base * base_bytes + parameters.adapters * _MASTER) / shards
    gathered = received_forward = received_backward = 0.0
    block = compute_bytes * (parameters.block + parameters.adapters / parameters.blocks)
    root = compute_bytes * parameters.root
    if shards > 1:
        away = (shards - 1) / shards
        received_forward = away * (parameters.blocks * block + root)
        if reshards:
            # The root and the last block stay: the backward begins with them.
            received_backward = away * (parameters.blocks - 1) * block
            # They, the block at work, and the next one that is being fetched.
            gathered = root + min(3, parameters.blocks) * block
        else:
            gathered = root + parameters.blocks * block
        if is_full:
            gathered += 2 * block / compute_bytes * _MASTER  # unreduced gradients of a block, and of the next
    # A ring: to sum up over n processes, each receives (n - 1) / n of it; to hand the sums round, as much again.
    share = trained * _MASTER
    reduced = share * (shards - 1) / shards + 2 * share / shards * (copies - 1) / copies
    rate, link = machine.tflops * 1e12 * machine.efficiency, machine.link * 1e9
    forward = operations.forward / rate
    backward = (operations.backward + operations.recomputed) / rate
    # The first block's weights are waited for in the forward; all else travels while something is computed.
    first = block * (shards - 1) / shards / link
    micro = first + max(forward, received_forward / link)
    step = accumulation * micro + (accumulation - 1) * max(backward, received_backward / link)
    step += max(backward, (received_backward + reduced) / link)
    moved = accumulation * (received_forward + received_backward) + reduced
    compute = accumulation * (forward + backward)
    return LayoutCost(
        layout=layout,
        weights=weights,
        gradients=trained * _MASTER / shards,
        optimizer=2 * trained * _MASTER / shards,
        gathered=gathered,
        activations=activation_bytes,
        received_forward=accumulation * received_forward,
        received_backward=accumulation * received_backward,
        reduced=reduced,
        compute=compute,
        step=step,
        exposed_step=compute + moved / link,
    )
