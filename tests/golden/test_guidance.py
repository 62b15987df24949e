"""Guidance: its perturbations from the block count alone, and its combine rule against the official numbers."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_trainer_plus import ModelHandle, Perturbations
from ltx_trainer_plus.guidance import combine_guidance, isolated_modalities, stg_perturbations
from ltx_trainer_plus.models import transformer_on_meta

SETTINGS = (
    "cfg1.0_stg1.0_mod1.0_rescale0.7",
    "cfg3.0_stg0.0_mod1.0_rescale0.0",
    "cfg3.0_stg1.0_mod1.0_rescale0.0",
    "cfg3.0_stg1.0_mod3.0_rescale0.0",
    "cfg3.0_stg1.0_mod3.0_rescale0.7",
    "cfg7.0_stg0.0_mod3.0_rescale1.0",
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_combined_prediction_equals_the_official_one(reference: Path, settings: str) -> None:
    numbers = load_file(reference / "sampling.safetensors")
    cfg, stg, modality, rescale = (float(n) for n in re.findall(r"\d+\.\d+", settings))
    result = combine_guidance(
        numbers["guider.cond"],
        negative=numbers["guider.uncond"],
        perturbed=numbers["guider.perturbed"],
        isolated=numbers["guider.isolated"],
        cfg_scale=cfg,
        stg_scale=stg,
        modality_scale=modality,
        rescale=rescale,
    )
    # 1e-5: float32 rounding of a sum of terms up to 7 times the size of the predictions.
    torch.testing.assert_close(result, numbers[f"guider.out.{settings}"], rtol=0, atol=1e-5)


def test_rescaling_takes_each_sample_by_itself() -> None:
    positive, negative = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    scales = {"cfg_scale": 3.0, "rescale": 0.7}
    together = combine_guidance(positive, negative=negative, **scales)
    first = combine_guidance(positive[:1], negative=negative[:1], **scales)
    torch.testing.assert_close(together[:1], first)


def test_neutral_scales_need_no_other_prediction_and_change_nothing() -> None:
    positive = torch.ones(1, 2, 3)
    assert combine_guidance(positive) is positive


def test_a_scale_without_its_prediction_is_an_error() -> None:
    with pytest.raises(ValueError, match="'negative' prediction is on"):
        combine_guidance(torch.ones(1, 2, 3), cfg_scale=3.0)


@pytest.fixture(scope="module")
def handle(reference: Path) -> ModelHandle:
    return ModelHandle.of(transformer_on_meta(reference / "ltx-2.3-tiny.safetensors"))


def test_stg_names_the_chosen_streams_and_blocks(handle: ModelHandle) -> None:
    assert stg_perturbations(handle, [1], video=True, audio=False) == Perturbations(video_self=frozenset({1}))
    everywhere = frozenset({0, 1, 2})
    both = Perturbations(video_self=everywhere, audio_self=everywhere)
    assert stg_perturbations(handle, None, video=True, audio=True) == both


@pytest.mark.parametrize(("blocks", "video", "audio"), [(None, False, False), ([], True, True), ([1], False, False)])
def test_stg_that_skips_nothing_is_none(handle: ModelHandle, blocks: list | None, video: bool, audio: bool) -> None:
    assert stg_perturbations(handle, blocks, video=video, audio=audio) is None


@pytest.mark.parametrize("block", [3, -1, 28])
@pytest.mark.parametrize("video", [True, False])
def test_a_block_that_does_not_exist_is_named_with_the_block_count(
    handle: ModelHandle, block: int, video: bool
) -> None:
    with pytest.raises(ValueError, match=rf"block {block} does not exist: this model has 3 blocks \(0 to 2\)"):
        stg_perturbations(handle, [1, block], video=video, audio=False)


def test_isolation_skips_both_cross_modal_attentions_everywhere(handle: ModelHandle) -> None:
    everywhere = frozenset({0, 1, 2})
    assert isolated_modalities(handle) == Perturbations(audio_to_video=everywhere, video_to_audio=everywhere)
