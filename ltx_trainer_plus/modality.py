"""What one forward of the transformer is given: the tokens of each stream, the text, the attentions to skip."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Modality:
    """One stream's tokens as the transformer receives them.

    Attributes:
        latent: (B, T, C) noisy tokens.
        sigma: (B,) the sample's noise level in [0, 1].
        timesteps: (B, T) or (B, T, 1) noise level of every token in [0, 1]; 0 on clean conditioning tokens.
            (B, 1) where all tokens of a sample share one level: same result, less work.
        positions: (B, 3, T, 2) for video, (B, 1, T, 2) for audio: `[start, end)` bounds; time in seconds,
            space in pixels.
        context: (B, S, D) text embeddings after the connectors.
        context_mask: (B, S) bool, True = attend; None = attend to all.
        keyframes_mask: (B, T, 1), non-zero on tokens whose latent frame is a single pixel frame (LTX-2.5); or None.
    """

    latent: Tensor
    sigma: Tensor
    timesteps: Tensor
    positions: Tensor
    context: Tensor
    context_mask: Tensor | None = None
    keyframes_mask: Tensor | None = None


@dataclass(frozen=True)
class Perturbations:
    """Which attentions are skipped in which blocks (block indices).

    A skipped self-attention passes its value projection through (STG); a skipped cross-modal attention adds nothing.
    """

    video_self: frozenset[int] = frozenset()
    audio_self: frozenset[int] = frozenset()
    audio_to_video: frozenset[int] = frozenset()
    video_to_audio: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TextContext:
    """Text as the transformer attends to it, after the connectors.

    Attributes:
        video: (B, S, D) for the video stream.
        audio: (B, S, D') for the audio stream.
        mask: (B, S) bool, True = attend; None = every token is valid.
    """

    video: Tensor
    audio: Tensor
    mask: Tensor | None = None
