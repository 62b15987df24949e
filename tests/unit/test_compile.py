"""Compiled blocks: how many graphs a run needs, and that it computes what eager does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ltx_trainer_plus import Modality, ModelHandle, Perturbations
from ltx_trainer_plus.guidance import isolated_modalities, stg_perturbations
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.compile import compile_blocks
from ltx_trainer_plus.models.lora import add_lora

TARGETS = [f"transformer_blocks.{block}.attn1.{linear}" for block in range(3) for linear in ("to_q", "to_v")]
BUCKETS = ((12, 5), (8, 5))  # video and audio tokens


def tokens(video: int, audio: int) -> dict[str, Modality]:
    generator = torch.Generator().manual_seed(video)

    def stream(count: int, width: int, dims: int, context: int) -> Modality:
        sigma = torch.rand(2, generator=generator)
        return Modality(
            latent=torch.randn(2, count, width, generator=generator),
            sigma=sigma,
            timesteps=sigma[:, None].expand(2, count).clone(),
            positions=torch.rand(2, dims, count, 2, generator=generator),
            context=torch.randn(2, 7, context, generator=generator),
        )

    return {"video": stream(video, 128, 3, 32), "audio": stream(audio, 128, 1, 16)}


@pytest.fixture
def transformer(reference: Path) -> LTXTransformer:
    model = load_transformer(reference / "ltx-2.3-tiny.safetensors", torch.float32)
    add_lora(model, rank=2, alpha=2, dropout=0.0, target_names=TARGETS, seed=0)
    return model


def run(handle: ModelHandle) -> list[torch.Tensor]:
    """Two steps in two buckets, and a validation with and without perturbations between them, as a run does it."""
    results: list[torch.Tensor] = []
    perturbations: list[Perturbations | None] = [
        None,
        stg_perturbations(handle, [1], video=True, audio=True),
        isolated_modalities(handle),
    ]
    handle.meta_module.train()
    for round_ in range(2):
        for bucket in BUCKETS:
            velocities = handle(**tokens(*bucket))
            sum(velocity.square().mean() for velocity in velocities if velocity is not None).backward()  # type: ignore[union-attr]
        if round_ == 0:
            with handle.evaluating(), torch.no_grad():
                for skipped in perturbations:
                    results += [v for v in handle(**tokens(6, 3), perturbations=skipped) if v is not None]
    return results + [p.grad for _, p in handle.trainable_parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_buckets_and_guided_validation_need_at_most_twelve_graphs_and_no_break(
    transformer: LTXTransformer, checkpointing: bool
) -> None:
    transformer.gradient_checkpointing = checkpointing
    eager = run(ModelHandle.of(transformer))
    transformer.zero_grad()
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    compile_blocks(transformer, backend=counting)
    compiled = run(ModelHandle.of(transformer))
    assert 0 < graphs <= 12
    assert not counters["graph_break"]
    for one, other in zip(compiled, eager, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
