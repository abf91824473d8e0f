"""The random convolutions of scripts/conv_sampling.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def sampling() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "conv_sampling.py"
    spec = importlib.util.spec_from_file_location("conv_sampling", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
