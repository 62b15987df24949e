"""How much host memory a rank needs to load the model: a sharded one never exists as a whole anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ltx_trainer_plus.measure.bench import LTX_2_3
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.models.lora import official_full_tensors
from ltx_trainer_plus.models.official import config_to_official
from tests.launch import accelerate_command, run

SCRIPT = Path(__file__).with_name("memory_script.py")
# One block of the real size and what is around the blocks: 1.6 GB in bfloat16.
MODEL: dict[str, Any] = {**LTX_2_3, "num_layers": 1}
SHARED = {
    "data": {"preprocessed_data_root": "."},
    "training_strategy": {"name": "flexible", "video": {}, "audio": {}},
    "lora": {"rank": 8, "alpha": 8},
    "device": "cpu",
}
# What is not the model: buffers of the process group, what Python keeps of its own work, one tensor on its way.
SLACK = 300e6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as an official single file and as a diffusers folder with two weight files."""
    root = tmp_path_factory.mktemp("models")
    transformer = transformer_on_meta(MODEL)
    tensors = {
        name: torch.full(parameter.shape, 0.01, dtype=torch.bfloat16)
        for name, parameter in transformer.named_parameters()
    }
    official = root / "official.safetensors"
    config = {"transformer": config_to_official(transformer.config)}
    save_file(official_full_tensors(tensors), official, metadata={"config": json.dumps(config)})

    folder = root / "pipeline" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "LTX2VideoTransformer3DModel", **MODEL}))
    names = list(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"diffusion_pytorch_model-{index + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {"official": official, "folder": folder.parent}


def measured(layout: str, root: Path, loads: dict[tuple[str, str], Path]) -> dict[str, list[dict[str, int]]]:
    """What every rank needed for each load, by "<kind of checkpoint> <training mode>"."""
    settings = {
        f"{kind} {mode}": {**SHARED, "model": {"model_path": str(path), "training_mode": mode}}
        for (kind, mode), path in loads.items()
    }
    job, output = root / "job.json", root / "memory.json"
    job.write_text(json.dumps({"output": str(output), "loads": settings}))
    run(accelerate_command(layout, SCRIPT, str(job)), timeout=900)
    found = json.loads(output.read_text())
    print(layout, json.dumps(found, indent=1))  # shown by `pytest -s`, for docs/throughput.md
    return found


def test_a_sharded_model_never_exists_as_a_whole(models: dict[str, Path], tmp_path: Path) -> None:
    size = models["official"].stat().st_size
    loads = {(kind, mode): path for kind, path in models.items() for mode in ("lora", "full")}
    for name, ranks in measured("cpu_fsdp2", tmp_path, loads).items():
        # Of two ranks; a frozen base stays as it is stored, what is trained becomes float32.
        share = 0.5 * size * (2 if name.endswith("full") else 1)
        for rank in ranks:
            assert 0.95 * share < rank["held"] < 1.05 * share
            assert rank["private"] < rank["held"] + SLACK
            # Each rank reads its own slices of the file, and no more.
            assert 0.4 * size < rank["file"] < 0.6 * size


def test_a_replicated_model_exists_once_on_each_rank(models: dict[str, Path], tmp_path: Path) -> None:
    size = models["official"].stat().st_size
    for rank in measured("cpu_ddp", tmp_path, {("official", "lora"): models["official"]})["official lora"]:
        assert 0.95 * size < rank["held"] < 1.05 * size
        # DDP compares the ranks' weights once, by a broadcast in buckets of 250 MB.
        assert rank["private"] < rank["held"] + SLACK + 3 * 250e6
