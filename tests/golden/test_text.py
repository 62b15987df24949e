"""The text side of official files gives the official numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_trainer_plus.models.text import load_connectors

# float32 on a CPU: two implementations of the same sums differ in their order of addition.
TOLERANCE = {"atol": 2e-6, "rtol": 0.0}
MODELS = ["ltx-2-tiny", "ltx-2.3-tiny"]


@pytest.mark.parametrize("model", MODELS)
def test_hidden_states_become_the_official_features_and_contexts(reference: Path, model: str):
    io = load_file(reference / f"{model}-text-io.safetensors")
    connectors = load_connectors(reference / f"{model}-text.safetensors", torch.float32)
    mask = io["attention_mask"].bool()
    assert not mask.all(), "the reference must hold padding, or the registers are not tested"

    video_features, audio_features = connectors.features(io["hidden_states"], mask)
    torch.testing.assert_close(video_features, io["video_features"], **TOLERANCE)
    torch.testing.assert_close(audio_features, io["audio_features"], **TOLERANCE)

    context = connectors.from_hidden_states(io["hidden_states"], mask)
    torch.testing.assert_close(context.video, io["out.video_context"], **TOLERANCE)
    torch.testing.assert_close(context.audio, io["out.audio_context"], **TOLERANCE)
    assert context.mask is None
    assert io["out.context_mask"].all()


@pytest.mark.parametrize("file", [f"{model}-{kind}" for model in MODELS for kind in ("text", "monolith")])
def test_stored_features_become_contexts_from_text_file_and_monolith(reference: Path, file: str):
    model = file.rsplit("-", 1)[0]
    io = load_file(reference / f"{model}-text-io.safetensors")
    connectors = load_connectors(reference / f"{file}.safetensors", torch.float32)
    context = connectors.from_features(io["video_features"], io["audio_features"], io["attention_mask"].bool())
    torch.testing.assert_close(context.video, io["out.video_context"], **TOLERANCE)
    torch.testing.assert_close(context.audio, io["out.audio_context"], **TOLERANCE)


@pytest.mark.parametrize("model", MODELS)
def test_text_beyond_the_mask_changes_nothing(reference: Path, model: str):
    io = load_file(reference / f"{model}-text-io.safetensors")
    connectors = load_connectors(reference / f"{model}-text.safetensors", torch.float32)
    mask = io["attention_mask"].bool()
    noisy = torch.where(mask[..., None, None], io["hidden_states"], 7.0)
    context = connectors.from_hidden_states(noisy, mask)
    torch.testing.assert_close(context.video, io["out.video_context"], **TOLERANCE)
    torch.testing.assert_close(context.audio, io["out.audio_context"], **TOLERANCE)
