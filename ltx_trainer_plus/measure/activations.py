"""How many bytes of activations a training step keeps: autograd is asked on a model that has shapes and no memory."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ltx_trainer_plus.measure.workload import Workload, shape_inputs, shape_transformer


@dataclass(frozen=True)
class Activations:
    """Bytes of activations that a process holds at most: at the start of the backward."""

    outside: int
    per_block: int
    recomputed: int

    def total(self, blocks: int) -> int:
        return self.outside + blocks * self.per_block + self.recomputed


def activations(
    config: Mapping[str, Any],
    work: Workload,
    *,
    dtype: torch.dtype,
    weights: torch.dtype,
    lora_targets: Collection[str],
    rank: int,
    checkpointing: bool,
) -> Activations:
    """What autograd keeps for the backward, found by tracing one block with tensors that have shapes and no memory.

    The kernels are those of a CPU: their attention is fused, as a GPU's is. What is not in it: temporary results while
    an operation runs, float32 copies that a GPU's autocast makes around norms, the device's context (about a gigabyte)
    and fragmentation.

    Args:
        dtype: what is computed in.
        lora_targets: names of the adapted linear layers; empty = full fine-tuning.
        weights: what the base weights are kept in, as the forward sees them (FSDP2 gathers them in `dtype`).
        checkpointing: a block keeps its inputs, and one block at a time keeps everything.
    """
    transformer = shape_transformer(config, [0], weights, lora_targets=lora_targets, rank=rank)
    transformer.compute_dtype = dtype
    with FakeTensorMode():
        for module in transformer.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    module._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        own = {parameter.untyped_storage()._cdata for parameter in transformer.parameters()}
        inputs = shape_inputs(transformer, work)
        kept: dict[int, int] = {}
        alive: list[Tensor] = []  # a freed storage's address may come again

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
            return tensor

        marks: list[int] = []
        block_inputs: list[int] = []
        block: Any = transformer.transformer_blocks[0]

        def enter(_: Any, __: Any, given: dict[str, Any]) -> dict[str, Any]:
            # Behind a trained layer, as in every block but the first, hidden states need gradients.
            hidden = {name: given[name].detach().requires_grad_() for name in ("hidden_states", "audio_hidden_states")}
            block_inputs.append(sum(tensor.untyped_storage().nbytes() for tensor in hidden.values()))
            marks.append(sum(kept.values()))
            return (), {**given, **hidden}  # type: ignore[return-value]

        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(lambda *_: marks.append(sum(kept.values())))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            transformer(**inputs)
    everything = marks[1] - marks[0]
    outside = sum(kept.values()) - everything
    if not checkpointing:
        return Activations(outside, everything, 0)
    return Activations(outside, block_inputs[0], everything)
