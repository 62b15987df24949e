"""LoRA: adapters inside the transformer's blocks, and weights in official file names."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from peft import LoraConfig
from torch import Tensor, nn

from ltx_trainer_plus.errors import ModelError
from ltx_trainer_plus.models.official import (
    LORA_PREFIX,
    TRANSFORMER_PREFIX,
    from_official_name,
    to_official_name,
    transformer_keys,
)
from ltx_trainer_plus.models.shards import copy_into
from ltx_trainer_plus.models.transformer import LTXTransformer

_BLOCKS = "transformer_blocks."
_ADAPTER = "default"  # peft's name for the adapter, inside parameter names


def lora_target_names(transformer: nn.Module, patterns: Sequence[str], reachable: AbstractSet[str]) -> list[str]:
    """Full names of the linears to adapt, in the model's order.

    Args:
        transformer: the transformer, also without weights (`transformer_on_meta`).
        patterns: names or endings of names, cut at a dot: `to_q`, `attn1.to_q`, `ff.net.0.proj`.
        reachable: the parameters that the loss reaches (`reachable_parameters`); others get no adapter.

    Raises:
        ModelError: a pattern that matches no linear of the blocks, or only linears that the loss does not reach.
            All such patterns are named together.
    """
    linears = [
        name
        for name, module in transformer.named_modules()
        if name.startswith(_BLOCKS) and isinstance(module, nn.Linear)
    ]
    matches = {pattern: [name for name in linears if _matches(name, pattern)] for pattern in patterns}
    unmatched = [pattern for pattern, names in matches.items() if not names]
    untrained = [
        pattern
        for pattern, names in matches.items()
        if names and not any(f"{name}.weight" in reachable for name in names)
    ]
    problems = []
    if not patterns:
        problems.append("The list is empty.")
    if unmatched:
        # Without the block number: every block has the same linears.
        known = dict.fromkeys(name.split(".", 2)[2] for name in linears)
        problems.append(
            f"{_listed(unmatched)} matches no linear layer of the transformer blocks. There are: {', '.join(known)}. "
            "Give such a name or its ending, as `to_q` or `attn1.to_q`."
        )
    if untrained:
        problems.append(
            f"{_listed(untrained)} matches only layers of a stream that this run does not train: no gradient "
            "reaches them. Leave it out, or let that stream be generated in training_strategy."
        )
    if problems:
        raise ModelError("lora.target_modules: " + "\n  ".join(problems))
    chosen = {name for names in matches.values() for name in names if f"{name}.weight" in reachable}
    return [name for name in linears if name in chosen]


def add_lora(
    transformer: LTXTransformer, *, rank: int, alpha: float, dropout: float, target_names: Sequence[str], seed: int
) -> None:
    """Add float32 adapters to `target_names` in place and freeze everything else.

    The initial values depend on `seed` and the adapter's name only: not on the device, the other adapters, the rank
    of the process, or what was drawn before; the global generator is left as it was.
    """
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # annotated int, but only ever divided by the rank
            lora_dropout=dropout,
            target_modules=list(target_names),
        )
        transformer.add_adapter(config, _ADAPTER)
    for name, parameter in transformer.named_parameters():
        if _split_adapter_name(name)[1]:
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.requires_grad_(True)
    initialise_lora(transformer, seed)


def initialise_lora(transformer: LTXTransformer, seed: int) -> None:
    """Give the adapters their initial values. `add_lora` does it, except on the meta device, where there are none."""
    for name, parameter in transformer.named_parameters():
        kind = _split_adapter_name(name)[1]
        if kind == "lora_A" and not parameter.is_meta:
            copy_into(parameter, _initial_lora_a(name, parameter.shape, seed))
        elif kind == "lora_B" and not parameter.is_meta:
            copy_into(parameter, torch.zeros(parameter.shape))


def official_lora_tensors(named: Mapping[str, Tensor], *, rank: int, alpha: float) -> dict[str, Tensor]:
    """Official LoRA file contents from adapter parameters named as in `named_parameters()`; other names are left out.

    The files carry no alpha and their readers take alpha = rank: `alpha / rank` is folded into `lora_B`.

    Raises:
        ValueError: no adapter among `named`.
    """
    tensors = {}
    for name, value in named.items():
        layer, kind = _split_adapter_name(name)
        if kind:
            scaled = value * (alpha / rank) if kind == "lora_B" else value
            tensors[f"{LORA_PREFIX}{to_official_name(layer)}.{kind}.weight"] = scaled
    if not tensors:
        raise ValueError("There is no LoRA parameter among those to be saved. Was the adapter added (add_lora)?")
    return tensors


def lora_parameters_from_official(tensors: Mapping[str, Tensor], *, rank: int, alpha: float) -> dict[str, Tensor]:
    """Adapter parameters, named as in `named_parameters()`, from an official LoRA file's contents.

    Raises:
        ModelError: a tensor that does not belong to an official LoRA file, or another rank.
    """
    named = {}
    for key, value in tensors.items():
        layer, _, kind = key.removeprefix(LORA_PREFIX).removesuffix(".weight").rpartition(".")
        if not key.startswith(LORA_PREFIX) or not key.endswith(".weight") or kind not in ("lora_A", "lora_B"):
            raise ModelError(
                f"{key} is not a name in an official LTX LoRA file ({LORA_PREFIX}<layer>.lora_A.weight). "
                "Give a LoRA that this trainer or the official one has written."
            )
        found = value.shape[0 if kind == "lora_A" else 1]
        if found != rank:
            raise ModelError(
                f"The LoRA file has rank {found} ({key}), the configuration asks for {rank}. Set lora.rank: {found}."
            )
        named[f"{from_official_name(layer)}.{kind}.{_ADAPTER}.weight"] = (
            value.float() * (rank / alpha) if kind == "lora_B" else value.float()
        )
    return named


def load_lora(transformer: LTXTransformer, tensors: Mapping[str, Tensor], *, rank: int, alpha: float) -> None:
    """Copy an official LoRA file's contents into the adapters that `add_lora` made.

    The official trainer writes adapters of streams that its run did not train; their `lora_B` is still zero. Where
    this run has no such adapter, nothing is lost by leaving it out.

    Raises:
        ModelError: an adapter that the file lacks, or a trained one of the file without an adapter; both are named.
    """
    own = {name: p for name, p in transformer.named_parameters() if _split_adapter_name(name)[1]}
    given = lora_parameters_from_official(tensors, rank=rank, alpha=alpha)
    untrained = {
        layer
        for name, value in given.items()
        for layer, kind in (_split_adapter_name(name),)
        if name not in own and kind == "lora_B" and not value.any()
    }
    kept = {name: value for name, value in given.items() if _split_adapter_name(name)[0] not in untrained}
    _copy_strictly("The LoRA file", own, kept)


def add_trained_lora(transformer: LTXTransformer, tensors: Mapping[str, Tensor], *, strength: float = 1.0) -> int:
    """Add the adapters of an official LoRA file, as readers of such files do: rank from the file, alpha = rank.

    Args:
        strength: factor on what the adapters add.

    Returns:
        The rank.

    Raises:
        ModelError: not an official LoRA file, or one of another model.
    """
    ranks = {value.shape[0] for key, value in tensors.items() if key.endswith(".lora_A.weight")}
    if len(ranks) != 1:
        found = f"adapters of ranks {sorted(ranks)}" if ranks else "no tensor named ...lora_A.weight"
        raise ModelError(f"it holds {found}. Give a LoRA that this trainer or the official one has written.")
    rank = ranks.pop()
    named = lora_parameters_from_official(tensors, rank=rank, alpha=rank)
    targets = list(dict.fromkeys(_split_adapter_name(name)[0] for name in named))
    known = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    if strange := [name for name in targets if name not in known]:
        raise ModelError(
            f"it adapts {len(strange)} layers that the model does not have, among them {strange[0]}. "
            "Use the base model that it was trained on."
        )
    add_lora(transformer, rank=rank, alpha=rank, dropout=0.0, target_names=targets, seed=0)
    scaled = {key: value * strength if ".lora_B." in key else value for key, value in tensors.items()}
    load_lora(transformer, scaled, rank=rank, alpha=rank)
    return rank


def official_full_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official single-file contents from transformer parameters named as in `named_parameters()`.

    With `{"config": json.dumps({"transformer": config_to_official(handle.config)})}` as its metadata, such a file is
    read by `load_transformer`.
    """
    return {TRANSFORMER_PREFIX + to_official_name(name): value for name, value in named.items()}


def full_parameters_from_official(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Transformer parameters, named as in `named_parameters()`, from an official single file's contents."""
    return {name: tensors[key] for name, key in transformer_keys(tensors).items()}


def load_full(transformer: LTXTransformer, tensors: Mapping[str, Tensor]) -> None:
    """Copy an official single file's contents into the transformer's parameters.

    Raises:
        ModelError: a parameter that the file lacks, or a tensor of the file without a parameter; both are named.
    """
    _copy_strictly("The weights file", dict(transformer.named_parameters()), full_parameters_from_official(tensors))


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}")


def _listed(patterns: Iterable[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns)


def _split_adapter_name(name: str) -> tuple[str, str]:
    """(layer, `lora_A` or `lora_B`) of an adapter parameter's name; ("", "") of any other parameter's."""
    layer, _, rest = name.partition(".lora_")
    kind = {f"A.{_ADAPTER}.weight": "lora_A", f"B.{_ADAPTER}.weight": "lora_B"}.get(rest, "")
    return (layer, kind) if kind else ("", "")


def _initial_lora_a(name: str, shape: torch.Size, seed: int) -> Tensor:
    """(rank, inputs) float32, uniform within ±1/sqrt(inputs): the usual initialisation of lora_A."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def _copy_strictly(what: str, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    misshapen = [name for name in own if name in given and own[name].shape != given[name].shape]
    if missing or unexpected or misshapen:
        parts = [
            f"{len(names)} {kind}, among them {', '.join(names[:3])}"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
            if names
        ]
        raise ModelError(
            f"{what} does not fit what this run trains: {'; '.join(parts)}. Use the model, the lora.target_modules and "
            "the training_strategy that the file was made with."
        )
    for name, parameter in own.items():
        copy_into(parameter, given[name])
