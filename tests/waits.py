"""Counts what makes a process wait: for its device, or for other processes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# On a GPU each of these makes the host wait until the device has computed what they ask for.
SYNCING_OPERATORS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "_unique2")
SYNCING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


class Waits(TorchDispatchMode):
    """Counts what waits, while it is active: in Python and below it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._active = False
        for name in SYNCING_METHODS:
            patch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
        for name in ("barrier", "monitored_barrier", "all_gather_object", "broadcast_object_list"):
            patch.setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.seen[name] += self._active
            return real(*args, **kwargs)

        return wrapper

    def __enter__(self) -> "Waits":
        self._active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._active = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        is_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in SYNCING_OPERATORS or "barrier" in name or is_mask:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))
