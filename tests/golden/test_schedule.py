"""The inference schedule and the Euler step give the official implementation's numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ltx_trainer_plus.flow.schedule import euler_step, inference_sigmas

# Same arithmetic in the same order: one float32 rounding is left for another platform's division.
TOLERANCE = 6e-8


@pytest.fixture(scope="module")
def sampling(reference: Path) -> dict[str, Tensor]:
    return load_file(reference / "sampling.safetensors")


@pytest.mark.parametrize("steps", [4, 8, 30])
def test_the_default_schedule_equals_the_official_one(sampling: dict[str, Tensor], steps: int) -> None:
    torch.testing.assert_close(inference_sigmas(steps), sampling[f"sigmas.steps{steps}"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", [(2, 2, 3), (7, 17, 30)])
def test_the_shift_follows_the_token_count(sampling: dict[str, Tensor], shape: tuple[int, int, int]) -> None:
    frames, height, width = shape
    expected = sampling[f"sigmas.steps8.latent1x128x{frames}x{height}x{width}"]
    torch.testing.assert_close(inference_sigmas(8, frames * height * width), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_every_schedule_falls_from_one_to_zero(steps: int) -> None:
    sigmas = inference_sigmas(steps)
    assert sigmas.shape == (steps + 1,)
    assert float(sigmas[0]) == pytest.approx(1, abs=1e-6)
    assert float(sigmas.max()) <= 1
    assert sigmas[-1] == 0
    assert bool((sigmas.diff() < 0).all())


def test_a_schedule_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="steps=0"):
        inference_sigmas(0)


@pytest.mark.parametrize("step", range(4))
def test_an_euler_step_equals_the_official_one(sampling: dict[str, Tensor], step: int) -> None:
    sigmas = sampling["euler.sigmas"].tolist()
    result = euler_step(sampling["euler.latent"], sampling["euler.denoised"], sigmas[step], sigmas[step + 1])
    torch.testing.assert_close(result, sampling[f"euler.out.step{step}"], atol=1e-6, rtol=0)
