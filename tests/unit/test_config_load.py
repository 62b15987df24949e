"""Loading: files, merging, overrides, interpolation, defaults, and the way back to YAML."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ltx_trainer_plus.config import ConfigError, TrainerConfig, config_as_dict, load_config, save_config
from ltx_trainer_plus.config.optimization import SAMPLING_PARAMS
from ltx_trainer_plus.config.overrides import split_arguments
from ltx_trainer_plus.flow.timesteps import shifted_logit_normal, uniform
from tests.unit.config_files import load, problems, smallest, write

OFFICIAL_DEFAULTS = {
    "model": {
        "text_encoder_path": None,
        "video_vae_path": None,
        "audio_vae_path": None,
        "training_mode": "lora",
        "load_checkpoint": None,
    },
    "lora": {"rank": 64, "alpha": 64, "dropout": 0.0, "target_modules": ["to_k", "to_q", "to_v", "to_out.0"]},
    "optimization": {
        "learning_rate": 5e-4,
        "steps": 3000,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "optimizer_type": "adamw",
        "scheduler_type": "linear",
        "scheduler_params": {},
        "enable_gradient_checkpointing": False,
    },
    "acceleration": {
        "mixed_precision_mode": "bf16",
        "quantization": None,
        "load_text_encoder_in_8bit": False,
        "offload_optimizer_during_validation": False,
    },
    "data": {"num_dataloader_workers": 2},
    "validation": {
        "samples": [],
        "video_dims": [960, 544, 89],
        "frame_rate": 24.0,
        "seed": 42,
        "inference_steps": 30,
        "interval": 100,
        "video_cfg_scale": 3.0,
        "audio_cfg_scale": 7.0,
        "video_stg_scale": 1.0,
        "audio_stg_scale": 1.0,
        "stg_blocks": [28],
        "guidance_rescale": 0.7,
        "video_modality_guidance_scale": 3.0,
        "audio_modality_guidance_scale": 3.0,
        "generate_audio": True,
        "generate_video": True,
        "skip_initial_validation": False,
    },
    "checkpoints": {"interval": None, "keep_last_n": 1, "precision": "bfloat16", "no_resume": False},
    "hub": {"push_to_hub": False, "hub_model_id": None},
    "flow_matching": {"timestep_sampling_mode": "shifted_logit_normal", "timestep_sampling_params": {}},
    "wandb": {
        "enabled": False,
        "project": "ltxv-trainer",
        "entity": None,
        "tags": [],
        "log_validation_videos": True,
    },
}


def test_what_is_left_out_has_the_official_default(tmp_path: Path) -> None:
    config = config_as_dict(load(tmp_path))
    for section, fields in OFFICIAL_DEFAULTS.items():
        for name, default in fields.items():
            assert config[section][name] == default, f"{section}.{name}"
    assert (config["seed"], config["output_dir"]) == (42, "outputs")


def test_our_own_fields_and_the_default_that_differs(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.checkpoints.save_training_state == "full"  # officially minimal, which loses the optimizer
    assert config.device == "auto"
    assert config.tracking.log_every == 1
    assert config.acceleration.parallel == "auto"
    assert config.acceleration.compile is None
    assert config.shape_group == config.optimization.batch_size == 2
    assert load(tmp_path, "data: {shape_group: 1}").shape_group == 1
    adam = config.optimization
    assert (adam.weight_decay, adam.betas, adam.eps) == (0.01, (0.9, 0.999), 1e-8)


def test_importing_and_failing_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: x\n")
    code = (
        "import sys; from ltx_trainer_plus.config import load_config, ConfigError\n"
        f"try: load_config({str(path)!r})\n"
        "except ConfigError: pass\n"
        "print(sorted({'torch', 'diffusers', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3"])
def test_a_learning_rate_in_any_usual_notation_is_a_float(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"optimization: {{learning_rate: {text}}}").optimization.learning_rate == 1e-4
    rate = load(tmp_path, "", f"optimization.learning_rate={text}").optimization.learning_rate
    assert rate == 1e-4
    assert isinstance(rate, float)


def test_a_whole_number_is_fine_where_a_number_is_asked_for(tmp_path: Path) -> None:
    rate = load(tmp_path, "validation: {frame_rate: 24}").validation.frame_rate
    assert rate == 24.0
    assert isinstance(rate, float)


def test_later_files_win_key_by_key_and_replace_lists(tmp_path: Path) -> None:
    first = write(tmp_path, "validation: {stg_blocks: [1, 2], seed: 3}\noptimization: {steps: 7}", "first.yaml")
    second = write(tmp_path, "validation: {stg_blocks: [5]}\noptimization: {batch_size: 4}", "second.yaml")
    config = load_config([smallest(tmp_path), first, second])
    assert config.validation.stg_blocks == (5,)
    assert config.validation.seed == 3
    assert (config.optimization.steps, config.optimization.batch_size) == (7, 4)


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "hub:\nlora:\nvalidation:\ntraining_strategy:\n") == load(tmp_path)


def test_overrides_are_yaml_and_come_last(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "optimization: {steps: 5}",
        "optimization.steps=6",
        "validation.interval=null",
        "validation.generate_audio=false",
        "lora.target_modules=[to_q, to_k]",
        "optimization.scheduler_params={end_factor: 0.5}",
    )
    assert config.optimization.steps == 6
    assert config.validation.interval is None
    assert config.validation.generate_audio is False
    assert config.lora.target_modules == ("to_q", "to_k")
    assert config.optimization.scheduler_params == {"end_factor": 0.5}


@pytest.mark.parametrize(
    ("value", "prompt"),
    [
        ("a cat: close-up", "a cat: close-up"),  # as a shell hands over prompt="a cat: close-up"
        ('"a cat: close-up"', "a cat: close-up"),
        ("'5'", "5"),
        ("scene # 3, a = b", "scene # 3, a = b"),
        ("- a dash", "- a dash"),
        ("it's", "it's"),
    ],
)
def test_a_prompt_on_the_command_line_keeps_its_punctuation(tmp_path: Path, value: str, prompt: str) -> None:
    text = "validation: {samples: [{prompt: old, seed: 7}]}"
    sample = load(tmp_path, text, f"validation.samples.0.prompt={value}").validation.samples[0]
    assert (sample.prompt, sample.seed) == (prompt, 7)


def test_overrides_address_list_items_by_index_and_the_next_index_adds_one(tmp_path: Path) -> None:
    text = "validation: {samples: [{prompt: a}, {prompt: b}]}"
    overrides = ("validation.samples.1.seed=0", "validation.samples.2.prompt=c", "validation.video_dims[2]=9")
    validation = load(tmp_path, text, *overrides).validation
    assert [(sample.prompt, sample.seed) for sample in validation.samples] == [("a", None), ("b", 0), ("c", None)]
    assert validation.video_dims == (960, 544, 9)  # the default's other items stay
    assert load(tmp_path, "", "validation.samples.0.prompt=first").validation.samples[0].prompt == "first"


def test_a_path_with_an_equals_sign_is_a_run_file() -> None:
    files, overrides = split_arguments(["seed=1", "sweep/lr=1e-4/run.yaml", "./a=b.yaml", "x.yaml", "output_dir=a/b=c"])
    assert files == [Path("sweep/lr=1e-4/run.yaml"), Path("a=b.yaml"), Path("x.yaml")]
    assert overrides == ["seed=1", "output_dir=a/b=c"]


def test_an_override_that_fits_nowhere_says_what_is_there(tmp_path: Path) -> None:
    text = "validation: {samples: [{prompt: a}]}"
    assert problems(tmp_path, text, "validation.samples.2.prompt=c", "seed.x=1", "steps", "wandb.tags=[a") == [
        "validation.samples.2.prompt: the list has no item 2: it has 1, counted from 0, and 1 would add one.",
        "seed.x: there is no x to set: what should hold it is the value 42.",
        "steps: is no override: write key.path=value, such as optimization.steps=100.",
        "wandb.tags: the value is not valid YAML ([a): line 1, column 3: expected ',' or ']', but got '<stream end>'.",
    ]


def test_zero_is_a_seed_and_null_takes_the_sections(tmp_path: Path) -> None:
    text = "validation: {seed: 9, samples: [{prompt: a, seed: 0}, {prompt: b, seed: null, video_dims: [64, 32, 9]}]}"
    validation = load(tmp_path, text).validation
    first, second = validation.samples
    assert (validation.seed_of(first), validation.seed_of(second)) == (0, 9)
    assert (validation.dims_of(first), validation.dims_of(second)) == ((960, 544, 89), (64, 32, 9))


def test_unquoted_no_and_off_are_the_words_that_the_documentation_uses(tmp_path: Path) -> None:
    config = load(tmp_path, "acceleration: {mixed_precision_mode: no}\ncheckpoints: {save_training_state: off}")
    assert config.acceleration.mixed_precision_mode == "no"
    assert config.checkpoints.save_training_state == "off"


def test_the_three_strategy_names_give_the_same_two_streams(tmp_path: Path) -> None:
    default = load(tmp_path).training_strategy
    assert (default.video_role, default.audio_role) == ("generated", "absent")

    text = "training_strategy: {name: text_to_video, with_audio: true, audio_latents_dir: sound}"
    short = load(tmp_path, text).training_strategy
    assert (short.video_role, short.audio_role) == ("generated", "generated")
    assert short.video is not None
    assert short.video.latents_dir == "latents"
    assert short.audio is not None
    assert short.audio.latents_dir == "sound"

    text = "training_strategy: {name: flexible, video: {is_generated: false}, audio: {latents_dir: sound}}"
    flexible = load(tmp_path, text).training_strategy
    assert (flexible.video_role, flexible.audio_role) == ("frozen", "generated")
    assert flexible.audio == short.audio


def test_interpolation_sees_defaults_other_fields_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_NAME", "night")
    monkeypatch.setenv("RUN_STEPS", "12")
    text = """
    output_dir: out/${oc.env:RUN_NAME}
    optimization: {steps: "${oc.decode:${oc.env:RUN_STEPS}}"}
    validation: {seed: "${seed}", interval: "${optimization.steps}"}
    wandb: {project: "${oc.env:NOT_SET,fallback}"}
    """
    config = load(tmp_path, text, "lora.alpha=${lora.rank}")
    assert config.output_dir == Path("out/night")
    assert config.validation.interval == config.optimization.steps == 12
    assert config.validation.seed == 42
    assert config.wandb.project == "fallback"
    assert config.lora.alpha == 64


def test_an_escaped_brace_is_a_literal_one(tmp_path: Path) -> None:
    text = "validation: {samples: [{prompt: 'for \\${5}'}]}"
    assert load(tmp_path, text).validation.samples[0].prompt == "for ${5}"


EVERYTHING = """
model: {training_mode: full, load_checkpoint: latest}
lora: {rank: 4, alpha: 8, dropout: 0.1, target_modules: [to_q]}
training_strategy: {name: flexible, video: {latents_dir: v}, audio: {is_generated: false, latents_dir: a}}
optimization:
  learning_rate: 1e-5
  steps: 10
  batch_size: 4
  gradient_accumulation_steps: 2
  max_grad_norm: 0
  scheduler_type: cosine_with_restarts
  scheduler_params: {eta_min: 1e-6, T_0: 3}
  enable_gradient_checkpointing: true
  betas: [0.8, 0.9]
acceleration: {mixed_precision_mode: no, parallel: ddp}
data: {num_dataloader_workers: 0, shape_group: 2}
validation:
  samples: [{prompt: "a: b # c", video_dims: [64, 32, 9], seed: 0}, {prompt: "1e-4"}, {prompt: "no"}]
  interval: null
  stg_blocks: null
checkpoints: {interval: 5, keep_last_n: -1, precision: float32, no_resume: true, save_training_state: off}
flow_matching: {timestep_sampling_mode: uniform, timestep_sampling_params: {min_value: 0.2}}
wandb: {enabled: true, entity: me, tags: [a, "2"], log_validation_videos: false}
tracking: {log_every: 3}
device: cpu
seed: 0
output_dir: somewhere
"""


@pytest.mark.parametrize("text", ["", EVERYTHING, "training_strategy: {with_audio: true}"])
def test_a_saved_configuration_reloads_to_an_equal_one(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text)
    path = tmp_path / "training_config.yaml"
    save_config(config, path)
    assert load_config(path) == config
    assert list(tmp_path.glob(".training_config*")) == []


@pytest.mark.parametrize(
    "prompt",
    ["${seed}", "\\${seed}", "a\\\\${b", "$", "no", "1e-4", "12:30", "2020-01-01", "a\nb\n", " x ", "#", "«é»\x85\t🦊"],
)
def test_any_prompt_survives_saving_as_it_is(tmp_path: Path, prompt: str) -> None:
    config = load(tmp_path, "validation: {samples: [{prompt: x}]}")
    tree = config_as_dict(config)
    tree["validation"]["samples"][0]["prompt"] = prompt
    changed = TrainerConfig.model_validate(tree)
    save_config(changed, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == changed


def test_the_configuration_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).optimization.steps = 5  # type: ignore[misc]


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    files = [
        tmp_path / "missing.yaml",
        write(tmp_path, "seed: [1\n", "open.yaml"),
        write(tmp_path, "seed: 1\nseed: 2\n", "twice.yaml"),
        write(tmp_path, "- 1\n", "list.yaml"),
    ]
    with pytest.raises(ConfigError) as error:
        load_config(files)
    assert [str(problem).removeprefix(f"{tmp_path}/") for problem in error.value.problems] == [
        "missing.yaml: this file does not exist.",
        "open.yaml: this file is not valid YAML: line 2, column 1: expected ',' or ']', but got '<stream end>'.",
        "twice.yaml: this file is not valid YAML: line 2, column 1: seed stands twice.",
        "list.yaml: this file does not hold a configuration (lines of key: value).",
    ]


@pytest.mark.parametrize(
    ("scheduler", "arguments"),
    [
        ("{scheduler_type: constant}", {}),
        ("{}", {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 100}),
        ("{scheduler_type: cosine}", {"eta_min": 0.0, "T_max": 100}),
        ("{scheduler_type: cosine_with_restarts}", {"T_0": 25, "T_mult": 1, "eta_min": 5e-5}),
        ("{scheduler_type: polynomial}", {"power": 1.0, "total_iters": 100}),
        ("{scheduler_type: step}", {"step_size": 50, "gamma": 0.1}),
        ("{scheduler_type: step, scheduler_params: {gamma: 0.5}}", {"step_size": 50, "gamma": 0.5}),
    ],
)
def test_scheduler_arguments_have_the_official_defaults(tmp_path: Path, scheduler: str, arguments: dict) -> None:
    config = load(tmp_path, f"optimization: {scheduler}", "optimization.steps=100")
    assert config.optimization.scheduler_arguments() == arguments


def test_a_run_of_one_step_has_valid_periods(tmp_path: Path) -> None:
    for kind, name in (("step", "step_size"), ("cosine_with_restarts", "T_0")):
        config = load(tmp_path, "", "optimization.steps=1", f"optimization.scheduler_type={kind}")
        assert config.optimization.scheduler_arguments()[name] == 1


@pytest.mark.parametrize(
    ("mode", "sampler", "defaults"),
    [
        ("shifted_logit_normal", shifted_logit_normal, {"std": 1.0, "eps": 1e-3, "uniform_prob": 0.1}),
        ("uniform", uniform, {"min_value": 0.0, "max_value": 1.0}),
    ],
)
def test_sampling_parameters_have_the_official_defaults(
    mode: str, sampler: Callable[..., Any], defaults: dict[str, float]
) -> None:
    assert SAMPLING_PARAMS[mode]().model_dump() == defaults
    taken = inspect.signature(sampler).parameters
    assert {name: taken[name].default for name in defaults} == defaults


@pytest.mark.parametrize("section", ["validation", "training_strategy", "optimization"])
@pytest.mark.parametrize("value", ["1.5", "true", "text", "[{}]", "[[1]]"])
def test_a_value_in_place_of_a_section_is_a_problem_with_its_path(tmp_path: Path, section: str, value: str) -> None:
    assert any(section in line for line in problems(tmp_path, f"{section}: {value}"))


def test_an_anchor_that_contains_itself_is_a_problem(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "wandb: {tags: &a [*a]}")
    assert "contains itself" in problem
