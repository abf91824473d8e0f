"""Comparisons of thousands of cases with PyTorch: `pytest` runs some of them, `pytest --exhaustive` all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def sampled(cases: Iterable[object], every: int) -> list[ParameterSet]:
    """Arguments for `parametrize`, in order: the first of each `every` cases always runs, the others have the mark
    `exhaustive`. Cases of one kind stand together, so each kind with as many cases keeps one. A tuple has the values of
    several parameters, `pytest.param` an id too."""
    return [_parameters(case, pytest.mark.exhaustive if index % every else ()) for index, case in enumerate(cases)]


def _parameters(case: object, marks: pytest.MarkDecorator | tuple[()]) -> ParameterSet:
    if isinstance(case, ParameterSet):
        own = (*case.marks, marks) if marks else case.marks
        return pytest.param(*case.values, marks=own, id=case.id)
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=marks)
