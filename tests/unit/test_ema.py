"""The moving average: what it is, that it is validated with, and that its resume is exact."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ltx_trainer_plus.checkpoints.resume import find_checkpoint
from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import load_transformer
from ltx_trainer_plus.step.ema import WeightAverage
from tests.runs import joint_run, train, write_prepared_data
from tests.states import read_state


@pytest.fixture
def handle(reference: Path) -> ModelHandle:
    model = load_transformer(reference / "ltx-2.3-tiny.safetensors", torch.float32)
    model.requires_grad_(False)
    model.proj_in.requires_grad_(True)
    return ModelHandle.of(model)


def test_the_average_follows_the_weights_by_its_decay(handle: ModelHandle) -> None:
    average = WeightAverage(handle, 0.9)
    parameter = dict(handle.trainable_parameters())["proj_in.bias"]
    expected = parameter.detach().clone()
    for number in range(200):
        with torch.no_grad():
            parameter.add_(1.0)
        average.update()
        decay = min(0.9, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * parameter.detach()
    torch.testing.assert_close(average.tensors()["proj_in.bias"], expected)
    assert average.updates == 200


def test_applied_gives_the_average_and_the_weights_come_back_bit_for_bit(handle: ModelHandle) -> None:
    average = WeightAverage(handle, 0.5)
    parameter = dict(handle.trainable_parameters())["proj_in.bias"]
    with torch.no_grad():
        parameter.mul_(3)
    average.update()
    weights, averaged = parameter.detach().clone(), average.tensors()["proj_in.bias"].clone()
    with average.applied():
        assert torch.equal(parameter, averaged)
    assert torch.equal(parameter, weights)
    assert torch.equal(average.tensors()["proj_in.bias"], averaged)


def test_a_run_with_an_average_saves_it_apart_and_resumes_exactly(
    tiny_pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_prepared_data(tmp_path / "data")
    settings: dict[str, Any] = joint_run(tiny_pipeline, data, tmp_path / "run")
    settings["checkpoints"] = {"interval": 2, "keep_last_n": -1, "ema_decay": 0.9, "precision": "float32"}
    train(settings)
    folder = tmp_path / "run" / "checkpoints"
    expected = read_state(folder / "training_state_step_00004.safetensors")
    weights = load_file(folder / "lora_weights_step_00004.safetensors")
    averaged = load_file(folder / "ema_lora_weights_step_00004.safetensors")
    assert averaged.keys() == weights.keys()
    changed = [name for name in weights if not torch.equal(weights[name], averaged[name])]
    assert any(".lora_B." in name for name in changed)

    train(settings, f"model.load_checkpoint={folder / 'lora_weights_step_00002.safetensors'}")
    resumed = read_state(folder / "training_state_step_00004.safetensors")
    assert resumed.tensors.keys() == expected.tensors.keys()
    assert any(name.startswith("average.") for name in expected.tensors)
    assert all(torch.equal(resumed.tensors[name], expected.tensors[name]) for name in expected.tensors)
    assert resumed.info["average_updates"] == 4

    # Averaged weights are a start of their own.
    with caplog.at_level(logging.WARNING):
        found = find_checkpoint(folder / "ema_lora_weights_step_00004.safetensors", RunFolder(tmp_path))
    assert (found.state, found.step) == (None, 0)
