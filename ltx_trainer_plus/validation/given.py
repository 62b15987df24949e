"""What a validation sample is given instead of generating it, and what of it is kept to be shown."""

from dataclasses import dataclass

from torch import Tensor

from ltx_trainer_plus.flow.tokens import Given

_NOTHING = Given()


@dataclass(frozen=True)
class GivenSample:
    """What one sample is given; tensors are on the CPU.

    Attributes:
        video, audio: to each stream.
        shown: references to be shown beside the result, each (F, H, W, 3) uint8 at the sample's frame rate.
        heard: references to be kept beside the result, each (2, N) float32 at 16 kHz.
    """

    video: Given = _NOTHING
    audio: Given = _NOTHING
    shown: tuple[Tensor, ...] = ()
    heard: tuple[Tensor, ...] = ()


NOTHING_GIVEN = GivenSample()
