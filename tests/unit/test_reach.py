"""What a run's loss reaches: the trace without weights against real backward passes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.models import load_transformer, read_transformer_config
from ltx_trainer_plus.models.lora import add_lora, lora_target_names
from ltx_trainer_plus.models.reach import StreamRole, reachable_parameters

ROLES: list[tuple[StreamRole, StreamRole]] = [
    ("generated", "generated"),
    ("generated", "absent"),
    ("absent", "generated"),
    ("generated", "frozen"),
    ("frozen", "generated"),
]


def real_inputs(path: Path) -> dict[str, Modality]:
    io = load_file(path)
    fields = ("latent", "sigma", "timesteps", "positions", "context")
    return {
        name: Modality(
            **{field: io[f"{name}_{field}"] for field in fields}, keyframes_mask=io.get(f"{name}_keyframes_mask")
        )
        for name in ("video", "audio")
    }


@pytest.mark.parametrize("model", ["ltx-2-tiny", "ltx-2.3-tiny", "ltx-2.5-tiny"])
@pytest.mark.parametrize(("video", "audio"), ROLES)
def test_exactly_the_parameters_that_a_real_loss_reaches(
    reference: Path, model: str, video: StreamRole, audio: StreamRole
) -> None:
    transformer = load_transformer(reference / f"{model}.safetensors", dtype=torch.float32)
    inputs, roles = real_inputs(reference / f"{model}-io.safetensors"), {"video": video, "audio": audio}
    outputs = transformer(**{name: inputs[name] for name, role in roles.items() if role != "absent"})
    sum(v.sum() for v, role in zip(outputs, roles.values(), strict=True) if role == "generated").backward()
    reached = {name for name, parameter in transformer.named_parameters() if parameter.grad is not None}
    assert reachable_parameters(transformer.config, video=video, audio=audio) == reached


@pytest.mark.parametrize(("video", "audio"), ROLES)
def test_every_adapter_gets_a_gradient(reference: Path, video: StreamRole, audio: StreamRole) -> None:
    path = reference / "ltx-2.3-tiny.safetensors"
    transformer = load_transformer(path, dtype=torch.float32)
    reachable = reachable_parameters(read_transformer_config(path), video=video, audio=audio)
    names = lora_target_names(transformer, ["to_k", "to_q", "to_v", "to_out.0"], reachable)
    add_lora(transformer, rank=2, alpha=2, dropout=0.0, target_names=names, seed=0)
    inputs, roles = real_inputs(reference / "ltx-2.3-tiny-io.safetensors"), {"video": video, "audio": audio}
    outputs = transformer(**{name: inputs[name] for name, role in roles.items() if role != "absent"})
    sum(v.sum() for v, role in zip(outputs, roles.values(), strict=True) if role == "generated").backward()
    trained = [p for p in transformer.parameters() if p.requires_grad]
    assert len(trained) == 2 * len(names)
    assert all(p.grad is not None for p in trained)


def test_names_alone_do_not_tell(reference: Path) -> None:
    config = read_transformer_config(reference / "ltx-2.3-tiny.safetensors")
    reached = reachable_parameters(config, video="generated", audio="frozen")
    assert "transformer_blocks.1.video_to_audio_attn.to_q.weight" in reached
    assert "transformer_blocks.2.video_to_audio_attn.to_q.weight" not in reached
    video_only = reachable_parameters(config, video="generated", audio="absent")
    assert "transformer_blocks.0.video_a2v_cross_attn_scale_shift_table" not in video_only


def test_a_run_that_generates_nothing_is_an_error(reference: Path) -> None:
    config = read_transformer_config(reference / "ltx-2.3-tiny.safetensors")
    with pytest.raises(ValueError, match="video is frozen and audio is absent"):
        reachable_parameters(config, video="frozen", audio="absent")
