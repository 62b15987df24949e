"""A run that is stopped and resumed computes what it would have computed, and says what has changed."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ltx_trainer_plus.checkpoints.continuation import Change
from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.checkpoints.state import CheckpointError, TrainingState
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.run.starts import read_starts
from ltx_trainer_plus.step.train_step import TrainStep
from tests.damage import empty, flip_a_bit, replace_by_a_foreign_file, truncate
from tests.runs import joint_run, losses, metrics, train, write_prepared_data
from tests.states import read_state

Settings = dict[str, Any]

SCHEDULERS: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"T_0": 2, "eta_min": 1e-6},
    "polynomial": {"power": 2.0},
    "step": {"step_size": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_data(tmp_path_factory.mktemp("data"), samples=5)


@pytest.fixture
def settings(tiny_pipeline: Path, data: Path, tmp_path: Path) -> Settings:
    settings = joint_run(tiny_pipeline, data, tmp_path / "run")
    return {**settings, "checkpoints": {"interval": 3, "keep_last_n": -1}}


def checkpoint(settings: Settings, step: int) -> Path:
    return Path(settings["output_dir"]) / "checkpoints" / f"lora_weights_step_{step:05d}.safetensors"


def final_state(folder: Path, step: int) -> TrainingState:
    return read_state(folder / f"training_state_step_{step:05d}.safetensors")


def assert_same_state(one: TrainingState, other: TrainingState) -> None:
    assert one.step == other.step
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert one.info["scheduler"] == other.info["scheduler"]
    assert one.info["data"] == other.info["data"]


@pytest.mark.parametrize(
    "scheduler",
    [
        name if name in ("linear", "cosine_with_restarts") else pytest.param(name, marks=pytest.mark.slow)
        for name in SCHEDULERS
    ],
)
def test_half_and_half_is_the_whole_bit_for_bit_with_every_scheduler(settings: Settings, scheduler: str) -> None:
    """Accumulation 2, a stop in the middle of an epoch (5 samples, 4 a step), dropout."""
    settings["lora"] = {**settings["lora"], "dropout": 0.3}
    settings["optimization"] = {
        **settings["optimization"],
        "steps": 6,
        "gradient_accumulation_steps": 2,
        "scheduler_type": scheduler,
        "scheduler_params": SCHEDULERS[scheduler],
    }
    train(settings)
    folder = Path(settings["output_dir"])
    whole = metrics(folder)
    expected = final_state(folder / "checkpoints", 6)

    train(settings, f"model.load_checkpoint={checkpoint(settings, 3)}")
    assert len(list((folder / "checkpoints" / "set_aside_001").iterdir())) == 3
    for key in ("step", "loss", "loss/video", "grad_norm", "learning_rate"):
        assert [line[key] for line in metrics(folder)] == [line[key] for line in whole]
    assert_same_state(final_state(folder / "checkpoints", 6), expected)


def test_full_fine_tuning_resumes_bit_for_bit(settings: Settings) -> None:
    settings["model"] = {**settings["model"], "training_mode": "full"}
    train(settings)
    folder = Path(settings["output_dir"]) / "checkpoints"
    expected = final_state(folder, 4)
    train(settings, f"model.load_checkpoint={folder / 'model_weights_step_00003.safetensors'}")
    assert_same_state(final_state(folder, 4), expected)


def test_another_batch_size_of_the_same_global_batch_continues_the_curve(settings: Settings) -> None:
    """2 x 2 to 4 x 1 to 1 x 4; the group of 2 that the first part used stays."""
    settings["optimization"] = {**settings["optimization"], "steps": 6, "gradient_accumulation_steps": 2}
    train(settings)
    expected = losses(Path(settings["output_dir"]))
    for batch, accumulation in ((4, 1), (1, 4)):
        train(
            settings,
            f"model.load_checkpoint={checkpoint(settings, 3)}",
            f"optimization.batch_size={batch}",
            f"optimization.gradient_accumulation_steps={accumulation}",
        )
        assert losses(Path(settings["output_dir"])) == pytest.approx(expected, rel=2e-6)


def test_a_changed_global_batch_is_announced_with_what_would_restore_it_and_no_sample_is_left_out(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings["optimization"] = {**settings["optimization"], "gradient_accumulation_steps": 2}
    train(settings)
    folder = Path(settings["output_dir"]) / "checkpoints"
    assert final_state(folder, 3).info["data"]["position"] == 12
    with caplog.at_level(logging.WARNING):
        train(
            settings,
            f"model.load_checkpoint={checkpoint(settings, 3)}",
            "optimization.batch_size=1",
            "optimization.steps=6",
            "checkpoints.interval=1",
        )
    assert "The global batch was 4 (2 per process x 2 micro-batches x 1 processes) and is 2" in caplog.text
    assert "optimization.gradient_accumulation_steps=4 would restore it" in caplog.text
    # 12 samples before, then 2 a step.
    assert [final_state(folder, step).info["data"]["position"] for step in (4, 5, 6)] == [14, 16, 18]


def test_what_may_change_is_shown_and_goes_on(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    train(settings)
    with caplog.at_level(logging.WARNING):
        train(
            settings,
            "model.load_checkpoint=latest",
            "optimization.steps=6",
            "optimization.learning_rate=5e-4",
            "optimization.scheduler_type=constant",
        )
    assert "optimization.steps: 4 -> 6" in caplog.text
    assert "optimization.learning_rate: 0.001 -> 0.0005" in caplog.text
    assert "output_dir" not in caplog.text
    lines = metrics(Path(settings["output_dir"]))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["learning_rate"] == 5e-4


@pytest.mark.parametrize(
    ("override", "shown", "remedy"),
    [
        ("lora.rank=8", "lora.rank: 4 -> 8", "set back: lora.rank=4"),
        ("lora.target_modules=[to_q]", "lora.target_modules: ", "set back: lora.target_modules=[to_k,to_q,to_v,"),
        ("model.training_mode=full", "model.training_mode: lora -> full", "set back: model.training_mode=lora"),
        ("lora.alpha=8", "lora.alpha: 4 -> 8", "checkpoints.no_resume=true"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_remedy(
    settings: Settings, override: str, shown: str, remedy: str
) -> None:
    train(settings)
    before = sorted(Path(settings["output_dir"]).rglob("*"))
    with pytest.raises(CheckpointError) as error:
        train(settings, "model.load_checkpoint=latest", override)
    assert shown in str(error.value)
    assert remedy in str(error.value)
    assert "another output_dir" in str(error.value)
    assert sorted(Path(settings["output_dir"]).rglob("*")) == before


def test_the_remedy_for_another_optimizer_setting_works(settings: Settings, tmp_path: Path) -> None:
    train(settings)
    fresh = (f"model.load_checkpoint={checkpoint(settings, 4)}", "checkpoints.no_resume=true", "lora.alpha=8")
    train(settings, *fresh, f"output_dir={tmp_path / 'fresh'}")
    assert [line["step"] for line in metrics(tmp_path / "fresh")] == [1, 2, 3, 4]


def test_another_data_set_or_group_is_announced(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    train(settings)
    with caplog.at_level(logging.WARNING):
        train(settings, "model.load_checkpoint=latest", "optimization.steps=5", "data.shape_group=1")
    assert "data.shape_group=2 would keep it" in caplog.text
    other = write_prepared_data(Path(settings["output_dir"]).with_name("other"), samples=3)
    with caplog.at_level(logging.WARNING):
        train(settings, "model.load_checkpoint=latest", "optimization.steps=6", f"data.preprocessed_data_root={other}")
    assert "The data set has changed" in caplog.text


def test_training_steps_go_on_while_a_checkpoint_is_still_being_written(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of step 2 is held until step 4 begins: were it waited for, nothing would ever end it."""
    settings["checkpoints"] = {"interval": 2, "keep_last_n": -1}
    events: list[str] = []
    fourth_step = threading.Event()
    save, train_step = CheckpointStore.save, TrainStep.__call__

    def held_save(store: CheckpointStore, step: int, *arguments: Any) -> Path:
        if not fourth_step.wait(60):
            raise OSError("the fourth step did not come")
        weights = save(store, step, *arguments)
        events.append(f"step {step} is written")
        return weights

    def noted_step(step: TrainStep, batches: Any) -> Any:
        events.append(f"step {1 + len(events)}")
        if len(events) == 4:
            fourth_step.set()
        return train_step(step, batches)

    monkeypatch.setattr(CheckpointStore, "save", held_save)
    monkeypatch.setattr(TrainStep, "__call__", noted_step)
    train(settings)
    assert events == ["step 1", "step 2", "step 3", "step 4", "step 2 is written", "step 4 is written"]
    folder = Path(settings["output_dir"]) / "checkpoints"
    assert [final_state(folder, step).info["data"]["position"] for step in (2, 4)] == [4, 8]


def test_keeping_one_checkpoint_keeps_the_newest_across_resumes(settings: Settings) -> None:
    settings["checkpoints"] = {"interval": 1, "keep_last_n": 1}
    train(settings)
    train(settings, "model.load_checkpoint=latest", "optimization.steps=6")
    folder = Path(settings["output_dir"]) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint_step_00006.json",
        "lora_weights_step_00006.safetensors",
        "training_state_step_00006.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, replace_by_a_foreign_file])
def test_latest_passes_over_a_damaged_training_state_by_name_and_continues_exactly(
    settings: Settings, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    train(settings)
    folder = Path(settings["output_dir"])
    expected = losses(folder)
    damage(folder / "checkpoints" / "training_state_step_00004.safetensors")
    with caplog.at_level(logging.WARNING):
        train(settings, "model.load_checkpoint=latest")
    assert "Passed over: training_state_step_00004.safetensors" in caplog.text
    assert losses(folder) == expected
    assert json.loads((folder / "checkpoints" / "checkpoint_step_00004.json").read_text())["step"] == 4


def test_the_wandb_run_is_continued_and_a_branch_is_a_run_of_its_own(settings: Settings, tmp_path: Path) -> None:
    settings["wandb"] = {"enabled": True}
    train(settings)
    first = final_state(checkpoint(settings, 4).parent, 4).info["wandb_id"]
    assert first
    train(settings, "model.load_checkpoint=latest", "optimization.steps=5")
    assert final_state(checkpoint(settings, 5).parent, 5).info["wandb_id"] == first
    # From this run's checkpoint, into another folder: both would write the same steps.
    branch = tmp_path / "branch"
    train(settings, f"model.load_checkpoint={checkpoint(settings, 3)}", f"output_dir={branch}")
    other = final_state(branch / "checkpoints", 4).info["wandb_id"]
    assert other
    assert other != first


def test_tensorboard_shows_a_resumed_run_as_one_that_was_never_stopped(settings: Settings) -> None:
    settings["tracking"] = {"backends": ["tensorboard"]}
    folder = Path(settings["output_dir"])
    train(settings)
    train(settings, f"model.load_checkpoint={checkpoint(settings, 3)}", "optimization.steps=5")
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(step, pytest.approx(loss)) for step, loss in enumerate(losses(folder), start=1)]
    assert len(shown) == 5


def test_the_run_folder_says_when_and_with_what_the_run_was_started(settings: Settings, tmp_path: Path) -> None:
    folder = RunFolder(Path(settings["output_dir"]))
    train(settings)
    train(settings, f"model.load_checkpoint={checkpoint(settings, 3)}", "optimization.learning_rate=5e-4")
    train(settings, f"model.load_checkpoint={checkpoint(settings, 3)}", f"output_dir={tmp_path / 'branch'}")
    first, second = read_starts(folder.starts)
    assert (first.step, first.weights, first.changes) == (0, None, ())
    assert (second.step, second.weights) == (3, str(checkpoint(settings, 3)))
    assert second.changes == (Change("optimization.learning_rate", 1e-3, 5e-4),)
    assert first.config["optimization"]["learning_rate"] == 1e-3
    assert second.config["optimization"]["learning_rate"] == 5e-4
    assert first.time < second.time
    (branch,) = read_starts(RunFolder(tmp_path / "branch").starts)
    # Of the state at step 3, which the first start wrote with the same settings.
    assert (branch.step, branch.changes) == (3, ())
