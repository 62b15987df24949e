"""The example run files, as they stand: each passes a dry run on a tiny model, with data of the size that it is for."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ltx_trainer_plus.media.audio import write_wav
from ltx_trainer_plus.media.video import write_video
from scripts import train

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name != "demo.yaml")
FRAMES, HEIGHT, WIDTH = 49, 576, 960
LATENT = (7, 18, 30)
AUDIO_STEPS = 52


@pytest.fixture(scope="module")
def workspace(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has beside the examples: a model, prepared clips, and files to validate with."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "models").mkdir()
    (folder / "models/LTX-2.3").symlink_to(tiny_pipeline)
    video = {"latents": torch.zeros(128, *LATENT, dtype=torch.bfloat16), "fps": 24.0}
    reference = {"latents": torch.zeros(128, 7, 9, 15, dtype=torch.bfloat16), "fps": 24.0}
    audio = {"latents": torch.zeros(8, AUDIO_STEPS, 16, dtype=torch.bfloat16)}
    text = {
        "video_prompt_embeds": torch.zeros(128, 64),
        "audio_prompt_embeds": torch.zeros(128, 32),
        "prompt_attention_mask": torch.ones(128, dtype=torch.bool),
    }
    contents = {
        "latents": video,
        "audio_latents": audio,
        "conditions": text,
        "reference_latents": reference,
        "reference_audio_latents": audio,
        "video_masks": {"mask": torch.ones(LATENT)},
        "audio_masks": {"mask": torch.ones(AUDIO_STEPS)},
    }
    for kind, entries in contents.items():
        for name in ("a", "b"):
            path = folder / f"clips/.precomputed/{kind}/{name}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(entries, path)
    examples = folder / "examples"
    examples.mkdir()
    Image.new("RGB", (WIDTH, HEIGHT)).save(examples / "first_frame.png")
    Image.new("L", (WIDTH, HEIGHT), 255).save(examples / "mask.png")
    for name in ("clip", "reference"):
        write_video(examples / f"{name}.mp4", np.zeros((FRAMES, HEIGHT, WIDTH, 3), np.uint8), 24, None, None)
    for name in ("sound", "audio_mask"):
        write_wav(examples / f"{name}.wav", torch.zeros(2, 16000 * 3), 16000)
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_a_dry_run_as_it_stands(
    name: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    # The tiny model has fewer blocks than the real one.
    overrides = ["validation.stg_blocks=[1]", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", str(CONFIGS / name), *overrides, "--dry-run"])
    assert train.main() == 0, capsys.readouterr().err
    plan = " ".join(capsys.readouterr().out.replace("│", " ").split())  # without the table's lines and line breaks
    assert "2 of 1 shape" in plan
    assert "models/LTX-2.3" in plan
    assert not (workspace / "outputs").exists()
    if name == "video_to_video_ic_lora.yaml":
        assert "video: reference (latents_dir reference_latents)" in plan
        assert "video: first_frame, in 20% of the samples" in plan
        assert "video references are smaller by 2 in size and by 1 in frame rate" in plan


def test_the_index_lists_every_example_and_no_other() -> None:
    index = (CONFIGS / "README.md").read_text(encoding="utf-8")
    listed = {part.partition(")")[0] for part in index.split("](")[1:]}
    assert listed == {*EXAMPLES, "demo.yaml", "accelerate"}


# Every field that the official trainer has, as its users write them; only the STG block is the tiny model's.
OFFICIAL = """
model: {model_path: models/LTX-2.3, text_encoder_path: models/LTX-2.3/text_encoder, video_vae_path: null,
        audio_vae_path: null, training_mode: lora, load_checkpoint: null}
lora: {rank: 32, alpha: 32, dropout: 0.0, target_modules: [to_k, to_q, to_v, to_out.0]}
training_strategy:
  name: flexible
  video:
    is_generated: true
    latents_dir: latents
    conditions:
      - {type: first_frame, probability: 0.5}
      - {type: reference, latents_dir: reference_latents, probability: 1.0}
  audio: {is_generated: true, latents_dir: audio_latents, conditions: []}
optimization: {learning_rate: 1e-4, steps: 2000, batch_size: 1, gradient_accumulation_steps: 1, max_grad_norm: 1.0,
               optimizer_type: adamw, scheduler_type: linear, scheduler_params: {}, enable_gradient_checkpointing: true}
acceleration: {mixed_precision_mode: bf16, quantization: null, load_text_encoder_in_8bit: false,
               offload_optimizer_during_validation: false}
data: {preprocessed_data_root: clips, num_dataloader_workers: 2}
validation:
  samples:
    - prompt: a cat
      conditions:
        - {type: first_frame, image_or_video: examples/first_frame.png}
        - {type: reference, video: examples/reference.mp4, downscale_factor: 2, temporal_scale_factor: 1,
           include_in_output: true}
      video_dims: [960, 576, 25]
      seed: 0
  negative_prompt: worst quality
  video_dims: [960, 576, 49]
  frame_rate: 24.0
  seed: 42
  inference_steps: 30
  interval: 100
  video_cfg_scale: 3.0
  audio_cfg_scale: 7.0
  video_stg_scale: 1.0
  audio_stg_scale: 1.0
  stg_blocks: [1]
  guidance_rescale: 0.7
  video_modality_guidance_scale: 3.0
  audio_modality_guidance_scale: 3.0
  generate_audio: true
  generate_video: true
  skip_initial_validation: false
checkpoints: {interval: 250, keep_last_n: -1, precision: bfloat16, no_resume: false, save_training_state: minimal}
hub: {push_to_hub: false, hub_model_id: null}
flow_matching: {timestep_sampling_mode: shifted_logit_normal, timestep_sampling_params: {}}
wandb: {enabled: false, project: ltx-2-trainer, entity: null, tags: [ltx2, lora], log_validation_videos: true}
seed: 42
output_dir: outputs/official
"""
OLDER = """
model: {model_path: models/LTX-2.3, training_mode: lora}
training_strategy: {name: video_to_video, first_frame_conditioning_p: 0.2, reference_latents_dir: reference_latents}
optimization: {learning_rate: 2e-4, steps: 1000, batch_size: 1}
data: {preprocessed_data_root: clips}
validation:
  prompts: [a cat, a dog]
  images: [examples/first_frame.png, null]
  reference_videos: [examples/reference.mp4, examples/reference.mp4]
  reference_downscale_factor: 2
  include_reference_in_output: true
  video_dims: [960, 576, 49]
  guidance_scale: 4.0
  stg_scale: 1.0
  stg_mode: stg_v
  stg_blocks: [1]
  generate_audio: false
output_dir: outputs/older
"""


@pytest.mark.parametrize(("text", "warnings"), [(OFFICIAL, 0), (OLDER, 9)])
def test_an_official_run_file_passes_a_dry_run_unchanged(
    text: str, warnings: int, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    (workspace / "official.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["train.py", "official.yaml", "device=cpu", "--dry-run"])
    code = train.main()
    plan, errors = capsys.readouterr()
    assert code == 0, errors
    plan = " ".join(plan.replace("│", " ").split())
    assert "video: reference (latents_dir reference_latents)" in plan
    assert "video references are smaller by 2 in size and by 1 in frame rate" in plan
    warned = [line.split(" is an older name")[0] for line in errors.splitlines() if "is an older name" in line]
    assert len(warned) == len(set(warned)) == warnings
