"""Prompts to what the transformer attends to: Gemma's hidden states, then the text connectors."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors, per_layer_masked_mean_norm, per_token_rms_norm
from torch import Tensor, nn
from transformers import AutoTokenizer

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models.json_files import read_json
from ltx_trainer_plus.models.official_text import load_official_connectors
from ltx_trainer_plus.models.pipeline_folder import component_folder, text_encoder_folders

logger = logging.getLogger(__name__)

TEXT_TOKENS = 1024
"""Length that every prompt is padded or cut to. The connectors fill the padding, so another length is another text."""

_ENCODERS = ("Gemma3ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")


class TextEncoder:
    """Gemma, for its hidden states only."""

    def __init__(self, encoder: nn.Module, tokenizer: Any) -> None:
        self._encoder = encoder.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    @torch.no_grad()
    def hidden_states(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Run the prompts through the encoder, all in one batch.

        Returns:
            hidden: (B, 1024, D, L + 1), the embeddings and the output of every layer, in the encoder's dtype.
            mask: (B, 1024) bool, True on the prompt's tokens; padding is on the left.

        Source: diffusers' `LTX2Pipeline._get_gemma_prompt_embeds`, which it equals exactly.
        """
        prompts = [prompt.strip() for prompt in prompts]
        device = next(self._encoder.parameters()).device
        for prompt, tokens in zip(prompts, self._tokenizer(prompts).input_ids, strict=True):
            if len(tokens) > TEXT_TOKENS:
                logger.warning(
                    "A prompt of %d tokens is cut to %d: %.60s...", len(tokens), TEXT_TOKENS, prompt.replace("\n", " ")
                )
        encoded = self._tokenizer(
            prompts, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
        ).to(device)
        output = self._encoder(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            output_hidden_states=True,
            use_cache=False,
        )
        return torch.stack(output.hidden_states, dim=-1), encoded.attention_mask.bool()


class TextConnectors:
    """From hidden states (or the features that official prepared data stores) to the contexts of both streams.

    Padding is replaced by learned registers, so every token of a context is valid.
    """

    def __init__(self, connectors: LTX2TextConnectors) -> None:
        self._connectors = connectors.eval().requires_grad_(False)

    @torch.no_grad()
    def from_hidden_states(self, hidden: Tensor, mask: Tensor) -> TextContext:
        """Contexts from what `TextEncoder.hidden_states` returns; exactly what diffusers' pipeline makes of it.

        Raises:
            ValueError: see `features` and `from_features`.
        """
        return self.from_features(*self.features(hidden, mask), mask)

    @torch.no_grad()
    def features(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The first half: normalise all layers and project them.

        Args:
            hidden: (B, S, D, L + 1), padding on the left.
            mask: (B, S) bool.

        Returns:
            (B, S, D) for the video connector and (B, S, D') for the audio connector; one tensor twice in LTX-2.

        Raises:
            ModelError: the text encoder is not the one that these connectors were trained with.
        """
        connectors, split = self._connectors, self._connectors.config["per_modality_projections"]
        width, layers = hidden.shape[2:]
        projection = connectors.video_text_proj_in if split else connectors.text_proj_in
        if width * layers != projection.in_features:
            raise ModelError(
                f"The text encoder gives {width} channels in {layers} layers (the embeddings counted), together "
                f"{width * layers}; these connectors take {projection.in_features}.\n"
                "  Set model.text_encoder_path to the Gemma that belongs to this model (Gemma-3-12B for LTX-2 and 2.3)."
            )
        mask = mask.to(connectors.device).bool()
        hidden = hidden.to(connectors.device, connectors.dtype)
        if not split:
            normal = per_layer_masked_mean_norm(hidden, mask.sum(dim=-1), device=hidden.device, padding_side="left")
            features = connectors.text_proj_in(normal)
            return features, features
        normal = per_token_rms_norm(hidden).flatten(2, 3)
        normal = torch.where(mask.unsqueeze(-1), normal, torch.zeros_like(normal))
        video = connectors.video_text_proj_in
        audio = connectors.audio_text_proj_in
        return (
            video(normal * math.sqrt(video.out_features / width)),
            audio(normal * math.sqrt(audio.out_features / width)),
        )

    @torch.no_grad()
    def from_features(self, video_features: Tensor, audio_features: Tensor, mask: Tensor | None) -> TextContext:
        """The second half: run each stream's connector.

        Args:
            video_features: (B, S, D).
            audio_features: (B, S, D').
            mask: (B, S) bool, True on the prompt's tokens; None = all of them.

        Raises:
            ValueError: features of another model, or a length that the registers do not divide.
        """
        return TextContext(
            video=self._connect("video", self._connectors.video_connector, video_features, mask),
            audio=self._connect("audio", self._connectors.audio_connector, audio_features, mask),
        )

    def _connect(self, stream: str, connector: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        length, width = features.shape[1:]
        if width != connector.inner_dim:
            raise ValueError(
                f"The {stream} text features have {width} channels; this model's connector takes "
                f"{connector.inner_dim}.\n  They were prepared for another model: prepare the captions again with this "
                "one."
            )
        registers = connector.get_parameter("learnable_registers").shape[0]
        if length % registers:
            raise ValueError(
                f"The text features are {length} tokens long, which is no multiple of the model's {registers} "
                f"registers.\n  Prepare the captions with {TEXT_TOKENS} tokens."
            )
        features = features.to(self._connectors.device, self._connectors.dtype)
        if mask is None:
            mask = torch.ones(features.shape[:2], dtype=torch.bool)
        # Additive, as the connector reads it: 0 for a token, the lowest number for padding.
        additive = (mask.to(features.device, features.dtype) - 1)[:, None, None, :] * torch.finfo(features.dtype).max
        context: Tensor = connector(features, additive)[0]
        return context


def encode_prompts(prompts: Sequence[str], encoder: TextEncoder, connectors: TextConnectors) -> list[TextContext]:
    """One context per prompt, (1, S, D) and (1, S, D'), on the CPU.

    Each prompt runs by itself: what a prompt becomes does not depend on its neighbours.
    """
    contexts = []
    for prompt in prompts:
        context = connectors.from_hidden_states(*encoder.hidden_states([prompt]))
        contexts.append(TextContext(video=context.video.cpu(), audio=context.audio.cpu()))
    return contexts


def load_text_encoder(
    model_path: str | Path,
    text_encoder_path: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> TextEncoder:
    """Load Gemma, each tensor straight to `device`; its vision tower and its vocabulary head are let go.

    Args:
        model_path: a diffusers pipeline folder, used where `text_encoder_path` is None.
        text_encoder_path: a Gemma folder (with its tokenizer in it), or a pipeline folder.

    Raises:
        ModelError: a single file, another kind of encoder, or no text encoder or tokenizer there.
    """
    folder, tokenizer_folder = text_encoder_folders(model_path, text_encoder_path)
    architecture = (read_json(folder / "config.json").get("architectures") or ["unknown"])[0]
    if architecture not in _ENCODERS:
        raise ModelError(
            f"{folder}: LTX-2 models use no text encoder of kind {architecture} (but {' or '.join(_ENCODERS)}).\n"
            "  Use the text encoder of the model's own pipeline folder, or the Gemma-3-12B folder as it was published."
        )
    with without_progress_bars():
        full = getattr(transformers, architecture).from_pretrained(
            folder, dtype=dtype, device_map={"": str(device)}, local_files_only=True
        )
    encoder = full.model
    # Prompts have no pictures in them, so these never run.
    for name in ("vision_tower", "multi_modal_projector"):
        if hasattr(encoder, name):
            setattr(encoder, name, None)
    return TextEncoder(encoder, AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True))


def load_connectors(
    model_path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> TextConnectors:
    """Load the text connectors of a diffusers pipeline folder or of an official file that holds the text side.

    Raises:
        ModelError: a file without a text side, one that this project cannot honour, or no connectors there.
    """
    path = Path(model_path)
    if path.is_file():
        return TextConnectors(load_official_connectors(path, dtype, device))
    folder = component_folder(path, "connectors")
    connectors = LTX2TextConnectors.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
    return TextConnectors(connectors.to(device))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing its own progress bars."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
