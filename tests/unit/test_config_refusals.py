"""What is refused although every field is valid: features to come, contradictions, paths that do not exist."""

from pathlib import Path

import pytest

from tests.unit.config_files import load, problems, write


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "model: {video_vae_path: vae.safetensors}",
            'model.video_vae_path: a VAE file of its own cannot be read yet (given: "vae.safetensors"). '
            "Set model.video_vae_path: null, and give a diffusers pipeline folder as model.model_path.",
        ),
        (
            "model: {audio_vae_path: vae.safetensors}",
            'model.audio_vae_path: a VAE file of its own cannot be read yet (given: "vae.safetensors"). '
            "Set model.audio_vae_path: null, and give a diffusers pipeline folder as model.model_path.",
        ),
        (
            "optimization: {optimizer_type: adamw8bit}",
            'optimization.optimizer_type: this optimizer is not available yet (given: "adamw8bit"). '
            "Set optimization.optimizer_type: adamw.",
        ),
        (
            "acceleration: {mixed_precision_mode: fp16}",
            'acceleration.mixed_precision_mode: fp16 is not available yet (given: "fp16"). '
            'Set acceleration.mixed_precision_mode: bf16, or "no" for float32.',
        ),
        (
            "acceleration: {quantization: int8-quanto}",
            'acceleration.quantization: quantization is not available yet (given: "int8-quanto"). '
            "Set acceleration.quantization: null.",
        ),
        (
            "acceleration: {load_text_encoder_in_8bit: true}",
            "acceleration.load_text_encoder_in_8bit: 8-bit loading is not available yet (given: true). "
            "Set acceleration.load_text_encoder_in_8bit: false.",
        ),
        (
            "acceleration: {offload_optimizer_during_validation: true}",
            "acceleration.offload_optimizer_during_validation: offloading is not available yet (given: true). "
            "Set acceleration.offload_optimizer_during_validation: false.",
        ),
        (
            "hub: {push_to_hub: true}",
            "hub.push_to_hub: uploading is not available yet (given: true). Set hub.push_to_hub: false.",
        ),
        (
            "hub: {hub_model_id: me/mine}",
            'hub.hub_model_id: uploading is not available yet (given: "me/mine"). Set hub.hub_model_id: null.',
        ),
    ],
)
def test_a_feature_that_does_not_exist_yet_is_refused_by_name(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


def test_naming_such_a_feature_with_its_default_is_fine(tmp_path: Path) -> None:
    text = """
    model: {video_vae_path: null}
    acceleration: {quantization: null, compile: null, load_text_encoder_in_8bit: false}
    hub: {push_to_hub: false, hub_model_id: null}
    validation: {prompts: [], images: null, reference_videos: null, reference_downscale_factor: 1,
                 include_reference_in_output: false, guidance_scale: null, stg_mode: null}
    """
    assert load(tmp_path, text) == load(tmp_path)


def test_official_files_of_other_components_are_refused_by_name(tmp_path: Path) -> None:
    monolith = write(tmp_path, "", "ltx.safetensors")
    gemma = write(tmp_path, "", "gemma.safetensors")
    text = f"model: {{model_path: {monolith}, text_encoder_path: {gemma}}}\nvalidation: {{samples: [{{prompt: a}}]}}"
    assert problems(tmp_path, text) == [
        f'model.text_encoder_path: a packed text encoder file cannot be read yet (given: "{gemma}"). '
        "Give the folder of the text encoder, or null to use the one of the pipeline folder.",
        "validation.samples: samples need VAEs and a vocoder, which cannot be read yet from a single file "
        f"({monolith}). "
        "Give a diffusers pipeline folder as model.model_path, or set validation.interval: null.",
    ]
    never = "model: {text_encoder_path: null}\nvalidation: {interval: null, samples: [{prompt: a}]}"
    assert load(tmp_path, never, f"model.model_path={monolith}").model.model_path == monolith


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "optimization: {batch_size: 4}\ndata: {shape_group: 3}",
            "data.shape_group: optimization.batch_size (4) is no multiple of it, so a batch would hold a part of a "
            "group (given: 3). Set it to a divisor of the batch size, or to null for the batch size itself.",
        ),
        (
            "checkpoints: {keep_last_n: 0}",
            "checkpoints.keep_last_n: would delete the checkpoint that was just written (given: 0). "
            "Set it to 1 or more, or to -1 to keep all.",
        ),
        (
            "validation: {generate_audio: false, generate_video: false}",
            "validation.generate_video: neither video nor audio would be generated (validation.generate_audio is "
            "false too) (given: false). Set one of them to true, or validation.interval: null to turn validation off.",
        ),
        (
            "validation: {stg_blocks: [], audio_stg_scale: 0}",
            "validation.stg_blocks: names no block, but validation.video_stg_scale or validation.audio_stg_scale "
            "turns STG on (given: []). Name blocks, write null for all, or set both scales to 0.",
        ),
        (
            "training_strategy: {name: flexible}",
            "training_strategy: nothing would be trained: video is absent and audio is absent. "
            "Give training_strategy.video or training_strategy.audio with is_generated: true.",
        ),
        (
            "training_strategy: {name: flexible, video: {is_generated: false}, audio: {is_generated: false}}",
            "training_strategy: nothing would be trained: video is frozen and audio is frozen. "
            "Give training_strategy.video or training_strategy.audio with is_generated: true.",
        ),
        (
            "training_strategy: {name: flexible, video: {}, audio: {latents_dir: latents}}",
            'training_strategy.audio.latents_dir: is the folder of the video latents (given: "latents"). '
            "Give each stream its own folder, such as latents and audio_latents.",
        ),
        (
            "optimization: {scheduler_type: step, scheduler_params: {gama: 0.5}}",
            "optimization.scheduler_params.gama: unknown key: optimization.scheduler_type: step takes step_size, "
            "gamma (given: 0.5). Did you mean optimization.scheduler_params.gamma?",
        ),
        (
            "optimization: {scheduler_type: constant, scheduler_params: {power: 2}}",
            "optimization.scheduler_params.power: unknown key: optimization.scheduler_type: constant takes no "
            "parameters (given: 2). Remove it.",
        ),
        (
            "optimization: {scheduler_params: {end_factor: 2}}",
            "optimization.scheduler_params.end_factor: must be at most 1 (given: 2).",
        ),
        (
            "optimization: {scheduler_type: cosine, scheduler_params: {eta_min: 1}}",
            "optimization.scheduler_params.eta_min: is above optimization.learning_rate (0.0005): the rate would "
            "rise, not fall (given: 1.0). Set it below the learning rate.",
        ),
        (
            "flow_matching: {timestep_sampling_mode: uniform, timestep_sampling_params: {std: 1}}",
            "flow_matching.timestep_sampling_params.std: unknown key: flow_matching.timestep_sampling_mode: uniform "
            "takes min_value, max_value (given: 1). Remove it.",
        ),
        (
            "flow_matching: {timestep_sampling_mode: uniform, timestep_sampling_params: {min_value: 1}}",
            "flow_matching.timestep_sampling_params.min_value: must be below max_value (1.0) (given: 1.0). "
            "Swap them, or leave both out for 0 to 1.",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


@pytest.mark.parametrize(
    "text",
    [
        "validation: {interval: null, generate_audio: false, generate_video: false}",  # never sampled
        "validation: {stg_blocks: [], video_stg_scale: 0, audio_stg_scale: 0}",
        "validation: {stg_blocks: null}",
        "training_strategy: {name: flexible, video: {is_generated: false}, audio: {}}",
        "training_strategy: {name: flexible, audio: {}}",
        "optimization: {batch_size: 4}\ndata: {shape_group: 2}",
        # The official default of eta_min, 5e-5, is above this rate: such files must run.
        "optimization: {scheduler_type: cosine_with_restarts, learning_rate: 1e-5}",
    ],
)
def test_what_only_looks_like_a_contradiction_is_fine(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


def test_every_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    taken = write(tmp_path, "", "taken")
    text = f"""
    model: {{model_path: Lightricks/LTX-2, text_encoder_path: no/gemma, load_checkpoint: no/checkpoint}}
    data: {{preprocessed_data_root: no/data}}
    output_dir: {taken}
    """
    assert problems(tmp_path, text) == [
        'model.model_path: does not exist (given: "Lightricks/LTX-2"). '
        "Give a local folder or file; a model of the Hub has to be downloaded first.",
        'model.text_encoder_path: does not exist (given: "no/gemma"). '
        "Give the folder of the text encoder, or null to use the one of the pipeline folder.",
        'model.load_checkpoint: does not exist (given: "no/checkpoint"). '
        "Give a checkpoint file or a folder that holds some, latest for this run's own folder, or null.",
        'data.preprocessed_data_root: does not exist (given: "no/data"). '
        "Give the folder that scripts/process_dataset.py wrote.",
        f'output_dir: is a file (given: "{taken}"). Give a folder; it is created when it is missing.',
    ]


def test_the_latest_checkpoint_is_a_word_and_not_a_path(tmp_path: Path) -> None:
    assert load(tmp_path, "model: {load_checkpoint: latest}").model.load_checkpoint == "latest"
    assert load(tmp_path, f"model: {{load_checkpoint: {tmp_path}}}").model.load_checkpoint == tmp_path


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(tmp_path, "model: {model_path: ~/model}").model.model_path == tmp_path / "model"
