"""Validation in one process: the files it makes, and that training does not notice it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ltx_trainer_plus import Modality, ModelHandle
from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.media.video import read_video
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.lora import add_lora
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.tracking.progress import TrainingProgress
from ltx_trainer_plus.validation import decode
from ltx_trainer_plus.validation.cache import PromptContexts
from ltx_trainer_plus.validation.runner import ValidationRunner

ALONE = Topology(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def context(seed: int) -> TextContext:
    generator = torch.Generator().manual_seed(seed)
    return TextContext(torch.randn(1, 16, 64, generator=generator), torch.randn(1, 16, 32, generator=generator))


def runner_for(model_path: Path, output_dir: Path, **options: Any) -> ValidationRunner:
    fields = {
        "samples": [{"prompt": "a"}, {"prompt": "b", "video_dims": [32, 64, 17], "seed": 0}],
        "video_dims": [64, 32, 9],
        "stg_blocks": [0],
        "inference_steps": 2,
    }
    topology = options.pop("topology", ALONE)
    progress = options.pop("progress", None)
    return ValidationRunner(
        ValidationConfig.model_validate({**fields, **options}),
        PromptContexts({"a": context(0), "b": context(1)}, context(2)),
        model_path=model_path,
        geometry=LatentGeometry(),
        topology=topology,
        sample_path=RunFolder(output_dir).sample,
        progress=progress,
    )


@pytest.fixture(scope="module")
def adapted(tiny_pipeline: Path) -> LTXTransformer:
    model = load_transformer(tiny_pipeline, dtype=torch.float32)
    names = [f"transformer_blocks.0.attn1.{part}" for part in ("to_q", "to_k", "to_v")]
    # With dropout, so that a model left in training mode would show.
    add_lora(model, rank=2, alpha=2, dropout=0.5, target_names=names, seed=0)
    return model


@pytest.fixture
def handle(adapted: LTXTransformer) -> ModelHandle:
    adapted.train()
    adapted.zero_grad(set_to_none=True)
    return ModelHandle.of(adapted)


def test_every_sample_is_a_file_of_its_own_size_named_after_step_and_number(
    handle: ModelHandle, tiny_pipeline: Path, tmp_path: Path
) -> None:
    files = runner_for(tiny_pipeline, tmp_path).run(handle, step=250)
    assert [file.path for file in files] == [tmp_path / f"samples/step_000250_{index}.mp4" for index in (1, 2)]
    assert [(file.prompt, file.index, file.fps) for file in files] == [("a", 1, 24.0), ("b", 2, 24.0)]
    assert read_video(files[0].path).frames.shape == (9, 32, 64, 3)
    assert read_video(files[1].path).frames.shape == (17, 64, 32, 3)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [file.path.name for file in files]


def test_the_same_weights_make_the_same_files(handle: ModelHandle, tiny_pipeline: Path, tmp_path: Path) -> None:
    first = runner_for(tiny_pipeline, tmp_path / "1").run(handle, 1)
    torch.manual_seed(99)
    second = runner_for(tiny_pipeline, tmp_path / "2").run(handle, 1)
    assert [file.path.read_bytes() for file in first] == [file.path.read_bytes() for file in second]
    assert first[0].path.read_bytes() != first[1].path.read_bytes()


def test_the_formats_follow_the_streams(handle: ModelHandle, tiny_pipeline: Path, tmp_path: Path) -> None:
    (wav, _) = runner_for(tiny_pipeline, tmp_path, generate_video=False).run(handle, 0)
    (png, silent) = runner_for(
        tiny_pipeline,
        tmp_path,
        generate_audio=False,
        samples=[{"prompt": "a", "video_dims": [64, 32, 1]}, {"prompt": "b"}],
    ).run(handle, 0)
    assert [file.path.suffix for file in (wav, png, silent)] == [".wav", ".png", ".mp4"]


def test_training_does_not_notice_validation(
    handle: ModelHandle, adapted: LTXTransformer, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A decoder that draws from every generator, as a VAE with noise injection would.
    load = decode.load_video_vae

    def drawing(*args: Any) -> Any:
        torch.rand(1), np.random.rand(), random.random()
        return load(*args)

    monkeypatch.setattr(decode, "load_video_vae", drawing)
    # Flags that differ from module to module: restoring one flag for all would show.
    adapted.transformer_blocks[1].eval()
    flags = {name: module.training for name, module in adapted.named_modules()}
    needs = {name: parameter.requires_grad for name, parameter in adapted.named_parameters()}
    values = {name: parameter.detach().clone() for name, parameter in adapted.named_parameters()}
    randomness = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    runner_for(tiny_pipeline, tmp_path).run(handle, 0)
    assert {name: module.training for name, module in adapted.named_modules()} == flags
    assert {name: parameter.requires_grad for name, parameter in adapted.named_parameters()} == needs
    assert all(torch.equal(parameter, values[name]) for name, parameter in adapted.named_parameters())
    assert all(parameter.grad is None for parameter in adapted.parameters())
    assert torch.equal(torch.get_rng_state(), randomness[0])
    assert (np.random.get_state()[1] == randomness[1]).all()  # type: ignore[index]
    assert random.getstate() == randomness[2]


def test_a_training_step_after_validation_gives_the_same_loss_and_gradients(
    handle: ModelHandle, adapted: LTXTransformer, tiny_pipeline: Path, tmp_path: Path
) -> None:
    def train() -> tuple[float, list[torch.Tensor]]:
        torch.manual_seed(5)  # dropout
        video = Modality(
            latent=torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(0)),
            sigma=torch.tensor([0.5]),
            timesteps=torch.tensor([[0.5]]),
            positions=torch.zeros(1, 3, 2, 2),
            context=context(0).video,
        )
        adapted.zero_grad(set_to_none=True)
        velocity, _ = handle(video=video)
        assert velocity is not None
        loss = velocity.square().mean()
        loss.backward()
        return loss.item(), [p.grad.clone() for _, p in handle.trainable_parameters() if p.grad is not None]

    loss, gradients = train()
    runner_for(tiny_pipeline, tmp_path).run(handle, 0)
    loss_after, gradients_after = train()
    assert loss_after == loss
    assert len(gradients) == len(gradients_after) > 0
    assert all(torch.equal(one, other) for one, other in zip(gradients, gradients_after, strict=True))


def test_progress_names_the_sample_and_the_denoising_step(
    handle: ModelHandle, tiny_pipeline: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, ...] | str] = []

    class Seen(TrainingProgress):
        def validation(self, *args: int) -> None:
            seen.append(args)

        def validation_done(self) -> None:
            seen.append("done")

    runner_for(tiny_pipeline, tmp_path, progress=Seen()).run(handle, 0)
    assert seen == [(1, 2, 1, 2), (1, 2, 2, 2), (2, 2, 1, 2), (2, 2, 2, 2), "done"]


@pytest.mark.parametrize(("samples", "ranks"), [(1, 2), (3, 2), (2, 2), (5, 3), (1, 4), (0, 2)])
def test_every_rank_runs_the_same_number_of_samples_and_each_file_has_one_owner(
    tiny_pipeline: Path, tmp_path: Path, samples: int, ranks: int
) -> None:
    owned, lengths = [], set()
    for rank in range(ranks):
        topology = Topology(rank=rank, local_rank=rank, world_size=ranks, device=torch.device("cpu"))
        runner = runner_for(tiny_pipeline, tmp_path, topology=topology, samples=[{"prompt": "a"}] * samples)
        owned += [request.index for request in runner._own()]
        lengths.add(len(runner._dealt()))
    assert sorted(owned) == list(range(samples))
    assert len(lengths) == 1
