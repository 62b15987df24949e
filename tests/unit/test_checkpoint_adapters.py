"""Weights files: official names, precision, and the same model when they are read back."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.checkpoints.adapters import collect_weights, load_weights, weights_metadata
from ltx_trainer_plus.checkpoints.state import CheckpointError
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config.schema import LoraConfig
from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import load_transformer
from ltx_trainer_plus.models.lora import add_lora, lora_target_names

LORA = LoraConfig(rank=4, alpha=8)
Make = Callable[..., ModelHandle]


@pytest.fixture
def adapted(reference: Path) -> Make:
    """A fresh model with adapters on all targets, trained (by chance) where `seed` is given."""

    def make(seed: int | None = None, rank: int = LORA.rank) -> ModelHandle:
        transformer = load_transformer(reference / "ltx-2.3-tiny.safetensors", torch.float32)
        every = {name for name, _ in transformer.named_parameters()}
        targets = lora_target_names(transformer, LORA.target_modules, every)
        add_lora(transformer, rank=rank, alpha=LORA.alpha, dropout=0.0, target_names=targets, seed=1)
        handle = ModelHandle.of(transformer)
        if seed is not None:
            randomise(handle, seed)
        return handle

    return make


def randomise(handle: ModelHandle, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in handle.trainable_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def output(handle: ModelHandle, reference: Path) -> torch.Tensor:
    io = load_file(reference / "ltx-2.3-tiny-io.safetensors")
    parts = ("latent", "sigma", "timesteps", "positions", "context")
    video, audio = (Modality(**{part: io[f"{stream}_{part}"] for part in parts}) for stream in ("video", "audio"))
    with torch.no_grad():
        return handle(video=video, audio=audio, perturbations=None)[0]


def test_a_lora_file_has_the_official_names_and_shapes_in_the_asked_precision(adapted: Make, reference: Path) -> None:
    official = json.loads((reference / "lora_keys.json").read_text())
    weights = collect_weights(adapted(), LORA)
    assert {n: list(t.shape) for n, t in weights.items()} == official["attention_short_names"]["tensors"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in collect_weights(adapted(), LORA, "float32").values()} == {torch.float32}


def test_a_lora_that_is_saved_and_loaded_into_a_fresh_model_gives_its_output(
    adapted: Make, reference: Path, tmp_path: Path
) -> None:
    trained, fresh = adapted(seed=7), adapted()
    path = CheckpointStore(tmp_path).save(
        5, "lora", collect_weights(trained, LORA, "float32"), weights_metadata(trained, LORA, 5)
    )
    expected = output(trained, reference)
    assert not torch.allclose(output(fresh, reference), expected, atol=1e-3)
    load_weights(fresh, path, LORA)
    torch.testing.assert_close(output(fresh, reference), expected, atol=1e-6, rtol=0)


def test_a_whole_model_that_is_saved_is_read_as_a_model_and_as_a_checkpoint(reference: Path, tmp_path: Path) -> None:
    base = reference / "ltx-2.3-tiny.safetensors"
    trained = ModelHandle.of(load_transformer(base, torch.float32))
    randomise(trained, seed=7)
    path = CheckpointStore(tmp_path).save(
        5, "full", collect_weights(trained, None, "float32"), weights_metadata(trained, None, 5)
    )
    assert load_file(path).keys() == load_file(base).keys()
    expected = output(trained, reference)
    assert torch.equal(output(ModelHandle.of(load_transformer(path, torch.float32)), reference), expected)
    other = ModelHandle.of(load_transformer(base, torch.float32))
    load_weights(other, path, None)
    assert torch.equal(output(other, reference), expected)


def test_collected_weights_do_not_change_while_training_goes_on(adapted: Make) -> None:
    handle = adapted()
    weights = collect_weights(handle, LORA, "float32")
    before = {name: tensor.clone() for name, tensor in weights.items()}
    randomise(handle, seed=3)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.items())


def test_no_name_of_a_wrapper_is_in_a_file(adapted: Make) -> None:
    handle = adapted()
    compiled = ModelHandle.of(torch.compile(handle.meta_module))
    assert collect_weights(compiled, LORA).keys() == collect_weights(handle, LORA).keys()


def test_the_header_says_what_wrote_the_file_and_at_which_step(adapted: Make, tmp_path: Path) -> None:
    handle = adapted()
    path = CheckpointStore(tmp_path).save(5, "lora", collect_weights(handle, LORA), weights_metadata(handle, LORA, 5))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["step"] == "5"
    assert metadata["trainer"].startswith("ltx-trainer-plus")


def test_another_rank_or_kind_of_file_is_an_error_that_names_the_file(
    adapted: Make, reference: Path, tmp_path: Path
) -> None:
    path = tmp_path / "lora.safetensors"
    save_file(collect_weights(adapted(rank=2), LoraConfig(rank=2, alpha=8)), path)
    with pytest.raises(CheckpointError, match=r"lora\.safetensors cannot be loaded.*rank 2"):
        load_weights(adapted(), path, LORA)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_weights(adapted(), reference / "ltx-2.3-tiny.safetensors", LORA)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_weights(ModelHandle.of(load_transformer(reference / "ltx-2.3-tiny.safetensors")), path, None)
