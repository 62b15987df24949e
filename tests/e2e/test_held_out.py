"""The held-out loss: what it is computed on, that training does not notice, and the checkpoint that it keeps."""

import math
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.checkpoints.store import CheckpointStore
from ltx_trainer_plus.config import ConfigError
from ltx_trainer_plus.run.preflight import check_run
from ltx_trainer_plus.validation.held_out import HeldOutLoss, HeldOutScore
from tests.runs import joint_run, metrics, train, write_prepared_data

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_data(tmp_path_factory.mktemp("data"), samples=8)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_data(tmp_path_factory.mktemp("apart"), samples=3, seed=1)


@pytest.fixture
def settings(tiny_pipeline: Path, data: Path, tmp_path: Path) -> Settings:
    settings = joint_run(tiny_pipeline, data, tmp_path / "run")
    settings["lora"]["dropout"] = 0.3  # would show a disturbed generator, and an evaluation in training mode
    return settings


def lines(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training lines, held-out lines."""
    found = metrics(Path(settings["output_dir"]))
    return [line for line in found if "loss" in line], [line for line in found if "held_out" in line]


def test_a_set_apart_is_scored_per_stream_and_training_does_not_notice(settings: Settings, apart: Path) -> None:
    train(settings)
    plain, _ = lines(settings)
    scored = {**settings, "output_dir": f"{settings['output_dir']}_scored"}
    scored["validation"] = {"interval": None, "loss": {"preprocessed_data_root": str(apart), "interval": 2}}
    train(scored)
    training, held_out = lines(scored)
    assert [line["loss"] for line in training] == [line["loss"] for line in plain]
    assert [line["step"] for line in held_out] == [0, 2, 4]
    for line in held_out:
        assert line["held_out"] == pytest.approx(line["held_out/video"] + line["held_out/audio"])
    assert len({line["held_out"] for line in held_out}) == 3
    # The same model, scored again: a run of one more step, resumed, starts from the model that was scored last.
    train({**scored, "output_dir": f"{settings['output_dir']}_again"})
    again = lines({**scored, "output_dir": f"{settings['output_dir']}_again"})[1]
    assert again == held_out


def test_a_fraction_is_taken_by_name_and_never_trained_on(settings: Settings, data: Path, tmp_path: Path) -> None:
    from ltx_trainer_plus.config import load_config
    from tests.runs import write_run_file

    def split(root: Path, fraction: float) -> tuple[set[str], set[str]]:
        run = {**settings, "validation": {"loss": {"fraction": fraction}}}
        run["data"] = {**settings["data"], "preprocessed_data_root": str(root)}
        facts = check_run(load_config(write_run_file(tmp_path / "run.yaml", run)))
        assert facts.held_out is not None
        assert len(facts.dataset.shapes) == len(facts.dataset.names) == len(facts.dataset)
        return set(facts.dataset.names), set(facts.held_out.names)

    trained, held_out = split(data, 0.3)
    assert trained | held_out == {f"clip_{index:02d}" for index in range(8)}
    assert not trained & held_out
    # More samples move none to the other side.
    more_trained, more_held_out = split(write_prepared_data(tmp_path / "more", samples=40), 0.3)
    assert trained <= more_trained
    assert held_out <= more_held_out
    assert 4 <= len(more_held_out) <= 20
    # At least one, whatever the fraction.
    assert len(split(data, 1e-9)[1]) == 1


def test_the_best_checkpoint_by_held_out_loss_outlives_the_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([9.0, 3.0, 1.0, 2.0, 5.0, 4.0, 0.5])  # at steps 0 to 4, then, resumed, at 5 and 6
    monkeypatch.setattr(HeldOutLoss, "score", lambda self, handle: HeldOutScore(next(scores), 1.0, None))
    settings["validation"] = {"interval": None, "loss": {"fraction": 0.3, "interval": 1}}
    settings["checkpoints"] = {"interval": None, "keep_last_n": 1, "keep_best": True}
    train(settings)
    store = CheckpointStore(Path(settings["output_dir"]) / "checkpoints")
    assert store.best() == (2, 1.0)
    assert [checkpoint.step for checkpoint in store.whole()] == [2, 4]
    train(settings, "model.load_checkpoint=latest", "optimization.steps=5")
    assert [checkpoint.step for checkpoint in store.whole()] == [2, 5]
    assert store.best() == (2, 1.0)
    train(settings, "model.load_checkpoint=latest", "optimization.steps=6")
    assert store.best() == (6, 0.5)


@pytest.mark.parametrize(
    ("validation", "checkpoints", "message"),
    [
        ({"loss": {}}, {}, "needs exactly one of preprocessed_data_root"),
        ({"loss": {"fraction": 0.1, "preprocessed_data_root": "."}}, {}, "needs exactly one of"),
        ({"loss": {"fraction": 0.1}, "interval": None}, {}, "the loss would never be computed"),
        ({}, {"keep_best": True}, "Set validation.loss"),
        ({"loss": {"preprocessed_data_root": "/nowhere"}}, {}, "does not exist"),
        ({"loss": {"fraction": 0.999999}}, {}, "leaves nothing to train on"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_the_start(
    settings: Settings, validation: dict[str, Any], checkpoints: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train({**settings, "validation": {"interval": 10, **validation}, "checkpoints": checkpoints})


def test_the_sigmas_are_quantiles_of_what_training_draws(settings: Settings, apart: Path) -> None:
    from ltx_trainer_plus.config.optimization import FlowMatchingConfig
    from ltx_trainer_plus.config.strategy import VideoStreamConfig
    from ltx_trainer_plus.flow.positions import LatentGeometry
    from ltx_trainer_plus.strategies.flexible import FlexibleStrategy

    flow = FlowMatchingConfig(timestep_sampling_mode="uniform")
    strategy = FlexibleStrategy(VideoStreamConfig(), None, LatentGeometry(), flow)
    held_out = HeldOutLoss([], strategy, None, None, levels=4, seed=0)  # type: ignore[arg-type]
    sigmas = held_out._sigmas(100).tolist()
    assert sigmas == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.02)
    assert all(math.isfinite(sigma) for sigma in sigmas)
