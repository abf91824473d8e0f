"""What all tests share: `@pytest.mark.torch` marks those that compare with PyTorch, and skips them where it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from loading import load_module

from staticmem.version import REFERENCE_TORCH

# The same examples every time: a failure is of the change. `--hypothesis-profile=search` looks for new ones.
# No deadline: the first example imports what the others have, on machines that do other things too.
# How long examples take to draw is the machine's affair.
_SLOW = [HealthCheck.too_slow]
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("search", deadline=None, suppress_health_check=_SLOW)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overwrite-golden", action="store_true", help="write the golden files of tests/report again")
    parser.addoption("--exhaustive", action="store_true", help="run also what is marked `exhaustive`, as .ci/run does")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.getoption("--overwrite-golden"):
        config.option.numprocesses = 0  # several tests write one page


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"torch: needs PyTorch (torch=={REFERENCE_TORCH})")
    config.addinivalue_line("markers", "exhaustive: one of very many alike cases; runs with --exhaustive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)  # a test that is named runs
    if not config.getoption("--exhaustive") and not named:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    if importlib.util.find_spec("torch") is not None:
        return
    for item in items:
        if item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason=f"PyTorch is not installed: pip install torch=={REFERENCE_TORCH}"))


@pytest.fixture(scope="session")
def sampling() -> ModuleType:
    """The random convolutions of scripts/convolutions/conv_sampling.py."""
    return load_module(Path(__file__).parents[1] / "scripts" / "convolutions" / "conv_sampling.py")
