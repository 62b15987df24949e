"""scripts/sample.py: what a run's own validation made, made again outside training."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_trainer_plus.commands.main import parse_command
from ltx_trainer_plus.commands.sample import read_config
from ltx_trainer_plus.media.video import read_video
from scripts import sample
from tests.launch import accelerate_command, run
from tests.runs import VALIDATION, joint_run, train, write_prepared_data, write_run_file
from tests.unit.media_files import assert_same_media, make_video

FLAGS = ("--size", "64x64x9", "validation.inference_steps=2", "validation.stg_blocks=[1]", "device=cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def trained(tiny_pipeline: Path, folder: Path) -> Path:
    """A run folder with a LoRA of 2 steps and the samples of its validation, conditions included."""
    clip = make_video(folder / "clip.mp4", 17)
    settings = joint_run(tiny_pipeline, write_prepared_data(folder / "data"), folder / "run")
    settings["optimization"] |= {"steps": 2, "learning_rate": 1e-1}
    settings["checkpoints"] = {"precision": "float32"}
    samples: list[dict[str, Any]] = [
        {"prompt": "a ball", "conditions": [{"type": "first_frame", "image_or_video": str(clip)}]},
        {"prompt": "a bell", "seed": 0, "conditions": [{"type": "video_to_audio", "video": str(clip)}]},
        {"prompt": "a square"},
    ]
    settings["validation"] = {**VALIDATION, "samples": samples, "interval": 5, "skip_initial_validation": True}
    train(settings)
    return folder / "run"


def test_a_run_file_and_its_lora_make_the_samples_of_the_runs_validation(trained: Path, folder: Path) -> None:
    status = sample.main([str(trained / "training_config.yaml"), "--lora", "latest", "--output", str(folder / "again")])
    assert status == 0
    made = sorted((folder / "again").iterdir())
    assert [path.name for path in made] == ["sample_1.mp4", "sample_2.mp4", "sample_3.mp4"]
    for index, path in enumerate(made, start=1):
        assert_same_media(path, trained / "samples" / f"step_000002_{index}.mp4")


def test_flags_count_for_every_sample_of_a_run_file(folder: Path) -> None:
    samples = [{"prompt": "a", "video_dims": [64, 64, 9], "seed": 5}, {"prompt": "b"}]
    run_file = write_run_file(
        folder / "own.yaml", {"model": {"model_path": str(folder)}, "validation": {"samples": samples}}
    )
    given = parse_command("sample", [str(run_file), "--size", "32x32x17", "--seed", "0", "validation.samples.1.seed=7"])
    validation = read_config(given).validation
    assert [validation.dims_of(one) for one in validation.samples] == [(32, 32, 17)] * 2
    assert [validation.seed_of(one) for one in validation.samples] == [0, 7]


def test_two_processes_share_the_samples_and_make_the_same_files(trained: Path, folder: Path) -> None:
    arguments = (str(trained / "training_config.yaml"), "--lora", str(trained), "--output", str(folder / "shared"))
    finished = run(accelerate_command("cpu_ddp", "scripts/sample.py", *arguments), timeout=400)
    for index in (1, 2, 3):
        assert str(folder / "shared" / f"sample_{index}.mp4") in finished.output
        validated = trained / "samples" / f"step_000002_{index}.mp4"
        assert_same_media(folder / "shared" / f"sample_{index}.mp4", validated)


def test_flags_alone_are_enough(tiny_pipeline: Path, trained: Path, folder: Path) -> None:
    base = ["--model-path", str(tiny_pipeline), "--prompt", 'a "cat": ${x}', "--seed", "3", *FLAGS]
    condition = f"{{type: first_frame, image_or_video: {folder / 'clip.mp4'}}}"
    lora = next((trained / "checkpoints").glob("lora_weights_*.safetensors"))
    files = {}
    for name, more in {
        "base": [],
        "lora": ["--lora", str(lora)],
        "nothing added": ["--lora", str(lora), "--lora-strength", "0"],
        "given": ["--condition", condition],
        "other seed": ["--seed", "4"],
    }.items():
        output = folder / f"{name}.mp4"
        assert sample.main([*base, *more, "--output", str(output)]) == 0
        files[name] = output
    assert read_video(folder / "base.mp4").frames.shape == (9, 64, 64, 3)
    assert_same_media(files["nothing added"], files["base"])
    for one, other in combinations(("base", "lora", "given", "other seed"), 2):
        with pytest.raises(AssertionError):
            assert_same_media(files[one], files[other])


def test_fully_trained_weights_take_the_place_of_the_base(tiny_pipeline: Path, folder: Path) -> None:
    settings = joint_run(tiny_pipeline, write_prepared_data(folder / "data"), folder / "full")
    settings["model"]["training_mode"] = "full"
    settings["optimization"]["steps"] = 1
    settings["validation"] = {**VALIDATION, "samples": [{"prompt": "a ball"}], "skip_initial_validation": True}
    settings["checkpoints"] = {"precision": "float32"}
    train(settings)
    config = str(folder / "full" / "training_config.yaml")
    assert sample.main([config, "--lora", "latest", "--output", str(folder / "full.mp4")]) == 0
    assert_same_media(folder / "full.mp4", folder / "full/samples/step_000001_1.mp4")


def test_a_run_with_a_moving_average_validates_with_the_averaged_weights(tiny_pipeline: Path, folder: Path) -> None:
    settings = joint_run(tiny_pipeline, write_prepared_data(folder / "data"), folder / "averaged")
    settings["optimization"] |= {"learning_rate": 1e-1}
    settings["validation"] = {**VALIDATION, "samples": [{"prompt": "a ball"}], "skip_initial_validation": True}
    settings["checkpoints"] = {"precision": "float32", "ema_decay": 0.9}
    train(settings)
    run_folder = folder / "averaged"
    validated = run_folder / "samples" / "step_000004_1.mp4"
    for name in ("lora_weights", "ema_lora_weights"):
        weights = str(run_folder / "checkpoints" / f"{name}_step_00004.safetensors")
        config = str(run_folder / "training_config.yaml")
        assert sample.main([config, "--lora", weights, "--output", str(folder / f"{name}.mp4")]) == 0
    assert_same_media(validated, folder / "ema_lora_weights.mp4")
    with pytest.raises(AssertionError):
        assert_same_media(validated, folder / "lora_weights.mp4")


def test_what_cannot_be_sampled_is_said(
    tiny_pipeline: Path, trained: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model-path", str(tiny_pipeline), "--prompt", "a cat", *FLAGS]

    def complaint(*arguments: str) -> str:
        assert sample.main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "validation.video_dims: [100, 64, 9]: width 100 is not a multiple of 32" in complaint(
        *base, "--size", "100x64x9"
    )
    assert "The run makes 3 samples, and --output is one file. Give --prompt, or a folder as --output." in complaint(
        str(trained / "training_config.yaml"), "--output", "one.mp4"
    )
    assert "--lora: nowhere does not exist." in complaint(*base, "--lora", "nowhere")

    lora = next((trained / "checkpoints").glob("lora_weights_*.safetensors"))
    tensors = load_file(lora)
    other = {key.replace("transformer_blocks.0", "transformer_blocks.7"): value for key, value in tensors.items()}
    save_file(other, folder / "other.safetensors")
    assert "layers that the model does not have" in complaint(*base, "--lora", str(folder / "other.safetensors"))
    save_file({"weight": torch.zeros(1)}, folder / "no_lora.safetensors")
    assert "it holds no tensor named ...lora_A.weight" in complaint(
        *base, "--lora", str(folder / "no_lora.safetensors")
    )


def test_a_loras_reference_scale_is_read_from_its_file(
    tiny_pipeline: Path, trained: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = next((trained / "checkpoints").glob("lora_weights_*.safetensors"))
    with safe_open(lora, "pt") as file:
        metadata = file.metadata()
    half = folder / "half.safetensors"
    save_file(load_file(lora), half, {**metadata, "reference_downscale_factor": "2"})
    base = ["--model-path", str(tiny_pipeline), "--prompt", "a cat", "--lora", str(half), *FLAGS]
    clip = folder / "clip.mp4"

    def sampled(name: str, scale: str) -> Path:
        condition = f"{{type: reference, video: {clip}{scale}}}"
        assert sample.main([*base, "--condition", condition, "--output", str(folder / name)]) == 0
        return folder / name

    assert_same_media(sampled("open.mp4", ""), sampled("two.mp4", ", downscale_factor: 2"))
    condition = f"{{type: reference, video: {clip}, downscale_factor: 1}}"
    assert sample.main([*base, "--condition", condition]) == 2
    assert (
        "validation.samples.0.conditions.0.downscale_factor: the LoRA was trained with 2 (its file says so) "
        "(given: 1). Set it to 2, or leave it out." in capsys.readouterr().err
    )


def test_latest_without_a_run_file_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert sample.main(["--model-path", "model", "--prompt", "a ball", "--lora", "latest"]) == 2
    assert "give the run folder instead, e.g. --lora outputs/my_run" in capsys.readouterr().err
