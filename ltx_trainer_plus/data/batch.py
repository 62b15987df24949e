"""What a training step is given: one prepared sample, and several of them stacked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

TextKind = Literal["features", "context"]


@dataclass(frozen=True)
class TextFeatures:
    """A caption as it was prepared; in a `Batch` every tensor has a leading B.

    Attributes:
        kind: "features" are what the connectors still have to turn into contexts (official prepared data),
            "context" is what the transformer attends to (data prepared by this project).
        video: (S, D) for the video stream.
        audio: (S, D') for the audio stream.
        mask: (S,) bool, True = a real token; None = every token is valid.
    """

    kind: TextKind
    video: Tensor
    audio: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class ReferenceClip:
    """Latents of another clip that a sample is conditioned on; in a `Batch` with a leading B.

    Attributes:
        latent: (C, F, H, W) of a video, (C, T, M) of an audio reference; normalised.
        fps: its own pixel frames per second (() or (B,) float32); None for audio.
    """

    latent: Tensor
    fps: Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """One prepared clip.

    Attributes:
        name: path of its files relative to the data folders, without suffix.
        text: its caption.
        video_latent: (C, F, H, W), normalised; None where the run has no video stream.
        fps: pixel frames per second of the clip; None where there is no video.
        audio_latent: (C, T, M), normalised; None where the run has no audio stream.
        masks: (F, H, W) or (T,) numbers by the name of their folder, 1 = given.
        references: by the name of their folder.
    """

    name: str
    text: TextFeatures
    video_latent: Tensor | None = None
    fps: float | None = None
    audio_latent: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    references: Mapping[str, ReferenceClip] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Samples of one shape, stacked: the tensors of `Sample` with a leading B.

    Attributes:
        names: the samples' names.
        ordinals: of the samples in the data order (`SampleOrder`); what its random draws are keyed by.
        text: captions.
        video_latent: (B, C, F, H, W) or None.
        fps: (B,) float32, None where there is no video.
        audio_latent: (B, C, T, M) or None.
        masks, references: by the name of their folder, with a leading B.
        replaced: names of samples that could not be read; others among `names` stand in for them.
        ends_step: True when nothing more is added to this data rank's optimizer step: synchronise gradients, step.
    """

    names: tuple[str, ...]
    ordinals: tuple[int, ...]
    text: TextFeatures
    video_latent: Tensor | None = None
    fps: Tensor | None = None
    audio_latent: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    references: Mapping[str, ReferenceClip] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    ends_step: bool = True

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Page-locked copy; torch's DataLoader calls this by name."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        def optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        text = replace(
            self.text,
            video=function(self.text.video),
            audio=function(self.text.audio),
            mask=optional(self.text.mask),
        )
        return replace(
            self,
            text=text,
            video_latent=optional(self.video_latent),
            fps=optional(self.fps),
            audio_latent=optional(self.audio_latent),
            masks={folder: function(mask) for folder, mask in self.masks.items()},
            references={
                folder: ReferenceClip(function(clip.latent), optional(clip.fps))
                for folder, clip in self.references.items()
            },
        )


def collate(samples: Sequence[Sample], ordinals: Sequence[int], *, ends_step: bool = True) -> Batch:
    """Stacks samples of one shape.

    Raises:
        ValueError: the samples differ in shape, or in what they hold; names the first that differs.
    """
    first = samples[0]
    for sample in samples[1:]:
        if _shapes(sample) != _shapes(first):
            raise ValueError(
                f"samples of different shapes cannot be stacked: {first.name!r} has {_shapes(first)}, "
                f"{sample.name!r} has {_shapes(sample)}. Take a batch from one shape group of the order."
            )
    text = TextFeatures(
        kind=first.text.kind,
        video=torch.stack([sample.text.video for sample in samples]),
        audio=torch.stack([sample.text.audio for sample in samples]),
        mask=_stack([sample.text.mask for sample in samples]),
    )
    return Batch(
        names=tuple(sample.name for sample in samples),
        ordinals=tuple(ordinals),
        text=text,
        video_latent=_stack([sample.video_latent for sample in samples]),
        fps=None if first.fps is None else torch.tensor([sample.fps for sample in samples], dtype=torch.float32),
        audio_latent=_stack([sample.audio_latent for sample in samples]),
        masks={folder: torch.stack([sample.masks[folder] for sample in samples]) for folder in first.masks},
        references={
            folder: ReferenceClip(
                latent=torch.stack([sample.references[folder].latent for sample in samples]),
                fps=_stack([sample.references[folder].fps for sample in samples]),
            )
            for folder in first.references
        },
        ends_step=ends_step,
    )


def _stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None


def _shapes(sample: Sample) -> dict[str, object]:
    text = sample.text
    tensors = {
        "video_latent": sample.video_latent,
        "audio_latent": sample.audio_latent,
        "text.video": text.video,
        "text.audio": text.audio,
        "text.mask": text.mask,
        **sample.masks,
        **{folder: clip.latent for folder, clip in sample.references.items()},
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    return {"text": text.kind, **shapes}
