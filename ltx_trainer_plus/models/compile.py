"""Compiling the transformer's blocks in place."""

from collections.abc import Callable
from typing import Any

import torch._dynamo

from ltx_trainer_plus.models.transformer import LTXTransformer

_RECOMPILE_LIMIT = 64


def compile_blocks(
    transformer: LTXTransformer,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = True,
) -> None:
    """Compile every block in place: no wrapper, no new names; the arguments are those of `torch.compile`.

    Before FSDP2 or DDP, after LoRA and gradient checkpointing. The blocks share their graphs where they are alike.
    """
    # All blocks share one code object, hence one budget of graphs: guidance, sequence lengths and validation's
    # no-grad forwards each need their own, and running out of the budget is an error under fullgraph.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * _RECOMPILE_LIMIT)
    blocks: Any = transformer.transformer_blocks
    for block in blocks:
        block.compile(backend=backend, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
