"""A custom autograd.Function hides what it saves: the report must say so."""

from __future__ import annotations

from prepared import clean

from staticmem.ir.dtypes import float32
from staticmem.ir.graph import Graph, Op, Ref, SourceLine, Value


def _graph(text: str) -> Graph:
    stack = (SourceLine("model.py", 3, "forward", text),)
    ops = tuple(Op(f"r{i}", "aten::relu", (Ref("x"),), {}, (f"y{i}",), stack=stack) for i in range(2))
    return Graph("g", "pt2", "", (Value("x", float32, (4,)),), (), (), ops, ("y1",))


def test_apply_is_warned_about_once_with_a_count() -> None:
    (note,) = clean(_graph("return GeLUFunction.apply(x)")).notes
    assert (note.kind, note.code, note.count) == ("warning", "SM325", 2)
    assert "GeLUFunction.apply" in note.text


def test_inference_saves_nothing_so_there_is_no_warning() -> None:
    assert clean(_graph("return GeLUFunction.apply(x)"), training=False).notes == ()


def test_other_lines_are_not_custom_functions() -> None:
    assert clean(_graph("return self.act(x)")).notes == ()
    assert clean(_graph("return apply(x)")).notes == ()
