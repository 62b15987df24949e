"""One process, DDP and FSDP2: the same held-out loss of weights and of their moving average, and exact resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.launch import run, torchrun_command
from tests.runs import joint_run, metrics, train, write_prepared_data, write_run_file
from tests.states import read_state

SCRIPT = Path(__file__).with_name("resume_script.py")


@pytest.fixture(scope="module")
def runs(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output folders of one run in three layouts, and of a resume of the sharded one."""
    folder = tmp_path_factory.mktemp("held_out")
    data = write_prepared_data(folder / "data", samples=8)

    def settings(name: str, layout: str, batch_size: int, accumulation: int = 1) -> dict[str, Any]:
        return {
            **joint_run(tiny_pipeline, data, folder / name),
            "optimization": {
                "steps": 4,
                "batch_size": batch_size,
                "gradient_accumulation_steps": accumulation,
                "learning_rate": 1e-3,
            },
            # So many numbers that the names in the files' headers weigh little.
            "lora": {"rank": 64, "alpha": 64},
            "acceleration": {"mixed_precision_mode": "no", "parallel": layout},
            "data": {"preprocessed_data_root": str(data), "num_dataloader_workers": 0, "shape_group": 1},
            # 3 samples at 3 levels: an odd number of forwards for two ranks.
            "validation": {"interval": None, "loss": {"fraction": 0.3, "sigmas": 3, "interval": 1}},
            "checkpoints": {"interval": 2, "keep_last_n": -1, "ema_decay": 0.9},
        }

    train(settings("single", "auto", 4))
    sharded = str(write_run_file(folder / "fsdp2.yaml", settings("fsdp2", "fsdp2", 1, 2)))
    ddp = str(write_run_file(folder / "ddp.yaml", settings("ddp", "ddp", 2)))
    second = folder / "fsdp2/checkpoints/lora_weights_step_00002.safetensors"
    arguments = [ddp, "--", sharded, "--", sharded, f"model.load_checkpoint={second}", "--"]
    run(torchrun_command(2, SCRIPT, *arguments), timeout=400)
    return {name: folder / name for name in ("single", "ddp", "fsdp2")}


def held_out(folder: Path) -> list[float]:
    return [line["held_out"] for line in metrics(folder) if "held_out" in line]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_same_model_has_the_same_held_out_loss_in_every_layout(runs: dict[str, Path], layout: str) -> None:
    assert len(held_out(runs["single"])) == 5
    assert held_out(runs[layout]) == pytest.approx(held_out(runs["single"]), rel=1e-5)


def test_a_sharded_run_with_an_average_and_accumulation_resumes_bit_for_bit(runs: dict[str, Path]) -> None:
    folder = runs["fsdp2"] / "checkpoints"
    expected = read_state(folder / "set_aside_001" / "training_state_step_00004")
    resumed = read_state(folder / "training_state_step_00004")
    assert any(name.startswith("average.") for name in expected.tensors)
    assert resumed.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(resumed.tensors[name], expected.tensors[name]) for name in expected.tensors)


def test_a_sharded_lora_checkpoint_holds_nothing_of_the_frozen_base(runs: dict[str, Path]) -> None:
    folder = runs["fsdp2"] / "checkpoints"
    state = read_state(folder / "training_state_step_00004").tensors
    assert all(".lora_" in name for name in state)
    adapters = sum(t.nbytes for name, t in state.items() if name.startswith("parameter."))
    counts = sum(t.nbytes for name, t in state.items() if name.startswith("optimizer.step."))
    # float32 masters, two moments and the average.
    assert sum(t.nbytes for t in state.values()) == 4 * adapters + counts
    weights = load_file(folder / "lora_weights_step_00004.safetensors")
    assert sum(t.nbytes for t in weights.values()) == adapters / 2  # bfloat16
    single = (runs["single"] / "checkpoints" / "training_state_step_00004.safetensors").stat().st_size
    sharded = sum(path.stat().st_size for path in (folder / "training_state_step_00004").iterdir())
    assert abs(sharded - single) < 0.05 * single


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_rank_wrote_its_half_and_torchs_own_reader_takes_them(runs: dict[str, Path]) -> None:
    folder = runs["fsdp2"] / "checkpoints" / "training_state_step_00004"
    halves = [load_file(path) for path in sorted(folder.iterdir())]
    expected = read_state(folder).tensors
    assert len(halves) == 2
    for half in halves:
        moments = [tensor for name, tensor in half.items() if name.startswith("optimizer.exp_avg.")]
        assert (
            sum(t.numel() for t in moments)
            == sum(t.numel() for name, t in expected.items() if name.startswith("optimizer.exp_avg.")) / 2
        )
    read = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(read[name], expected[name]) for name in expected)
