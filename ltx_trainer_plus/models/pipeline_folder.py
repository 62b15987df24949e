"""Where each component lies in a diffusers pipeline folder, and what is missing there: metadata only."""

from collections.abc import Iterable
from pathlib import Path

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models.json_files import read_json
from ltx_trainer_plus.models.official_text import has_text_side, no_text_side

_NAMES = {
    "vae": "video VAE",
    "audio_vae": "audio VAE",
    "vocoder": "vocoder",
    "connectors": "text connectors",
    "text_encoder": "text encoder (Gemma)",
}


def component_folder(path: str | Path, name: str, what: str | None = None) -> Path:
    """Find one component in a pipeline folder.

    Args:
        path: the pipeline folder.
        name: the component's folder in it: `vae`, `audio_vae`, `vocoder`, `connectors`, `text_encoder`.
        what: how errors call it; None = by its usual name.

    Raises:
        ModelError: `path` is a single file (an official checkpoint), or there is no such component, or not all of it.
    """
    path, what = Path(path), what or _NAMES[name]
    if path.is_file():
        raise ModelError(
            f"{path}: the {what} cannot be read from a single official file yet.\n"
            f"  Give a diffusers pipeline folder (the one with model_index.json and {name}/ in it)."
        )
    folder = path / name
    if not (folder / "config.json").is_file():
        found = (
            ", ".join(sorted(entry.name for entry in path.iterdir())) if path.is_dir() else "nothing: no such folder"
        )
        raise ModelError(
            f"{path}: there is no {what} here ({name}/config.json is missing; found: {found}).\n"
            "  Give a complete diffusers pipeline folder."
        )
    _check_weights(folder)
    return folder


def text_encoder_folders(model_path: str | Path, text_encoder_path: str | Path | None = None) -> tuple[Path, Path]:
    """Find the text encoder and its tokenizer.

    Args:
        model_path: a pipeline folder, used where `text_encoder_path` is None.
        text_encoder_path: a Gemma folder (with its tokenizer in it or beside it), or a pipeline folder.

    Raises:
        ModelError: a single file, or no text encoder or no tokenizer there, or not all of it.
    """
    path = Path(model_path if text_encoder_path is None else text_encoder_path)
    if path.is_file():
        raise ModelError(
            f"{path}: the text encoder (Gemma) cannot be read from a single file yet.\n"
            "  Set model.text_encoder_path to a Gemma folder (config.json, model-*.safetensors, tokenizer.json), or to "
            "a diffusers pipeline folder of the model."
        )
    if (path / "config.json").is_file():
        folder = path
        _check_weights(folder)
    else:
        folder = component_folder(path, "text_encoder")
    for candidate in (path / "tokenizer", path, path.parent / "tokenizer"):
        if any((candidate / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            return folder, candidate
    raise ModelError(
        f"{path}: there is no tokenizer here (neither tokenizer.json nor tokenizer/tokenizer.json).\n"
        "  Give a complete Gemma folder, or a diffusers pipeline folder with tokenizer/ in it."
    )


def check_components(
    model_path: str | Path, *, needed: Iterable[str], text_encoder_path: str | Path | None = None
) -> list[str]:
    """Look for components without loading them.

    Args:
        model_path: a pipeline folder or an official file.
        needed: names as for `component_folder`.
        text_encoder_path: as for `text_encoder_folders`.

    Returns:
        A problem per component that is not there, with its remedy.
    """
    path = Path(model_path)
    problems = []
    for name in needed:
        try:
            if name == "text_encoder":
                text_encoder_folders(path, text_encoder_path)
            elif name != "connectors" or not path.is_file():
                component_folder(path, name)
            elif not has_text_side(path):
                problems.append(no_text_side(path))
        except ModelError as error:
            problems.append(str(error))
    return problems


def _check_weights(folder: Path) -> None:
    indices = list(folder.glob("*.safetensors.index.json"))
    shards = {shard for index in indices for shard in read_json(index)["weight_map"].values()}
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if not shards and not any(folder.glob("*.safetensors")):
        missing = ["its .safetensors file"]
    if missing:
        raise ModelError(f"{folder}: {', '.join(missing)} is missing.\n  Download the folder again, completely.")
