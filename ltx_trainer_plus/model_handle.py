"""The rule: the module you call and the module you ask are two references, held by one `ModelHandle`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ltx_trainer_plus.modality import Modality, Perturbations
from ltx_trainer_plus.models.shards import compute_device, is_sharded
from ltx_trainer_plus.models.transformer import LTXTransformer

_OWN_ENGINES = ("DeepSpeedEngine", "PipelineEngine", "MegatronEngine")
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True, eq=False)
class ModelHandle:
    """A prepared model: `forward_module` is called, `meta_module` is asked. Nothing else knows that wrappers exist.

    Attributes:
        forward_module: what a launch made of the model: DDP, compiled, sharded, or the bare transformer itself.
            Every forward goes through it; calling the bare module would skip gathers and hooks.
        meta_module: the bare transformer inside it. Every question goes to it; wrappers answer none reliably.
        reduces_each_backward: `no_sync` does nothing, which under FSDP2 saves the memory of gradients that are not
            sharded (`ParallelPlan.reduces_each_backward`).
    """

    forward_module: nn.Module
    meta_module: LTXTransformer
    reduces_each_backward: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.meta_module, LTXTransformer):
            raise TypeError(
                f"meta_module is a {type(self.meta_module).__name__}; it must be the bare LTXTransformer, "
                "as load_transformer returned it."
            )

    @classmethod
    def of(cls, prepared: nn.Module, *, reduces_each_backward: bool = False) -> "ModelHandle":
        """Find the bare transformer inside any stack of known wrappers. Resolved once; nothing is changed.

        Raises:
            TypeError: a wrapper that is refused or not known, or no LTX transformer inside.
        """
        *_, innermost = _layers(prepared)
        if not isinstance(innermost, LTXTransformer):
            _refuse(innermost)
        return cls(prepared, innermost, reduces_each_backward)

    def __call__(
        self,
        *,
        video: Modality | None = None,
        audio: Modality | None = None,
        perturbations: Perturbations | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Velocities of video and audio, through `forward_module`; arguments as `LTXTransformer.forward`."""
        return self.forward_module(video=video, audio=audio, perturbations=perturbations)

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks."""
        return self.meta_module.num_blocks

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype (weights and masters may be kept in another)."""
        return self.meta_module.compute_dtype

    @property
    def device(self) -> torch.device:
        """Where the inputs have to be."""
        return compute_device(next(self.meta_module.parameters()))

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds a part of the model only, so that a forward needs others too."""
        return any(is_sharded(parameter) for parameter in self.meta_module.parameters())

    @property
    def config(self) -> Any:
        """The model's configuration, by key or attribute."""
        return self.meta_module.config

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of everything that is trained; the names do not depend on the wrappers."""
        return [
            (".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS), parameter)
            for name, parameter in self.meta_module.named_parameters()
            if parameter.requires_grad
        ]

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which a backward leaves gradients unreduced: all micro-steps of a step but the last.

        It does nothing where the plan wants each backward to reduce its own, or there is nobody to reduce with.
        """
        if self.reduces_each_backward:
            return nullcontext()
        for layer in _layers(self.forward_module):
            if isinstance(layer, DistributedDataParallel):
                return layer.no_sync()
            if isinstance(layer, FSDPModule):
                return _without_gradient_sync(layer)
        return nullcontext()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the model is in eval mode; every module's own training flag is restored afterwards."""
        modules = {id(m): m for root in (self.forward_module, self.meta_module) for m in root.modules()}
        flags = [(module, module.training) for module in modules.values()]
        self.forward_module.eval()
        self.meta_module.eval()
        try:
            yield
        finally:
            for module, was_training in flags:
                module.training = was_training
            self.reshard()

    def reshard(self) -> None:
        """Free what a forward without a backward has left gathered; parameters are shards again, and can be saved."""
        for module in self.meta_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"ModelHandle has no {name!r}. It passes nothing through: ask `handle.meta_module` for what belongs to the "
            "bare transformer, and use `handle(video=..., audio=...)` to run it."
        )


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The module and what it wraps, outermost first, down to the last one that is known."""
    yield module
    inner = _unwrapped(module)
    while inner is not None:
        yield inner
        inner = _unwrapped(inner)


def _unwrapped(module: nn.Module) -> nn.Module | None:
    """What a known wrapper holds; None for the bare model and for what is not known."""
    # accelerate's regional compile returns a shallow clone that keeps the original in its __dict__; FSDP2 of a
    # compiled model is an OptimizedModule too. A model compiled or sharded in place is itself the bare model.
    if isinstance(module, OptimizedModule) or "_orig_mod" in vars(module):
        inner: Any = module._orig_mod
        return inner
    if isinstance(module, DistributedDataParallel):
        return module.module
    if isinstance(module, DataParallel):
        if len(module.device_ids) > 1:
            raise TypeError(
                f"DataParallel over {len(module.device_ids)} GPUs would hand the whole batch to each of them. "
                "Use DDP: `accelerate launch --multi_gpu scripts/train.py config.yaml`."
            )
        return module.module
    if isinstance(module, CheckpointWrapper):
        return module._checkpoint_wrapped_module
    if isinstance(module, PeftModel):
        return module.get_base_model()
    return None


def _refuse(module: nn.Module) -> NoReturn:
    name = type(module).__name__
    if isinstance(module, FullyShardedDataParallel):
        raise TypeError(
            "FSDP1 (FullyShardedDataParallel) is not supported, only FSDP2. "
            "`accelerate to-fsdp2 --config_file OLD.yaml --output_file NEW.yaml` converts the accelerate config."
        )
    if any(base.__name__ in _OWN_ENGINES for base in type(module).__mro__):
        raise TypeError(
            f"{name} is not supported: DeepSpeed and Megatron replace the training loop. "
            "Use an accelerate config for DDP (distributed_type: MULTI_GPU) instead."
        )
    if isinstance(module, nn.Module) and any(isinstance(part, LTXTransformer) for part in module.modules()):
        raise TypeError(
            f"{name} is a wrapper that ModelHandle does not know, around an LTXTransformer. "
            "Say yourself which is which: ModelHandle(forward_module=wrapper, meta_module=transformer)."
        )
    raise TypeError(
        f"{name} contains no LTXTransformer. Load one with ltx_trainer_plus.models.load_transformer(path) "
        "(a diffusers LTX2VideoTransformer3DModel has another forward and will not do)."
    )


@contextmanager
def _without_gradient_sync(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
