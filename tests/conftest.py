"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guards import mark_processes, nothing_left_behind, own_temporary_directory

pytest_plugins = ["pytester"]

# Read when torch is loaded. The models are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
mark_processes()


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # where it would be without us
    with own_temporary_directory():
        yield


@pytest.fixture(scope="module", autouse=True)
def module_leaves_nothing_behind(temporary_directory: None) -> Iterator[None]:
    """For what the module's own fixtures leave."""
    with nothing_left_behind():
        yield


@pytest.fixture(autouse=True)
def test_leaves_nothing_behind(temporary_directory: None) -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder with numbers from the official implementation."""
    return Path(__file__).parent / "reference"


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LTX-2.3-style diffusers pipeline folder with every real component."""
    from ltx_trainer_plus.models.tiny import create_tiny_pipeline

    return create_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", seed=0)
