"""Runs from start to end in one process: what they train, write, refuse and continue."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.checkpoints.run_folder import RunFolderError
from ltx_trainer_plus.config import ConfigError, load_config
from ltx_trainer_plus.models import load_transformer
from tests.runs import VALIDATION, joint_run, losses, metrics, train, write_prepared_data

AUDIO_LAYERS = ("audio_attn", "audio_ff", "video_to_audio")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def settings(tiny_pipeline: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    return joint_run(tiny_pipeline, data, tmp_path / "run")


def elsewhere(settings: dict[str, Any], name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The same run with changed sections, in a folder of its own."""
    changed = {key: {**settings.get(key, {}), **values} for key, values in sections.items()}
    output = str(Path(settings["output_dir"]).with_name(name))
    return {**settings, **changed, "output_dir": output}


def test_a_joint_run_logs_both_losses_apart_and_their_sum(settings):
    result = train(settings)
    lines = metrics(Path(settings["output_dir"]))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert result.step == 4
    for line in lines:
        assert line["loss"] == pytest.approx(line["loss/video"] + line["loss/audio"], rel=1e-6)
        assert line["grad_norm"] > 0
        # 2 samples of 2*2*2 video and 4 audio tokens
        assert line["tokens_per_second"] * line["step_time"] == pytest.approx(24)
    # Linear from 1 to 0.1 in 4 steps, one notch for each.
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3, 7.75e-4, 5.5e-4, 3.25e-4])


def test_the_saved_configuration_starts_the_same_run_again(settings, tmp_path):
    train(settings)
    first = losses(Path(settings["output_dir"]))
    saved = Path(settings["output_dir"]) / "training_config.yaml"
    again = load_config(saved, [f"output_dir={tmp_path / 'again'}"])
    from ltx_trainer_plus.trainer import Trainer

    Trainer(again).train()
    assert losses(tmp_path / "again") == first


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(
    ("streams", "trained"), [(("video",), "video"), (("audio",), "audio"), (("video", "audio"), "both")]
)
def test_every_stream_alone_and_together_trains_and_only_what_the_loss_reaches(
    settings, tiny_pipeline, mode, streams, trained
):
    settings = {**settings, "model": {**settings["model"], "training_mode": mode}}
    settings["training_strategy"] = {"name": "flexible", **{stream: {} for stream in streams}}
    settings["checkpoints"] = {"precision": "float32"}
    result = train(settings, "optimization.steps=2")
    line = metrics(Path(settings["output_dir"]))[-1]
    assert {key for key in ("loss/video", "loss/audio") if key in line} == {f"loss/{stream}" for stream in streams}
    if mode == "lora":
        names = load_file(result.weights).keys()
        touched_audio = any(part in name for name in names for part in AUDIO_LAYERS)
        touched_video = any(".attn1." in name for name in names)
    else:
        before = load_transformer(tiny_pipeline, torch.float32).state_dict()
        after = load_transformer(result.weights, torch.float32).state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        touched_audio = any(part in name for name in changed for part in AUDIO_LAYERS)
        touched_video = any(".attn1." in name for name in changed)
    assert touched_audio == (trained != "video")
    assert touched_video == (trained != "audio")


def test_batch_size_and_accumulation_do_not_change_the_loss_curve(settings):
    curves = {}
    for name, batch, accumulation in (("4x1", 4, 1), ("2x2", 2, 2), ("1x4", 1, 4)):
        run = elsewhere(
            settings,
            name,
            optimization={"batch_size": batch, "gradient_accumulation_steps": accumulation},
            data={"shape_group": 1},
        )
        train(run)
        curves[name] = losses(Path(run["output_dir"]))
    assert curves["2x2"] == pytest.approx(curves["4x1"], rel=2e-6)
    assert curves["1x4"] == pytest.approx(curves["4x1"], rel=2e-6)


def test_gradient_checkpointing_and_dataloader_workers_change_no_loss(settings):
    train(settings)
    changed = elsewhere(
        settings, "changed", optimization={"enable_gradient_checkpointing": True}, data={"num_dataloader_workers": 2}
    )
    train(changed)
    assert losses(Path(changed["output_dir"])) == losses(Path(settings["output_dir"]))


def test_validation_leaves_the_training_losses_as_they_are_and_writes_its_samples(settings):
    settings = {**settings, "lora": {**settings["lora"], "dropout": 0.3}}  # would show a disturbed generator
    train(settings)
    validated = elsewhere(settings, "validated", validation=VALIDATION)
    train(validated)
    output = Path(validated["output_dir"])
    assert losses(output) == losses(Path(settings["output_dir"]))
    assert sorted(path.name for path in (output / "samples").iterdir()) == [
        f"step_{step:06d}_{index}.mp4" for step in (0, 2, 4) for index in (1, 2)
    ]
    assert not (Path(settings["output_dir"]) / "samples").exists()


def test_in_bfloat16_the_base_is_small_and_the_adapters_are_float32_masters(settings):
    settings = {**settings, "acceleration": {"mixed_precision_mode": "bf16"}, "checkpoints": {"precision": "bfloat16"}}
    result = train(settings)
    assert losses(Path(settings["output_dir"]))[-1] > 0
    with safe_open(result.weights, "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    with safe_open(result.weights.with_name("training_state_step_00004.safetensors"), "pt") as state:
        masters = [name for name in state.keys() if name.startswith("parameter.")]  # noqa: SIM118
        assert masters
        assert {state.get_tensor(name).dtype for name in masters} == {torch.float32}


def test_a_resumed_run_continues_the_loss_curve_and_overwrites_nothing(settings):
    straight = elsewhere(settings, "straight", optimization={"steps": 6}, checkpoints={"keep_last_n": -1})
    train(straight)

    # The same schedule, stopped half-way.
    parts = elsewhere(straight, "parts", optimization={"steps": 6}, checkpoints={"keep_last_n": -1, "interval": 3})
    output = Path(parts["output_dir"])
    train(parts)
    for path in output.glob("checkpoints/*_step_00006*"):
        path.unlink()
    kept = {path: path.read_bytes() for path in output.glob("checkpoints/*_step_00003*")}
    assert len(kept) == 3

    train(parts, "model.load_checkpoint=latest")
    assert losses(output) == losses(Path(straight["output_dir"]))
    assert [line["step"] for line in metrics(output)] == [1, 2, 3, 4, 5, 6]
    assert {path: path.read_bytes() for path in kept} == kept
    final = "checkpoints/lora_weights_step_00006.safetensors"
    ours, expected = load_file(output / final), load_file(Path(straight["output_dir"]) / final)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_weights_alone_start_a_new_run(settings):
    first = train(settings)
    second = elsewhere(settings, "second", model={"load_checkpoint": str(first.weights)})
    (Path(first.weights).with_name("training_state_step_00004.safetensors")).unlink()
    (Path(first.weights).with_name("checkpoint_step_00004.json")).unlink()
    train(second)
    lines = metrics(Path(second["output_dir"]))
    assert lines[0]["step"] == 1
    assert lines[0]["loss"] != losses(Path(settings["output_dir"]))[0]


def test_a_fresh_start_in_a_folder_that_holds_a_run_is_refused(settings):
    train(settings)
    with pytest.raises(RunFolderError, match=r"model\.load_checkpoint: latest"):
        train(settings)


@pytest.mark.parametrize(
    ("model", "root", "streams"),
    [
        ("ltx-2.3-tiny-monolith.safetensors", "official-precomputed", ("video", "audio")),
        ("ltx-2-tiny-monolith.safetensors", "official-precomputed-legacy", ("video",)),
    ],
)
def test_official_prepared_data_trains(settings, reference, model, root, streams):
    settings = {**settings, "model": {"model_path": str(reference / model)}}
    settings["training_strategy"] = {"name": "flexible", **{stream: {} for stream in streams}}
    train(settings, f"data.preprocessed_data_root={reference / root}")
    assert len(losses(Path(settings["output_dir"]))) == 4


def test_a_step_with_infinite_gradients_is_skipped_and_counted(settings, data, tmp_path):
    root = write_prepared_data(tmp_path / "huge", samples=2)
    for path in (root / ".precomputed/latents").iterdir():
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {"latents": file.get_tensor("latents") * 1e30}
        save_file(tensors, path, metadata)
    settings = {**settings, "data": {**settings["data"], "preprocessed_data_root": str(root)}}
    result = train(settings)
    assert metrics(Path(settings["output_dir"]))[-1]["skipped_steps"] == 4
    weights = load_file(result.weights)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert all(tensor.count_nonzero() == 0 for name, tensor in weights.items() if ".lora_B." in name)


def test_all_problems_of_model_data_and_validation_are_found_before_anything_starts(settings, reference):
    settings = elsewhere(settings, "faulty", validation={**VALIDATION, "stg_blocks": [28], "video_dims": [60, 64, 10]})
    settings["lora"] = {"rank": 4, "target_modules": ["to_q", "to_v_typo"]}
    with pytest.raises(ConfigError) as error:
        train(settings)
    message = str(error.value)
    assert "to_v_typo" in message
    assert "block 28 does not exist: this model has 3 blocks (0 to 2)" in message
    assert "width 60 is not a multiple of 32" in message
    assert "10 frames" in message
    assert not Path(settings["output_dir"]).exists()


def test_data_prepared_for_another_model_is_refused(settings, reference):
    settings = {**settings, "model": {"model_path": str(reference / "ltx-2-tiny.safetensors")}}
    with pytest.raises(ConfigError, match="prepared with another model"):
        train(settings)


def test_one_sample_of_another_model_among_many_is_named_before_anything_starts(settings, tmp_path):
    root = write_prepared_data(tmp_path / "mixed")
    odd = root / ".precomputed/conditions/clip_05.safetensors"
    save_file({"video_context": torch.randn(8, 48), "audio_context": torch.randn(8, 32)}, odd)
    settings = {**settings, "data": {**settings["data"], "preprocessed_data_root": str(root)}}
    with pytest.raises(ConfigError, match="sample clip_05: the video caption has 48 channels, the model takes 64"):
        train(settings)


def test_the_metrics_file_is_plain_json_in_full_precision(settings):
    train(settings)
    text = (Path(settings["output_dir"]) / "metrics.jsonl").read_text().splitlines()[0]
    line = json.loads(text)
    assert len(repr(line["loss"])) > 10
    assert json.loads(json.dumps(line)) == line
