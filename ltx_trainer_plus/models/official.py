"""Names and configuration of official LTX single-file checkpoints, to and from those of diffusers."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ltx_trainer_plus.errors import ModelError

logger = logging.getLogger(__name__)

TRANSFORMER_PREFIX = "model.diffusion_model."
"""Official single files keep the transformer's tensors behind this."""

LORA_PREFIX = "diffusion_model."
"""Official LoRA files name their targets with this in front."""

# Of the text side, although official files keep them behind the transformer's prefix.
_NOT_THE_TRANSFORMERS = ("video_embeddings_connector.", "audio_embeddings_connector.")

_FIRST = {  # official → diffusers, only as the first part of a name
    "patchify_proj": "proj_in",
    "audio_patchify_proj": "audio_proj_in",
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}
_LATER = {  # official → diffusers, inside the blocks
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
_FIRST_BACK = {ours: official for official, ours in _FIRST.items()}
_LATER_BACK = {ours: official for official, ours in _LATER.items()}


def from_official_name(name: str) -> str:
    """Parameter name of the transformer from its official name (both without prefix)."""
    return _rename(name, _FIRST, _LATER)


def to_official_name(name: str) -> str:
    """Official name of a transformer parameter (both without prefix)."""
    return _rename(name, _FIRST_BACK, _LATER_BACK)


def _rename(name: str, first: Mapping[str, str], later: Mapping[str, str]) -> str:
    head, *rest = name.split(".")
    return ".".join([first.get(head, head), *(later.get(part, part) for part in rest)])


def transformer_keys(keys: Iterable[str]) -> dict[str, str]:
    """Our parameter name → key in the file, for the transformer's keys among those of an official file."""
    found = {}
    for key in keys:
        name = key.removeprefix(TRANSFORMER_PREFIX)
        if name != key and not name.startswith(_NOT_THE_TRANSFORMERS):
            found[from_official_name(name)] = key
    return found


_SAME_NAME = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "num_layers",
    "cross_attention_dim",
    "audio_num_attention_heads",
    "audio_attention_head_dim",
    "audio_in_channels",
    "audio_out_channels",
    "audio_cross_attention_dim",
    "caption_channels",
    "timestep_scale_multiplier",
    "norm_eps",
    "norm_elementwise_affine",
    "attention_bias",
    "ff_bias",
    "audio_ff_bias",
    "use_prompt_adaln_single",
    "use_keyframes_abs_pos_embedding",
)

# What the blocks of diffusers do; another value would be silently ignored.
_ONLY_VALUE: dict[str, Any] = {
    "activation_fn": "gelu-approximate",
    "adaptive_norm": "single_scale_shift",
    "attention_type": "default",
    "av_cross_ada_norm": True,
    "causal_temporal_positioning": True,
    "cross_attention_norm": True,
    "double_self_attention": False,
    "dropout": 0.0,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "positional_embedding_type": "rope",
    "qk_norm": "rms_norm",
    "share_ff": False,
    "standardization_norm": "rms_norm",
    "upcast_attention": False,
    "use_audio_video_cross_attention": True,
    "use_linear_projection": False,
    "use_middle_indices_grid": True,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "rope_type": ("split", "interleaved"),
    "frequencies_precision": ("float64", "float32"),
}
_OF_NO_EFFECT = {"norm_num_groups", "num_embeds_ada_norm", "project_to_2d_pos", "sample_size"}
_TEXT_SIDE = ("connector_", "audio_connector_", "caption_projection_", "caption_proj_input_norm", "text_encoder_")
_TRANSLATED = {
    "positional_embedding_max_pos",
    "audio_positional_embedding_max_pos",
    "positional_embedding_theta",
    "av_ca_timestep_scale_multiplier",
    "cross_attention_adaln",
    "apply_gated_attention",
    "caption_proj_before_connector",
}


def config_from_official(official: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LTXTransformer` from the `transformer` section of an official file's config.

    Raises:
        ModelError: a key whose value this project cannot honour; all of them are named together.

    Source: docs/design.md, "The model"; checked by loading tests/reference/ltx-2*-tiny.safetensors.
    """
    wrong = [
        f"  {key}: {official[key]!r} (only {only!r} is supported)"
        for key, only in _ONLY_VALUE.items()
        if key in official and official[key] != only
    ]
    wrong += [
        f"  {key}: {official[key]!r} (choose among {', '.join(choices)})"
        for key, choices in _CHOICES.items()
        if key in official and official[key] not in choices
    ]
    if wrong:
        raise ModelError(
            "The checkpoint's transformer config asks for what this project cannot do:\n"
            + "\n".join(wrong)
            + "\nUse an official LTX-2, 2.3 or 2.5 checkpoint."
        )
    known = {*_SAME_NAME, *_ONLY_VALUE, *_CHOICES, *_OF_NO_EFFECT, *_TRANSLATED}
    unknown = sorted(k for k in official if k not in known and not k.startswith(("_", *_TEXT_SIDE)))
    if unknown:
        logger.warning("Ignoring unknown keys in the checkpoint's transformer config: %s", ", ".join(unknown))

    time, height, width = official.get("positional_embedding_max_pos", (20, 2048, 2048))
    (audio_time,) = official.get("audio_positional_embedding_max_pos", (20,))
    cross_adaln = official.get("cross_attention_adaln", False)
    gated = official.get("apply_gated_attention", False)
    return {
        **{key: official[key] for key in _SAME_NAME if key in official},
        "pos_embed_max_pos": time,
        "base_height": height,
        "base_width": width,
        "audio_pos_embed_max_pos": audio_time,
        "rope_theta": official.get("positional_embedding_theta", 10000.0),
        "rope_type": official.get("rope_type", "split"),
        "rope_double_precision": official.get("frequencies_precision") == "float64",
        "cross_attn_timestep_scale_multiplier": official.get("av_ca_timestep_scale_multiplier", 1),
        "cross_attn_mod": cross_adaln,
        "audio_cross_attn_mod": cross_adaln,
        "gated_attn": gated,
        "audio_gated_attn": gated,
        "use_prompt_embeddings": not official.get("caption_proj_before_connector", False),
        "perturbed_attn": True,
    }


def config_to_official(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `transformer` section that makes an official single file of our parameters loadable again.

    Raises:
        ValueError: the streams differ in a switch that official configs have only once.
    """
    for ours, twin in (("cross_attn_mod", "audio_cross_attn_mod"), ("gated_attn", "audio_gated_attn")):
        if config[ours] != config[twin]:
            raise ValueError(
                f"{ours} is {config[ours]} but {twin} is {config[twin]}: an official config has one switch for both, "
                "so this model cannot be written as an official file. Train a LoRA instead."
            )
    return {
        **{key: config[key] for key in _SAME_NAME},
        **_ONLY_VALUE,
        "positional_embedding_max_pos": [config["pos_embed_max_pos"], config["base_height"], config["base_width"]],
        "audio_positional_embedding_max_pos": [config["audio_pos_embed_max_pos"]],
        "positional_embedding_theta": config["rope_theta"],
        "rope_type": config["rope_type"],
        "frequencies_precision": "float64" if config["rope_double_precision"] else "float32",
        "av_ca_timestep_scale_multiplier": config["cross_attn_timestep_scale_multiplier"],
        "cross_attention_adaln": config["cross_attn_mod"],
        "apply_gated_attention": config["gated_attn"],
        "caption_proj_before_connector": not config["use_prompt_embeddings"],
    }
