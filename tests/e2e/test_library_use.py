"""docs/library.md: the loop as it stands there, and that it computes what the trainer computes."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import joint_run, losses, train, write_prepared_data

IMPORTS, LOOP = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/library.md").read_text(encoding="utf-8"), flags=re.DOTALL
)
SETTINGS = re.compile(r"model, data, steps, batch_size, rank, seed = .*\n")


def test_the_loop_is_short() -> None:
    assert 25 < sum(bool(line.strip()) for line in LOOP.splitlines()) < 40


def test_the_loop_trains_the_trainers_lora(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_prepared_data(tmp_path / "data", samples=4)
    settings = joint_run(tiny_pipeline, data, tmp_path / "run") | {"seed": 7}
    settings["optimization"] = {"steps": 3, "batch_size": 2, "learning_rate": 1e-4, "scheduler_type": "constant"}
    result = train(settings, "checkpoints.precision=float32", "checkpoints.save_training_state=off")

    monkeypatch.chdir(tmp_path)
    values = f"model, data, steps, batch_size, rank, seed = {str(tiny_pipeline)!r}, {str(data)!r}, 3, 2, 4, 7\n"
    loop, replaced = SETTINGS.subn(values.replace("\\", r"\\"), LOOP)
    assert replaced == 1
    loop = loop.replace("torch.bfloat16, accelerator.device", 'torch.float32, "cpu"')
    scope: dict[str, object] = {}
    exec(compile(IMPORTS + loop, "docs/library.md", "exec"), scope)

    last = scope["loss"]
    assert isinstance(last, torch.Tensor)
    assert last.item() == pytest.approx(losses(tmp_path / "run")[-1], rel=1e-6)
    assert result.weights is not None
    own, trainers = load_file(tmp_path / "lora.safetensors"), load_file(result.weights)
    assert own.keys() == trainers.keys()
    assert any(tensor.any() for name, tensor in own.items() if ".lora_B." in name)
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, trainers[name], rtol=1e-5, atol=1e-8, msg=name)
