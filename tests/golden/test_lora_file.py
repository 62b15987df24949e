"""LoRA files: names and shapes of the official trainer, and other programs read our deltas exactly."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.lora import add_lora, load_lora, lora_target_names, official_lora_tensors

RANK = 4


def adapted(path: Path, patterns: list[str], *, alpha: float, trained: bool = False) -> LTXTransformer:
    transformer = load_transformer(path, dtype=torch.float32)
    reachable = {name for name, _ in transformer.named_parameters()}
    names = lora_target_names(transformer, patterns, reachable)
    add_lora(transformer, rank=RANK, alpha=alpha, dropout=0.0, target_names=names, seed=0)
    if trained:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in transformer.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return transformer


def exported(transformer: LTXTransformer, *, alpha: float) -> dict[str, Tensor]:
    return official_lora_tensors(dict(transformer.named_parameters()), rank=RANK, alpha=alpha)


@pytest.fixture(scope="module")
def official(reference: Path) -> dict[str, dict]:
    return json.loads((reference / "lora_keys.json").read_text())


@pytest.fixture
def path(reference: Path) -> Path:
    return reference / "ltx-2.3-tiny.safetensors"


def streams(io: dict[str, Tensor], *, equal_levels: bool = False) -> dict[str, Modality]:
    found = {}
    for name in ("video", "audio"):
        sigma = io["video_sigma"] if equal_levels else io[f"{name}_sigma"]
        found[name] = Modality(
            latent=io[f"{name}_latent"],
            sigma=sigma,
            timesteps=sigma[:, None].expand(io[f"{name}_latent"].shape[:2])
            if equal_levels
            else io[f"{name}_timesteps"],
            positions=io[f"{name}_positions"],
            context=io[f"{name}_context"],
        )
    return found


@pytest.mark.parametrize("case", ["attention_short_names", "video_attention_and_ff"])
def test_names_and_shapes_are_those_of_the_official_trainer(path: Path, official: dict, case: str) -> None:
    tensors = exported(adapted(path, official[case]["target_modules"], alpha=RANK), alpha=RANK)
    assert {key: list(value.shape) for key, value in tensors.items()} == official[case]["tensors"]


@pytest.mark.parametrize("case", ["attention_short_names", "video_attention_and_ff"])
def test_an_official_file_loads_back(path: Path, official: dict, case: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = official[case]["tensors"]
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    transformer = adapted(path, official[case]["target_modules"], alpha=8)
    load_lora(transformer, tensors, rank=RANK, alpha=8)
    again = exported(transformer, alpha=8)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)  # alpha / rank = 2 is exact


@pytest.mark.parametrize("alpha", [4, 8, 1, 3])
def test_a_reader_that_knows_no_alpha_gets_the_trained_output(
    path: Path, reference: Path, tmp_path: Path, alpha: int
) -> None:
    trained = adapted(path, ["to_q", "to_v"], alpha=alpha, trained=True)
    save_file(exported(trained, alpha=alpha), tmp_path / "lora.safetensors")
    reader = adapted(path, ["to_q", "to_v"], alpha=RANK)  # takes alpha = rank, as every reader does
    inputs = streams(load_file(reference / "ltx-2.3-tiny-io.safetensors"))
    with torch.no_grad():
        before, expected = reader(**inputs), trained(**inputs)
        load_lora(reader, load_file(tmp_path / "lora.safetensors"), rank=RANK, alpha=RANK)
        after = reader(**inputs)
    for stream_before, stream_after, stream_expected in zip(before, after, expected, strict=True):
        assert (stream_before - stream_expected).abs().max() > 1e-3
        # alpha / rank = 3 / 4 is not a power of two: float32 rounding, otherwise exact.
        torch.testing.assert_close(stream_after, stream_expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("alpha", [4, 8])
def test_diffusers_pipelines_read_our_file_and_give_our_output(tiny_pipeline: Path, tmp_path: Path, alpha: int) -> None:
    from diffusers import LTX2Pipeline

    trained = adapted(tiny_pipeline, ["to_k", "to_q", "to_v", "to_out.0"], alpha=alpha, trained=True)
    save_file(exported(trained, alpha=alpha), tmp_path / "lora.safetensors")
    pipeline = LTX2Pipeline.from_pretrained(tiny_pipeline, torch_dtype=torch.float32)

    generator = torch.Generator().manual_seed(0)
    config = trained.config
    shapes = {
        "video_latent": (2, 12, config["in_channels"]),
        "audio_latent": (2, 5, config["audio_in_channels"]),
        "video_context": (2, 7, config["cross_attention_dim"]),
        "audio_context": (2, 7, config["audio_cross_attention_dim"]),
    }
    io = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    io["video_sigma"] = torch.tensor([0.3, 0.8])
    io["video_positions"] = torch.rand(2, 3, 12, 2, generator=generator)
    io["audio_positions"] = torch.rand(2, 1, 5, 2, generator=generator)
    # One level for both streams and all tokens: the case in which diffusers' own forward is right.
    inputs = streams(io, equal_levels=True)

    def theirs() -> tuple[Tensor, Tensor]:
        levels = {name: modality.timesteps * 1000 for name, modality in inputs.items()}
        return pipeline.transformer(
            hidden_states=io["video_latent"],
            audio_hidden_states=io["audio_latent"],
            encoder_hidden_states=io["video_context"],
            audio_encoder_hidden_states=io["audio_context"],
            timestep=levels["video"],
            audio_timestep=levels["audio"],
            sigma=io["video_sigma"] * 1000,
            video_coords=io["video_positions"],
            audio_coords=io["audio_positions"],
            return_dict=False,
        )

    with torch.no_grad():
        expected, before = trained(**inputs), theirs()
        pipeline.load_lora_weights(tmp_path, weight_name="lora.safetensors")
        after = theirs()
    for stream_before, stream_after, stream_expected in zip(before, after, expected, strict=True):
        assert (stream_before - stream_expected).abs().max() > 1e-3
        torch.testing.assert_close(stream_after, stream_expected, rtol=0, atol=1e-5)
