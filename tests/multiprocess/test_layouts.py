"""The strategy switch: one run file in every layout gives one set of numbers.

Every layout is launched once, with accelerate's own config file, and trains all its variants in that launch. Each is
compared with the same global batch on one process.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.launch import ROOT, accelerate_command, run
from tests.runs import VALIDATION, joint_run, metrics, write_prepared_data

SCRIPT = ROOT / "tests/multiprocess/layouts_script.py"
GLOBAL_BATCH = 16
MICRO_STEPS = 4
STEPS = 8
BLOCKS = 3
GATHER = "c10d::_allgather_base_"
PROCESSES = {
    "cpu_single": 1,
    "cpu_ddp": 2,
    "cpu_fsdp2": 2,
    "cpu_hsdp": 4,
    "four_ddp": 4,
    "four_fsdp2": 4,
}
SHARDS = {"cpu_fsdp2": 2, "cpu_hsdp": 2, "four_fsdp2": 4}
# What accelerate exports for other options than those of its file.
ENVIRONMENT = {"offloaded": {"FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"}}

# What differs from the plain run: float32, joint audio and video, LoRA, validated at the start and the end.
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"validation": {**VALIDATION, "interval": STEPS}},
    "accumulated": {},
    "checkpointed": {"optimization": {"enable_gradient_checkpointing": True}},
    # Sharded alone: shards in host memory, blocks kept gathered between forward and backward.
    "offloaded": {},
    "bf16": {"acceleration": {"mixed_precision_mode": "bf16"}},
    "full": {"model": {"training_mode": "full"}, "optimization": {"learning_rate": 1e-4}},
    # Everything of torch.compile but inductor's kernels, which take minutes to build.
    "compiled": {"acceleration": {"compile": {"backend": "aot_eager"}}},
    "compiled validated": {
        "acceleration": {"compile": {"backend": "aot_eager"}},
        "validation": {**VALIDATION, "interval": STEPS},
    },
    "inductor": {"acceleration": {"compile": "blocks"}},
    "full accumulated": {"model": {"training_mode": "full"}, "optimization": {"learning_rate": 1e-4}},
    "full checkpointed": {
        "model": {"training_mode": "full"},
        "optimization": {"learning_rate": 1e-4, "enable_gradient_checkpointing": True},
    },
    "full bf16": {
        "model": {"training_mode": "full"},
        "optimization": {"learning_rate": 1e-4},
        "acceleration": {"mixed_precision_mode": "bf16"},
    },
    "video only": {"training_strategy": {"audio": None}},
    "audio only": {"training_strategy": {"video": None}},
}
# The one-process run that a variant is compared with: what it should not change is left out there.
SAME_AS = {
    "accumulated": "lora",
    "checkpointed": "lora",
    "offloaded": "lora",
    "compiled": "lora",
    "compiled validated": "lora",
    "inductor": "lora",
    "full accumulated": "full",
    "full checkpointed": "full",
}
# Of the layouts in `make test`; the rest is in `make test-all`.
ESSENTIAL = {
    "cpu_ddp": ("lora", "accumulated", "checkpointed", "bf16", "full", "compiled"),
    "cpu_fsdp2": ("lora", "accumulated", "checkpointed", "offloaded", "bf16", "full", "compiled"),
    "cpu_hsdp": ("lora", "bf16", "full"),
}


def tolerance(variant: str) -> float:
    """Relative, on losses and weights. 2e-6: float32 sums in another order; 1e-3: bfloat16 sums, fused operations."""
    return 1e-3 if {"bf16", "compiled", "inductor"} & set(variant.split()) else 2e-6


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one variant left behind."""

    folder: Path
    ranks: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in metrics(self.folder)]

    @property
    def gradient_norms(self) -> list[float]:
        return [line["grad_norm"] for line in metrics(self.folder)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.ranks[0]["weights"])

    def gradients(self, rank: int) -> dict[str, torch.Tensor]:
        """Of the second step, as the rank holds them."""
        return load_file(f"{self.folder}.gradients.{rank}.safetensors")

    def latents(self, stream: str, samples: int = 2) -> list[torch.Tensor]:
        """Validation latents in the order in which one process makes them; sample `n` is made by rank `n % ranks`."""
        by_rank = []
        for rank in range(min(samples, len(self.ranks))):
            found = load_file(f"{self.folder}.latents.{rank}.safetensors")
            by_rank.append([found[key] for key in sorted(found) if key.endswith(stream)])
        return [latent for round_ in zip(*by_rank, strict=True) for latent in round_]


class Launches:
    """Launches a layout when a test first asks for it, with all the variants that the selected tests want."""

    def __init__(self, root: Path, model: Path, data: Path, wanted: dict[str, set[str]]) -> None:
        self._root, self._model, self._data, self._wanted = root, model, data, wanted
        self._done: dict[str, dict[str, Outcome]] = {}
        self._failed: set[str] = set()

    def outcome(self, layout: str, variant: str) -> Outcome:
        if layout in self._failed:
            pytest.fail(f"The launch of {layout} failed before, see there.")
        if layout not in self._done:
            self._failed.add(layout)
            self._done[layout] = self._launched(layout, sorted(self._wanted[layout]))
            self._failed.remove(layout)
        return self._done[layout][variant]

    def _launched(self, layout: str, variants: list[str]) -> dict[str, Outcome]:
        folder = self._root / layout
        folder.mkdir()
        runs = {
            name: {"settings": self._settings(layout, name), "environment": ENVIRONMENT.get(name, {})}
            for name in variants
        }
        file = self._root / f"{layout}.json"
        file.write_text(json.dumps({"output": str(folder), "runs": runs}))
        command = accelerate_command(layout.replace("four_", "cpu_"), SCRIPT, str(file))
        if layout.startswith("four_"):
            command[command.index(str(SCRIPT)) : command.index(str(SCRIPT))] = ["--num_processes", "4"]
        run(command, timeout=900)
        return {name: Outcome(folder / name, json.loads((folder / f"{name}.json").read_text())) for name in variants}

    def _settings(self, layout: str, variant: str) -> dict[str, Any]:
        settings = joint_run(self._model, self._data, self._root / "unused")
        per_rank = GLOBAL_BATCH // PROCESSES[layout]
        settings["optimization"] |= {"steps": STEPS, "batch_size": per_rank, "learning_rate": 2e-3}
        # Adam gives an element whose gradient is rounding noise a step of full size, in a random direction; with this
        # it gives it none.
        settings["optimization"] |= {"eps": 1e-5}
        settings["data"] |= {"shape_group": 1}
        settings["checkpoints"] = {"precision": "float32"}
        for section, changes in VARIANTS[variant].items():
            settings[section] = {**settings[section], **changes}
        if "accumulated" in variant:
            settings["optimization"] |= {
                "batch_size": per_rank // MICRO_STEPS,
                "gradient_accumulation_steps": MICRO_STEPS,
            }
        return settings


CASES = [
    pytest.param(
        layout,
        variant,
        marks=() if variant in ESSENTIAL[layout] else pytest.mark.slow,
        id=f"{layout}-{variant}",
    )
    for layout in ESSENTIAL
    for variant in VARIANTS
    if layout in SHARDS or variant != "offloaded"
] + [pytest.param(layout, "lora", marks=pytest.mark.slow, id=f"{layout}-lora") for layout in ("four_ddp", "four_fsdp2")]


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    root = tmp_path_factory.mktemp("layouts")
    wanted: dict[str, set[str]] = {}
    for item in request.session.items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and "layout" in parameters.params and item.path == request.path:
            layout, variant = parameters.params["layout"], parameters.params.get("variant", "lora")
            wanted.setdefault(layout, {"lora"}).add(variant)
            wanted.setdefault("cpu_single", {"lora"}).add(SAME_AS.get(variant, variant))
    return Launches(root, tiny_pipeline, write_prepared_data(root / "data", samples=24), wanted)


def relative_distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    distance = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    size = sum(float(tensor.double().square().sum()) for tensor in other.values())
    return (distance / size) ** 0.5


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_every_layout_computes_the_losses_and_weights_of_one_process(
    launches: Launches, layout: str, variant: str
) -> None:
    alone = launches.outcome("cpu_single", SAME_AS.get(variant, variant))
    outcome = launches.outcome(layout, variant)
    assert len(outcome.losses) == STEPS
    assert len(set(outcome.losses)) == STEPS
    assert outcome.losses == pytest.approx(alone.losses, rel=tolerance(variant))
    # Of all ranks' parts together. Full fine-tuning is clipped by it here, so the weights tell that too.
    assert outcome.gradient_norms == pytest.approx(alone.gradient_norms, rel=5 * tolerance(variant))
    assert variant != "full" or max(alone.gradient_norms) > 1
    distance = relative_distance(outcome.weights, alone.weights)
    assert distance < tolerance(variant)


@pytest.mark.parametrize("layout", ESSENTIAL)
def test_validation_makes_the_same_latents_in_every_layout(launches: Launches, layout: str) -> None:
    for stream in ("video", "audio"):
        alone = launches.outcome("cpu_single", "lora").latents(stream)
        latents = launches.outcome(layout, "lora").latents(stream)
        assert len(latents) == len(alone) == 4
        for one, other in zip(latents, alone, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", ["cpu_ddp", "cpu_fsdp2", pytest.param("cpu_hsdp", marks=pytest.mark.slow)])
def test_four_micro_steps_exchange_gradients_as_often_as_one(launches: Launches, layout: str) -> None:
    one = launches.outcome(layout, "lora").ranks[0]["collectives"]
    accumulated = launches.outcome(layout, "accumulated").ranks[0]["collectives"]
    for name in ("c10d::allreduce_", "c10d::_reduce_scatter_base_"):
        assert accumulated.get(name) == one.get(name)
    assert one["c10d::allreduce_"] > 0  # DDP: of gradients; FSDP2: of their norm; both: of the metrics
    if layout in SHARDS:
        assert one["c10d::_reduce_scatter_base_"] == BLOCKS  # nothing else is trained
        assert accumulated[GATHER] == MICRO_STEPS * one[GATHER]


@pytest.mark.parametrize("layout", ["cpu_ddp", "cpu_fsdp2"])
@pytest.mark.parametrize("variant", ["compiled", pytest.param("compiled validated", marks=pytest.mark.slow)])
def test_spread_blocks_compile_to_few_graphs_without_a_break(launches: Launches, layout: str, variant: str) -> None:
    for rank in launches.outcome(layout, variant).ranks:
        assert 0 < rank["graphs"] <= 12
        assert rank["graph_breaks"] == 0


@pytest.mark.parametrize("layout", ["cpu_ddp", "cpu_fsdp2"])
def test_gradient_checkpointing_changes_no_gradient(launches: Launches, layout: str) -> None:
    plain, checkpointed = launches.outcome(layout, "lora"), launches.outcome(layout, "checkpointed")
    for rank in range(PROCESSES[layout]):
        gradients = plain.gradients(rank)
        assert gradients
        assert all(gradient.abs().max() > 0 for gradient in gradients.values() if gradient.numel())
        # The weights of the second step are those after the first, equal up to the last bits.
        assert relative_distance(checkpointed.gradients(rank), gradients) < 1e-6


@pytest.mark.parametrize("layout", ESSENTIAL)
def test_a_step_that_logs_nothing_makes_no_rank_wait(launches: Launches, layout: str) -> None:
    for rank in launches.outcome(layout, "lora").ranks:
        assert rank["waits"] == {"1": {}, "2": {}}  # with one and with two micro-steps


def test_weights_are_gathered_once_a_pass_and_one_block_ahead(launches: Launches) -> None:
    plain, checkpointed, kept = (
        launches.outcome("cpu_fsdp2", name).ranks[0] for name in ("lora", "checkpointed", "offloaded")
    )
    ahead = [min(index + 3, BLOCKS + 1) for index in range(BLOCKS)]  # the root, the block itself, and the next
    assert plain["gathered_at"] == kept["gathered_at"] == ahead
    # The last block and the root stay for the backward.
    forward, backward = BLOCKS + 1, BLOCKS - 1
    assert plain["collectives"][GATHER] == forward + backward
    # A block that is recomputed is there already.
    assert checkpointed["collectives"][GATHER] == forward + backward
    assert len(checkpointed["gathered_at"]) == 2 * BLOCKS
    # fsdp_reshard_after_forward: false
    assert kept["collectives"][GATHER] == forward


def test_options_of_the_launch_reach_every_unit(launches: Launches) -> None:
    assert launches.outcome("cpu_fsdp2", "lora").ranks[0]["offloads"] == [False] * (BLOCKS + 1)
    assert launches.outcome("cpu_fsdp2", "offloaded").ranks[0]["offloads"] == [True] * (BLOCKS + 1)


@pytest.mark.parametrize("layout", ["cpu_fsdp2", "cpu_hsdp"])
def test_weights_travel_in_bfloat16_and_gradients_in_float32(launches: Launches, layout: str) -> None:
    for rank in launches.outcome(layout, "bf16").ranks:
        assert rank["dtypes"][GATHER] == ["torch.bfloat16"]
        assert rank["dtypes"]["c10d::_reduce_scatter_base_"] == ["torch.float32"]


@pytest.mark.parametrize("layout", ["cpu_fsdp2", "cpu_hsdp"])
def test_every_block_is_a_unit_and_a_rank_holds_its_part_of_the_frozen_base_in_bf16(
    launches: Launches, layout: str
) -> None:
    for rank in launches.outcome(layout, "bf16").ranks:
        assert rank["blocks_are_units"]
        assert rank["is_unit"]
        assert rank["frozen_dtypes"] == ["torch.bfloat16"]
        assert rank["trained_dtypes"] == ["torch.float32"]
        assert rank["local_frozen"] <= (1 / SHARDS[layout] + 0.02) * rank["frozen"]


@pytest.mark.parametrize("layout", ESSENTIAL)
def test_parameters_change_on_every_rank_and_copies_stay_equal(launches: Launches, layout: str) -> None:
    plain, full = launches.outcome(layout, "lora").ranks, launches.outcome(layout, "full").ranks
    for ranks in (plain, full):
        assert all(rank["trained_sum"] != rank["first_trained_sum"] for rank in ranks)
        # Ranks that hold the same part hold the same numbers.
        assert len({rank["trained_sum"] for rank in ranks}) == SHARDS.get(layout, 1)


@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        (layout, variant)
        for layout in ESSENTIAL
        for variant in ("lora", "full", "compiled")
        if variant in ESSENTIAL[layout]
    ],
)
def test_no_name_of_a_wrapper_is_saved(launches: Launches, layout: str, variant: str) -> None:
    outcome = launches.outcome(layout, variant)
    files = sorted((outcome.folder / "checkpoints").rglob("*.safetensors"))
    assert len(files) == 1 + SHARDS.get(layout, 1)  # weights and training state
    for file in files:
        with safe_open(file, "pt") as opened:
            text = " ".join([*opened.keys(), *opened.metadata().values()])
        for name in ("_orig_mod", "module.", "_checkpoint_wrapped_module"):
            assert f"{name}transformer" not in text
        assert "_orig_mod" not in text
    alone = launches.outcome("cpu_single", SAME_AS.get(variant, variant))
    assert outcome.weights.keys() == alone.weights.keys()
