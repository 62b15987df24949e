"""Synthetic training for measurements: a model of any size with random weights, random batches, and steps to time."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.batch import Batch, TextFeatures
from ltx_trainer_plus.flow.positions import (
    LatentGeometry,
    audio_positions,
    patchify_audio,
    patchify_video,
    video_positions,
)
from ltx_trainer_plus.measure.workload import Workload
from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models import LTXTransformer, transformer_on_meta
from ltx_trainer_plus.models.lora import initialise_lora, lora_target_names
from ltx_trainer_plus.models.reach import reachable_parameters
from ltx_trainer_plus.models.shards import local_part
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.prepare import prepare_model, weight_dtype
from ltx_trainer_plus.step.sums import PendingMetrics
from ltx_trainer_plus.step.train_step import TrainStep
from ltx_trainer_plus.step.trained import Trained
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy

LTX_2_3: dict[str, Any] = {
    "num_layers": 48,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "cross_attention_dim": 4096,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
    "rope_type": "split",
}
"""The transformer of LTX-2.3, 19 billion parameters."""

BENCH_CPU_MODEL: dict[str, Any] = {
    **LTX_2_3,
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64,
}
"""Small enough for a step of milliseconds on one core, wide enough that arithmetic outweighs Python."""


BENCH_CPU = Workload(frames=2, height=6, width=6, audio_tokens=17, text_tokens=32)
BENCH_GPU = Workload(frames=7, height=17, width=30, audio_tokens=51, text_tokens=1024)
"""960 x 544 pixels, 49 frames at 24 per second: 3,570 video tokens."""


def bench_config(**sections: Mapping[str, Any]) -> TrainerConfig:
    """The run that is measured: a joint LoRA of rank 8 on the attentions of both streams, batch 1, in bfloat16."""
    settings: dict[str, Any] = {
        "model": {"model_path": "."},
        "data": {"preprocessed_data_root": "."},
        "lora": {"rank": 8, "alpha": 8},
        "training_strategy": {"name": "flexible", "video": {}, "audio": {}},
        "optimization": {"batch_size": 1, "scheduler_type": "constant"},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return TrainerConfig.model_validate(settings)


def random_handle(model: Mapping[str, Any], config: TrainerConfig, plan: ParallelPlan) -> ModelHandle:
    """A model of the config `model` with random weights, prepared and spread as a run would do it."""
    transformer = transformer_on_meta(model, weight_dtype(config, plan))
    strategy = config.training_strategy
    reachable = reachable_parameters(model, video=strategy.video_role, audio=strategy.audio_role)
    targets: list[str] = []
    if config.model.training_mode == "lora":
        targets = lora_target_names(transformer, config.lora.target_modules, reachable)
    device = plan.topology.device
    if plan.is_sharded:
        handle = prepare_model(transformer, config, plan, lora_targets=targets, reachable=reachable)
        transformer.to_empty(device="cpu" if plan.offloads_to_cpu else device)
        _fill(transformer)
        initialise_lora(transformer, config.seed)
        return handle
    transformer.to_empty(device=device)
    _fill(transformer)
    return prepare_model(transformer, config, plan, lora_targets=targets, reachable=reachable)


@torch.no_grad()
def _fill(transformer: LTXTransformer) -> None:
    generator = torch.Generator(next(transformer.parameters()).device).manual_seed(0)
    for name, parameter in transformer.named_parameters():
        if ".norm_" in name:
            local_part(parameter).fill_(1)
        else:
            local_part(parameter).normal_(0, 0.02, generator=generator)


def random_batch(model: Mapping[str, Any], work: Workload) -> Batch:
    """A micro-batch on the CPU, as the loader gives it, of captions that were prepared as contexts."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(work.batch, *shape, generator=generator)

    return Batch(
        names=tuple(f"sample {index}" for index in range(work.batch)),
        ordinals=tuple(range(work.batch)),
        text=TextFeatures(
            kind="context",
            video=normal(work.text_tokens, model["cross_attention_dim"]),
            audio=normal(work.text_tokens, model["audio_cross_attention_dim"]),
        ),
        video_latent=normal(128, work.frames, work.height, work.width),
        fps=torch.full((work.batch,), 24.0),
        audio_latent=normal(8, work.audio_tokens, 16),
    )


def random_inputs(
    model: Mapping[str, Any], work: Workload, device: torch.device, sigma: float = 0.7
) -> dict[str, Modality]:
    """What the transformer receives of `random_batch` at one noise level, by its argument names."""
    batch = random_batch(model, work).to(device)
    assert batch.video_latent is not None
    assert batch.audio_latent is not None
    assert batch.fps is not None
    geometry = LatentGeometry()
    level = torch.full((work.batch,), sigma, device=device)
    shared = {"sigma": level, "timesteps": level.view(-1, 1)}
    return {
        "video": Modality(
            latent=patchify_video(batch.video_latent),
            positions=video_positions(work.frames, work.height, work.width, batch.fps, geometry, device=device),
            context=batch.text.video,
            **shared,
        ),
        "audio": Modality(
            latent=patchify_audio(batch.audio_latent),
            positions=audio_positions(work.audio_tokens, geometry, device=device).expand(work.batch, -1, -1, -1),
            context=batch.text.audio,
            **shared,
        ),
    }


def trainer_step(handle: ModelHandle, config: TrainerConfig, batch: Batch) -> Callable[[], None]:
    """The trainer's own step with its metrics, as the training loop runs it."""
    accumulation = config.optimization.gradient_accumulation_steps
    step = TrainStep(
        Trained.start(handle, config),
        FlexibleStrategy(
            config.training_strategy.video,
            config.training_strategy.audio,
            LatentGeometry.of(handle.config),
            config.flow_matching,
        ),
        connectors=None,
        seed=config.seed,
        samples=len(batch) * accumulation,
        max_grad_norm=config.optimization.max_grad_norm,
    )
    micro_batches = [replace(batch, ends_step=index == accumulation - 1) for index in range(accumulation)]
    batches = itertools.cycle(micro_batches)
    pending: PendingMetrics | None = None

    def run() -> None:
        nonlocal pending
        previous, pending = pending, step(batches).reduce_async()
        if previous is not None:
            previous.read()

    return run


def bare_step(handle: ModelHandle, config: TrainerConfig, inputs: Mapping[str, Modality]) -> Callable[[], None]:
    """A training loop as one writes it by hand, over the same model and batch: the floor of what a step can cost.

    It draws noise and noise levels, and clips; no accumulation, no metrics, nothing that could be skipped or resumed.
    """
    model = handle.forward_module
    parameters = [parameter for _, parameter in handle.trainable_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.optimization.learning_rate, fused=True)
    video, audio = inputs["video"], inputs["audio"]

    def noisy(clean: Modality) -> tuple[Modality, Tensor]:
        sigma, noise = torch.rand_like(clean.sigma), torch.randn_like(clean.latent)
        level = sigma.view(-1, 1, 1)
        latent = (1 - level) * clean.latent + level * noise
        return replace(clean, latent=latent, sigma=sigma, timesteps=sigma.view(-1, 1)), noise - clean.latent

    def run() -> None:
        noisy_video, video_target = noisy(video)
        noisy_audio, audio_target = noisy(audio)
        video_velocity, audio_velocity = model(video=noisy_video, audio=noisy_audio)
        loss = (video_velocity.float() - video_target).square().mean()
        loss = loss + (audio_velocity.float() - audio_target).square().mean()
        loss.backward()
        clip_grad_norm_(parameters, config.optimization.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return run


def step_seconds(step: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Run some steps one after the other, as training does, and return how long each took."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    # Not the host's clock: the host runs ahead of the device.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(events)]


def blocks_step(handle: ModelHandle, inputs: Mapping[str, Modality]) -> Callable[[], None]:
    """Forward and backward of the transformer blocks alone, on what the model hands to the first of them."""
    blocks: Any = handle.meta_module.transformer_blocks
    captured: dict[str, Any] = {}
    hook = blocks[0].register_forward_pre_hook(lambda _, __, given: captured.update(given), with_kwargs=True)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        handle(video=inputs["video"], audio=inputs["audio"])
    hook.remove()
    parameters = [parameter for _, parameter in handle.trainable_parameters()]

    def run() -> None:
        arguments = dict(captured)
        with torch.autocast(handle.device.type, handle.dtype, enabled=handle.dtype != torch.float32):
            for block in blocks:
                video, audio = block(**arguments)
                arguments |= {"hidden_states": video, "audio_hidden_states": audio}
        (video.float().square().mean() + audio.float().square().mean()).backward()
        for parameter in parameters:
            parameter.grad = None

    return run
