"""Views that an exporter wrote down again where they are used."""

from __future__ import annotations

from prepared import restored
from small_graphs import Builder

from staticmem.ir.graph import Op, Ref

X = Ref("x")
BLOCK, CONV = "b:lib.Block", "torch.nn.modules.conv.Conv2d"


def rewritten(b: Builder, *outputs: str) -> list[Op]:
    return list(restored(b.ops, outputs, ["views"]).ops)


def split(b: Builder, name: str, x: Ref, *, outputs: tuple[str, ...]) -> None:
    frames = b.modules
    b.ops.append(Op(name, "aten::split.Tensor", (x, 2, 1), {}, outputs, frames))


def two_splits() -> Builder:
    """`a, b = relu(x).split(2, 1); conv(a) + b`, as functionalization leaves it."""
    b = Builder(x=(1, 4, 2, 2))
    y = b.within(BLOCK).call("relu", X, name="y")
    b.within(BLOCK, f"b.conv:{CONV}")
    split(b, "s1", y, outputs=("a", "s1.1"))
    c = b.call("conv2d", Ref("a"), name="c")
    b.within(BLOCK)
    split(b, "s2", y, outputs=("s2.0", "b"))
    b.call("add.Tensor", c, Ref("b"), name="out")
    return b


def test_the_parts_come_from_one_split_in_the_module_that_has_the_base() -> None:
    ops = rewritten(two_splits(), "out")
    assert [op.base for op in ops] == ["aten::relu", "aten::split", "aten::conv2d", "aten::add"]
    assert ops[1].outputs == ("a", "b")
    assert [frame.path for frame in ops[1].modules] == ["", "b"]
    assert ops[3].refs() == ("c", "b")


def test_a_view_within_a_module_of_one_op_is_its_callers() -> None:
    b = Builder(x=(1, 4, 2, 2))
    y = b.within(BLOCK, "b.act:lib.Act").call("relu", X, name="y")
    part = b.within(BLOCK, "b.layer:lib.Layer", f"b.layer.conv:{CONV}").call("slice.Tensor", y, 1, 0, 2, name="part")
    b.call("conv2d", part, name="out")
    assert [frame.path for frame in rewritten(b, "out")[1].modules] == ["", "b"]


def test_equal_views_of_other_modules_stay() -> None:
    b = Builder(x=(1, 4, 2, 2))
    first = b.within("a:lib.A").call("slice.Tensor", X, 1, 0, 2, name="first")
    second = b.within("b:lib.B").call("slice.Tensor", X, 1, 0, 2, name="second")
    b.within().call("add.Tensor", first, second, name="out")
    assert rewritten(b, "out") == b.ops


def test_a_result_of_the_model_keeps_its_name() -> None:
    b = two_splits()
    ops = rewritten(b, "out", "s1.1")
    assert ops[1].outputs == ("a", "s1.1")
    assert ops[3].refs() == ("c", "s1.1")
