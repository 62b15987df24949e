"""The training-sigma samplers against the official distribution."""

import json
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from ltx_trainer_plus.flow.timesteps import sample_sigma


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("tokens", [256, 1024, 3570, 8192])
def test_a_million_draws_have_the_official_quantiles(tokens: int, reference: Path) -> None:
    official = json.loads((reference / "shifted_logit_normal.json").read_text())
    draws = sample_sigma("shifted_logit_normal", {}, tokens, generator(), size=(1_000_000,))
    ours = torch.quantile(draws, torch.tensor(official["quantiles"]))
    # The reference's own sampling error is about 0.001.
    torch.testing.assert_close(ours, torch.tensor(official["sigma_at_quantile"][str(tokens)]), rtol=0, atol=0.005)


def test_one_sample_at_a_time_has_the_same_distribution() -> None:
    shared = generator()
    singly = torch.stack([sample_sigma("shifted_logit_normal", {}, 1024, shared) for _ in range(20_000)])
    at_once = sample_sigma("shifted_logit_normal", {}, 1024, generator(1), size=(20_000,))
    levels = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(torch.quantile(singly, levels), torch.quantile(at_once, levels), rtol=0, atol=0.02)


@pytest.mark.parametrize("tokens", [1, 1024, 100_000])
def test_noise_levels_stay_between_zero_and_one(tokens: int) -> None:
    draws = sample_sigma("shifted_logit_normal", {}, tokens, generator(), size=(100_000,))
    assert draws.dtype == torch.float32
    assert draws.min() >= 1e-3
    assert draws.max() <= 1


@pytest.mark.parametrize("tokens", [40_000, 100_000, 1_000_000])
def test_long_sequences_keep_the_distribution_that_they_tend_to(tokens: int) -> None:
    draws = sample_sigma("shifted_logit_normal", {"uniform_prob": 0.0}, tokens, generator(), size=(100_000,))
    # Far out the logistic curve is an exponential: sigma at the normal's quantile z is this.
    z = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    low, high = (torch.tensor(NormalDist().inv_cdf(p), dtype=torch.float64) for p in (0.005, 0.999))
    expected = ((-low).exp() - (-z).exp()) / ((-low).exp() - (-high).exp())
    levels = torch.tensor([NormalDist().cdf(x) for x in z.tolist()])
    torch.testing.assert_close(torch.quantile(draws, levels), expected.float(), rtol=0, atol=0.01)


def test_parameters_reach_the_sampler() -> None:
    uniform = sample_sigma("uniform", {"min_value": 0.2, "max_value": 0.3}, 1024, generator(), size=(1000,))
    assert 0.2 <= uniform.min() < 0.21
    assert 0.29 < uniform.max() <= 0.3
    narrow = sample_sigma("shifted_logit_normal", {"std": 0.01, "uniform_prob": 0.0}, 1024, generator(), size=(1000,))
    flat = sample_sigma("shifted_logit_normal", {"uniform_prob": 1.0}, 1024, generator(), size=(100_000,))
    assert abs(flat.mean().item() - 0.5) < 0.01
    # A logit-normal this narrow is nearly normal, whose median lies 2.58 of 2.58 + 3.09 standard deviations up.
    assert abs(narrow.median().item() - 0.4546) < 0.05


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="there is no 'logit'"):
        sample_sigma("logit", {}, 1024, generator())
