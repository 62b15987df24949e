"""What each of the launched ranks of test_validation.py runs: MODEL_FOLDER OUTPUT_FOLDER LAYOUT."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ltx_trainer_plus import Modality, ModelHandle, Perturbations
from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.lora import add_lora
from ltx_trainer_plus.parallel.collectives import gather_objects
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation.cache import PromptContexts
from ltx_trainer_plus.validation.conditions import encode_conditions
from ltx_trainer_plus.validation.requests import sample_requests
from ltx_trainer_plus.validation.runner import ValidationRunner
from tests.unit.media_files import make_sound, make_video

MODEL, OUTPUT, LAYOUT = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
TARGETS = [f"transformer_blocks.0.{attention}.to_q" for attention in ("attn1", "audio_attn1")]


def prepared() -> ModelHandle:
    model = load_transformer(MODEL, dtype=torch.float32)
    # Dropout draws from the global generator: a validation that draws from it, or leaves eval mode on, shows.
    add_lora(model, rank=2, alpha=2, dropout=0.5, target_names=TARGETS, seed=0)
    model.train()
    return ModelHandle.of(wrapped(model))


def wrapped(model: LTXTransformer) -> nn.Module:
    if LAYOUT == "ddp":
        # With buffers broadcast in each forward, as DDP does by default, unequal numbers of forwards would hang.
        model.register_buffer("constant", torch.zeros(1))
        return DistributedDataParallel(model)
    if LAYOUT == "fsdp2":
        for block in model.transformer_blocks:
            fully_shard(block)
        return fully_shard(model)
    return model


def text(seed: int) -> TextContext:
    generator = torch.Generator().manual_seed(seed)
    return TextContext(torch.randn(1, 8, 64, generator=generator), torch.randn(1, 8, 32, generator=generator))


def every_condition(topology: Topology) -> list[list[dict[str, Any]]]:
    """All eight kinds of condition in four samples; beside one that needs no negative prompt stands one that does."""
    clip, sound, mask = (str(OUTPUT / name) for name in ("clip.mp4", "tone.wav", "cells.pt"))
    if topology.is_main:  # the only process that reads them
        make_video(Path(clip), 17)
        make_sound(Path(sound), 1.0)
        torch.save({"mask": torch.tensor([[[1.0, 0.0], [0.0, 0.0]]] * 2)}, mask)
    return [
        [{"type": "video_to_audio", "video": clip}],
        [
            {"type": "first_frame", "image_or_video": clip},
            {"type": "reference", "video": clip, "downscale_factor": 2, "include_in_output": True},
            {"type": "prefix", "audio": sound, "duration": 0.1},
        ],
        [{"type": "audio_to_video", "audio": sound}],
        [
            {"type": "mask", "video": clip, "mask": mask},
            {"type": "spatial_crop", "video": clip, "spatial_region": [32, 32, 64, 64]},
            {"type": "suffix", "audio": sound, "duration": 0.1},
        ],
    ]


def validation(
    topology: Topology, folder: Path, count: int, should_stop: Callable[[], bool] | None = None, **changes: Any
) -> ValidationRunner:
    prompts = [f"prompt {index}" for index in range(count)]
    fields = {
        "samples": [{"prompt": prompt, "seed": index} for index, prompt in enumerate(prompts)],
        "video_dims": [32, 32, 9],
        "inference_steps": 2,
        "stg_blocks": None,  # all: needs the number of blocks
    }
    config = ValidationConfig.model_validate({**fields, **changes})
    return ValidationRunner(
        config,
        PromptContexts({prompt: text(index) for index, prompt in enumerate(prompts)}, text(99)),
        model_path=MODEL,
        geometry=LatentGeometry(),
        topology=topology,
        sample_path=RunFolder(folder).sample,
        given=encode_conditions(sample_requests(config), MODEL, LatentGeometry(), topology),
        should_stop=should_stop,
    )


def training_losses(topology: Topology, runner: ValidationRunner | None) -> list[float]:
    torch.manual_seed(topology.rank)
    handle = prepared()
    optimizer = torch.optim.AdamW([parameter for _, parameter in handle.trainable_parameters()], lr=1e-2)
    losses = []
    for step in range(4):
        if runner is not None and step % 2 == 0:
            runner.run(handle, step)
        generator = torch.Generator().manual_seed(10 * step + topology.rank)
        sigma = torch.rand(1, generator=generator)
        video, audio = (
            Modality(
                latent=torch.randn(1, 2, 128, generator=generator),
                sigma=sigma,
                timesteps=sigma[:, None],
                positions=torch.zeros(1, dims, 2, 2),
                context=context,
            )
            for dims, context in ((3, text(0).video), (1, text(0).audio))
        )
        video_velocity, audio_velocity = handle(video=video, audio=audio)
        assert video_velocity is not None
        assert audio_velocity is not None
        loss = video_velocity.square().mean() + audio_velocity.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    topology = Topology.start("cpu")
    handle = prepared()
    forwards: list[Perturbations | None] = []
    handle.forward_module.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["perturbations"]), with_kwargs=True
    )
    mine: dict[str, Any] = {"asks_the_wrapper": hasattr(handle.forward_module, "num_blocks")}
    for samples in (3, 1):
        forwards.clear()
        files = validation(topology, OUTPUT / f"{samples}", samples).run(handle, 250)
        mine[f"{samples}"] = {
            "files": [(file.path.name, file.prompt, file.index) for file in files],
            "forwards": len(forwards),
            "skips_all_blocks": any(p is not None and len(p.video_self) == handle.num_blocks for p in forwards),
            "isolates": any(p is not None and len(p.audio_to_video) == handle.num_blocks for p in forwards),
        }
    forwards.clear()
    conditioned = [
        {"prompt": f"prompt {index}", "conditions": conditions}
        for index, conditions in enumerate(every_condition(topology))
    ]
    changes = {"samples": conditioned, "video_dims": [64, 64, 9], "audio_cfg_scale": 1.0}
    files = validation(topology, OUTPUT / "conditions", 4, **changes).run(handle, 250)
    mine["conditions"] = {"files": [file.path.name for file in files], "forwards": len(forwards)}
    forwards.clear()
    # Only the last rank is asked to stop, after its first denoising step.
    is_asked = topology.rank == topology.world_size - 1
    stopped = validation(topology, OUTPUT / "stopped", 3, should_stop=lambda: is_asked).run(handle, 250)
    mine["stopped"] = {"files": len(stopped), "forwards": len(forwards)}
    mine["losses"] = training_losses(topology, None)
    mine["losses_with_validation"] = training_losses(topology, validation(topology, OUTPUT / "training", 1))
    everyones = gather_objects(mine, topology)
    if topology.is_main:
        (OUTPUT / "result.json").write_text(json.dumps(everyones))


run_and_exit(main)
