"""LoRA: which layers are adapted, how adapters start, and what does not fit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ltx_trainer_plus.models import LTXTransformer, load_transformer, read_transformer_config, transformer_on_meta
from ltx_trainer_plus.models.lora import (
    add_lora,
    load_full,
    load_lora,
    lora_parameters_from_official,
    lora_target_names,
    official_full_tensors,
    official_lora_tensors,
)
from ltx_trainer_plus.models.reach import reachable_parameters

ATTENTION = ["to_k", "to_q", "to_v", "to_out.0"]


@pytest.fixture
def path(reference: Path) -> Path:
    return reference / "ltx-2.3-tiny.safetensors"


@pytest.fixture
def everything(path: Path) -> frozenset[str]:
    return frozenset(name for name, _ in transformer_on_meta(path).named_parameters())


def adapted(path: Path, names: list[str], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LTXTransformer:
    transformer = load_transformer(path, dtype=dtype)
    add_lora(transformer, rank=4, alpha=8, dropout=0.0, target_names=names, seed=seed)
    return transformer


def adapters(transformer: LTXTransformer) -> dict[str, Tensor]:
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}


def test_short_patterns_match_every_attention_of_every_block(path: Path, everything: frozenset[str]) -> None:
    names = lora_target_names(transformer_on_meta(path), ATTENTION, everything)
    assert len(names) == 3 * 24
    assert len(set(names)) == len(names)


def test_only_transformer_blocks_are_adapted(path: Path, everything: frozenset[str]) -> None:
    transformer = load_transformer(path)
    transformer.connector = torch.nn.ModuleDict({"to_q": torch.nn.Linear(2, 2)})
    names = lora_target_names(transformer, ["to_q"], everything | {"connector.to_q.weight"})
    assert len(names) == 3 * 6
    assert all(name.startswith("transformer_blocks.") for name in names)


def test_a_longer_pattern_matches_only_whole_parts_of_a_name(path: Path, everything: frozenset[str]) -> None:
    names = lora_target_names(transformer_on_meta(path), ["ff.net.0.proj", "attn1.to_q"], everything)
    assert names == [f"transformer_blocks.{i}.{name}" for i in range(3) for name in ("attn1.to_q", "ff.net.0.proj")]


def test_patterns_that_match_nothing_are_named_with_what_there_is(path: Path, everything: frozenset[str]) -> None:
    with pytest.raises(ValueError, match=r"'to_v_typo', 'proj_in' matches no linear.*attn1\.to_q.*audio_ff\.net\.2"):
        lora_target_names(transformer_on_meta(path), ["to_q", "to_v_typo", "proj_in"], everything)


def test_no_pattern_at_all_is_an_error(path: Path, everything: frozenset[str]) -> None:
    with pytest.raises(ValueError, match="The list is empty"):
        lora_target_names(transformer_on_meta(path), [], everything)


def test_a_pattern_of_a_stream_that_is_not_trained_is_an_error(path: Path) -> None:
    reachable = reachable_parameters(read_transformer_config(path), video="generated", audio="absent")
    with pytest.raises(ValueError, match=r"'audio_attn1\.to_q' matches only layers of a stream.*not train"):
        lora_target_names(transformer_on_meta(path), ["to_q", "audio_attn1.to_q"], reachable)


def test_a_pattern_is_narrowed_to_what_the_loss_reaches(path: Path) -> None:
    reachable = reachable_parameters(read_transformer_config(path), video="generated", audio="absent")
    names = lora_target_names(transformer_on_meta(path), ["to_q"], reachable)
    assert names == [f"transformer_blocks.{i}.{attention}.to_q" for i in range(3) for attention in ("attn1", "attn2")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_float32_and_all_else_is_frozen(path: Path, dtype: torch.dtype) -> None:
    transformer = adapted(path, ["transformer_blocks.1.attn1.to_q"], dtype=dtype)
    assert {name.rpartition(".to_q.")[2]: p.dtype for name, p in adapters(transformer).items()} == {
        "lora_A.default.weight": torch.float32,
        "lora_B.default.weight": torch.float32,
    }
    assert {p.dtype for p in transformer.parameters() if not p.requires_grad} == {dtype}


def test_an_untrained_adapter_changes_nothing(path: Path) -> None:
    lora_b = [p for name, p in adapters(adapted(path, ["transformer_blocks.1.attn1.to_q"])).items() if "lora_B" in name]
    assert [p.abs().max().item() for p in lora_b] == [0.0]


def test_initial_values_depend_on_seed_and_name_only(path: Path) -> None:
    one, two = "transformer_blocks.0.attn1.to_q", "transformer_blocks.1.attn1.to_q"
    torch.manual_seed(1)
    state = torch.get_rng_state()
    alone = adapters(adapted(path, [two], dtype=torch.bfloat16))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    both = adapters(adapted(path, [one, two]))
    other_seed = adapters(adapted(path, [two], seed=1))
    name = f"{two}.lora_A.default.weight"
    assert torch.equal(alone[name], both[name])
    assert not torch.equal(both[name], both[f"{one}.lora_A.default.weight"])
    assert not torch.equal(other_seed[name], both[name])
    assert 0.8 / 32**0.5 < both[name].abs().max() <= 1 / 32**0.5


def test_dropout_is_handed_on(path: Path) -> None:
    transformer = load_transformer(path)
    add_lora(transformer, rank=2, alpha=2, dropout=0.25, target_names=["transformer_blocks.0.attn1.to_q"], seed=0)
    assert transformer.transformer_blocks[0].attn1.to_q.lora_dropout["default"].p == 0.25


def test_loading_into_other_adapters_names_what_is_missing_and_what_is_too_much(path: Path) -> None:
    source = adapted(path, ["transformer_blocks.0.attn1.to_q"])
    named = {name: torch.ones_like(value) for name, value in adapters(source).items()}
    tensors = official_lora_tensors(named, rank=4, alpha=8)
    target = adapted(path, ["transformer_blocks.1.attn1.to_q"])
    with pytest.raises(
        ValueError, match=r"2 missing, among them transformer_blocks\.1.*2 unexpected, among them transformer_blocks\.0"
    ):
        load_lora(target, tensors, rank=4, alpha=8)


def test_adapters_that_another_trainer_wrote_but_did_not_train_are_left_out(path: Path) -> None:
    video, audio = "transformer_blocks.0.attn1.to_q", "transformer_blocks.0.audio_attn1.to_q"
    source = adapted(path, [video, audio], seed=1)
    named = {n: torch.ones_like(v) if "audio" not in n else v for n, v in adapters(source).items()}
    target = adapted(path, [video], seed=2)
    load_lora(target, official_lora_tensors(named, rank=4, alpha=8), rank=4, alpha=8)
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in adapters(target).values())


def test_another_rank_in_the_file_is_named_with_the_setting(path: Path) -> None:
    tensors = official_lora_tensors(adapters(adapted(path, ["transformer_blocks.0.attn1.to_q"])), rank=4, alpha=8)
    with pytest.raises(ValueError, match=r"has rank 4 .*asks for 16\. Set lora\.rank: 4"):
        lora_parameters_from_official(tensors, rank=16, alpha=16)


@pytest.mark.parametrize("key", ["transformer.x.lora_A.weight", "diffusion_model.x.alpha", "diffusion_model.x.weight"])
def test_a_foreign_tensor_name_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not a name in an official LTX LoRA file"):
        lora_parameters_from_official({key: torch.ones(4, 4)}, rank=4, alpha=4)


def test_saving_without_an_adapter_is_an_error(path: Path) -> None:
    with pytest.raises(ValueError, match="no LoRA parameter"):
        official_lora_tensors(dict(load_transformer(path).named_parameters()), rank=4, alpha=4)


def test_full_weights_load_back_strictly(path: Path) -> None:
    source, target = load_transformer(path, dtype=torch.float32), load_transformer(path, dtype=torch.float32)
    with torch.no_grad():
        source.proj_in.weight.add_(1)
    tensors = official_full_tensors(dict(source.named_parameters()))
    load_full(target, tensors)
    assert torch.equal(target.proj_in.weight, source.proj_in.weight)
    del tensors["model.diffusion_model.patchify_proj.weight"]
    with pytest.raises(ValueError, match=r"1 missing, among them proj_in\.weight"):
        load_full(target, tensors)
