"""Comparisons of thousands of cases with PyTorch: `pytest` runs some of them, `pytest --exhaustive` all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def sampled(cases: Sequence[T], every: int, name: Callable[[T], str]) -> list[ParameterSet]:
    """Parameters of a test, in order: the first of each `every` cases always runs, the rest has the mark `exhaustive`.

    Cases of one op stand together, so each op with as many cases keeps one.
    """
    return [
        pytest.param(case, id=name(case), marks=() if index % every == 0 else pytest.mark.exhaustive)
        for index, case in enumerate(cases)
    ]
