"""ModelHandle: every wrapper of the table, alone and stacked, and what is refused."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import compile_regions
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ltx_trainer_plus import Modality, ModelHandle, Perturbations
from ltx_trainer_plus.models import LTXTransformer, load_transformer
from ltx_trainer_plus.models.compile import compile_blocks


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def original(reference: Path) -> LTXTransformer:
    return load_transformer(reference / "ltx-2.3-tiny.safetensors", dtype=torch.float32)


@pytest.fixture
def bare(original: LTXTransformer) -> Iterator[LTXTransformer]:
    torch._dynamo.reset()
    yield copy.deepcopy(original)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def inputs(reference: Path) -> dict[str, Modality]:
    io = load_file(reference / "ltx-2.3-tiny-io.safetensors")
    fields = ("latent", "sigma", "timesteps", "positions", "context")
    return {name: Modality(**{field: io[f"{name}_{field}"] for field in fields}) for name in ("video", "audio")}


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def block_wise(module: nn.Module) -> nn.Module:
    compile_blocks(module, backend="eager")
    return module


def regional(module: nn.Module) -> nn.Module:
    return compile_regions(module, backend="eager")


def peft(module: nn.Module) -> nn.Module:
    return get_peft_model(module, LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=True))


def sharded(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def block_sharded(module: LTXTransformer) -> nn.Module:
    for block in module.transformer_blocks:
        sharded(block)
    return sharded(module)


Wrap = Callable[[nn.Module], nn.Module]
DEEPEST = "compile(DDP(PEFT(blocks compiled in place)))"
STACKS: dict[str, tuple[Wrap, ...]] = {
    "bare": (),
    "compile": (compiled,),
    "regional compile": (regional,),
    "compiled in place": (in_place,),
    "blocks compiled in place": (block_wise,),
    "DDP": (DistributedDataParallel,),
    "DataParallel": (DataParallel,),
    "FSDP2": (block_sharded,),
    "FSDP2 of a compiled model": (compiled, sharded),
    "checkpoint wrapper": (checkpoint_wrapper,),
    "PEFT": (peft,),
    "DDP(PEFT)": (peft, DistributedDataParallel),
    "DDP(regional compile)": (regional, DistributedDataParallel),
    "DDP(compile)": (compiled, DistributedDataParallel),
    "compile(FSDP2)": (block_sharded, compiled),
    DEEPEST: (block_wise, peft, DistributedDataParallel, compiled),
    "checkpoint wrapper(compile(DDP(PEFT(in place))))": (
        in_place,
        peft,
        DistributedDataParallel,
        compiled,
        checkpoint_wrapper,
    ),
}


@pytest.mark.parametrize("stack", STACKS)
def test_any_stack_is_called_outside_and_asked_inside_and_left_alone(
    stack: str, bare: LTXTransformer, inputs: dict[str, Modality]
) -> None:
    with torch.no_grad():
        expected = bare(**inputs)
    prepared: nn.Module = bare
    for wrap in STACKS[stack]:
        prepared = wrap(prepared)
    keys, kinds = list(prepared.state_dict()), [type(m) for m in prepared.modules()]
    training = [module.training for module in prepared.modules()]
    attributes = set(vars(prepared))

    handle = ModelHandle.of(prepared)

    assert handle.forward_module is prepared
    assert handle.meta_module is bare
    assert handle.num_blocks == 3
    assert handle.dtype == torch.float32
    assert handle.device == torch.device("cpu")
    assert handle.config["num_layers"] == 3

    assert list(prepared.state_dict()) == keys
    assert [type(m) for m in prepared.modules()] == kinds
    assert [module.training for module in prepared.modules()] == training
    assert set(vars(prepared)) == attributes
    if isinstance(prepared, DistributedDataParallel):
        assert callable(prepared.no_sync)

    # Tracing takes seconds: only the deepest stack really compiles, the others run their compiled layers eagerly.
    with torch.no_grad(), torch.compiler.set_stance("default" if stack == DEEPEST else "force_eager"):
        outputs = handle(**inputs)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stack", STACKS)
def test_trainable_names_do_not_depend_on_the_wrappers(stack: str, bare: LTXTransformer) -> None:
    bare.requires_grad_(False)
    bare.proj_in.requires_grad_(True)
    bare.transformer_blocks[1].attn1.norm_q.requires_grad_(True)
    prepared: nn.Module = bare
    for wrap in STACKS[stack]:
        prepared = wrap(prepared)
    ours = [n for n, _ in ModelHandle.of(prepared).trainable_parameters() if ".lora_" not in n]
    if "PEFT" not in stack:  # PEFT freezes what it does not add
        assert ours == ["proj_in.weight", "proj_in.bias", "transformer_blocks.1.attn1.norm_q.weight"]
    assert not any("_orig_mod" in name or "module." in name for name in ours)


def test_names_are_clean_when_single_blocks_are_wrapped(bare: LTXTransformer) -> None:
    names = [name for name, _ in ModelHandle.of(bare).trainable_parameters()]
    bare.transformer_blocks[0] = torch.compile(bare.transformer_blocks[0], backend="eager")
    bare.transformer_blocks[1] = checkpoint_wrapper(bare.transformer_blocks[1])
    assert [name for name, _ in ModelHandle.of(bare).trainable_parameters()] == names


class Unknown(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_an_unknown_wrapper_is_refused_with_the_remedy(bare: LTXTransformer) -> None:
    with pytest.raises(TypeError, match=r"Unknown is a wrapper.*ModelHandle\(forward_module=wrapper, meta_module="):
        ModelHandle.of(Unknown(bare))
    with pytest.raises(TypeError, match="Unknown is a wrapper"):
        ModelHandle.of(DistributedDataParallel(Unknown(bare)))


def test_fsdp1_is_refused_with_the_command_that_converts_the_config(bare: LTXTransformer) -> None:
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # needs a GPU to be built properly
    nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = bare
    with pytest.raises(TypeError, match="accelerate to-fsdp2"):
        ModelHandle.of(wrapped)


def test_other_engines_are_refused_by_name(bare: LTXTransformer) -> None:
    class DeepSpeedEngine(Unknown):
        pass

    with pytest.raises(TypeError, match="DeepSpeedEngine is not supported"):
        ModelHandle.of(DeepSpeedEngine(bare))


def test_data_parallel_over_several_gpus_is_refused(bare: LTXTransformer) -> None:
    wrapped = DataParallel(bare)
    wrapped.device_ids = [0, 1]
    with pytest.raises(TypeError, match="DataParallel over 2 GPUs"):
        ModelHandle.of(wrapped)


@pytest.mark.parametrize("thing", [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))])
def test_something_without_an_ltx_transformer_is_refused(thing: nn.Module) -> None:
    with pytest.raises(TypeError, match="contains no LTXTransformer"):
        ModelHandle.of(thing)
    with pytest.raises(TypeError, match="contains no LTXTransformer"):
        ModelHandle.of(DistributedDataParallel(thing))


def test_meta_module_must_be_the_bare_transformer(bare: LTXTransformer) -> None:
    wrapped = DistributedDataParallel(bare)
    with pytest.raises(TypeError, match="must be the bare LTXTransformer"):
        ModelHandle(forward_module=wrapped, meta_module=wrapped)


def test_nothing_is_passed_through_and_nothing_can_be_changed(bare: LTXTransformer) -> None:
    handle = ModelHandle.of(bare)
    with pytest.raises(AttributeError, match=r"no 'transformer_blocks'.*handle\.meta_module"):
        _ = handle.transformer_blocks
    with pytest.raises(AttributeError):
        handle.meta_module = bare
    with pytest.raises((AttributeError, TypeError)):  # TypeError: CPython 3.11 on frozen dataclasses with slots
        handle.note = 1


class Hostile(nn.Module):
    """Runs its model, and raises on every attribute that `nn.Module` itself does not have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **arguments: object) -> object:
        return self._modules["inner"](**arguments)

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"somebody asked the wrapper for {name!r}")


def test_a_hand_made_handle_asks_a_hostile_wrapper_for_nothing(
    bare: LTXTransformer, inputs: dict[str, Modality]
) -> None:
    handle = ModelHandle(forward_module=Hostile(bare), meta_module=bare)
    everywhere = frozenset(range(handle.num_blocks))
    with handle.no_sync(), handle.evaluating(), torch.no_grad():
        video_v, _ = handle(**inputs, perturbations=Perturbations(video_self=everywhere))
    assert video_v.shape == inputs["video"].latent.shape
    assert handle.trainable_parameters()
    assert (handle.dtype, handle.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("stack", ["bare", "regional compile", "DDP(PEFT)", "FSDP2", "compile"])
def test_evaluating_restores_every_training_flag(stack: str, bare: LTXTransformer) -> None:
    prepared: nn.Module = bare
    for wrap in STACKS[stack]:
        prepared = wrap(prepared)
    prepared.train()
    bare.train()
    bare.proj_in.training = False  # somebody froze one part in eval mode
    before = [m.training for m in bare.modules()]
    handle = ModelHandle.of(prepared)

    def validate() -> None:
        with handle.evaluating():
            assert not prepared.training
            assert not any(m.training for m in bare.modules())
            raise KeyError("an error in validation restores them too")

    with pytest.raises(KeyError):
        validate()
    assert prepared.training
    assert [m.training for m in bare.modules()] == before


@pytest.mark.parametrize("outer", [(), (compiled,)])
def test_no_sync_reaches_ddp_through_what_is_around_it(outer: tuple[Wrap, ...], bare: LTXTransformer) -> None:
    ddp = DistributedDataParallel(bare)
    prepared: nn.Module = ddp
    for wrap in outer:
        prepared = wrap(prepared)
    with ModelHandle.of(prepared).no_sync():
        assert ddp.require_backward_grad_sync is False
    assert ddp.require_backward_grad_sync is True


@pytest.mark.parametrize("reduces_each_backward", [False, True])
def test_no_sync_holds_back_gradients_under_fsdp2_as_the_plan_decided(
    bare: LTXTransformer, reduces_each_backward: bool
) -> None:
    prepared = block_sharded(bare)
    groups = [m._get_fsdp_state()._fsdp_param_group for m in prepared.modules() if isinstance(m, FSDPModule)]
    assert len(groups) == 4
    with ModelHandle.of(prepared, reduces_each_backward=reduces_each_backward).no_sync():
        assert all(group.reduce_grads is reduces_each_backward for group in groups)
    assert all(group.reduce_grads for group in groups)


@pytest.mark.parametrize(("outer", "answer"), [((block_sharded,), True), ((compiled, sharded), True), ((), False)])
def test_the_handle_tells_whether_the_model_is_sharded(
    outer: tuple[Wrap, ...], answer: bool, bare: LTXTransformer
) -> None:
    prepared: nn.Module = bare
    for wrap in outer:
        prepared = wrap(prepared)
    assert ModelHandle.of(prepared).is_sharded is answer


def test_no_sync_of_one_process_is_nothing(bare: LTXTransformer) -> None:
    with ModelHandle.of(bare).no_sync():
        pass


def test_peft_is_peeled_to_the_model_it_was_given(bare: LTXTransformer) -> None:
    wrapped = peft(bare)
    assert isinstance(wrapped, PeftModel)
    assert any(".lora_A." in name for name, _ in ModelHandle.of(wrapped).trainable_parameters())
