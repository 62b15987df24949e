"""A process that is killed in the middle of a function, played in this one."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it."""


@contextmanager
def killed_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool] = lambda *_, **__: True
) -> Iterator[None]:
    """Context that is left by a kill in a call of `owner.name` whose arguments satisfy `when`."""
    real = getattr(owner, name)

    def dies(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        with pytest.raises(Killed):
            yield


def after(calls: int) -> Callable[..., bool]:
    """For `killed_in`: every call but the first `calls`."""
    made = itertools.count()
    return lambda *_, **__: next(made) >= calls
