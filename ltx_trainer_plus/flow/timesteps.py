"""Sigma samplers for training: which noise level a sample is trained at."""

from collections.abc import Mapping
from statistics import NormalDist

import torch
from torch import Generator, Tensor

from ltx_trainer_plus.flow.shift import shift_at

# The quantiles of the logit-normal that are stretched to 0 and 1.
_LOW, _HIGH = NormalDist().inv_cdf(0.005), NormalDist().inv_cdf(0.999)


def sample_sigma(
    mode: str, params: Mapping[str, float], tokens: int, generator: Generator, *, size: tuple[int, ...] = ()
) -> Tensor:
    """Draws noise levels.

    Args:
        mode: `flow_matching.timestep_sampling_mode`: "uniform" or "shifted_logit_normal".
        params: `flow_matching.timestep_sampling_params`: what differs from the sampler's defaults.
        tokens: target tokens of the stream that the noise level is for (references excluded).
        generator: on the CPU.
        size: shape of the result; a scalar for one sample.

    Returns:
        float32 of shape `size`, in [0, 1].

    Raises:
        ValueError: there is no such mode.
    """
    if mode == "uniform":
        return uniform(size, generator, **params)
    if mode == "shifted_logit_normal":
        return shifted_logit_normal(tokens, size, generator, **params)
    raise ValueError(
        f"flow_matching.timestep_sampling_mode: there is no {mode!r}. Use 'uniform' or 'shifted_logit_normal'."
    )


def uniform(size: tuple[int, ...], generator: Generator, *, min_value: float = 0.0, max_value: float = 1.0) -> Tensor:
    return min_value + (max_value - min_value) * torch.rand(size, generator=generator)


def shifted_logit_normal(
    tokens: int,
    size: tuple[int, ...],
    generator: Generator,
    *,
    std: float = 1.0,
    eps: float = 1e-3,
    uniform_prob: float = 0.1,
) -> Tensor:
    """Logit-normal that leans to more noise the longer the sequence is, mixed with a uniform.

    Its 0.5 % and 99.9 % points are stretched to 0 and 1, what falls below `eps` is reflected there.

    Source: docs/design.md, "The objective"; checked against the quantiles in tests/reference/shifted_logit_normal.json.
    """
    mean = shift_at(tokens)
    # All three are always drawn, so that a sample's number does not decide how much of the generator is used up.
    normal = torch.randn(size, generator=generator)
    spread = eps + (1 - eps) * torch.rand(size, generator=generator)
    is_uniform = torch.rand(size, generator=generator) < uniform_prob

    # Distances from 1, in double: beyond 40,000 tokens float32 knows no number between the quantiles and 1.
    points = mean + std * torch.cat([torch.tensor([_LOW, _HIGH], dtype=torch.float64), normal.double().flatten()])
    below_one = torch.sigmoid(-points)
    low, high = below_one[:2]
    stretched = ((low - below_one[2:]) / (low - high)).float().view(size)
    reflected = torch.where(stretched < eps, 2 * eps - stretched, stretched).clamp(max=1)
    return torch.where(is_uniform, spread, reflected)
