"""Dtypes that code takes from tensors, under autocast."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import Builder

from staticmem.ir.dtypes import bfloat16, float32, int64
from staticmem.ir.graph import Frame, Graph, Ref, SourceLine
from staticmem.passes.open_dtypes import with_dtype_of_autocast


def graph(op: str, *args: object, line: str = "", cls: str = "net.Net") -> Graph:
    b = Builder(x=(4, 4))
    made: Graph = b.graph(b.call(op, *args, name="out"))
    stack = (SourceLine("net.py", 3, "forward", line),) if line else ()
    return replace(made, ops=tuple(replace(op, stack=stack, modules=(Frame("", cls),)) for op in made.ops))


@pytest.mark.parametrize("line", ["", "y = F.one_hot(i).to(z.dtype)", "y = y.type_as(z)", "dtype=z.dtype,"])
def test_a_cast_that_may_be_to_the_dtype_of_a_tensor(line: str) -> None:
    half = with_dtype_of_autocast(graph("to.dtype", Ref("x"), float32, line=line), bfloat16)
    assert half is not None
    assert half.ops[0].args == (Ref("x"), bfloat16)


@pytest.mark.parametrize("line", ["y = self.aggregate(y, z)", "y = aggregate(y, z)"])
def test_a_cast_in_a_function_that_no_trace_shows(line: str) -> None:
    half = with_dtype_of_autocast(graph("to.dtype", Ref("x"), float32, line=line), bfloat16)
    assert half is not None
    assert half.ops[0].args == (Ref("x"), bfloat16)


@pytest.mark.parametrize("line", ["y = y.float()", "y = y.to(torch.float32)", "y = torch.randn(3)"])
def test_a_dtype_that_the_line_names(line: str) -> None:
    assert with_dtype_of_autocast(graph("to.dtype", Ref("x"), float32, line=line), bfloat16) is None


def test_new_tensors_without_a_line() -> None:
    half = with_dtype_of_autocast(graph("randn", (4, 4)), bfloat16)
    assert half is not None
    assert half.ops[0].kwargs == {"dtype": bfloat16}
    assert with_dtype_of_autocast(graph("full", (4, 4), 1), bfloat16) is None  # of integers
    assert with_dtype_of_autocast(graph("to.dtype", Ref("x"), int64), bfloat16) is None


def test_published_code_is_as_it_was_compared() -> None:
    published = graph("to.dtype", Ref("x"), float32, cls="transformers.models.t5.T5")
    assert with_dtype_of_autocast(published, bfloat16) is None
