"""Two ranks stop and resume bit for bit; one and two ranks continue each other's runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import Finished, run, torchrun_command
from tests.runs import joint_run, losses, train, write_prepared_data, write_run_file
from tests.states import read_state

SCRIPT = Path(__file__).with_name("resume_script.py")


class Runs:
    """The folders of four runs over the same data: every one has its third step as a checkpoint.

    `two` was resumed at step 3 on the two ranks that began it, `to_two` began on one rank and ends on two.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        data = write_prepared_data(folder / "data", samples=5)
        self._folder = folder
        self._settings = {
            **joint_run(model, data, folder / "unused"),
            "optimization": {"steps": 6, "learning_rate": 1e-3, "gradient_accumulation_steps": 2, "batch_size": 1},
            "checkpoints": {"interval": 3, "keep_last_n": -1},
        }
        self.straight: dict[str, list[float]] = {}
        train(self.settings("to_two", batch_size=2))
        self.straight["one"] = losses(self.path("to_two"))
        self.launch = self._launch(
            [self._file("two"), f"model.load_checkpoint={self.checkpoint('two')}"],
            [self._file("to_two"), f"model.load_checkpoint={self.checkpoint('to_two')}", "lora.dropout=0"],
        )

    def _launch(self, *resumes: list[str]) -> Finished:
        first = [self._file("two"), "--"]
        later = [argument for resume in resumes for argument in (*resume, "--")]
        return run(torchrun_command(2, SCRIPT, *first, *later), timeout=300)

    def settings(self, name: str, **optimization: Any) -> dict[str, Any]:
        return {
            **self._settings,
            "optimization": {**self._settings["optimization"], **optimization},
            "output_dir": str(self.path(name)),
            "lora": {"rank": 4, "alpha": 4, "dropout": 0.3 if name == "two" else 0.0},
        }

    def path(self, name: str) -> Path:
        return self._folder / name

    def checkpoint(self, name: str) -> Path:
        return self.path(name) / "checkpoints" / "lora_weights_step_00003.safetensors"

    def _file(self, name: str) -> str:
        return str(write_run_file(self._folder / f"{name}_launched.yaml", self.settings(name)))


@pytest.fixture(scope="module")
def runs(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("resume"), tiny_pipeline)


def test_two_ranks_resume_bit_for_bit_with_accumulation_and_dropout(runs: Runs) -> None:
    folder = runs.path("two") / "checkpoints"
    expected = read_state(folder / "set_aside_001" / "training_state_step_00006.safetensors")
    resumed = read_state(folder / "training_state_step_00006.safetensors")
    assert resumed.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(resumed.tensors[name], expected.tensors[name]) for name in expected.tensors)
    assert resumed.info["data"] == expected.info["data"]
    assert resumed.info["scheduler"]["last_epoch"] == 6


def test_two_ranks_continue_the_curve_of_one(runs: Runs) -> None:
    assert losses(runs.path("to_two")) == pytest.approx(runs.straight["one"], rel=2e-6)
    assert "The global batch was" not in runs.launch.output


def test_one_rank_continues_the_curve_of_two(runs: Runs) -> None:
    """`to_two`, resumed once more at its third step, on one rank."""
    train(
        runs.settings("to_two", batch_size=4, gradient_accumulation_steps=1),
        f"model.load_checkpoint={runs.checkpoint('to_two')}",
    )
    assert losses(runs.path("to_two")) == pytest.approx(runs.straight["one"], rel=2e-6)
