"""Modules from files that are no part of a package: scripts, benchmarks, and code that tests write."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(path: Path, *, registered: bool = False) -> ModuleType:
    """The module in a file, named as the file. `registered`: `sys.modules` has it, where its dataclasses look."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
