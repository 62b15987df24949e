"""Loading the transformer from an official single file or a diffusers folder."""

import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models.json_files import read_json
from ltx_trainer_plus.models.official import TRANSFORMER_PREFIX, config_from_official, transformer_keys
from ltx_trainer_plus.models.shards import copy_into
from ltx_trainer_plus.models.transformer import LTXTransformer

logger = logging.getLogger(__name__)

_WEIGHTS = "diffusion_pytorch_model.safetensors"
_COMPONENTS = {
    "vae.": "video VAE",
    "audio_vae.": "audio VAE",
    "vocoder.": "vocoder",
    "text_embedding_projection.": "text projection",
    "encoder.": "VAE encoder",
    "decoder.": "VAE decoder",
}


def load_transformer(
    path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> LTXTransformer:
    """Load the bare transformer, in eval mode.

    Args:
        path: an official single file (transformer alone or with other components in it), a diffusers pipeline
            folder, or its `transformer` folder.
        dtype: of the weights, and of the computation until `compute_dtype` is changed.
        device: where each tensor goes straight from the mapped file; there is never a second copy of the model.

    Raises:
        ModelError: nothing at `path`, a folder without a transformer, not a transformer checkpoint, a config that
            cannot be honoured, or tensors that do not fit it.
    """
    path = Path(path)
    transformer = transformer_on_meta(path)
    # A CPU tensor from safe_open is a window onto the file: copy it, or rewriting the file would change the model.
    copies = torch.device(device).type == "cpu"
    for name, tensors, key in _stored(path, transformer, str(device)):
        owner, _, leaf = name.rpartition(".")
        setattr(transformer.get_submodule(owner), leaf, nn.Parameter(tensors.get_tensor(key).to(dtype, copy=copies)))
    transformer.compute_dtype = dtype
    return transformer.eval()


def read_into(transformer: LTXTransformer, path: Path) -> None:
    """Read the checkpoint at `path` into a transformer that has its memory already, sharded or not.

    Every process reads only its own part of every tensor, so that the model exists once over all of them. Adapters
    keep their values; the parameters keep their dtypes.

    Raises: as `load_transformer`.
    """
    # peft keeps the weights of an adapted linear under another name.
    own = {name.replace(".base_layer.", "."): parameter for name, parameter in transformer.named_parameters()}
    for name, tensors, key in _stored(path, transformer_on_meta(transformer.config), "cpu"):
        copy_into(own[name], tensors.get_slice(key))


def _stored(path: Path, transformer: LTXTransformer, device: str) -> Iterator[tuple[str, Any, str]]:
    """Parameter name, open file, key in it, of everything stored at `path`, which has to fit `transformer`."""
    sources = _folder_sources(_transformer_folder(path)) if path.is_dir() else _file_sources(path)
    _check_fit(path, transformer, sources)
    shapes = {name: parameter.shape for name, parameter in transformer.named_parameters()}
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, (file, key) in sources.items():
        by_file.setdefault(file, []).append((name, key))
    for file, names in by_file.items():
        with _open(file, device) as tensors:
            for name, key in names:
                found = tuple(tensors.get_slice(key).get_shape())
                if found != shapes[name]:
                    raise ModelError(
                        f"{file}: {key} has shape {found}, but the checkpoint's config makes it "
                        f"{tuple(shapes[name])}. The file and its config do not belong together."
                    )
                yield name, tensors, key


def read_transformer_config(path: str | Path) -> dict[str, Any]:
    """Arguments of `LTXTransformer` for the checkpoint at `path`, without reading a weight.

    Raises: as `load_transformer`.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(
            f"There is no model at {path}. Give a downloaded LTX-2 .safetensors file or a diffusers pipeline folder."
        )
    if path.is_dir():
        return _known_config(read_json(_transformer_folder(path) / "config.json"))
    with _open(path, "cpu") as tensors:
        _check_is_transformer(path, list(tensors.keys()))
        metadata = tensors.metadata() or {}
    if "config" not in metadata:
        raise ModelError(
            f"{path} has no `config` in its metadata, so the shape of the model is unknown. "
            "Use the official LTX-2 single file as it was published (re-saving drops the metadata)."
        )
    config = json.loads(metadata["config"])
    if "transformer" not in config:
        raise ModelError(
            f"{path}: the `config` in its metadata has no `transformer` section (only: {', '.join(config)}). "
            "Use the official LTX-2 single file as it was published."
        )
    return config_from_official(config["transformer"])


def transformer_on_meta(
    path_or_config: str | Path | Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> LTXTransformer:
    """The transformer without weights: names, shapes and structure only, for dry runs, tracing and sharding.

    `path_or_config` is a checkpoint, or the config of a transformer (`read_transformer_config`, `handle.config`).
    """
    config = path_or_config if isinstance(path_or_config, Mapping) else read_transformer_config(path_or_config)
    with torch.device("meta"):
        # diffusers adds notes of its own (`_class_name`, ...) to the config of a loaded model.
        transformer = LTXTransformer(**{key: value for key, value in config.items() if not key.startswith("_")})
    # Not diffusers' `to`, which warns of a cast that it would rather do while loading.
    nn.Module.to(transformer, dtype)
    transformer.compute_dtype = dtype
    return transformer


def _open(path: Path, device: str) -> Any:
    try:
        return safe_open(path, framework="pt", device=device)
    except SafetensorError as error:
        raise ModelError(
            f"{path} is not a whole .safetensors file ({error}). Download it again, or give the right file."
        ) from error


def _check_is_transformer(path: Path, keys: list[str]) -> None:
    if any(".lora_" in key for key in keys):
        raise ModelError(
            f"{path} is a LoRA, not a model. Give the base model here, and the LoRA as `model.load_checkpoint`."
        )
    if transformer_keys(keys):
        return
    components = sorted({name for prefix, name in _COMPONENTS.items() if any(k.startswith(prefix) for k in keys)})
    raise ModelError(
        f"{path} holds no transformer: no key starts with {TRANSFORMER_PREFIX!r} "
        f"(it looks like: {', '.join(components) or 'something else'}; first keys: {', '.join(keys[:3]) or 'none'}). "
        "Give the LTX-2 transformer's or the all-in-one file, or a diffusers pipeline folder."
    )


def _transformer_folder(path: Path) -> Path:
    for folder in (path / "transformer", path):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(
        f"{path} has neither transformer/config.json nor config.json. Give a diffusers LTX-2 pipeline folder "
        "(the one with model_index.json) or a single .safetensors file."
    )


def _known_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("_class_name") not in ("LTX2VideoTransformer3DModel", "LTXTransformer"):
        raise ModelError(
            f"The folder's config.json describes {config.get('_class_name')}, not LTX2VideoTransformer3DModel. "
            "Give the folder of an LTX-2, 2.3 or 2.5 pipeline."
        )
    known = inspect.signature(LTXTransformer.__init__).parameters
    unknown = sorted(key for key in config if key not in known and not key.startswith("_"))
    if unknown:
        logger.warning("Ignoring unknown keys in the transformer's config.json: %s", ", ".join(unknown))
    return {key: value for key, value in config.items() if key in known} | {"perturbed_attn": True}


def _file_sources(path: Path) -> dict[str, tuple[Path, str]]:
    """Parameter name → (file, key in it)."""
    with _open(path, "cpu") as tensors:
        return {name: (path, key) for name, key in transformer_keys(tensors.keys()).items()}


def _folder_sources(folder: Path) -> dict[str, tuple[Path, str]]:
    """Parameter name → (file, key in it), whether the folder's weights are in one file or sharded."""
    index = folder / f"{_WEIGHTS}.index.json"
    if index.is_file():
        files = sorted({folder / name for name in read_json(index)["weight_map"].values()})
    else:
        files = [folder / _WEIGHTS]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}. Download the folder again, completely, with its .safetensors files."
        )
    sources = {}
    for file in files:
        with _open(file, "cpu") as tensors:
            sources.update({key: (file, key) for key in tensors.keys()})  # noqa: SIM118 (not a dict)
    return sources


def _check_fit(path: Path, transformer: nn.Module, sources: Mapping[str, tuple[Path, str]]) -> None:
    expected = set(transformer.state_dict())
    missing, unexpected = sorted(expected - set(sources)), sorted(set(sources) - expected)
    if not missing and not unexpected:
        return
    lines = [f"{path} does not fit its own transformer config:"]
    if missing:
        lines.append(f"  {len(missing)} missing, among them {', '.join(missing[:5])}")
    if unexpected:
        lines.append(f"  {len(unexpected)} unexpected, among them {', '.join(sources[n][1] for n in unexpected[:5])}")
    if any(name.endswith("_scale") for name in unexpected):
        lines.append("The file is quantised (it has scales): use the bf16 file of the same model.")
    else:
        lines.append("Use an official LTX-2, 2.3 or 2.5 file; a damaged download shows itself like this too.")
    raise ModelError("\n".join(lines))
