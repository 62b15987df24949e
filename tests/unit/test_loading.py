"""Loading the transformer: the layouts that are read, and what is said about those that are not."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models import load_transformer, read_transformer_config, transformer_on_meta
from ltx_trainer_plus.models.lora import official_full_tensors
from ltx_trainer_plus.models.official import config_from_official, config_to_official

MODELS = ("ltx-2-tiny", "ltx-2.3-tiny", "ltx-2.5-tiny")


@pytest.fixture
def official(reference: Path) -> Path:
    return reference / "ltx-2.3-tiny.safetensors"


def config_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["config"])


def rewritten(path: Path, official: Path, *, tensors: dict | None = None, config: dict | None = None) -> Path:
    metadata = {"config": json.dumps(config if config is not None else config_of(official))}
    save_file(load_file(official) if tensors is None else tensors, path, metadata=metadata)
    return path


def weights(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    return load_transformer(path, dtype=torch.float32, **options).state_dict()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_computation_get_the_dtype_that_was_asked_for(official: Path, dtype: torch.dtype) -> None:
    transformer = load_transformer(official, dtype=dtype)
    assert {p.dtype for p in transformer.parameters()} == {dtype}
    assert transformer.compute_dtype == dtype
    assert not transformer.training
    assert transformer.num_blocks == 3


def test_other_components_in_the_file_are_left_alone(official: Path, tmp_path: Path) -> None:
    extra = {
        "vae.encoder.conv_in.weight": torch.ones(2),
        "audio_vae.decoder.conv_in.weight": torch.ones(2),
        "vocoder.conv_pre.weight": torch.ones(2),
        "text_embedding_projection.aggregate_embed.weight": torch.ones(2),
        "model.diffusion_model.video_embeddings_connector.learnable_registers": torch.ones(2),
        "model.diffusion_model.audio_embeddings_connector.learnable_registers": torch.ones(2),
    }
    path = rewritten(tmp_path / "all.safetensors", official, tensors={**load_file(official), **extra})
    assert_same(weights(path), weights(official))


@pytest.mark.parametrize("shard_size", ["10GB", "200KB"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_diffusers_folder_loads_sharded_or_not(official: Path, tmp_path: Path, shard_size: str, inside: bool) -> None:
    folder = tmp_path / "transformer"
    load_transformer(official, dtype=torch.float32).save_pretrained(folder, max_shard_size=shard_size)
    assert len(list(folder.glob("*.safetensors"))) == (1 if shard_size == "10GB" else 4)
    config = json.loads((folder / "config.json").read_text())
    config |= {"_class_name": "LTX2VideoTransformer3DModel", "perturbed_attn": False}  # as published
    (folder / "config.json").write_text(json.dumps(config))
    transformer = load_transformer(tmp_path if inside else folder, dtype=torch.float32)
    assert_same(transformer.state_dict(), weights(official))
    assert all(block.perturbed_attn for block in transformer.transformer_blocks)


@pytest.mark.parametrize("model", MODELS)
def test_a_full_fine_tune_is_written_as_an_official_file_that_loads_back(
    reference: Path, tmp_path: Path, model: str
) -> None:
    original = reference / f"{model}.safetensors"
    transformer = load_transformer(original, dtype=torch.float32)
    tensors = official_full_tensors(dict(transformer.named_parameters()))
    assert tensors.keys() == load_file(original).keys()
    config = {"transformer": config_to_official(transformer.config)}
    path = rewritten(tmp_path / "model.safetensors", original, tensors=tensors, config=config)
    again = load_transformer(path, dtype=torch.float32)
    assert_same(again.state_dict(), transformer.state_dict())
    assert read_transformer_config(path).items() <= dict(transformer.config).items()


def test_rewriting_the_file_does_not_change_a_loaded_model(official: Path, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "model.safetensors", official)
    transformer = load_transformer(path, dtype=torch.float32)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 400_000)
        file.write(bytes(400_000))
    assert_same(transformer.state_dict(), weights(official))


def test_the_structure_is_known_without_reading_weights(official: Path) -> None:
    on_meta = transformer_on_meta(official)
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    loaded = load_transformer(official)
    assert {n: p.shape for n, p in on_meta.named_parameters()} == {n: p.shape for n, p in loaded.named_parameters()}
    assert transformer_on_meta(loaded.config).num_blocks == 3


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model at .*nowhere\.safetensors"):
        load_transformer(tmp_path / "nowhere.safetensors")


def test_a_folder_without_a_transformer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="diffusers LTX-2 pipeline folder"):
        load_transformer(tmp_path)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "LTXVideoTransformer3DModel"}))
    with pytest.raises(ValueError, match="LTXVideoTransformer3DModel, not LTX2VideoTransformer3DModel"):
        load_transformer(tmp_path)


def test_a_folder_that_lacks_a_shard_is_refused(official: Path, tmp_path: Path) -> None:
    load_transformer(official).save_pretrained(tmp_path, max_shard_size="100KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match=r"lacks diffusion_pytorch_model-00002-of-\d+\.safetensors"):
        load_transformer(tmp_path)


def test_a_cut_off_file_is_refused(official: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(official.read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"not a whole \.safetensors file"):
        load_transformer(path)


def test_a_file_without_config_metadata_is_refused(official: Path, tmp_path: Path) -> None:
    save_file(load_file(official), tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="no `config` in its metadata"):
        load_transformer(tmp_path / "bare.safetensors")


def test_a_config_without_a_transformer_is_refused(official: Path, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "m.safetensors", official, config={"vae": {}})
    with pytest.raises(ValueError, match=r"no `transformer` section \(only: vae\)"):
        load_transformer(path)


def test_a_lora_is_not_a_model(official: Path, tmp_path: Path) -> None:
    tensors = {"diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(4, 32)}
    with pytest.raises(ValueError, match="is a LoRA, not a model"):
        load_transformer(rewritten(tmp_path / "lora.safetensors", official, tensors=tensors))


def test_a_vae_is_not_a_transformer(official: Path, tmp_path: Path) -> None:
    tensors = {"vae.encoder.conv_in.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"holds no transformer.*looks like: video VAE"):
        load_transformer(rewritten(tmp_path / "vae.safetensors", official, tensors=tensors))


def test_missing_and_unexpected_tensors_are_both_named(official: Path, tmp_path: Path) -> None:
    tensors = load_file(official)
    del tensors["model.diffusion_model.patchify_proj.bias"]
    tensors["model.diffusion_model.novel.weight"] = torch.ones(2)
    path = rewritten(tmp_path / "m.safetensors", official, tensors=tensors)
    with pytest.raises(ValueError, match=r"(?s)1 missing, among them proj_in\.bias.*1 unexpected, .*\.novel\.weight"):
        load_transformer(path)


def test_a_quantised_file_is_called_so(official: Path, tmp_path: Path) -> None:
    tensors = load_file(official) | {"model.diffusion_model.patchify_proj.weight_scale": torch.ones(1)}
    with pytest.raises(ValueError, match="The file is quantised"):
        load_transformer(rewritten(tmp_path / "m.safetensors", official, tensors=tensors))


def test_a_shape_that_contradicts_the_config_is_named(official: Path, tmp_path: Path) -> None:
    tensors = load_file(official) | {"model.diffusion_model.patchify_proj.weight": torch.ones(4, 4)}
    with pytest.raises(ValueError, match=r"patchify_proj\.weight has shape \(4, 4\)"):
        load_transformer(rewritten(tmp_path / "m.safetensors", official, tensors=tensors))


def test_config_values_that_cannot_be_honoured_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"(?s)positional_embedding_type: 'sinusoidal'.*rope_type: 'spiral'"):
        config_from_official({"positional_embedding_type": "sinusoidal", "rope_type": "spiral"})


def test_unknown_config_keys_are_a_warning_that_names_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config_from_official({"num_layers": 3, "connector_num_layers": 2, "quantum_attention": True})
    assert "quantum_attention" in caplog.text
    assert "connector_num_layers" not in caplog.text


def test_config_defaults_are_the_official_ones() -> None:
    config = config_from_official({})
    assert config["rope_type"] == "split"
    assert config["cross_attn_timestep_scale_multiplier"] == 1
    assert config["use_prompt_embeddings"] is True
    assert config["rope_double_precision"] is False


def test_a_model_whose_streams_differ_has_no_official_config(official: Path) -> None:
    config = {**read_transformer_config(official), "audio_gated_attn": False}
    with pytest.raises(ValueError, match="gated_attn is True but audio_gated_attn is False"):
        config_to_official(config)
