"""The texts of validation: each different one is encoded once, and the encoder is let go."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models.text import TextConnectors, TextEncoder, encode_prompts, load_connectors, load_text_encoder
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation import cache
from ltx_trainer_plus.validation.cache import encode_validation_prompts

ALONE = Topology(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def config_for(model_path: Path, **validation: Any) -> TrainerConfig:
    samples = [{"prompt": "a cat"}, {"prompt": "a dog"}, {"prompt": "a cat", "seed": 1}]
    return TrainerConfig.model_validate(
        {
            "model": {"model_path": model_path},
            "data": {"preprocessed_data_root": model_path},
            "validation": {"samples": samples, "negative_prompt": "blurry", **validation},
        }
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that are really encoded."""
    prompts: list[str] = []

    def noting(given: list[str], *parts: Any) -> Any:
        prompts.extend(given)
        return encode_prompts(given, *parts)

    monkeypatch.setattr(cache, "encode_prompts", noting)
    return prompts


def test_each_different_prompt_is_encoded_once_and_equals_the_pipelines_text(
    tiny_pipeline: Path, asked: list[str]
) -> None:
    contexts = encode_validation_prompts(config_for(tiny_pipeline), ALONE)
    assert asked == ["a cat", "a dog", "blurry"]
    assert list(contexts.positive) == ["a cat", "a dog"]
    encoder = load_text_encoder(tiny_pipeline, dtype=torch.float32)
    connectors = load_connectors(tiny_pipeline, torch.float32)
    (expected,) = encode_prompts(["blurry"], encoder, connectors)
    assert contexts.negative is not None
    assert torch.equal(contexts.negative.video, expected.video)
    assert torch.equal(contexts.negative.audio, expected.audio)
    assert not torch.equal(contexts.positive["a cat"].video, contexts.positive["a dog"].video)


def test_without_cfg_no_negative_prompt_is_encoded(tiny_pipeline: Path, asked: list[str]) -> None:
    config = config_for(tiny_pipeline, video_cfg_scale=1, generate_audio=False)
    assert encode_validation_prompts(config, ALONE).negative is None
    assert asked == ["a cat", "a dog"]


def test_the_text_encoder_and_the_connectors_are_let_go(tiny_pipeline: Path) -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(item, TextEncoder | TextConnectors) for item in gc.get_objects())

    before = alive()
    encode_validation_prompts(config_for(tiny_pipeline), ALONE)
    assert alive() == before


def test_a_failure_of_the_main_process_reaches_the_others_instead_of_leaving_them_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, **_: sent.extend(box))
    main_of_two = Topology(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    with pytest.raises(ModelError):
        encode_validation_prompts(config_for(tmp_path), main_of_two)
    assert sent


def test_without_samples_nothing_is_loaded(tmp_path: Path) -> None:
    contexts = encode_validation_prompts(config_for(tmp_path, samples=[]), ALONE)
    assert contexts.positive == {}
    assert contexts.negative is None
