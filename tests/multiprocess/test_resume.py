"""Two ranks stop and resume bit for bit; a run that is handed from layout to layout computes one curve."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ltx_trainer_plus.checkpoints.state import TrainingState
from tests.launch import Finished, run, torchrun_command
from tests.runs import joint_run, losses, train, write_prepared_data, write_run_file
from tests.states import read_state

SCRIPT = Path(__file__).with_name("resume_script.py")
GLOBAL_BATCH = 4
COMPILED = "acceleration.compile={backend: aot_eager}"


class Chain:
    """A run of several steps on one process, and its resumes: each continues from a step of the one before.

    Later steps of a part are set aside when the next one begins, so in the end every step is there once, computed by
    the part that it fell to.
    """

    def __init__(self, folder: Path, model: Path, data: Path, *, steps: int, is_full: bool = False) -> None:
        settings = joint_run(model, data, folder / "chain")
        # Adam gives an element whose gradient is rounding noise a step of full size, in a random direction; with this
        # eps it gives it none.
        settings["optimization"] |= {"steps": steps, "batch_size": GLOBAL_BATCH, "eps": 1e-5}
        if is_full:
            settings["model"] |= {"training_mode": "full"}
            settings["optimization"] |= {"learning_rate": 1e-4}
        settings["data"] |= {"shape_group": 1}
        settings["checkpoints"] = {"interval": 1, "keep_last_n": -1, "ema_decay": 0.9}
        self.settings = settings
        self.folder = folder / "chain"
        self._steps = steps
        self._weights = "model_weights" if is_full else "lora_weights"
        self._file = str(write_run_file(folder / "launched.yaml", settings))
        train(settings)
        self.straight = losses(self.folder)
        self._straight_state = self.state()

    def link(self, step: int, *overrides: str, processes: int, accumulation: int = 1) -> list[str]:
        """Arguments of the script for a resume after `step`."""
        return [self._file, *self._overrides(step, processes, accumulation), *overrides, "--"]

    def alone(self, step: int, *overrides: str) -> None:
        train(self.settings, *self._overrides(step, 1, 1), *overrides)

    def state(self) -> TrainingState:
        """The last training state, a file or a folder."""
        (path,) = (self.folder / "checkpoints").glob(f"training_state_step_{self._steps:05d}*")
        return read_state(path)

    def distance(self) -> float:
        """Relative, of masters and averages in the end, from those of the run in one go."""
        ours, straight = self.state().tensors, self._straight_state.tensors
        assert ours.keys() == straight.keys()
        names = [name for name in ours if name.startswith(("parameter.", "average."))]
        squares = sum(float((ours[name].double() - straight[name].double()).square().sum()) for name in names)
        return (squares / sum(float(straight[name].double().square().sum()) for name in names)) ** 0.5

    def _overrides(self, step: int, processes: int, accumulation: int) -> list[str]:
        return [
            f"model.load_checkpoint={self.folder}/checkpoints/{self._weights}_step_{step:05d}.safetensors",
            f"optimization.batch_size={GLOBAL_BATCH // processes // accumulation}",
            f"optimization.gradient_accumulation_steps={accumulation}",
        ]


def launch(processes: int, *runs: list[str]) -> Finished:
    """Several runs in one launch, one after the other."""
    return run(torchrun_command(processes, SCRIPT, *(argument for each in runs for argument in each)), timeout=600)


class Runs:
    """`two` was resumed at step 3 on the two ranks that began it; `chain` went from one process over both layouts of
    two ranks back to one. One launch does all that two ranks do."""

    def __init__(self, folder: Path, model: Path) -> None:
        data = write_prepared_data(folder / "data", samples=5)
        self.two = folder / "two"
        settings: dict[str, Any] = {
            **joint_run(model, data, self.two),
            "lora": {"rank": 4, "alpha": 4, "dropout": 0.3},
            "optimization": {"steps": 6, "learning_rate": 1e-3, "gradient_accumulation_steps": 2, "batch_size": 1},
            "checkpoints": {"interval": 3, "keep_last_n": -1},
        }
        two = str(write_run_file(folder / "two.yaml", settings))
        self.chain = Chain(folder, model, data, steps=6)
        self.launch = launch(
            2,
            [two, "--"],
            [two, f"model.load_checkpoint={self.two}/checkpoints/lora_weights_step_00003.safetensors", "--"],
            self.chain.link(1, "acceleration.parallel=fsdp2", processes=2, accumulation=2),
            self.chain.link(3, "acceleration.parallel=ddp", processes=2),
        )
        self.chain.alone(5)


@pytest.fixture(scope="module")
def runs(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("resume"), tiny_pipeline)


def test_two_ranks_resume_bit_for_bit_with_accumulation_and_dropout(runs: Runs) -> None:
    folder = runs.two / "checkpoints"
    expected = read_state(folder / "set_aside_001" / "training_state_step_00006.safetensors")
    resumed = read_state(folder / "training_state_step_00006.safetensors")
    assert resumed.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(resumed.tensors[name], expected.tensors[name]) for name in expected.tensors)
    assert resumed.info["data"] == expected.info["data"]
    assert resumed.info["scheduler"]["last_epoch"] == 6


def test_one_process_and_fsdp2_and_ddp_and_one_process_again_compute_one_curve(runs: Runs) -> None:
    chain = runs.chain
    assert len(set(chain.straight)) == 6
    assert losses(chain.folder) == pytest.approx(chain.straight, rel=2e-6)
    assert chain.distance() < 2e-6
    assert "The global batch was" not in runs.launch.output
    # What the ranks of FSDP2 left: a file for each.
    parts = chain.folder / "checkpoints" / "training_state_step_00003"
    assert len(list(parts.iterdir())) == 2


@pytest.mark.slow
def test_four_ranks_and_two_and_one_continue_each_others_curve(tiny_pipeline: Path, tmp_path: Path) -> None:
    data = write_prepared_data(tmp_path / "data", samples=5)
    chain = Chain(tmp_path, tiny_pipeline, data, steps=9)
    ddp, fsdp2 = "acceleration.parallel=ddp", "acceleration.parallel=fsdp2"
    hsdp = ("acceleration.parallel=hsdp", "acceleration.hsdp_replicas=2")
    launch(
        4,
        chain.link(1, *hsdp, processes=4),
        chain.link(2, ddp, processes=4),
        chain.link(3, fsdp2, processes=4),
    )
    launch(
        2, chain.link(4, fsdp2, processes=2, accumulation=2), chain.link(5, "acceleration.parallel=ddp", processes=2)
    )
    launch(4, chain.link(6, fsdp2, processes=4), chain.link(7, *hsdp, processes=4))
    chain.alone(8)
    assert losses(chain.folder) == pytest.approx(chain.straight, rel=2e-6)
    assert chain.distance() < 2e-6
    parts = {step: chain.folder / "checkpoints" / f"training_state_step_{step:05d}" for step in (2, 4, 5, 7, 8)}
    assert {step: len(list(path.iterdir())) for step, path in parts.items()} == {2: 2, 4: 4, 5: 2, 7: 4, 8: 2}


@pytest.mark.slow
def test_full_fine_tuning_continues_its_curve_sharded_and_whole(tiny_pipeline: Path, tmp_path: Path) -> None:
    data = write_prepared_data(tmp_path / "data", samples=5)
    chain = Chain(tmp_path, tiny_pipeline, data, steps=4, is_full=True)
    launch(2, chain.link(1, "acceleration.parallel=fsdp2", processes=2, accumulation=2))
    chain.alone(3)
    assert losses(chain.folder) == pytest.approx(chain.straight, rel=2e-6)
    assert chain.distance() < 2e-6


@pytest.mark.slow
def test_a_minimal_state_is_one_small_file_under_fsdp2_and_no_state_is_none(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    settings = joint_run(tiny_pipeline, write_prepared_data(tmp_path / "data", samples=5), tmp_path / "minimal")
    settings["acceleration"] |= {"parallel": "fsdp2"}
    settings["checkpoints"] = {"interval": 2, "keep_last_n": -1, "save_training_state": "minimal"}
    file = str(write_run_file(tmp_path / "run.yaml", settings))
    off = [f"output_dir={tmp_path / 'off'}", "checkpoints.save_training_state=off"]
    launch(2, [file, "--"], [file, "model.load_checkpoint=latest", "optimization.steps=6", "--"], [file, *off, "--"])
    state = read_state(tmp_path / "minimal" / "checkpoints" / "training_state_step_00006.safetensors")
    assert (state.step, state.level, state.tensors) == (6, "minimal", {})
    assert len(losses(tmp_path / "minimal")) == 6
    assert not list((tmp_path / "off" / "checkpoints").glob("training_state*"))
    assert len(list((tmp_path / "off" / "checkpoints").iterdir())) == 4


@pytest.mark.slow
def test_compiled_and_eager_parts_continue_each_others_curve(tiny_pipeline: Path, tmp_path: Path) -> None:
    data = write_prepared_data(tmp_path / "data", samples=5)
    chain = Chain(tmp_path, tiny_pipeline, data, steps=8)
    fsdp2, ddp = "acceleration.parallel=fsdp2", "acceleration.parallel=ddp"
    launch(
        2,
        chain.link(1, fsdp2, COMPILED, processes=2),
        chain.link(2, fsdp2, processes=2),
        chain.link(3, ddp, COMPILED, processes=2),
        chain.link(4, ddp, processes=2, accumulation=2),
        chain.link(5, fsdp2, COMPILED, processes=2, accumulation=2),
    )
    chain.alone(6, COMPILED)
    chain.alone(7)
    assert losses(chain.folder) == pytest.approx(chain.straight, rel=1e-3)
    assert chain.distance() < 1e-3
