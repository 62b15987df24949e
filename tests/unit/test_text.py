"""Prompts become exactly what diffusers' pipeline makes of them, and the wrong files are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import LTX2Pipeline
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models.official_text import connector_config, connector_keys
from ltx_trainer_plus.models.text import TextConnectors, TextEncoder, encode_prompts, load_connectors, load_text_encoder

PROMPTS = ["  a red ball bounces, häufig\n", "a blue square slides to the left while a low tone fades, " * 5, ""]


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> LTX2Pipeline:
    return LTX2Pipeline.from_pretrained(tiny_pipeline)


@pytest.fixture(scope="module")
def encoder(tiny_pipeline: Path) -> TextEncoder:
    return load_text_encoder(tiny_pipeline, None, torch.float32)


@pytest.fixture(scope="module")
def connectors(tiny_pipeline: Path) -> TextConnectors:
    return load_connectors(tiny_pipeline, torch.float32)


def test_prompts_become_what_the_diffusers_pipeline_makes_of_them(encoder, connectors, pipeline):
    embeds, mask, _, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
    with torch.no_grad():
        video, audio, context_mask = pipeline.connectors(embeds, mask)

    hidden, own_mask = encoder.hidden_states(PROMPTS)
    assert hidden.shape == (3, 1024, 32, 7)
    assert own_mask.dtype == torch.bool
    assert torch.equal(own_mask, mask.bool())
    assert not own_mask[:, 0].any(), "padding is on the left"
    assert own_mask[:, -1].all()
    assert torch.equal(hidden.flatten(2, 3), embeds)

    context = connectors.from_hidden_states(hidden, own_mask)
    assert torch.equal(context.video, video)
    assert torch.equal(context.audio, audio)
    assert context_mask.all()
    assert context.mask is None
    assert context.video.shape == (3, 1024, 64)
    assert context.audio.shape == (3, 1024, 32)
    assert (context.video[0] - context.video[1]).abs().mean() > 1e-3


def test_a_context_does_not_depend_on_the_other_prompts(encoder, connectors):
    together = encode_prompts(PROMPTS, encoder, connectors)
    alone = [encode_prompts([prompt], encoder, connectors)[0] for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        assert one.video.shape == (1, 1024, 64)
        assert torch.equal(one.video, other.video)
        assert torch.equal(one.audio, other.audio)


def test_a_prompt_that_is_too_long_is_cut_and_named(encoder, caplog):
    with caplog.at_level("WARNING"):
        hidden, mask = encoder.hidden_states(["long story " * 200])
    assert hidden.shape[1] == 1024
    assert mask.all()
    assert "is cut to 1024: long story" in caplog.text


def test_weights_come_in_the_given_dtype_without_vision_tower_and_frozen(tiny_pipeline: Path):
    encoder = load_text_encoder(tiny_pipeline, None, torch.bfloat16)
    names = [name for name, _ in encoder._encoder.named_parameters()]
    assert not any("vision" in name or "projector" in name or "lm_head" in name for name in names)
    assert {parameter.dtype for parameter in encoder._encoder.parameters()} == {torch.bfloat16}
    hidden, mask = encoder.hidden_states(["a ball"])
    context = load_connectors(tiny_pipeline, torch.bfloat16).from_hidden_states(hidden, mask)
    assert hidden.dtype == context.video.dtype == context.audio.dtype == torch.bfloat16
    assert not context.video.requires_grad
    assert torch.isfinite(context.video).all()


def test_contexts_can_be_used_in_a_training_forward(connectors):
    context = connectors.from_features(torch.ones(1, 128, 64), torch.ones(1, 128, 32), None)
    weight = torch.ones(64, requires_grad=True)
    (context.video * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("layout", ["pipeline folder", "Gemma folder", "text_encoder beside tokenizer"])
def test_text_encoder_path_may_be_any_folder_that_holds_gemma(
    layout: str, tiny_pipeline: Path, tmp_path: Path, encoder
):
    if layout == "pipeline folder":
        path = tiny_pipeline
    elif layout == "Gemma folder":
        shutil.copytree(tiny_pipeline / "text_encoder", tmp_path, dirs_exist_ok=True)
        shutil.copytree(tiny_pipeline / "tokenizer", tmp_path, dirs_exist_ok=True)
        path = tmp_path
    else:
        path = tiny_pipeline / "text_encoder"
    loaded = load_text_encoder(tmp_path / "model-that-is-not-read", path, torch.float32)
    assert torch.equal(loaded.hidden_states(["a ball"])[0], encoder.hidden_states(["a ball"])[0])


def test_the_gemma_4_of_newer_models_gives_its_hidden_states_too(tiny_pipeline: Path, tmp_path: Path):
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 8, "sliding_window": 64}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    full = Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(text_config=text)).eval()
    full.save_pretrained(tmp_path)
    shutil.copytree(tiny_pipeline / "tokenizer", tmp_path, dirs_exist_ok=True)

    encoder = load_text_encoder(tiny_pipeline, tmp_path, torch.float32)
    hidden, mask = encoder.hidden_states(["a ball"])
    tokens = encoder._tokenizer(["a ball"], padding="max_length", max_length=1024, return_tensors="pt")
    with torch.no_grad():
        expected = full(**tokens, output_hidden_states=True).hidden_states
    assert torch.equal(mask, tokens.attention_mask.bool())
    assert torch.equal(hidden, torch.stack(expected, dim=-1))


def test_text_files_that_cannot_be_read_are_refused_by_name(reference: Path, tiny_pipeline: Path, tmp_path: Path):
    monolith = reference / "ltx-2.3-tiny-monolith.safetensors"
    with pytest.raises(ValueError, match=r"\(Gemma\) cannot be read from a single file(.|\n)*text_encoder_path"):
        load_text_encoder(monolith)
    with pytest.raises(ValueError, match=r"\(Gemma\) cannot be read from a single file"):
        load_text_encoder(tiny_pipeline, monolith)
    with pytest.raises(ValueError, match="no text side in this file"):
        load_connectors(reference / "ltx-2.3-tiny.safetensors")
    with pytest.raises(ModelError, match="no text connectors here"):
        load_connectors(tiny_pipeline / "vae")
    (tmp_path / "cut.safetensors").write_bytes(monolith.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"not a whole \.safetensors file"):
        load_connectors(tmp_path / "cut.safetensors")

    shutil.copytree(tiny_pipeline / "text_encoder", tmp_path / "gemma")
    with pytest.raises(ModelError, match="no tokenizer here"):
        load_text_encoder(tiny_pipeline, tmp_path / "gemma")
    config = json.loads((tmp_path / "gemma" / "config.json").read_text())
    (tmp_path / "gemma" / "config.json").write_text(json.dumps({**config, "architectures": ["T5EncoderModel"]}))
    shutil.copytree(tiny_pipeline / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="no text encoder of kind T5EncoderModel"):
        load_text_encoder(tiny_pipeline, tmp_path / "gemma")


def test_text_of_another_model_is_refused(connectors: TextConnectors):
    with pytest.raises(ValueError, match=r"48 channels in 7 layers(.|\n)*take 224(.|\n)*text_encoder_path"):
        connectors.features(torch.zeros(1, 128, 48, 7), torch.ones(1, 128, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"audio text features have 64 channels(.|\n)*prepared for another model"):
        connectors.from_features(torch.zeros(1, 128, 64), torch.zeros(1, 128, 64), None)
    with pytest.raises(ValueError, match=r"100 tokens long(.|\n)*1024 tokens"):
        connectors.from_features(torch.zeros(1, 100, 64), torch.zeros(1, 100, 32), None)


def test_official_text_weights_load_completely_or_not_at_all(reference: Path, tmp_path: Path):
    source = reference / "ltx-2.3-tiny-text.safetensors"
    tensors = load_file(source)
    keys = connector_keys(tensors)
    assert sorted(keys.values()) == sorted(tensors)
    config = {
        "caption_proj_before_connector": True,
        "connector_num_attention_heads": 2,
        "connector_apply_gated_attention": True,
    }
    header = {"config": json.dumps({"transformer": {**config, "connector_attention_head_dim": 16}})}
    save_file(tensors, tmp_path / "heads.safetensors", header)
    with pytest.raises(ValueError, match=r"does not fit its own config(.|\n)*audio_connector"):
        load_connectors(tmp_path / "heads.safetensors")
    gone = keys["video_connector.transformer_blocks.1.attn1.norm_q.weight"]
    with_gap = {name: value for name, value in tensors.items() if name != gone}
    audio = {"audio_connector_num_attention_heads": 2, "audio_connector_attention_head_dim": 8}
    header = {"config": json.dumps({"transformer": {**config, **audio, "connector_attention_head_dim": 16}})}
    save_file(tensors, tmp_path / "whole.safetensors", header)
    load_connectors(tmp_path / "whole.safetensors")
    save_file(with_gap, tmp_path / "gap.safetensors", header)
    with pytest.raises(ValueError, match=r"video_connector.transformer_blocks.1.attn1.norm_q.weight: missing"):
        load_connectors(tmp_path / "gap.safetensors")


def test_a_known_key_with_a_value_that_cannot_be_honoured_is_an_error_and_an_unknown_key_a_warning(caplog):
    shapes = {"text_proj_in.weight": (24, 72)}
    with pytest.raises(ValueError, match="caption_proj_input_norm: True"):
        connector_config({"caption_proj_input_norm": True}, shapes)
    with caplog.at_level("WARNING"):
        config = connector_config({"connector_colour": "red", "unrelated": 1}, shapes)
    assert "connector_colour" in caplog.text
    assert "unrelated" not in caplog.text
    assert config["caption_channels"] * config["text_proj_in_factor"] == 72
