"""A tiny random LTX-2.3-style pipeline folder: every component real, small enough for a laptop's CPU.

The folder has the layout of a published LTX-2.3 diffusers pipeline, so everything that reads one reads this, and
`LTX2Pipeline.from_pretrained` too. The demo trains on it and the tests are built on it. Its pictures are noise.
"""

import math
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.flow.shift import FEW_TOKENS, MANY_TOKENS, SHIFT_AT_FEW, SHIFT_AT_MANY
from ltx_trainer_plus.models.text import without_progress_bars

VIDEO_HEADS, VIDEO_HEAD_DIM = 4, 16
AUDIO_HEADS, AUDIO_HEAD_DIM = 4, 8
VIDEO_DIM, AUDIO_DIM = VIDEO_HEADS * VIDEO_HEAD_DIM, AUDIO_HEADS * AUDIO_HEAD_DIM
BLOCKS = 3
GEMMA_DIM, GEMMA_LAYERS, GEMMA_VOCABULARY = 32, 6, 384
TEXT_TOKENS = 1024


def create_tiny_pipeline(folder: str | Path, seed: int = 0) -> Path:
    """Build the pipeline and save it in `folder`; the same seed gives the same bytes.

    A folder that holds a pipeline already is returned as it is.

    Raises:
        FileExistsError: `folder` holds something else.
    """
    folder = Path(folder)
    if (folder / "model_index.json").is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{folder} exists and is no pipeline folder (it has no model_index.json).\n"
            "  Name a folder that does not exist yet, or remove this one."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = LTX2Pipeline(
            scheduler=_scheduler(),
            vae=_video_vae(),
            audio_vae=_audio_vae(),
            text_encoder=_text_encoder(),
            tokenizer=_tokenizer(),
            connectors=_connectors(),
            transformer=_transformer(),
            vocoder=_vocoder(),
        )
    with replacing(folder) as unfinished, without_progress_bars():
        pipeline.save_pretrained(unfinished)
    return folder


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=FEW_TOKENS,
        base_shift=SHIFT_AT_FEW,
        max_image_seq_len=MANY_TOKENS,
        max_shift=SHIFT_AT_MANY,
        shift_terminal=0.1,
        use_dynamic_shifting=True,
    )


def _transformer() -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        num_layers=BLOCKS,
        num_attention_heads=VIDEO_HEADS,
        attention_head_dim=VIDEO_HEAD_DIM,
        cross_attention_dim=VIDEO_DIM,
        audio_num_attention_heads=AUDIO_HEADS,
        audio_attention_head_dim=AUDIO_HEAD_DIM,
        audio_cross_attention_dim=AUDIO_DIM,
        caption_channels=GEMMA_DIM,
        gated_attn=True,
        audio_gated_attn=True,
        cross_attn_mod=True,
        audio_cross_attn_mod=True,
        perturbed_attn=True,
        use_prompt_embeddings=False,
        rope_type="split",
    )


def _video_vae() -> AutoencoderKLLTX2Video:
    vae = AutoencoderKLLTX2Video(
        block_out_channels=(8, 16, 32, 32),
        layers_per_block=(0, 1, 1, 1, 1),
        decoder_block_out_channels=(8, 16, 16, 32),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True, True, True),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        upsample_residual=(False, False, False, False),
        upsample_factor=(2, 2, 1, 2),
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros",
        # Without these two the model derives 64 and 16 from the number of its blocks.
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    _set_statistics(vae)
    return vae


def _audio_vae() -> AutoencoderKLLTX2Audio:
    # base_channels is also the length of the statistics, which belong to packed 8x16 features: it must be 128.
    vae = AutoencoderKLLTX2Audio(base_channels=128, ch_mult=(1, 1, 1), num_res_blocks=0)
    _set_statistics(vae)
    return vae


def _set_statistics(vae: nn.Module) -> None:
    """Give a VAE means and deviations that are not 0 and 1, so that a forgotten normalisation shows."""
    vae.get_buffer("latents_mean").copy_(0.1 * torch.randn(128))
    vae.get_buffer("latents_std").copy_(0.2 + 0.2 * torch.rand(128))


def _text_encoder() -> Gemma3ForConditionalGeneration:
    text = {
        "vocab_size": GEMMA_VOCABULARY,
        "hidden_size": GEMMA_DIM,
        "intermediate_size": 2 * GEMMA_DIM,
        "num_hidden_layers": GEMMA_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "max_position_embeddings": TEXT_TOKENS,
        "initializer_range": 0.2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    # The image tokens are ids that the tokenizer never makes.
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=GEMMA_VOCABULARY - 3,
        eoi_token_index=GEMMA_VOCABULARY - 2,
        image_token_index=GEMMA_VOCABULARY - 1,
    )
    return Gemma3ForConditionalGeneration(config).eval()


def _tokenizer() -> GemmaTokenizer:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"] + [chr(code) for code in range(0x21, 0x7F)]
    vocabulary = {piece: index for index, piece in enumerate(special + pieces)}
    return GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=TEXT_TOKENS, add_bos_token=True)


def _connectors() -> LTX2TextConnectors:
    return LTX2TextConnectors(
        caption_channels=GEMMA_DIM,
        text_proj_in_factor=GEMMA_LAYERS + 1,
        video_connector_num_attention_heads=VIDEO_HEADS,
        video_connector_attention_head_dim=VIDEO_HEAD_DIM,
        video_connector_num_layers=2,
        video_gated_attn=True,
        audio_connector_num_attention_heads=AUDIO_HEADS,
        audio_connector_attention_head_dim=AUDIO_HEAD_DIM,
        audio_connector_num_layers=2,
        audio_gated_attn=True,
        rope_type="split",
        per_modality_projections=True,
        video_hidden_dim=VIDEO_DIM,
        audio_hidden_dim=AUDIO_DIM,
        proj_bias=True,
    )


def _vocoder() -> LTX2VocoderWithBWE:
    # 160 samples a mel frame at 16 kHz, then 240 at 48 kHz for every 80: the products of the factors are fixed.
    vocoder = LTX2VocoderWithBWE(
        hidden_channels=32,
        upsample_kernel_sizes=[11, 8, 8, 4],
        upsample_factors=[5, 4, 4, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        bwe_hidden_channels=32,
        bwe_upsample_kernel_sizes=[12, 11, 8, 4],
        bwe_upsample_factors=[6, 5, 4, 2],
        bwe_resnet_kernel_sizes=[3],
        bwe_resnet_dilations=[[1, 3]],
    )
    # These buffers start as zeros: the bandwidth extension would not hear its input.
    stft = vocoder.mel_stft
    stft.stft_fn.forward_basis.copy_(_windowed_dft(stft.stft_fn.window_length))
    stft.mel_basis.copy_(_triangles(*stft.mel_basis.shape))
    return vocoder


def _windowed_dft(length: int) -> Tensor:
    """Real and imaginary DFT rows under a Hann window: (2 * (length // 2 + 1), 1, length)."""
    time = torch.arange(length, dtype=torch.float64)
    frequency = torch.arange(length // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi * frequency[:, None] * time / length
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * time / length)
    return (torch.cat([angle.cos(), -angle.sin()]) * window).float().unsqueeze(1)


def _triangles(bands: int, frequencies: int) -> Tensor:
    """Overlapping triangular bands on a mel-like (quadratic) scale: (bands, frequencies)."""
    edges = (frequencies - 1) * torch.linspace(0, 1, bands + 2, dtype=torch.float64) ** 2
    low, centre, high = (edges[i : i + bands, None] for i in range(3))
    frequency = torch.arange(frequencies, dtype=torch.float64)
    rising, falling = (frequency - low) / (centre - low), (high - frequency) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0).float()
