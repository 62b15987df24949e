"""The inference schedule: which noise levels a sample passes through, and the Euler step between two of them."""

import math

import torch
from torch import Tensor

from ltx_trainer_plus.flow.shift import MANY_TOKENS, shift_at

_LAST_NONZERO_SIGMA = 0.1


def inference_sigmas(steps: int, tokens: int = MANY_TOKENS) -> Tensor:
    """Noise levels of a denoising run, from 1 down to 0.

    Args:
        steps: how many Euler steps are taken, at least 1.
        tokens: token count that sets the shift; validation always uses 4096.

    Returns:
        (steps + 1,) float32 on the CPU: 1 first, then falling to 0.1 and, last, 0. One step alone goes from 1 to 0.

    Raises:
        ValueError: fewer than one step.

    Source: docs/design.md, "The objective"; checked against tests/reference/sampling.safetensors.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: denoising needs at least one step.")
    shift = math.exp(shift_at(tokens))
    # float32, and in this order, as the official schedule is computed: guidance multiplies a rounding of sigma by a
    # hundred on its way to the latent. The first level may so be a rounding below 1.
    even = torch.linspace(1, 0, steps + 1)[:-1]
    shifted = shift / (shift + (1 / even - 1))
    if steps > 1:
        noise_left = 1 - shifted
        shifted = 1 - noise_left / (noise_left[-1] / (1 - _LAST_NONZERO_SIGMA))
    return torch.cat([shifted, shifted.new_zeros(1)])


def euler_step(latent: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """One step along the straight line from `latent` towards the denoised prediction.

    Args:
        latent: any shape, at noise level `sigma` > 0.
        denoised: same shape, the prediction of the clean latent.

    Returns:
        The latent at noise level `sigma_next`, in the dtype of `latent`.
    """
    velocity = (latent - denoised) / sigma
    return latent + velocity * (sigma_next - sigma)
