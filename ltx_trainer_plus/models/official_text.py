"""The text side of official LTX files, as diffusers' `LTX2TextConnectors`."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from safetensors import SafetensorError, safe_open

from ltx_trainer_plus.errors import ModelError

logger = logging.getLogger(__name__)

_PREFIX = "model.diffusion_model."
_FIRST = {  # official → diffusers, as the first parts of a name
    "text_embedding_projection.aggregate_embed.": "text_proj_in.",
    "text_embedding_projection.video_aggregate_embed.": "video_text_proj_in.",
    "text_embedding_projection.audio_aggregate_embed.": "audio_text_proj_in.",
    "video_embeddings_connector.": "video_connector.",
    "audio_embeddings_connector.": "audio_connector.",
}
_LATER = {"transformer_1d_blocks": "transformer_blocks", "q_norm": "norm_q", "k_norm": "norm_k"}

_SIZES = {  # of one connector: official → diffusers, and the official default
    "num_attention_heads": ("num_attention_heads", 30),
    "attention_head_dim": ("attention_head_dim", 128),
    "num_layers": ("num_layers", 2),
    "num_learnable_registers": ("num_learnable_registers", 128),
}
_ONLY_VALUE = {
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
}
_TEXT_SIDE = ("connector_", "audio_connector_", "caption_proj_", "caption_projection_")
_KNOWN = {
    *_ONLY_VALUE,
    *(prefix + size for prefix in ("connector_", "audio_connector_") for size in _SIZES),
    "caption_proj_before_connector",
    "connector_apply_gated_attention",
    "connector_positional_embedding_max_pos",
}


def load_official_connectors(path: Path, dtype: torch.dtype, device: str | torch.device) -> LTX2TextConnectors:
    """Read the text projection and both connectors, each tensor straight to `device`.

    Raises:
        ModelError: a file without a text side, or one that this project cannot honour.
    """
    try:
        file = safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ModelError(f"{path} is not a whole .safetensors file ({error}).\n  Download it again.") from error
    with file:
        keys = connector_keys(file.keys())
        metadata = file.metadata() or {}
        if not keys or "config" not in metadata:
            raise ModelError(no_text_side(path))
        shapes = {name: tuple(file.get_slice(key).get_shape()) for name, key in keys.items()}
        try:
            config = connector_config(json.loads(metadata["config"]).get("transformer", {}), shapes)
        except KeyError as missing:
            raise ModelError(f"{path}: the text side lacks {missing}.\n  Download the file again.") from missing
        with torch.device("meta"):
            connectors = LTX2TextConnectors(**config)
        _check_fit(path, {name: tuple(value.shape) for name, value in connectors.state_dict().items()}, shapes)
        # Copied: a CPU tensor of an open file is a window onto the file.
        tensors = {name: file.get_tensor(key).to(dtype, copy=True) for name, key in keys.items()}
    connectors.load_state_dict(tensors, assign=True)
    return connectors


def has_text_side(path: Path) -> bool:
    """Whether `path` is an official file that holds the text projection and the connectors."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool(connector_keys(file.keys())) and "config" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def no_text_side(path: Path) -> str:
    """What to say where `has_text_side` is False."""
    return (
        f"{path}: there is no text side in this file (text_embedding_projection.*, *_embeddings_connector.*, and a "
        "`config` in its metadata).\n"
        "  Give the complete official checkpoint or a diffusers pipeline folder."
    )


def _check_fit(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    lines = [f"{name}: missing" for name in sorted(expected.keys() - found.keys())]
    lines += [f"{name}: unexpected" for name in sorted(found.keys() - expected.keys())]
    lines += [
        f"{name}: {found[name]}, the config makes it {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    if lines:
        raise ModelError(
            f"{path}: the text side does not fit its own config ({len(lines)} tensors, among them):\n  "
            + "\n  ".join(lines[:5])
            + "\nUse the official file as it was published."
        )


def connector_keys(keys: Iterable[str]) -> dict[str, str]:
    """Parameter name of `LTX2TextConnectors` → key in the file, for the text side's keys of an official file."""
    found = {}
    for key in keys:
        bare = key.removeprefix(_PREFIX)
        for official, ours in _FIRST.items():
            if bare.startswith(official):
                rest = bare.removeprefix(official).split(".")
                found[ours + ".".join(_LATER.get(part, part) for part in rest)] = key
    return found


def connector_config(official: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Arguments of `LTX2TextConnectors`.

    Args:
        official: the `transformer` section of an official file's config.
        shapes: of the file's tensors, by the names that `connector_keys` gives them.

    Raises:
        ModelError: a value that this project cannot honour.

    Source: docs/design.md, "The model"; checked against tests/reference/ltx-2*-tiny-text-io.safetensors.
    """
    wrong = [f"  {key}: {official[key]!r}" for key, only in _ONLY_VALUE.items() if official.get(key, only) != only]
    if wrong:
        raise ModelError(
            "The checkpoint's text projection is of a kind that this project does not know:\n"
            + "\n".join(wrong)
            + "\nUse an official LTX-2 or LTX-2.3 checkpoint."
        )
    unknown = sorted(key for key in official if key.startswith(_TEXT_SIDE) and key not in _KNOWN)
    if unknown:
        logger.warning("Ignoring unknown keys of the text side in the checkpoint's config: %s", ", ".join(unknown))

    config: dict[str, Any] = {}
    for size, (ours, default) in _SIZES.items():
        video = official.get(f"connector_{size}", default)
        config[f"video_connector_{ours}"] = video
        config[f"audio_connector_{ours}"] = official.get(f"audio_connector_{size}", video)
    split = official.get("caption_proj_before_connector", False)
    first = "video_text_proj_in" if split else "text_proj_in"
    gated = official.get("connector_apply_gated_attention", False)
    (positions,) = official.get("connector_positional_embedding_max_pos", (4096,))
    return {
        **config,
        # The text encoder's width and its number of layers shape the projection only by their product, and text-side
        # files state neither.
        "caption_channels": shapes[f"{first}.weight"][1] if split else shapes[f"{first}.weight"][0],
        "text_proj_in_factor": 1 if split else shapes[f"{first}.weight"][1] // shapes[f"{first}.weight"][0],
        "proj_bias": f"{first}.bias" in shapes,
        "per_modality_projections": split,
        "video_hidden_dim": shapes["video_text_proj_in.weight"][0] if split else 0,
        "audio_hidden_dim": shapes["audio_text_proj_in.weight"][0] if split else 0,
        "video_gated_attn": gated,
        "audio_gated_attn": gated,
        "connector_rope_base_seq_len": positions,
        "rope_type": official.get("rope_type", "split"),
        "rope_double_precision": official.get("frequencies_precision") == "float64",
    }
