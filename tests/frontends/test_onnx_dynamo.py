"""Dynamo exports: the ATen calls that their metadata holds, with functionalisation and decomposition undone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from onnx_models import bound, fx, ints, model, node, scalar, targets, value, weight
from prepared import in_place

import staticmem
from staticmem.errors import StaticmemError
from staticmem.frontends.onnx import open_onnx
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Ref
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind

RELU = ("torchvision.models.resnet.ResNet", "torch.nn.modules.activation.ReLU", "aten.relu.default")


def call(name: str, target: str, args: str, kwargs: str = "{}") -> str:
    return f"%{name} : [num_users=1] = call_function[target=torch.ops.{target}](args = {args}, kwargs = {kwargs})"


def signature(proto: Any, *lines: str) -> Any:
    """The graph signature that the exporter stores."""
    entry = proto.graph.metadata_props.add()
    entry.key = "pkg.torch.export.ExportedProgram.graph_signature"
    entry.value = "\n# inputs\n" + "\n".join(lines) + "\nx: USER_INPUT\n\n# outputs\n"
    return proto


CONV = call("conv2d", "aten.conv2d.default", "(%x, %p_c_weight, None, [1, 1], [1, 1])")
NORM = call(
    "_native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit_functional.default",
    "(%conv2d, %p_b_weight, %p_b_bias, %b_b_running_mean, %b_b_running_var, True, 0.1, 1e-05)",
)
SIGNATURE = (
    "p_c_weight: PARAMETER target='c.weight'",
    "p_b_weight: PARAMETER target='b.weight'",
    "p_b_bias: PARAMETER target='b.bias'",
    "b_b_running_mean: BUFFER target='b.running_mean' persistent=True",
    "b_b_running_var: BUFFER target='b.running_var' persistent=True",
    "b_b_num_batches_tracked: BUFFER target='b.num_batches_tracked' persistent=True",
)


def scopes(path: str, cls: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("", path, "op"), ("torchvision.models.resnet.ResNet", f"torch.nn.modules.{cls}", "op")


def conv_norm_relu() -> Any:
    stats = ["b.weight", "b.bias", "b.running_mean", "b.running_var"]
    nodes = [
        fx(node("Conv", ["x", "c.weight"], ["conv2d"], pads=[1] * 4), CONV, *scopes("c", "conv.Conv2d")),
        fx(node("BatchNormalization", ["conv2d", *stats], ["getitem"]), NORM, *scopes("b", "batchnorm.BatchNorm2d")),
        fx(node("Relu", ["getitem"], ["relu"]), call("relu", "aten.relu.default", "(%getitem,)"),
           *scopes("r", "activation.ReLU")),
    ]  # fmt: skip
    tensors = [weight("c.weight", 4, 3, 3, 3), *(weight(s, 4) for s in stats)]
    return signature(model(nodes, [value("x", ["s77", 3, 8, 8])], ["relu"], tensors), *SIGNATURE)


def folded() -> Any:
    """What onnxscript's optimizer makes of it."""
    nodes = [
        fx(node("Conv", ["x", "c.weight", "c.weight_bias"], ["getitem"], pads=[1] * 4, kernel_shape=[3, 3]), NORM,
           *scopes("b", "batchnorm.BatchNorm2d")),
        fx(node("Relu", ["getitem"], ["relu"]), call("relu", "aten.relu.default", "(%getitem,)"),
           *scopes("r", "activation.ReLU")),
    ]  # fmt: skip
    tensors = [weight("c.weight", 4, 3, 3, 3), weight("c.weight_bias", 4)]
    return signature(model(nodes, [value("x", ["s77", 3, 8, 8])], ["relu"], tensors), *SIGNATURE)


@pytest.mark.parametrize("make", [conv_norm_relu, folded])
def test_convolution_norm_relu(tmp_path: Path, make: Any) -> None:
    graph = bound(make(), tmp_path, batch=2)
    assert targets(graph) == ["aten::conv2d", "aten::batch_norm", "aten::relu"]
    conv, norm, relu = graph.ops
    assert conv.args[:5] == (Ref("x"), Ref("c.weight"), None, (1, 1), (1, 1))
    assert norm.args == (
        Ref(conv.outputs[0]), Ref("b.weight"), Ref("b.bias"), Ref("b.running_mean"), Ref("b.running_var"),
        True, 0.1, 1e-05, True,
    )  # fmt: skip
    assert relu.args == (Ref("getitem"),)
    assert [op.modules[-1].path for op in graph.ops] == ["c", "b", "r"]
    assert conv.modules[-1] == Frame("c", "torch.nn.modules.conv.Conv2d")
    assert sorted(p.fqn for p in graph.parameters) == ["b.bias", "b.weight", "c.weight"]
    assert sorted(p.fqn for p in graph.buffers) == ["b.num_batches_tracked", "b.running_mean", "b.running_var"]
    assert ("SM260" in [n.code for n in graph.notes]) == (make is folded)


def two_convolutions() -> Any:
    """`conv_norm_relu` with a convolution behind it."""
    proto = conv_norm_relu()
    text = call("conv2d_1", "aten.conv2d.default", "(%relu, %p_d_weight, None, [1, 1], [1, 1])")
    proto.graph.node.append(
        fx(node("Conv", ["relu", "d.weight"], ["out"], pads=[1] * 4), text, *scopes("d", "conv.Conv2d"))
    )
    proto.graph.initializer.append(weight("d.weight", 4, 4, 3, 3))
    proto.graph.output[0].name = "out"
    return proto


@pytest.mark.parametrize(
    ("make", "policy", "target"),
    [
        (conv_norm_relu, "auto", "aten::relu"),  # a guess is made for networks of several convolutions
        (two_convolutions, "auto", "aten::relu_"),
        (two_convolutions, "none", "aten::relu"),
        (two_convolutions, "all", "aten::relu_"),
    ],
)
def test_in_place_policies(tmp_path: Path, make: Any, policy: str, target: str) -> None:
    graph = in_place(bound(make(), tmp_path, batch=2), policy)
    assert graph.ops[2].target == target
    assert ("SM254" in [n.code for n in graph.notes]) == target.endswith("_")


def test_in_place_never_writes_what_others_read(tmp_path: Path) -> None:
    nodes = [
        fx(node("Relu", ["x"], ["relu"]), call("relu", "aten.relu.default", "(%x,)"), ("", "r", "o"), RELU),
        fx(node("Relu", ["relu"], ["relu_1"]), call("relu_1", "aten.relu.default", "(%relu,)"), ("", "r", "o"), RELU),
        fx(node("Add", ["relu", "relu_1"], ["add"]), call("add", "aten.add.Tensor", "(%relu, %relu_1)")),
    ]
    graph = in_place(bound(model(nodes, [value("x", [2, 3])], ["add"]), tmp_path), "all")
    assert targets(graph) == ["aten::relu", "aten::relu", "aten::add.Tensor"]


def graph_of(tmp_path: Path, nodes: list[Any], tensors: list[Any] | None = None, **kwargs: Any) -> Graph:
    proto = model(nodes, [value("x", ["s77", 4, 6])], [nodes[-1].output[0]], tensors or [])
    return bound(proto, tmp_path, batch=2, **kwargs)


def test_symbolic_integers_are_evaluated(tmp_path: Path) -> None:
    nodes = [
        fx(node("Shape", ["x"], ["v0"], start=0, end=1), call("sym", "aten.sym_size.int", "(%x, 0)")),
        fx(node("Squeeze", ["v0"], ["sym"]), call("sym", "aten.sym_size.int", "(%x, 0)")),
        fx(
            node("Mul", ["sym", "four"], ["mul"]),
            call("mul", "x", "").replace("torch.ops.x](args = ", "operator.mul](args = (%sym, 4)"),
        ),
        fx(node("Reshape", ["x", "shape"], ["view"]), call("view", "aten.view.default", "(%x, [%mul, 6])")),
    ]
    graph = graph_of(tmp_path, nodes, [scalar("four", 4), ints("shape", -1, 6)])
    assert [(op.target, op.args) for op in graph.ops] == [("aten::view", (Ref("x"), (8, 6)))]


def test_split_results_and_what_reads_them(tmp_path: Path) -> None:
    def item(i: int) -> Any:
        text = call(f"getitem_{i}", "x", "").replace("torch.ops.x](args = ", f"operator.getitem](args = (%split, {i})")
        return fx(node("SequenceAt", ["split", f"i{i}"], [f"getitem_{i}"]), text)

    nodes = [
        fx(node("SplitToSequence", ["x", "two"], ["split"], axis=1), call("split", "aten.split.Tensor", "(%x, 2, 1)")),
        item(0),
        item(1),
        fx(
            node("Mul", ["getitem_0", "getitem_1"], ["mul"]), call("mul", "aten.mul.Tensor", "(%getitem_0, %getitem_1)")
        ),
    ]
    graph = graph_of(tmp_path, nodes, [scalar("two", 2), scalar("i0", 0), scalar("i1", 1)])
    assert targets(graph) == ["aten::split.Tensor", "aten::mul.Tensor"]
    assert graph.ops[0].outputs == ("getitem_0", "getitem_1")
    assert graph.values["mul"].shape == (2, 2, 6)


def test_contiguous_reshape_dropout_and_casts(tmp_path: Path) -> None:
    clone = "{memory_format: torch.contiguous_format}"
    nodes = [
        fx(node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), call("t", "aten.transpose.int", "(%x, 1, 2)")),
        fx(node("Identity", ["t"], ["c"]), call("c", "aten.clone.default", "(%t,)", clone)),
        fx(node("Reshape", ["c", "flat"], ["u"]), call("u", "aten._unsafe_view.default", "(%c, [2, 24])")),
        fx(node("Identity", ["t"], ["c2"]), call("c2", "aten.clone.default", "(%t,)", clone)),
        fx(node("Identity", ["c2"], ["d0"]), call("d0", "aten.clone.default", "(%c2,)")),
        fx(
            node("Dropout", ["d0", "p", "yes"], ["getitem", "mask"]),
            call("nd", "aten.native_dropout.default", "(%d0, 0.1, True)"),
        ),
        fx(
            node("Cast", ["getitem"], ["h"], to=10),
            call("h", "aten._to_copy.default", "(%getitem,)", "{dtype: torch.float16}"),
        ),
        fx(node("Reshape", ["h", "flat"], ["v"]), call("v", "aten.view.default", "(%h, [2, 24])")),
        fx(node("CastLike", ["u", "v"], ["w"]), call("w", "prims.convert_element_type.default", "(%u, torch.float16)")),
        fx(node("Add", ["w", "v"], ["y"]), call("y", "aten.add.Tensor", "(%w, %v)")),
    ]
    graph = graph_of(tmp_path, nodes, [ints("flat", 2, 24), scalar("p", 0.1), scalar("yes", True)])
    assert targets(graph) == [
        "aten::transpose.int", "aten::reshape", "aten::contiguous", "aten::dropout", "aten::dropout", "aten::to.dtype",
        "aten::view", "aten::to.dtype", "aten::add.Tensor",
    ]  # fmt: skip
    assert graph.ops[1].args == (Ref("t"), (2, 24))
    assert [op.args[1] for op in graph.ops if op.target == "aten::dropout"] == [0.0, 0.1]
    assert graph.ops[5].args[1] is dtypes.float16


def test_writes_into_views(tmp_path: Path) -> None:
    """x = new_zeros; x[0:1, 2:] = 3."""
    nodes = [
        fx(node("ConstantOfShape", ["size"], ["z"]), call("z", "aten.new_zeros.default", "(%x, [4, 6])")),
        fx(node("Slice", ["z", "n0", "n1", "n0"], ["s0"]), call("s0", "aten.slice.Tensor", "(%z, 0, 0, 1)")),
        fx(
            node("Slice", ["s0", "n2", "n9", "n1"], ["s1"]),
            call("s1", "aten.slice.Tensor", "(%s0, 1, 2, 9223372036854775807)"),
        ),
        fx(node("Expand", ["three", "sub"], ["f"]), call("f", "aten.fill.Scalar", "(%s1, 3.0)")),
        fx(node("Slice", ["z", "n0", "n1", "n0"], ["s2"]), call("s2", "aten.slice.Tensor", "(%z, 0, 0, 1)")),
        fx(
            node("ScatterND", ["s2", "i", "f"], ["w0"]),
            call("w0", "aten.slice_scatter.default", "(%s2, %f, 1, 2, 9223372036854775807)"),
        ),
        fx(node("ScatterND", ["z", "j", "w0"], ["w1"]), call("w1", "aten.slice_scatter.default", "(%z, %w0, 0, 0, 1)")),
        fx(node("Add", ["x", "w1"], ["y"]), call("y", "aten.add.Tensor", "(%x, %w1)")),
    ]
    tensors = [ints("size", 4, 6), *(ints(f"n{i}", i) for i in (0, 1, 2)), ints("n9", 2**62), scalar("three", 3.0),
               ints("sub", 1, 4), weight("i", 1, 4, 2, dtype=7), weight("j", 1, 6, 1, dtype=7)]  # fmt: skip
    graph = graph_of(tmp_path, nodes, tensors)
    assert targets(graph) == [
        "aten::new_zeros",
        "aten::slice.Tensor",
        "aten::slice.Tensor",
        "aten::fill_.Scalar",
        "aten::add.Tensor",
    ]
    assert graph.ops[-1].args == (Ref("x"), Ref("z"))


def test_a_group_with_a_broken_text_is_translated(tmp_path: Path) -> None:
    nodes = [
        fx(node("Relu", ["x"], ["a"]), "%a : = nonsense"),
        fx(node("Add", ["a", "x"], ["b"]), call("b", "aten.add.Tensor", "(%gone, %lost)")),
        fx(node("Exp", ["b"], ["y"]), call("y", "aten.exp.default", "(%b,)")),
    ]
    graph = graph_of(tmp_path, nodes)
    assert targets(graph) == ["aten::relu", "aten::add.Tensor", "aten::exp"]
    assert [(n.code, n.count) for n in graph.notes] == [("SM251", 1), ("SM271", 2)]


def test_several_merged_arguments_are_in_the_order_of_the_node(tmp_path: Path) -> None:
    """Eager runs `mv` a second time, with a gradient: an optimiser has taken both for one."""
    nodes = [
        fx(node("MatMul", ["w", "x"], ["mv"]), call("mv", "aten.mv.default", "(%w, %x)")),
        fx(node("Relu", ["mv"], ["relu"]), call("relu", "aten.relu.default", "(%mv,)")),
        fx(node("MatMul", ["relu", "mv"], ["dot"]), call("dot", "aten.dot.default", "(%clone_1, %mv_1)")),
        fx(node("Exp", ["dot"], ["y"]), call("y", "aten.exp.default", "(%dot,)")),
    ]
    proto = model(nodes, [value("w", (4, 8)), value("x", (8,))], ["y"])
    graph = bound(proto, tmp_path)
    assert targets(graph) == ["aten::mv", "aten::relu", "aten::mv", "aten::dot", "aten::exp"]
    assert graph.ops[3].args == (Ref("relu"), Ref("mv_1"))


def lined(proto: Any, text: str) -> Any:
    """A node whose stack trace ends in this line."""
    entry = proto.metadata_props.add()
    entry.key, entry.value = "pkg.torch.onnx.stack_trace", f'File "m.py", line 3, in forward\n    {text}'
    return proto


@pytest.mark.parametrize(("text", "assigned"), [("z[:, 0] = a", True), ("z = z.select_scatter(a, 1, 0)", False)])
def test_an_assignment_whose_copy_an_optimiser_left_out(tmp_path: Path, text: str, assigned: bool) -> None:
    """Of `z[:, 0] = a` a select, a copy and a scatter are traced; nothing reads the first two."""
    scatter = call("w", "aten.select_scatter.default", "(%z, %copy, 1, 0)")
    nodes = [
        fx(node("Exp", ["x"], ["z"]), call("z", "aten.exp.default", "(%x,)")),
        fx(node("ReduceMax", ["x", "axis"], ["a"], keepdims=0), call("a", "aten.amax.default", "(%x, [1])")),
        lined(fx(node("Unsqueeze", ["a", "axis"], ["u"]), scatter), text),
        lined(fx(node("ScatterElements", ["z", "at", "u"], ["w"], axis=1), scatter), text),
        fx(node("Relu", ["w"], ["y"]), call("y", "aten.relu.default", "(%w,)")),
    ]
    tensors = [ints("axis", 1), weight("at", 2, 1, 6, dtype=TensorProto.INT64)]
    graph = graph_of(tmp_path, nodes, tensors)
    if not assigned:
        assert targets(graph) == ["aten::exp", "aten::amax", "aten::select_scatter", "aten::relu"]
        return
    assert targets(graph) == ["aten::exp", "aten::amax", "aten::select.int", "aten::copy_", "aten::relu"]
    part = graph.ops[2]
    assert (part.args, graph.ops[3].args) == ((Ref("z"), 1, 0), (Ref(part.outputs[0]), Ref("a")))
    assert graph.ops[4].args == (Ref("z"),)


def test_a_batch_norm_that_is_called_twice(tmp_path: Path) -> None:
    """The second call reads the statistics that the first one wrote, which eager writes in place."""
    names = ("weight", "bias", "running_mean", "running_var")
    nodes = []
    for turn, (mean, var) in enumerate([("%b_mean", "%b_var"), ("%g3", "%g4")]):
        source, norm = ("x", "y")[turn], f"n{turn}"
        text = call(norm, "aten._native_batch_norm_legit_functional.default",
                    f"(%{source}, %p_weight, %p_bias, {mean}, {var}, True, 0.1, 1e-05)")  # fmt: skip
        result = ("y", "z")[turn]
        nodes.append(fx(node("BatchNormalization", [source, *names], [result]), text))
        for k, name in ((3, "running_mean"), (4, "running_var")):
            nodes.append(fx(node("Identity", [name], [f"g{k}" if not turn else f"h{k}"]), text))
    nodes.append(fx(node("Relu", ["z"], ["r"]), call("r", "aten.relu.default", "(%z,)")))
    proto = model(nodes, [value("x", [2, 4, 6])], ["r"], [weight(n, 4) for n in names])
    lines = ("p_weight: PARAMETER target='weight'", "p_bias: PARAMETER target='bias'")
    signature(proto, *lines, "b_mean: BUFFER target='running_mean' persistent=True",
              "b_var: BUFFER target='running_var' persistent=True")  # fmt: skip
    graph = bound(proto, tmp_path)
    assert targets(graph) == ["aten::batch_norm", "aten::batch_norm", "aten::relu"]
    assert [op.args[0] for op in graph.ops] == [Ref("x"), Ref("y"), Ref("z")]
    assert graph.ops[0].args[1:] == graph.ops[1].args[1:]
    assert not [n for n in graph.notes if n.code == "SM251"]


def test_one_argument_under_another_name_is_told_by_what_the_node_reads(tmp_path: Path) -> None:
    """An optimiser merges equal nodes, and texts name the one that is gone."""
    nodes = [
        fx(node("Relu", ["x"], ["a"]), call("a", "aten.relu.default", "(%x,)")),
        fx(node("Tanh", ["a"], ["b"]), call("b", "aten.tanh.default", "(%relu_1,)")),
        fx(node("Mul", ["b", "a"], ["y"]), call("y", "aten.mul.Tensor", "(%b, %relu_2)")),
    ]
    graph = graph_of(tmp_path, nodes)
    assert [op.args for op in graph.ops] == [(Ref("x"),), (Ref("a"),), (Ref("b"), Ref("a"))]
    assert [(n.kind, n.code, n.count) for n in graph.notes] == [("warning", "SM271", 2)]


def test_repeated_calls_of_a_module_are_numbered(tmp_path: Path) -> None:
    def relu(source: str, out: str) -> Any:
        return fx(node("Relu", [source], [out]), call(out, "aten.relu.default", f"(%{source},)"), ("", "r", "o"), RELU)

    root = (("", "o"), ("torchvision.models.resnet.ResNet", "o"))
    nodes = [
        relu("x", "a"),
        fx(node("Tanh", ["a"], ["b"]), call("b", "aten.tanh.default", "(%a,)"), *root),
        relu("b", "c"),
    ]
    assert [op.modules[-1].call for op in graph_of(tmp_path, nodes).ops] == [0, 0, 1]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_models_end_in_a_message(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(conv_norm_relu().SerializeToString())
    for position, byte in changes:
        data[position % len(data)] = byte
    path = tmp_path / "damaged.onnx"
    path.write_bytes(data)
    with contextlib.suppress(StaticmemError):
        opened = open_onnx(str(path))
        bind(opened, resolve(opened, batch=2, dims={s: 4 for s in opened.symbols if s != "s77"}))


def test_numbers_that_data_give_are_views_for_what_reads_them(tmp_path: Path) -> None:
    """`x if rate.item() == 16000 else ...`: the number is Reshape and Gather in the file, and Equal reads it."""
    item = call("_local_scalar_dense", "aten._local_scalar_dense.default", "(%rate,)")
    equal = "%eq : [num_users=1] = call_function[target=operator.eq](args = (%_local_scalar_dense, 16000), kwargs = {})"
    nodes = [
        fx(node("Reshape", ["rate", "one"], ["flat"]), item),
        fx(node("Gather", ["flat", "first"], ["number"], axis=0), item),
        fx(node("Equal", ["number", "limit"], ["same"]), equal),
        fx(node("Relu", ["x"], ["y"]), call("relu", "aten.relu.default", "(%x,)")),
    ]
    tensors = [ints("one", -1), scalar("first", 0), scalar("limit", 16000)]
    given = [value("x", [2, 3]), value("rate", [], TensorProto.INT64)]
    bound(model(nodes, given, ["y", "same"], tensors), tmp_path)
    report = staticmem.analyze(str(tmp_path / "model.onnx"))
    assert not report.coverage.unknown
