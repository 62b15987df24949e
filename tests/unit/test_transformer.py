"""The transformer's behaviour beyond its numbers: precision, checkpointing, absent streams, wrong inputs."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ltx_trainer_plus.modality import Modality, Perturbations
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.compile import compile_blocks
from ltx_trainer_plus.models.lora import add_lora


@pytest.fixture
def transformer(reference: Path) -> LTXTransformer:
    return load_transformer(reference / "ltx-2.3-tiny.safetensors", dtype=torch.float32)


@pytest.fixture
def inputs(reference: Path) -> dict[str, Modality]:
    io = load_file(reference / "ltx-2.3-tiny-io.safetensors")
    fields = ("latent", "sigma", "timesteps", "positions", "context")
    return {name: Modality(**{field: io[f"{name}_{field}"] for field in fields}) for name in ("video", "audio")}


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def with_adapters(transformer: LTXTransformer) -> LTXTransformer:
    names = [f"transformer_blocks.{i}.{part}.to_q" for i in range(3) for part in ("attn1", "audio_attn2")]
    add_lora(transformer, rank=4, alpha=4, dropout=0.0, target_names=names, seed=0)
    for name, parameter in transformer.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return transformer


def gradients(transformer: LTXTransformer, inputs: dict[str, Modality]) -> dict[str, Tensor]:
    transformer.zero_grad()
    video_v, audio_v = transformer(**inputs)
    (video_v.float().square().mean() + audio_v.float().square().mean()).backward()
    return {n: p.grad.clone() for n, p in transformer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_checkpointing_changes_no_gradient(
    transformer: LTXTransformer, inputs: dict[str, Modality], compiled: bool
) -> None:
    with_adapters(transformer).train()
    plain = gradients(transformer, inputs)
    if compiled:
        compile_blocks(transformer, backend="aot_eager")
    transformer.gradient_checkpointing = True
    checkpointed = gradients(transformer, inputs)
    assert len(plain) == 12
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_bf16_base_trains_float32_adapters(reference: Path, inputs: dict[str, Modality]) -> None:
    transformer = with_adapters(load_transformer(reference / "ltx-2.3-tiny.safetensors", dtype=torch.bfloat16))
    assert transformer.compute_dtype == torch.bfloat16
    found = gradients(transformer, inputs)
    assert len(found) == 12
    assert all(gradient.dtype == torch.float32 and gradient.abs().max() > 0 for gradient in found.values())
    assert transformer(**inputs)[0].dtype == torch.bfloat16


def test_bf16_computation_over_float32_masters_keeps_the_tokens_in_bf16(
    transformer: LTXTransformer, inputs: dict[str, Modality]
) -> None:
    exact = transformer(**inputs)[0]
    transformer.compute_dtype = torch.bfloat16
    seen = set()
    for block in transformer.transformer_blocks:
        block.register_forward_pre_hook(lambda _m, _a, kw: seen.add(kw["hidden_states"].dtype), with_kwargs=True)
    rounded = transformer(**inputs)[0]
    assert seen == {torch.bfloat16}
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


def test_autocast_from_outside_does_not_reach_a_float32_model(
    transformer: LTXTransformer, inputs: dict[str, Modality]
) -> None:
    expected = transformer(**inputs)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transformer(**inputs)[0], expected)


def test_one_noise_level_for_all_tokens_may_be_given_once(
    transformer: LTXTransformer, inputs: dict[str, Modality]
) -> None:
    def at(modality: Modality, tokens: int) -> Modality:
        return dataclasses.replace(modality, timesteps=modality.sigma[:, None].expand(-1, tokens))

    each = transformer(**{name: at(m, m.latent.shape[1]) for name, m in inputs.items()})
    once = transformer(**{name: at(m, 1) for name, m in inputs.items()})
    column = transformer(
        **{name: dataclasses.replace(m, timesteps=m.sigma[:, None, None]) for name, m in inputs.items()}
    )
    for a, b, c in zip(each, once, column, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-6)
        assert torch.equal(b, c)


@pytest.mark.parametrize("present", ["video", "audio"])
def test_an_absent_stream_gives_nothing_and_gets_no_gradient(
    transformer: LTXTransformer, inputs: dict[str, Modality], present: str
) -> None:
    outputs = dict(zip(("video", "audio"), transformer(**{present: inputs[present]}), strict=True))
    absent = "audio" if present == "video" else "video"
    assert outputs[absent] is None
    outputs[present].sum().backward()
    projections = {"video": transformer.proj_in, "audio": transformer.audio_proj_in}
    assert projections[present].weight.grad is not None
    assert projections[absent].weight.grad is None


def test_an_absent_stream_is_one_token(transformer: LTXTransformer, inputs: dict[str, Modality]) -> None:
    shapes = []
    transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda _m, _a, kw: shapes.extend((kw["audio_hidden_states"].shape, kw["audio_encoder_hidden_states"].shape)),
        with_kwargs=True,
    )
    transformer(video=inputs["video"])
    assert [shape[1] for shape in shapes] == [1, 1]


def test_perturbing_one_stream_leaves_the_other_alone(transformer: LTXTransformer, inputs: dict[str, Modality]) -> None:
    everywhere = frozenset(range(3))
    apart = Perturbations(audio_to_video=everywhere, video_to_audio=everywhere)
    video, audio = transformer(**inputs, perturbations=apart)
    perturbed = dataclasses.replace(apart, audio_self=everywhere)
    same_video, other_audio = transformer(**inputs, perturbations=perturbed)
    assert torch.equal(same_video, video)
    assert not torch.allclose(other_audio, audio)


def test_no_stream_at_all_is_an_error(transformer: LTXTransformer) -> None:
    with pytest.raises(ValueError, match="neither video nor audio"):
        transformer()


def test_a_mask_that_is_not_bool_is_refused(transformer: LTXTransformer, inputs: dict[str, Modality]) -> None:
    audio = dataclasses.replace(inputs["audio"], context_mask=torch.ones(2, 7))
    with pytest.raises(TypeError, match=r"audio.context_mask is torch.float32; it must be bool"):
        transformer(video=inputs["video"], audio=audio)


@pytest.mark.parametrize("field", ["video_self", "audio_self", "audio_to_video", "video_to_audio"])
def test_a_perturbed_block_that_does_not_exist_is_an_error(
    transformer: LTXTransformer, inputs: dict[str, Modality], field: str
) -> None:
    with pytest.raises(ValueError, match=f"{field}: block 3 does not exist: this model has 3 blocks"):
        transformer(**inputs, perturbations=Perturbations(**{field: frozenset({0, 3})}))
