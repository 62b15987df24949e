"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

# Read when torch is loaded. The models are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder with numbers from the official implementation."""
    return Path(__file__).parent / "reference"


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LTX-2.3-style diffusers pipeline folder with every real component."""
    from ltx_trainer_plus.models.tiny import create_tiny_pipeline

    return create_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", seed=0)
