"""The IR's own answers: references, sizes, dependencies; and stack traces as frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staticmem.ir import dtypes
from staticmem.ir.graph import Op, Ref, SourceLine, Value
from staticmem.ir.stacks import MAX_TRACE, source_lines


def test_references_in_order_with_repetitions() -> None:
    op = Op("o", "aten::x.y", (Ref("a"), 1, (Ref("b"), (Ref("a"), None))), {"k": Ref("c")}, ("r",))
    assert op.refs() == ("a", "b", "a", "c")
    assert op.refs() is op.refs()
    assert op.base == "aten::x"
    assert Op("o", "aten::x", (), {}, ()).refs() == ()


def test_elements() -> None:
    assert Value("v", dtypes.float32, (2, 3, 4)).numel == 24
    assert Value("v", dtypes.float32, ()).numel == 1
    assert Value("v", dtypes.float32, (2, 0)).numel == 0


TRACE = """  File "/m/net.py", line 12, in forward
    x = self.a(x)
  File "/m/a.py", line 3, in forward
    return F.relu(x)
"""


def test_frames_of_a_traceback() -> None:
    assert source_lines(TRACE) == (
        SourceLine("/m/net.py", 12, "forward", "x = self.a(x)"),
        SourceLine("/m/a.py", 3, "forward", "return F.relu(x)"),
    )


def test_frames_without_their_source() -> None:
    text = '  File "a.py", line 1, in f\n  File "b.py", line 2, in <lambda>\n    g()\n  File "c.py", line 3, in h'
    assert [(f.file, f.text) for f in source_lines(text)] == [("a.py", ""), ("b.py", "g()"), ("c.py", "")]


def test_what_is_no_traceback() -> None:
    assert source_lines("") == ()
    assert source_lines("x" * 100) == ()
    assert source_lines(TRACE * (MAX_TRACE // len(TRACE) + 1)) == ()


@given(st.text())
def test_any_text(text: str) -> None:
    for frame in source_lines(text):
        assert frame.line >= 0
