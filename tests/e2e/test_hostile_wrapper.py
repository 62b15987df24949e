"""A whole run through a wrapper that answers no question: only `meta_module` may be asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ltx_trainer_plus import ModelHandle
from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.trainer import Trainer
from tests.runs import VALIDATION, joint_run, losses, train, write_prepared_data, write_run_file

# What calling, training and evaluating an nn.Module takes.
NEEDED = {
    *("forward", "training", "train", "eval", "modules", "named_modules", "children", "named_children"),
    *("parameters", "named_parameters", "zero_grad", "call_super_init"),
}


class Hostile(nn.Module):
    """Around a model, telling nothing about it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner
        self._calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        return self._inner(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in NEEDED:
            return super().__getattribute__(name)
        raise AttributeError(f"{name!r} was asked of the wrapper instead of the bare model")


def test_the_wrapper_of_this_test_is_hostile():
    wrapper = Hostile(nn.Linear(1, 1))
    for name in ("num_blocks", "config", "dtype", "device", "module", "weight", "state_dict", "no_sync"):
        with pytest.raises(AttributeError, match=name):
            getattr(wrapper, name)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_training_validation_and_saving_ask_nothing_of_the_wrapper(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    data = write_prepared_data(tmp_path / "data", samples=4)
    settings = joint_run(tiny_pipeline, data, tmp_path / "hostile")
    settings["model"]["training_mode"] = mode
    settings["validation"] = VALIDATION
    settings["optimization"] |= {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 2}
    wrappers: list[Hostile] = []
    prepare = Trainer._load_model

    def hostile(self: Trainer, *args: Any) -> ModelHandle:
        handle = prepare(self, *args)
        wrappers.append(Hostile(handle.forward_module))
        return ModelHandle(forward_module=wrappers[0], meta_module=handle.meta_module)

    monkeypatch.setattr(Trainer, "_load_model", hostile)
    result = Trainer(load_config(write_run_file(tmp_path / "run.yaml", settings))).train()
    monkeypatch.undo()

    # 3 steps of 2 micro-batches; 3 validations of 2 samples, 2 denoising steps and 4 guidance terms.
    assert wrappers[0]._calls == 3 * 2 + 3 * 2 * 2 * 4
    assert result.weights.is_file()
    assert len(list((tmp_path / "hostile/samples").iterdir())) == 6
    plain = {**settings, "output_dir": str(tmp_path / "plain")}
    train(plain)
    assert losses(tmp_path / "hostile") == losses(tmp_path / "plain")
    assert torch.isfinite(torch.tensor(losses(tmp_path / "hostile"))).all()
