"""What each of the launched ranks of test_validation.py runs: MODEL_FOLDER OUTPUT_FOLDER LAYOUT."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ltx_trainer_plus import Modality, ModelHandle, Perturbations
from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.lora import add_lora
from ltx_trainer_plus.parallel.collectives import gather_objects
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.validation.cache import PromptContexts
from ltx_trainer_plus.validation.runner import ValidationRunner

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


def validation(topology: Topology, folder: Path, samples: int, **changes: Any) -> ValidationRunner:
    prompts = [f"prompt {index}" for index in range(samples)]
    fields = {
        "samples": [{"prompt": prompt, "seed": index} for index, prompt in enumerate(prompts)],
        "video_dims": [32, 32, 9],
        "inference_steps": 2,
        "stg_blocks": None,  # all: needs the number of blocks
    }
    return ValidationRunner(
        ValidationConfig.model_validate({**fields, **changes}),
        PromptContexts({prompt: text(index) for index, prompt in enumerate(prompts)}, text(99)),
        model_path=MODEL,
        geometry=LatentGeometry(),
        topology=topology,
        output_dir=folder,
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
    mine["losses"] = training_losses(topology, None)
    mine["losses_with_validation"] = training_losses(topology, validation(topology, OUTPUT / "training", 1))
    everyones = gather_objects(mine, topology)
    if topology.is_main:
        (OUTPUT / "result.json").write_text(json.dumps(everyones))


main()
