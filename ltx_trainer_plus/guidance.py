"""Guidance: which attentions its extra forwards skip, and how their predictions are combined."""

from collections.abc import Sequence

from torch import Tensor

from ltx_trainer_plus.modality import Perturbations
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.transformer import check_blocks


def stg_perturbations(
    handle: ModelHandle, blocks: Sequence[int] | None, *, video: bool, audio: bool
) -> Perturbations | None:
    """The self-attentions that spatio-temporal guidance (STG) skips.

    Args:
        handle: the model; its number of blocks is all that is asked.
        blocks: block indices; None = all.
        video: skip the video self-attention in them.
        audio: skip the audio self-attention in them.

    Returns:
        None where nothing is skipped: no STG forward is needed.

    Raises:
        ValueError: a block that the model does not have.
    """
    if blocks is not None:
        check_blocks("STG", blocks, handle.num_blocks)
    chosen = frozenset(range(handle.num_blocks) if blocks is None else blocks)
    if not chosen or not (video or audio):
        return None
    nothing: frozenset[int] = frozenset()
    return Perturbations(video_self=chosen if video else nothing, audio_self=chosen if audio else nothing)


def isolated_modalities(handle: ModelHandle) -> Perturbations:
    """Both cross-modal attentions skipped in every block: what modality guidance steers away from."""
    every = frozenset(range(handle.num_blocks))
    return Perturbations(audio_to_video=every, video_to_audio=every)


def combine_guidance(
    positive: Tensor,
    *,
    negative: Tensor | None = None,
    perturbed: Tensor | None = None,
    isolated: Tensor | None = None,
    cfg_scale: float = 1.0,
    stg_scale: float = 0.0,
    modality_scale: float = 1.0,
    rescale: float = 0.0,
) -> Tensor:
    """Combine the predictions of one denoising step; all are (B, ...) predictions of the clean latent (x0).

    Args:
        positive: with the prompt.
        negative: with the negative prompt; needed unless `cfg_scale` is 1.
        perturbed: with STG's attentions skipped; needed unless `stg_scale` is 0.
        isolated: with the streams apart; needed unless `modality_scale` is 1.
        cfg_scale: prompt guidance, 1 = off.
        stg_scale: spatio-temporal guidance, 0 = off.
        modality_scale: modality guidance, 1 = off.
        rescale: how far (0 to 1) the result gets back the standard deviation of `positive`, sample by sample.

    Raises:
        ValueError: a scale is on, but its prediction is missing.

    Source: docs/design.md, "The objective"; checked against `guider.*` of tests/reference/sampling.safetensors.
    """
    result = positive
    for name, weight, other in (
        ("negative", cfg_scale - 1, negative),
        ("perturbed", stg_scale, perturbed),
        ("isolated", modality_scale - 1, isolated),
    ):
        if weight == 0:
            continue
        if other is None:
            raise ValueError(f"The guidance scale of the {name!r} prediction is on, but that prediction is missing.")
        result = result + weight * (positive - other)
    if rescale != 0:
        dims = tuple(range(1, positive.ndim))
        ratio = positive.std(dims, keepdim=True) / result.std(dims, keepdim=True)
        result = result * (rescale * ratio + (1 - rescale))
    return result
