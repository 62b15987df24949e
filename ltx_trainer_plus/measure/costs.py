"""What a training step costs by arithmetic: operations, bytes held and bytes moved, from the model's shapes alone.

Everything is per process (rank) and optimizer step. The model may be on the meta device; nothing is computed with it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.models import LTXTransformer, transformer_on_meta
from ltx_trainer_plus.models.lora import add_lora

Layout = Literal["single", "ddp", "fsdp2", "hsdp"]
_MASTER = 4  # bytes of a float32 master weight, of its gradient, and of each of AdamW's two moments


@dataclass(frozen=True)
class Workload:
    """What a process trains on in one micro-step.

    Attributes:
        frames, height, width: of the video latent; each of its cells is a token. 0 frames = no video.
        audio_tokens: audio latent steps; 0 = no audio.
        text_tokens: of the caption.
        batch: samples.
    """

    frames: int
    height: int
    width: int
    audio_tokens: int
    text_tokens: int
    batch: int = 1

    @property
    def video_tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def target_tokens(self) -> int:
        """Video and audio tokens of all samples."""
        return self.batch * (self.video_tokens + self.audio_tokens)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one micro-step; a multiplication and its addition are two.

    Matrix products only: norms, RoPE and activations are under 1 % of the operations of a real model.

    Attributes:
        forward: once through the model.
        backward: without recomputation.
        recomputed: the blocks' second forward under gradient checkpointing, else 0.
    """

    forward: float
    backward: float
    recomputed: float

    @property
    def executed(self) -> float:
        """What the device has to do."""
        return self.forward + self.backward + self.recomputed

    @property
    def useful(self) -> float:
        """What the mathematics needs: the numerator of a model FLOP/s utilisation."""
        return self.forward + self.backward


def flops(
    transformer: LTXTransformer, work: Workload, *, lora_targets: Collection[str], rank: int, checkpointing: bool
) -> Flops:
    """Count the operations of a joint audio-video micro-step.

    - A linear layer of `in` x `out` weights over T tokens: 2 * T * in * out forward. In the backward as much again for
      the gradient of its input (where anything before it is trained), and as much again for that of its weight (full
      fine-tuning only: a frozen weight gets none).
    - A LoRA adapter is two thin linear layers, `in` x rank and rank x `out`: forward, and twice that backward.
    - Attention of Tq queries over Tk keys at a total width of W: 2 * Tq * Tk * W for the scores and as much for the
      weighted sum. Backward: twice that (gradients of queries, keys, values and weights).

    Args:
        transformer: without adapters, also on the meta device.
        lora_targets: names of the adapted linear layers; empty = full fine-tuning.
    """
    is_full = not lora_targets
    forward = backward = outside = 0.0
    for name, linear in transformer.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        is_block = name.startswith("transformer_blocks.")
        tokens = work.batch * _tokens(name.split(".", 2)[2] if is_block else name, work)
        product = 2.0 * tokens * linear.in_features * linear.out_features
        forward += product
        outside += 0.0 if is_block else product
        # Latents, and in LoRA everything before the first adapter and the caption, need no gradient.
        needs_input_gradient = _is_behind_trained(name, is_full=is_full)
        backward += product * (needs_input_gradient + is_full)
        if name in lora_targets:
            adapter = 2.0 * tokens * rank * (linear.in_features + linear.out_features)
            forward += adapter
            backward += 2 * adapter
    attention = transformer.num_blocks * _attention(transformer, work)
    forward += attention
    backward += 2 * attention
    return Flops(forward, backward, forward - outside if checkpointing else 0.0)


def _tokens(layer: str, work: Workload) -> int:
    """Tokens per sample that go through a linear layer, by its name (in a block: behind the block's number)."""
    module, _, rest = layer.partition(".")
    is_key_or_value = rest.startswith(("to_k", "to_v"))
    if module in ("attn2", "audio_attn2") and is_key_or_value:
        return work.text_tokens
    if module == "audio_to_video_attn":
        return work.audio_tokens if is_key_or_value else work.video_tokens
    if module == "video_to_audio_attn":
        return work.video_tokens if is_key_or_value else work.audio_tokens
    if module in ("attn1", "attn2", "ff", "proj_in", "proj_out"):
        return work.video_tokens
    if module in ("audio_attn1", "audio_attn2", "audio_ff", "audio_proj_in", "audio_proj_out"):
        return work.audio_tokens
    if "caption_projection" in module:
        return work.text_tokens
    return 1  # embeddings of the noise level: one per sample, where no token is given


def _is_behind_trained(name: str, *, is_full: bool) -> bool:
    if name.startswith("transformer_blocks."):
        is_text = name.split(".")[2] in ("attn2", "audio_attn2") and name.split(".")[3] in ("to_k", "to_v")
        return is_full or not is_text
    if name in ("proj_out", "audio_proj_out"):
        return True
    return is_full and not name.endswith(("proj_in", "linear_1"))


def _attention(transformer: LTXTransformer, work: Workload) -> float:
    config = transformer.config
    video = config["num_attention_heads"] * config["attention_head_dim"]
    audio = config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
    v, a, t = work.video_tokens, work.audio_tokens, work.text_tokens
    pairs = video * (v * v + v * t) + audio * (a * a + a * t)
    pairs += audio * 2 * v * a  # both cross-modal attentions have the audio's heads
    return 4.0 * work.batch * pairs


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
    transformer = transformer_on_meta({**config, "num_layers": 1}, weights)
    transformer.compute_dtype = dtype
    transformer.train()
    if lora_targets:
        first = [name for name in lora_targets if name.startswith("transformer_blocks.0.")]
        add_lora(transformer, rank=rank, alpha=rank, dropout=0, target_names=first, seed=0)
    with FakeTensorMode():
        for module in transformer.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    module._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        own = {parameter.untyped_storage()._cdata for parameter in transformer.parameters()}
        inputs = _shapes_only(transformer, work)
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


def _shapes_only(transformer: LTXTransformer, work: Workload) -> dict[str, Modality | None]:
    config = transformer.config

    def stream(tokens: int, channels: int, dimensions: int, width: int) -> Modality | None:
        if tokens == 0:
            return None
        return Modality(
            latent=torch.zeros(work.batch, tokens, channels),
            sigma=torch.zeros(work.batch),
            timesteps=torch.zeros(work.batch, 1),
            positions=torch.zeros(work.batch, dimensions, tokens, 2),
            context=torch.zeros(work.batch, work.text_tokens, width),
        )

    captions = config["caption_channels"] if config["use_prompt_embeddings"] else None
    video_width, audio_width = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    return {
        "video": stream(work.video_tokens, config["in_channels"], 3, captions or video_width),
        "audio": stream(work.audio_tokens, config["audio_in_channels"], 1, captions or audio_width),
    }


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
        raise ValueError(f"hsdp: {gpus} GPUs cannot hold {replicas} sharded copies of the model.")
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
