"""What a validation sample is given instead of generating it: clean tokens, and references for the model to look at."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """A clip that stands before a stream's own tokens.

    Attributes:
        tokens: (1, R, C) float32, clean.
        positions: (1, 3 or 1, R, 2), as in `Modality`.
        keyframe_tokens: how many of them, the first ones, come from a single pixel frame.
    """

    tokens: Tensor
    positions: Tensor
    keyframe_tokens: int = 0


@dataclass(frozen=True)
class GivenStream:
    """What one stream is given; tensors are on the CPU.

    Attributes:
        clean: (1, T, C) float32 tokens, only right where they are given; None where none are.
        is_given: (1, T) bool; None with `clean`.
        references: in the order in which they stand before the stream.
        is_frozen: all of it is given, and conditions the other stream.
    """

    clean: Tensor | None = None
    is_given: Tensor | None = None
    references: tuple[Reference, ...] = ()
    is_frozen: bool = False


@dataclass(frozen=True)
class GivenSample:
    """What one sample is given.

    Attributes:
        shown: references to be shown beside the result, each (F, H, W, 3) uint8 at the sample's frame rate.
        heard: references to be kept beside the result, each (2, N) float32 at 16 kHz.
    """

    video: GivenStream = GivenStream()
    audio: GivenStream = GivenStream()
    shown: tuple[Tensor, ...] = ()
    heard: tuple[Tensor, ...] = ()


NOTHING_GIVEN = GivenSample()
