"""What a user reads when fields are wrong: one line each, with the path and what to do."""

from pathlib import Path

import pytest

from ltx_trainer_plus.config import ConfigError, load_config
from tests.unit.config_files import load, problems, write


def test_a_misspelt_key_is_named_with_its_section_and_the_nearest_real_key(tmp_path: Path) -> None:
    assert problems(tmp_path, "optimization: {learning_rat: 5}") == [
        "optimization.learning_rat: unknown key (given: 5). Did you mean optimization.learning_rate?"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("optimisation: {steps: 5}", 'optimisation: unknown key (given: {"steps": 5}). Did you mean optimization?'),
        ("learning_rate: 1", "learning_rate: unknown key (given: 1). Did you mean optimization.learning_rate?"),
        ("optimization: {rank: 4}", "optimization.rank: unknown key (given: 4). Did you mean lora.rank?"),
        (
            "interval: 5",
            "interval: unknown key (given: 5). Did you mean validation.interval or validation.loss.interval or "
            "checkpoints.interval?",
        ),
        ("lora: {Rank: 4}", "lora.Rank: unknown key (given: 4). Did you mean lora.rank?"),
        (
            "validation: {samples: [{prompt: a}, {prompt: b, sede: 1}]}",
            "validation.samples.1.sede: unknown key (given: 1). Did you mean validation.samples.1.seed?",
        ),
        (
            "training_strategy: {name: flexible, video: {latent_dir: a}}",
            'training_strategy.video.latent_dir: unknown key (given: "a"). '
            "Did you mean training_strategy.video.latents_dir?",
        ),
        (
            "training_strategy: {video: {}}",
            "training_strategy.video: unknown key (given: {}). It belongs to training_strategy.name: flexible.",
        ),
        (
            "optimization.steps: 5",
            "optimization.steps: unknown key (given: 5). "
            "Dots are for overrides: in a file write steps inside the section optimization.",
        ),
        ("hub: {zzz: 1}", "hub.zzz: unknown key (given: 1). The keys here are push_to_hub, hub_model_id."),
    ],
)
def test_an_unknown_key_leads_to_the_key_that_was_meant(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'optimization: {steps: "5"}',
            'optimization.steps: must be a whole number (given: "5"). A value in quotes is a text: remove the quotes.',
        ),
        ("optimization: {steps: true}", "optimization.steps: must be a whole number (given: true)."),
        ("optimization: {steps: 5.5}", "optimization.steps: must be a whole number (given: 5.5)."),
        ("optimization: {steps: 1e3}", "optimization.steps: must be a whole number (given: 1000.0). Write 1000."),
        ("optimization: {steps: null}", "optimization.steps: must be a whole number (given: null)."),
        ("optimization: {steps: [5]}", "optimization.steps: must be a whole number (given: [5])."),
        ("optimization: {learning_rate: true}", "optimization.learning_rate: must be a number (given: true)."),
        (
            'optimization: {learning_rate: "1e-4"}',
            'optimization.learning_rate: must be a number (given: "1e-4"). '
            "A value in quotes is a text: remove the quotes.",
        ),
        (
            "validation: {frame_rate: .inf}",
            "validation.frame_rate: must be a finite number (given: Infinity).",
        ),
        ("wandb: {enabled: 1}", "wandb.enabled: must be true or false (given: 1)."),
        (
            'wandb: {enabled: "true"}',
            'wandb.enabled: must be true or false (given: "true"). A value in quotes is a text: remove the quotes.',
        ),
        ("wandb: {project: 5}", "wandb.project: must be a text (given: 5). Put it in quotes."),
        ("wandb: {tags: one}", 'wandb.tags: must be a list (given: "one").'),
        ("wandb: {tags: [one, 2]}", "wandb.tags.1: must be a text (given: 2). Put it in quotes."),
        ("wandb: true", "wandb: must be a section (lines of key: value) (given: true)."),
        (
            "validation: {samples: [a cat]}",
            "validation.samples.0: must be a section (lines of key: value) "
            '(given: "a cat"). Each sample is a section, such as {prompt: "a cat"}.',
        ),
        ("validation: {samples: [{seed: 1}]}", "validation.samples.0.prompt: required, but not given."),
        (
            "validation: {video_dims: [64, 32]}",
            "validation.video_dims: has too few items (given: [64, 32]). "
            "It takes width, height and frames, such as [960, 544, 89].",
        ),
        (
            "validation: {video_dims: [64, 32, 9, 1]}",
            "validation.video_dims: has too many items (given: [64, 32, 9, 1]). "
            "It takes width, height and frames, such as [960, 544, 89].",
        ),
        (
            "validation: {video_dims: [0, 32, 9]}",
            "validation.video_dims.0: must be greater than 0 (given: 0). "
            "It takes width, height and frames, such as [960, 544, 89].",
        ),
        (
            "validation: {samples: [{prompt: a, video_dims: [64, '32', 9]}]}",
            'validation.samples.0.video_dims.1: must be a whole number (given: "32"). '
            "It takes width, height and frames, such as [960, 544, 89].",
        ),
        (
            "validation: {interval: 0}",
            "validation.interval: must be greater than 0 or null (given: 0). Write null to never validate.",
        ),
        (
            "checkpoints: {interval: 0}",
            "checkpoints.interval: must be greater than 0 or null (given: 0). Write null to save at the end only.",
        ),
        ("lora: {rank: 1}", "lora.rank: must be at least 2 (given: 1)."),
        ("lora: {alpha: 0}", "lora.alpha: must be at least 1 (given: 0)."),
        ("lora: {dropout: 1.5}", "lora.dropout: must be at most 1 (given: 1.5)."),
        ("lora: {target_modules: []}", "lora.target_modules: must not be empty (given: [])."),
        ("validation: {stg_blocks: [-1]}", "validation.stg_blocks.0: must be at least 0 (given: -1)."),
        (
            "optimization: {max_grad_norm: -1}",
            "optimization.max_grad_norm: must be at least 0 (given: -1). Write 0 to turn clipping off.",
        ),
        (
            "checkpoints: {keep_last_n: -2}",
            "checkpoints.keep_last_n: must be at least -1 (given: -2). Write -1 to keep every checkpoint.",
        ),
        ("seed: -1", "seed: must be at least 0 (given: -1)."),
        (
            "checkpoints: {precision: bf16}",
            'checkpoints.precision: must be one of bfloat16, float32 (given: "bf16"). Did you mean bfloat16?',
        ),
        ("device: cuda", 'device: must be one of auto, cpu (given: "cuda").'),
        (
            "acceleration: {quantization: int8}",
            "acceleration.quantization: must be one of int8-quanto, int4-quanto, int2-quanto, fp8-quanto, "
            'fp8uz-quanto or null (given: "int8").',
        ),
        (
            "training_strategy: {name: flexibel}",
            "training_strategy.name: must be one of flexible, text_to_video, video_to_video "
            '(given: "flexibel"). Did you mean flexible?',
        ),
        (
            "training_strategy: {name: flexible, video: {latents_dir: ../other}}",
            "training_strategy.video.latents_dir: must be the name of a folder inside data.preprocessed_data_root, "
            'such as latents (given: "../other").',
        ),
        (
            "model: {model_path: 'https://example.org/model.safetensors'}",
            "model.model_path: must be a local path, not a URL "
            '(given: "https://example.org/model.safetensors"). '
            "Give the local folder of a diffusers pipeline, or an official single file.",
        ),
        (
            "model: {model_path: ' '}",
            'model.model_path: must be a path, and is empty (given: " "). '
            "Give the local folder of a diffusers pipeline, or an official single file.",
        ),
        (
            "optimization: {scheduler_params: [1]}",
            "optimization.scheduler_params: must be a section (lines of key: value) (given: [1]).",
        ),
    ],
)
def test_a_wrong_value_is_explained(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


def test_what_is_required_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, ""))
    assert str(error.value) == (
        "The configuration has 2 problems:\n"
        "  model.model_path: required, but not given. "
        "Give the local folder of a diffusers pipeline, or an official single file.\n"
        "  data.preprocessed_data_root: required, but not given. "
        "Give the folder that scripts/process_dataset.py wrote."
    )


def test_a_broken_interpolation_says_what_is_missing_and_how_to_escape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "12")
    text = """
    optimization: {steps: "${oc.env:STEPS}"}
    validation: {negative_prompt: "costs ${ 5", seed: "${sead}", frame_rate: "${oc.env:NOT_SET}", interval: ???}
    lora: ${hub}
    hub: ${lora}
    """.replace("interval: ???", "interval: '???'")
    escape = r"For a literal ${ write \${ (inside double quotes: \\${)."
    assert problems(tmp_path, text) == [
        'lora: this interpolation fails: Recursive interpolation detected (given: "${hub}"). ' + escape,
        'optimization.steps: must be a whole number (given: "12"). '
        "The environment holds texts: ${oc.decode:${oc.env:NAME}} reads one as YAML.",
        'validation.negative_prompt: holds a ${ that begins no interpolation (given: "costs ${ 5"). ' + escape,
        'validation.frame_rate: the environment variable NOT_SET is not set (given: "${oc.env:NOT_SET}"). '
        "Set it, or write ${oc.env:NOT_SET,default}.",
        'validation.seed: there is no sead to take the value from (given: "${sead}"). '
        "Name a key by its whole path. " + escape,
        'validation.interval: still has to be filled in (given: "???"). Give it a value.',
        'hub: this interpolation fails: Recursive interpolation detected (given: "${lora}"). ' + escape,
    ]


def test_interpolations_in_a_circle_are_an_error_and_not_a_hang(tmp_path: Path) -> None:
    assert problems(tmp_path, "", "lora.rank=${hub}", "hub.push_to_hub=${lora}") == [
        "lora: its interpolations lead back to it without end. Break the circle.",
        "hub: its interpolations lead back to it without end. Break the circle.",
    ]


def test_everything_that_is_wrong_is_reported_at_once_in_the_order_of_the_sections(tmp_path: Path) -> None:
    text = """
    wandb: {tagz: []}
    model: {load_checkpoint: nowhere}
    optimization: {batch_size: 3, steps: x, scheduler_params: {gamma: 1}}
    data: {shape_group: 2}
    acceleration: {quantization: int8-quanto}
    validation: {interval: 5, generate_audio: false, generate_video: false, guidance_scale: 0, stg_blocks: [a]}
    sed: 1
    """
    assert [line.split(": ")[0] for line in problems(tmp_path, text, "lora.rank=0")] == [
        "model.load_checkpoint",
        "lora.rank",
        "optimization.steps",
        "optimization.scheduler_params.gamma",
        "acceleration.quantization",
        "data.shape_group",
        "validation.guidance_scale",
        "validation.stg_blocks.0",
        "validation.generate_video",
        "wandb.tagz",
        "sed",
    ]


def test_a_contradiction_is_not_reported_on_top_of_a_field_that_is_faulty_itself(tmp_path: Path) -> None:
    text = "optimization: {batch_size: x}\ndata: {shape_group: 4}"  # the default batch size, 2, would not fit
    assert problems(tmp_path, text) == ['optimization.batch_size: must be a whole number (given: "x").']


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, f"device: {'x' * 500}")
    assert len(line) < 300
    assert load(tmp_path).device == "auto"
