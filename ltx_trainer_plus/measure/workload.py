"""What a process trains on in a micro-step, and a model with inputs of that size that have shapes and no memory."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.models import LTXTransformer, transformer_on_meta
from ltx_trainer_plus.models.example_inputs import example_inputs
from ltx_trainer_plus.models.lora import add_lora


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


def shape_transformer(
    config: Mapping[str, Any], blocks: Sequence[int], weights: torch.dtype, *, lora_targets: Collection[str], rank: int
) -> LTXTransformer:
    """A model on the meta device, ready to be trained, of the blocks with these numbers alone.

    Args:
        lora_targets: names of the adapted linear layers of the whole model; empty = full fine-tuning.
    """
    transformer = transformer_on_meta({**config, "num_layers": len(blocks)}, weights)
    numbers = {block: number for number, block in enumerate(blocks)}
    adapted = [
        f"transformer_blocks.{numbers[block]}.{layer}"
        for block, layer in block_layers(lora_targets)
        if block in numbers
    ]
    if lora_targets:
        transformer.requires_grad_(False)
    if adapted:
        add_lora(transformer, rank=rank, alpha=rank, dropout=0, target_names=adapted, seed=0)
    return transformer.train()


def block_layers(names: Iterable[str]) -> list[tuple[int, str]]:
    """`transformer_blocks.3.attn1.to_q` as (3, `attn1.to_q`), for each name."""
    parts = (name.split(".", 2) for name in names)
    return [(int(block), layer) for _, block, layer in parts]


def shape_inputs(transformer: LTXTransformer, work: Workload) -> dict[str, Modality | None]:
    """The transformer's arguments for a micro-step, on the default device, all zero; None for no stream."""
    return example_inputs(
        transformer.config,
        video_tokens=work.video_tokens,
        audio_tokens=work.audio_tokens,
        text_tokens=work.text_tokens,
        batch=work.batch,
    )
