"""Calls that the dynamo exporter takes apart or takes out of their region, put back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prepared import restored as after
from small_graphs import Builder

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Note, Op, Ref, SourceLine, Value
from staticmem.passes.restoring.module_calls import regions_without_grad

X = Ref("x")


def without_grad(ops: list[Op], values: dict[str, Value]) -> tuple[list[Op], list[Note]]:
    graph = after(ops, (), ["regions without grad"], values=values)
    return list(graph.ops), list(graph.notes)


def chain(keepdim: bool, root: bool) -> Builder:
    b = Builder(x=(4, 8))
    value = b.call("var", X, (1,), 1.0)
    ops = [replace(b.ops[-1], target="prims::var")]
    if keepdim:
        value = b.call("broadcast_in_dim", value, (4, 1), (0,))
        ops.append(replace(b.ops[-1], target="prims::broadcast_in_dim"))
    if root:
        b.call("sqrt", value)
        ops.append(b.ops[-1])
    b.ops = ops
    return b


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("root", [True, False])
def test_a_variance_is_one_call(keepdim: bool, root: bool) -> None:
    parts = chain(keepdim, root).ops
    (op,) = after(parts, parts[-1].outputs).ops
    assert op.target == ("aten::std.correction" if root else "aten::var.correction")
    assert (op.args, op.kwargs) == ((X, (1,)), {"correction": 1.0, "keepdim": keepdim})
    assert op.outputs == parts[-1].outputs


def test_a_variance_that_is_read_besides_stays_one() -> None:
    parts = chain(False, True).ops
    found = after(parts, (*parts[0].outputs, *parts[-1].outputs)).ops
    assert [op.target for op in found] == ["aten::var.correction", "aten::sqrt"]


@pytest.mark.parametrize(
    ("line", "target"), [("d = torch.cdist(x, z)", "aten::cdist"), ("d = dist(x, z)", "aten::sqrt")]
)
def test_distances_are_one_call_where_the_line_says_so(line: str, target: str) -> None:
    b = Builder(x=(4, 30, 8), z=(4, 30, 8))
    b.stack = (SourceLine("m.py", 1, "forward", line),)

    def padded(name: str, scale: bool) -> Ref:
        norm = b.call("sum.dim_IntList", b.call("pow.Tensor_Scalar", Ref(name), 2), (-1,), True)
        ones = b.call("ones_like", norm)
        parts = (b.call("mul.Tensor", Ref(name), -2), norm, ones) if scale else (Ref(name), ones, norm)
        return b.call("cat", parts, -1)

    product = b.call("matmul", padded("x", True), b.call("transpose.int", padded("z", False), -1, -2))
    b.call("sqrt", b.call("clamp_min", product, 0))
    result = after(b.ops, b.ops[-1].outputs).ops
    assert result[-1].target == target
    assert len(result) == (1 if target == "aten::cdist" else len(b.ops))
    assert target != "aten::cdist" or result[-1].args == (X, Ref("z"))


ONE = (Ref("i"),)


def put(text: str, indices: Any = ONE, accumulate: Any = True) -> Op:
    line = SourceLine("m.py", 1, "forward", text)
    return Op("p", "aten::index_put", (X, indices, Ref("s"), accumulate), {}, ("y",), stack=(line,))


@pytest.mark.parametrize(("op", "args"), [
    (put("out = out.index_add(0, dst, msg)"), (X, 0, Ref("i"), Ref("s"))),
    (put("d = zeros.index_add_(1, i, s)", (None, Ref("i"))), (X, 1, Ref("i"), Ref("s"))),
    (put("out[i] += s"), None),
    (put("out = out.index_add(0, i, s)", accumulate=False), None),
    (put("out.index_add(0, i, s)", (Ref("i"), Ref("j"))), None),
])  # fmt: skip
def test_index_add_is_told_by_its_line(op: Op, args: tuple[Any, ...] | None) -> None:
    (found,) = after([op], ("y",)).ops
    assert (found.target, found.args) == (("aten::index_add", args) if args else (op.target, op.args))


@pytest.mark.parametrize(("maker", "restored"), [("empty_like", True), ("exp", False)])
def test_an_exponential_in_place(maker: str, restored: bool) -> None:
    """Noise of `gumbel_softmax`: of uniform numbers in a tensor of their own."""
    b = Builder(x=(4, 8))
    given = b.call(maker, X)
    uniform = b.call("rand_like", given)
    large = b.call("ge.Scalar", uniform, 0.9999999403953552)
    chosen = b.call("where.ScalarSelf", large, -5.96e-08, b.call("log", uniform))
    result = b.call("mul.Tensor", chosen, -1.0)
    ops = after(b.ops, (result.name,)).ops
    if restored:
        assert [(op.target, op.args) for op in ops[1:]] == [("aten::exponential_", (given,))]
    else:
        assert list(ops) == b.ops


def generated(text: str, target: str = "aten::relu") -> Op:
    return Op("g", target, (X,), {}, ("y",), stack=(SourceLine("<eval_with_key>.7", 9, "forward", text),))


OWN = Op("o", "aten::relu", (X,), {}, ("z",), stack=(SourceLine("m.py", 1, "forward", "z = F.relu(x)"),))
FLOAT = {"y": Value("y", dtypes.float32, (2,))}


def test_generated_code_ran_without_gradients_and_says_what_was_in_place() -> None:
    ops = [generated("relu_ = torch.ops.aten.relu_.default(x);  x = None"), OWN]
    (first, second), notes = without_grad(ops, FLOAT)
    assert (first.target, first.grad, first.stack) == ("aten::relu_", False, ())
    assert second is OWN
    assert [(note.code, note.count) for note in notes] == [("SM262", 1)]
    (first, _), _ = without_grad([generated("relu = torch.ops.aten.relu.default(x)"), OWN], FLOAT)
    assert first.target == "aten::relu"


def test_a_named_region_without_gradients_is_certain_and_its_modules_are_those_of_its_weights() -> None:
    weights = "backbone.0.conv.weight", "backbone.1.conv.weight"
    floats = {name: Value(name, dtypes.float32, (4, 4)) for name in ("x", "a", "b", "c", "y", *weights)}
    ops = []
    for target, refs, out in (("mm", ("x", weights[0]), "a"), ("relu", ("a",), "b"), ("mm", ("b", weights[1]), "c")):
        op = generated(f"{target} = torch.ops.aten.{target}.default({', '.join(refs)})", f"aten::{target}")
        ops.append(replace(op, args=tuple(map(Ref, refs)), outputs=(out,), modules=(Frame(""),)))
    last = replace(OWN, args=(Ref("c"),), modules=(Frame(""),))
    graph = Graph("g", "onnx", "test", (floats["x"],), (), (), (*ops, last), ("z",), floats)
    found, notes = regions_without_grad(graph, None)
    assert [op.grad for op in found.ops] == [False, False, False, True]
    assert notes == []
    assert [[frame.path for frame in op.modules[1:]] for op in found.ops] == [
        ["backbone.0", "backbone.0.conv"], ["backbone.0"], ["backbone.1", "backbone.1.conv"], [],
    ]  # fmt: skip


def test_half_precision_is_a_region_of_autocast() -> None:
    half = {"y": Value("y", dtypes.float16, (2,))}
    (first, _), _ = without_grad([generated("relu = torch.ops.aten.relu.default(x)"), OWN], half)
    assert first.grad


def test_inputs_without_names_are_those_of_a_region_of_autocast() -> None:
    """torch/_export/utils.py, `_name_hoo_subgraph_placeholders`, names those of set_grad_enabled alone."""
    ops = [generated("relu = torch.ops.aten.relu.default(arg2_1);  arg2_1 = None"), OWN]
    (first, _), notes = without_grad(ops, FLOAT)
    assert (first.grad, first.amp, first.stack) == (True, False, ())
    assert [(note.code, note.count) for note in notes] == [("SM263", 1)]


@pytest.mark.parametrize(("read", "grad"), [("w", True), ("x", False)])
def test_a_region_that_a_parameter_needs_for_its_gradient_is_of_autocast(read: str, grad: bool) -> None:
    """`relu(w * x)` where the region has the relu: under no_grad the multiplication would train nothing."""
    before = Op("m", "aten::mul.Tensor", (Ref(read), Ref("x")), {}, ("h",), stack=OWN.stack)
    inside = replace(generated("relu = torch.ops.aten.relu.default(mul)"), args=(Ref("h"),))
    last = Op("a", "aten::add.Tensor", (Ref("y"), Ref("x")), {}, ("z",), stack=OWN.stack)
    graph = Graph("g", "onnx", "test", (), (), (), (before, inside, last), ("z",), FLOAT)
    found, _ = regions_without_grad(graph, None)
    assert found.ops[1].grad is grad


def test_a_region_within_a_region_has_both() -> None:
    ops = [
        generated("neg = torch.ops.aten.neg.default(x)"),
        replace(generated("relu = torch.ops.aten.relu.default(arg0_1)"), name="i", outputs=("v",)),
        generated("exp = torch.ops.aten.exp.default(wrap_with_autocast)"),
        OWN,
    ]
    line = replace(ops[1].stack[0], file="<eval_with_key>.8")
    ops[1] = replace(ops[1], stack=(line,))
    found, _ = without_grad(ops, FLOAT)
    assert [(op.grad, op.amp) for op in found] == [(False, True), (False, False), (False, True), (True, True)]


def test_a_cast_to_float32_in_a_region_of_autocast_is_put_back() -> None:
    """`x.float()` returns `x` in a float32 export, and copies what autocast around the region has made half."""
    ops = [generated("relu = torch.ops.aten.relu.default(to);  to = arg2_1 = None"), OWN]
    (cast, first, _), _ = without_grad(ops, {**FLOAT, "x": Value("x", dtypes.float32, (2,))})
    assert (cast.target, cast.args, cast.amp) == ("aten::to.dtype", (X, dtypes.float32), False)
    assert first.args == (Ref(cast.outputs[0]),)


def test_a_traced_graph_has_generated_code_only() -> None:
    ops = [generated("relu = torch.ops.aten.relu.default(x)")]
    assert without_grad(ops, FLOAT) == (ops, [])
