"""The transformer against the official implementation's numbers (tests/reference/*-io.safetensors)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ltx_trainer_plus.modality import Modality, Perturbations
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.compile import compile_blocks

MODELS = ("ltx-2-tiny", "ltx-2.3-tiny", "ltx-2.5-tiny")
ALL = frozenset(range(3))
CASES: dict[str, Perturbations | None] = {
    "plain": None,
    "video_only": None,
    "audio_only": None,
    "masked_context": None,
    "stg_v_block1": Perturbations(video_self=frozenset({1})),
    "stg_av_block1": Perturbations(video_self=frozenset({1}), audio_self=frozenset({1})),
    "stg_v_all": Perturbations(video_self=ALL),
    "isolated": Perturbations(audio_to_video=ALL, video_to_audio=ALL),
    "a2v_skipped": Perturbations(audio_to_video=ALL),
}


def streams(io: dict[str, Tensor], *, masked: bool = False) -> tuple[Modality, Modality]:
    mask = io["context_mask"].bool() if masked else None
    video, audio = (
        Modality(
            latent=io[f"{name}_latent"],
            sigma=io[f"{name}_sigma"],
            timesteps=io[f"{name}_timesteps"],
            positions=io[f"{name}_positions"],
            context=io[f"{name}_context"],
            context_mask=mask,
            keyframes_mask=io.get(f"{name}_keyframes_mask"),
        )
        for name in ("video", "audio")
    )
    return video, audio


def run_case(transformer: LTXTransformer, io: dict[str, Tensor], case: str) -> dict[str, Tensor | None]:
    video, audio = streams(io, masked=case == "masked_context")
    with torch.no_grad():
        video_v, audio_v = transformer(
            video=None if case == "audio_only" else video,
            audio=None if case == "video_only" else audio,
            perturbations=CASES[case],
        )
    return {"video": video_v, "audio": audio_v}


def assert_matches(outputs: dict[str, Tensor | None], io: dict[str, Tensor], case: str, tolerance: float) -> None:
    for stream, velocity in outputs.items():
        expected = io.get(f"out.{case}.{stream}")
        assert (velocity is None) == (expected is None)
        if velocity is not None:
            torch.testing.assert_close(velocity, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_every_output_equals_the_official_one(reference: Path, model: str, case: str) -> None:
    transformer = load_transformer(reference / f"{model}.safetensors", dtype=torch.float32)
    io = load_file(reference / f"{model}-io.safetensors")
    # 2e-6: float32 rounding of outputs of order 1 through three blocks.
    assert_matches(run_case(transformer, io, case), io, case, 2e-6)


def assert_all_match_compiled(reference: Path, model: str, backend: str) -> int:
    """Run every case through compiled blocks; returns how many graphs that took."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    transformer = load_transformer(reference / f"{model}.safetensors", dtype=torch.float32)
    compile_blocks(transformer, backend=backend, fullgraph=True)
    io = load_file(reference / f"{model}-io.safetensors")
    for case in CASES:
        # 1e-5: compilers reorder float32 sums.
        assert_matches(run_case(transformer, io, case), io, case, 1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs


@pytest.mark.parametrize(
    ("model", "backend"),
    # `eager` stops after the tracing that finds graph breaks; `aot_eager` also does the compiler's rewriting.
    [("ltx-2-tiny", "eager"), ("ltx-2.3-tiny", "aot_eager"), ("ltx-2.5-tiny", "eager")],
)
def test_blocks_compiled_without_graph_breaks_give_the_official_outputs(
    reference: Path, model: str, backend: str
) -> None:
    graphs = assert_all_match_compiled(reference, model, backend)
    # One each for: joint, video alone, audio alone, masked text, isolated, one cross-attention. STG needs none, and
    # the blocks share theirs.
    assert graphs == 6


@pytest.mark.slow
def test_blocks_compiled_by_inductor_give_the_official_outputs(reference: Path) -> None:
    assert_all_match_compiled(reference, "ltx-2.3-tiny", "inductor")
