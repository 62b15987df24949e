"""A stream's tokens: what is given stays clean at level 0, and references stand in front."""

import torch
from torch import Tensor

from ltx_trainer_plus.flow.positions import LatentGeometry, audio_positions, video_positions
from ltx_trainer_plus.flow.references import ReferenceScale, audio_reference, video_reference
from ltx_trainer_plus.flow.tokens import Given, Tokens, keyframe_marks, tokens_of

GEOMETRY = LatentGeometry()
FPS = torch.tensor([24.0])
CONTEXT = torch.zeros(1, 5, 4)
SIGMA = torch.tensor([0.7])


def clip(value: float, size: tuple[int, int, int] = (2, 1, 2)) -> Tensor:
    return torch.full((1, 8, *size), value)


def noise(*, marks: bool = True) -> Tokens:
    """Four tokens of two frames."""
    latent = torch.full((1, 4, 8), 9.0)
    positions = video_positions(2, 1, 2, FPS, GEOMETRY)
    return Tokens(latent, positions, keyframes_mask=keyframe_marks(latent, 2) if marks else None)


def levels(tokens: Tokens) -> list[float]:
    return tokens.modality(SIGMA, CONTEXT, None).timesteps.flatten().tolist()


def first(count: int, tokens: int = 4) -> Tensor:
    return torch.arange(tokens).view(1, -1) < count


def test_without_anything_given_all_tokens_share_one_level() -> None:
    tokens = noise().with_given(Given())
    assert levels(tokens) == SIGMA.tolist()
    assert tokens.is_generated.tolist() == [[True] * 4]


def test_given_tokens_are_clean_and_at_level_0() -> None:
    tokens = noise().with_given(Given(torch.full((1, 4, 8), 1.0), first(2)))
    assert tokens.latent[0, :, 0].tolist() == [1, 1, 9, 9]
    assert levels(tokens) == [0, 0, *SIGMA.tolist() * 2]
    assert tokens.is_generated.tolist() == [[False, False, True, True]]


def test_what_is_given_later_replaces_what_was_given_before() -> None:
    given = Given().and_tokens(torch.full((1, 4, 8), 1.0), first(3)).and_tokens(torch.full((1, 4, 8), 2.0), first(1))
    assert noise().with_given(given).latent[0, :, 0].tolist() == [2, 1, 1, 9]


def test_references_stand_in_front_in_their_order_and_are_left_out_of_the_result() -> None:
    small = video_reference(clip(3.0, (2, 1, 1)), FPS, FPS, ReferenceScale(), GEOMETRY)
    same = video_reference(clip(4.0), FPS, FPS, ReferenceScale(), GEOMETRY)
    tokens = noise().with_given(Given(torch.full((1, 4, 8), 1.0), first(1), (small, same)))
    assert tokens.reference_tokens == 6
    assert tokens.latent[0, :, 0].tolist() == [3, 3, 4, 4, 4, 4, 1, 9, 9, 9]
    assert tokens.without_references[0, :, 0].tolist() == [1, 9, 9, 9]
    assert tokens.is_generated.tolist() == [[False] * 7 + [True] * 3]
    assert torch.equal(tokens.positions[:, :, 2:6], tokens.positions[:, :, 6:])
    marks = tokens.keyframes_mask
    assert marks is not None
    # The first latent frame of every clip comes from a single pixel frame.
    assert marks.flatten().tolist() == [1, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    # A model that knows no marks gets none, although the references have them.
    assert noise(marks=False).with_given(Given(references=(same,))).keyframes_mask is None


def test_a_reference_alone_is_given_and_everything_behind_it_generated() -> None:
    sound = Tokens(torch.full((1, 2, 32), 9.0), audio_positions(2, GEOMETRY))
    tokens = sound.with_given(Given(references=(audio_reference(torch.zeros(1, 2, 4, 16), GEOMETRY),)))
    assert tokens.is_generated.tolist() == [[False] * 4 + [True] * 2]
    assert tokens.keyframes_mask is None


def test_a_frozen_stream_is_clean_at_one_level_which_is_0() -> None:
    clean = torch.full((1, 4, 8), 1.0)
    tokens = noise().with_given(Given(clean, first(4), is_frozen=True))
    assert torch.equal(tokens.latent, clean)
    modality = tokens.modality(SIGMA, CONTEXT, None)
    assert modality.sigma.tolist() == [0]
    assert modality.timesteps.tolist() == [[0]]


def test_a_latent_becomes_tokens_in_float32() -> None:
    video = tokens_of(clip(2.0).bfloat16(), video_positions(2, 1, 2, FPS, GEOMETRY))
    assert (video.latent.shape, video.latent.dtype) == ((1, 4, 8), torch.float32)
    assert video.keyframes_mask is not None
    sound = tokens_of(torch.zeros(1, 8, 3, 16).bfloat16(), audio_positions(3, GEOMETRY))
    assert (sound.latent.shape, sound.latent.dtype) == ((1, 3, 128), torch.float32)
    assert sound.keyframes_mask is None
