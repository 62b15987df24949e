"""A stream's tokens in training and in sampling: where they lie, and which of them are given."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ltx_trainer_plus.flow.positions import patchify_audio, patchify_video
from ltx_trainer_plus.modality import Modality


@dataclass(frozen=True)
class Tokens:
    """One stream's tokens: R of references, if any, then the T of the stream itself.

    Attributes:
        latent: (B, R + T, C) float32.
        positions: (B, 3, R + T, 2) for video, (B, 1, R + T, 2) for audio, as in `Modality`.
        is_given: (B, R + T) bool, True where a token is clean conditioning: at noise level 0, out of the loss, kept as
            it is while the others are denoised. None = all are generated.
        keyframes_mask: (B, R + T, 1) float32, as in `Modality`.
        reference_tokens: R. The model sees them, the result has none.
        is_frozen: the whole stream is given: it conditions the other one, at noise level 0.
    """

    latent: Tensor
    positions: Tensor
    is_given: Tensor | None = None
    keyframes_mask: Tensor | None = None
    reference_tokens: int = 0
    is_frozen: bool = False

    @property
    def is_generated(self) -> Tensor:
        """(B, R + T) bool: what is learnt in training, and denoised in sampling, unless the stream is frozen."""
        if self.is_given is None:
            return torch.ones(self.latent.shape[:2], dtype=torch.bool, device=self.latent.device)
        return ~self.is_given

    @property
    def without_references(self) -> Tensor:
        """(B, T, C) the stream's own latents."""
        return self.latent[:, self.reference_tokens :]

    def with_given(self, given: "Given") -> "Tokens":
        """The same stream, which has no references yet, with everything that it is given."""
        tokens = self
        if given.clean is not None and given.is_frozen:
            return replace(tokens, latent=given.clean.to(self.latent), is_frozen=True)
        if given.clean is not None and given.is_given is not None:
            is_given = given.is_given.to(self.latent.device)
            latent = torch.where(is_given.unsqueeze(-1), given.clean.to(self.latent), self.latent)
            tokens = replace(tokens, latent=latent, is_given=is_given)
        return tokens._behind(given.references) if given.references else tokens

    def _behind(self, references: "tuple[Tokens, ...]") -> "Tokens":
        latents = [reference.latent.to(self.latent) for reference in references]
        count = sum(latent.shape[1] for latent in latents)
        marks = [reference.keyframes_mask for reference in references if reference.keyframes_mask is not None]
        keyframes = self.keyframes_mask
        if keyframes is not None:
            keyframes = torch.cat([*(mark.to(keyframes) for mark in marks), keyframes], dim=1)
        return replace(
            self,
            latent=torch.cat([*latents, self.latent], dim=1),
            positions=torch.cat([*(one.positions.to(self.positions) for one in references), self.positions], dim=2),
            is_given=torch.cat([self.is_generated.new_ones(len(self.latent), count), ~self.is_generated], dim=1),
            keyframes_mask=keyframes,
            reference_tokens=count,
        )

    def modality(self, sigma: Tensor, context: Tensor, context_mask: Tensor | None) -> Modality:
        """What the transformer receives at noise level `sigma` (B,); a frozen stream is at level 0 whatever it says.

        Timesteps are (B, 1) where all tokens of a sample share one level.
        """
        sigma = torch.zeros_like(sigma) if self.is_frozen else sigma
        level = sigma.view(-1, 1)
        return Modality(
            latent=self.latent,
            sigma=sigma,
            timesteps=level if self.is_given is None else torch.where(self.is_given, 0.0, level),
            positions=self.positions,
            context=context,
            context_mask=context_mask,
            keyframes_mask=self.keyframes_mask,
        )


@dataclass(frozen=True)
class Given:
    """What one stream is given instead of generating it.

    Attributes:
        clean: (B, T, C) tokens, only right where they are given; None where none are.
        is_given: (B, T) bool; None with `clean`.
        references: clips for the model to look at, in the order in which they stand before the stream.
        is_frozen: all of it is given, and conditions the other stream. Then nothing else is.
    """

    clean: Tensor | None = None
    is_given: Tensor | None = None
    references: tuple[Tokens, ...] = ()
    is_frozen: bool = False

    def and_tokens(self, clean: Tensor, is_given: Tensor) -> "Given":
        """With more tokens, which replace those that are given already."""
        if self.clean is None or self.is_given is None:
            return replace(self, clean=clean, is_given=is_given)
        clean = torch.where(is_given.unsqueeze(-1), clean, self.clean)
        return replace(self, clean=clean, is_given=self.is_given | is_given)


def tokens_of(latent: Tensor, positions: Tensor) -> Tokens:
    """The tokens of a latent: (B, C, F, H, W) of a video, (B, C, T, M) of a sound."""
    if latent.dim() == 4:
        return Tokens(patchify_audio(latent).float(), positions)
    tokens = patchify_video(latent).float()
    return Tokens(tokens, positions, keyframes_mask=keyframe_marks(tokens, latent.shape[3] * latent.shape[4]))


def keyframe_marks(latent: Tensor, first_frame: int) -> Tensor:
    """(B, T, 1) of a video's tokens (B, T, C), whose first latent frame has `first_frame` of them.

    The causal video VAE makes that frame from a single pixel frame. Training marks it as inference does: a model
    trained without the mark would meet it there for the first time.
    """
    marks = torch.zeros(*latent.shape[:2], 1, device=latent.device)
    marks[:, :first_frame] = 1
    return marks
