"""The texts of validation, encoded once at the start: the text encoder is gone before training begins."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models.components import encoding_dtype
from ltx_trainer_plus.models.text import encode_prompts, load_connectors, load_text_encoder
from ltx_trainer_plus.parallel.collectives import from_main
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation.checks import uses_negative_prompt


@dataclass(frozen=True)
class PromptContexts:
    """What the model attends to for each prompt, (1, S, D) and (1, S, D') on the CPU.

    Attributes:
        positive: one entry per different prompt.
        negative: of the negative prompt; None where no stream uses CFG.
    """

    positive: Mapping[str, TextContext]
    negative: TextContext | None = None


def encode_validation_prompts(config: TrainerConfig, topology: Topology) -> PromptContexts:
    """Encode the prompts of all samples, and the negative prompt where CFG is on.

    A collective: the main process loads the text encoder and the connectors, encodes and lets them go; the others
    receive the result, so a host holds one text encoder however many processes it runs.

    Raises:
        ModelError: see `load_text_encoder` and `load_connectors`.
    """
    return from_main(lambda: _encode(config, topology.device), topology)


def _encode(config: TrainerConfig, device: torch.device) -> PromptContexts:
    validation = config.validation
    prompts = list(dict.fromkeys(sample.prompt for sample in validation.samples))
    if not prompts:
        return PromptContexts({})
    negative = [validation.negative_prompt] if uses_negative_prompt(validation) else []
    dtype = encoding_dtype(device)
    encoder = load_text_encoder(config.model.model_path, config.model.text_encoder_path, dtype, device)
    connectors = load_connectors(config.model.model_path, dtype, device)
    contexts = encode_prompts([*prompts, *negative], encoder, connectors)
    del encoder, connectors
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return PromptContexts(
        positive=dict(zip(prompts, contexts[: len(prompts)], strict=True)),
        negative=contexts[-1] if negative else None,
    )
