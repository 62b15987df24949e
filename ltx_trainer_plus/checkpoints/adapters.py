"""The weights file of a checkpoint: what was trained, in official names and the precision that is asked for."""

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ltx_trainer_plus.checkpoints.state import CheckpointError, versions
from ltx_trainer_plus.config.schema import LoraConfig
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.lora import load_full, load_lora, official_full_tensors, official_lora_tensors
from ltx_trainer_plus.models.official import config_to_official
from ltx_trainer_plus.models.shards import whole

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def collect_weights(
    handle: ModelHandle,
    lora: LoraConfig | None,
    precision: Literal["bfloat16", "float32"] = "bfloat16",
    *,
    keeps: bool = True,
) -> dict[str, Tensor]:
    """Copy the weights out as CPU tensors that training does not change any more.

    Args:
        lora: the adapters' settings; None = full fine-tuning, where the whole transformer is taken.
        precision: of the file (`checkpoints.precision`); the masters in the training state keep theirs.
        keeps: False where another process writes the file and this one only helps to gather it: every process has
            to take part for sharded weights, and gets empty tensors then. A big model is gathered tensor by tensor and
            lies in one host memory only.
    """
    if lora is None:
        tensors = official_full_tensors(dict(handle.meta_module.named_parameters()))
    else:
        # Folding alpha happens in the masters' float32, before rounding.
        tensors = official_lora_tensors(dict(handle.trainable_parameters()), rank=lora.rank, alpha=lora.alpha)

    def copied_out(tensor: Tensor) -> Tensor:
        gathered = whole(tensor.detach().to(_DTYPES[precision]))
        return gathered.to("cpu", copy=True).contiguous() if keeps else torch.empty(0)

    return {name: copied_out(tensor) for name, tensor in tensors.items()}


def weights_metadata(handle: ModelHandle, lora: LoraConfig | None, step: int) -> dict[str, str]:
    """Header entries of the weights file; in a full model's, the `config` by which `load_transformer` reads it."""
    metadata = {"step": str(step), "trainer": f"ltx-trainer-plus {versions().get('ltx-trainer-plus', '')}".strip()}
    if lora is None:
        metadata["config"] = json.dumps({"transformer": config_to_official(handle.config)})
    return metadata


def load_weights(handle: ModelHandle, path: Path, lora: LoraConfig | None) -> None:
    """Copy a weights file into the prepared model, on every rank alike.

    Not needed where a `full` training state follows, which holds the unrounded masters.

    Args:
        lora: the adapters' settings; None = full fine-tuning.

    Raises:
        CheckpointError: the file is of another kind, model, rank or set of target modules; names are given.
    """
    try:
        tensors = load_file(path)
        if lora is None:
            load_full(handle.meta_module, tensors)
        else:
            load_lora(handle.meta_module, tensors, rank=lora.rank, alpha=lora.alpha)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"model.load_checkpoint: {path} cannot be loaded. {error}") from error


def read_reference_scale(path: Path) -> ReferenceScale:
    """How much smaller than their targets the video references were that a weights file was trained with.

    Raises:
        CheckpointError: the file cannot be read, or its header says something impossible.
    """
    try:
        with safe_open(path, "pt") as file:
            return ReferenceScale.from_metadata(file.metadata() or {})
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
