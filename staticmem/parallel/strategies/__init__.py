"""One file a strategy of several GPUs. See `division_of`."""

from __future__ import annotations

from importlib import import_module

from staticmem.parallel.division import Division
from staticmem.scenario.strategies import STRATEGIES


def division_of(name: str) -> Division:
    """How the strategy of this name divides a step."""
    division: Division = import_module(f"{__name__}.{STRATEGIES[name].room}").DIVISION
    return division
