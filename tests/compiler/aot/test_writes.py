"""Writes to tensors that have views, against AOTAutograd's functionalization."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from typing import Any

import pytest
from observe import Case, Program, Spec, f, i

marks: list[pytest.MarkDecorator] = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("torch") is not None:
    import joint_case
pytestmark = marks


def program(name: str, run: Program, *inputs: Spec) -> Case:
    return Case(name, run, inputs, ("aten::add_.Tensor",))


def _base(op: Any, x: Any) -> Any:
    return op("aten::mul.Tensor", x, 2.0)


def _view_read_after(op: Any, x: Any, y: Any) -> Any:
    base = _base(op, x)
    view = op("aten::slice.Tensor", base, 1, 0, 2)
    op("aten::add_.Tensor", base, y)
    return op("aten::exp", view)


def _one_view_written_another_read(op: Any, x: Any, y: Any) -> Any:
    base = _base(op, x)
    row, rows = op("aten::select.int", base, 0, 1), op("aten::slice.Tensor", base, 0, 0, 2)
    op("aten::add_.Tensor", row, y)
    return [op("aten::exp", rows), op("aten::sin", base)]


def _twice(op: Any, x: Any, y: Any) -> Any:
    base = _base(op, x)
    view = op("aten::slice.Tensor", base, 1, 0, 3)
    op("aten::add_.Tensor", view, y)
    op("aten::add_.Tensor", base, 1.0)
    op("aten::add_.Tensor", view, y)
    return op("aten::exp", base)


def _chunk(op: Any, x: Any, y: Any) -> Any:
    base = _base(op, x)
    first, second = op("aten::chunk", base, 2, 1)
    op("aten::add_.Tensor", second, y)
    return [op("aten::exp", base), op("aten::exp", first)]


def _reshaped(op: Any, x: Any, y: Any) -> Any:
    base = _base(op, x)
    op("aten::add_.Tensor", op("aten::view", op("aten::unsqueeze", base, 0), (2, 12)), y)
    return op("aten::exp", base)


def _places(op: Any, x: Any, index: Any, y: Any) -> Any:
    base = _base(op, x)
    op("aten::index_put_", op("aten::slice.Tensor", base, 0, 0, 3), (index,), y)
    return op("aten::exp", base)


def _number(op: Any, x: Any) -> Any:
    base = _base(op, x)
    op("aten::fill_.Scalar", op("aten::slice.Tensor", base, 0, 1, 3), 3.0)
    op("aten::zero_", op("aten::select.int", base, 1, 0))
    return op("aten::exp", base)


def _into_an_input(op: Any, cache: Any, y: Any) -> Any:
    op("aten::copy_", op("aten::slice.Tensor", cache, 1, 2, 4), op("aten::exp", y))
    return op("aten::mul.Tensor", cache, 2.0)


CASES = [
    program("a view that is read after a write to its base", _view_read_after, f(4, 6), f(4, 6)),
    program("a view that is read after a write to another", _one_view_written_another_read, f(4, 6), f(6)),
    program("three writes", _twice, f(4, 6), f(4, 3)),
    program("a part of a chunk", _chunk, f(4, 6).fixed, f(4, 3).fixed),
    program("views of other sizes", _reshaped, f(4, 6), f(2, 12)),
    program("places in a slice", _places, f(4, 6), i(2), f(2, 6)),
    program("numbers", _number, f(4, 6)),
    program("a cache", _into_an_input, f(4, 6).fixed, f(4, 2).fixed),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """PyTorch logs its graphs for tools that nobody has asked for."""
    logging.getLogger("torch.__trace").setLevel(logging.ERROR)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_nodes_are_those_of_functionalization(case: Case) -> None:
    for pattern in case.patterns():
        nodes, outputs, made, counts = joint_case.real(case, pattern)
        expected = joint_case.text(nodes, outputs)
        found = joint_case.text(*joint_case.ours(made, counts))
        difference = "\n".join(difflib.unified_diff(expected, found, "PyTorch", "ours", n=99, lineterm=""))
        assert not difference, f"with gradients for {pattern}:\n{difference}"
