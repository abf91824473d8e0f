"""What source lines say of ops in place, and the ends of what they leave open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared import in_place
from small_graphs import Builder

from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Op, Ref, SourceLine, Value
from staticmem.passes.restoring.inplace import written

MODULE = "return F.relu(input, inplace=self.inplace)"


def op(base: str, *lines: str) -> Op:
    stack = tuple(SourceLine("m.py", number, "forward", line) for number, line in enumerate(lines, 1))
    return Op("op", f"aten::{base}", (), {}, ("y",), stack=stack)


@pytest.mark.parametrize(("base", "lines", "said"), [
    ("relu", ("out = F.relu(self.bn1(self.conv1(x)))",), False),
    ("relu", ("x = torch.relu(x)",), False),
    ("relu", ("x = F.relu(x, inplace=True)",), True),
    ("relu", ("x = F.relu(x, True)",), True),
    ("relu", ("y = self.c1(x).relu_()",), True),
    ("relu", ("x = F.relu_(x)",), True),
    ("relu", ("return F.relu(F.max_pool2d(x, 2, ceil_mode=True))",), False),
    ("relu", ("x = self.relu(x)", MODULE), None),
    ("relu", ("x = nn.ReLU(True)(x)", MODULE), True),
    ("leaky_relu", ("return F.leaky_relu(input, self.negative_slope, self.inplace)",), None),
    ("masked_fill", ("h.masked_fill_(mask, 0.0)",), True),
    ("leaky_relu", ("m = nn.LeakyReLU(0.1)(self.conv1(m))", MODULE.replace("relu", "leaky_relu")), False),
    ("leaky_relu", ("m = nn.LeakyReLU(0.1, inplace=True)(m)", MODULE.replace("relu", "leaky_relu")), True),
    ("add", ("out += identity",), True),
    ("add", ("self.x += y",), True),
    ("add", ("x[:, 0] += y",), True),
    ("add", ("out = out + identity",), False),
    ("add", ("out = out.add_(identity)",), True),
    ("add", ("out += a + b",), None),
    ("add", ("xs += self.blocks[i * self.kinds + j](x)",), True),
    ("add", ("x = self.block(x)",), None),
    ("mul", ("z.mul_(2.0)",), True),
    ("mul", ("z *= gate",), True),
    ("mul", ("z = z * gate",), False),
    ("mul", ("x += y",), None),
    ("sigmoid", ("z = torch.sigmoid_(z)",), True),
    ("sigmoid", ("z = torch.sigmoid(z)",), False),
    ("relu", (), None),
])  # fmt: skip
def test_a_line_says_it_or_not(base: str, lines: tuple[str, ...], said: bool | None) -> None:
    assert written(op(base, *lines)) is said


def network(*lines: str) -> Graph:
    """A convolution and an activation for each line, as an ONNX file has them."""
    b = Builder(x=(2, 4, 8, 8)).within()
    value = b.call("conv2d", "x", "w")
    for number, line in enumerate(lines):
        b.stack = (SourceLine("m.py", number, "forward", line),)
        value = b.call("relu", b.call("conv2d", value, "w"))
    graph: Graph = b.graph(b.call("sum", value))
    return replace(graph, inplace_known=False)


def test_what_a_line_says_holds_at_both_ends() -> None:
    graph = network("x = F.relu(x)", "x = F.relu(x, inplace=True)", "x = self.act(x)")
    for policy, last in (("least", "aten::relu"), ("most", "aten::relu_")):
        targets = [o.target for o in in_place(graph, policy).ops if o.base.startswith("aten::relu")]
        assert targets == ["aten::relu", "aten::relu_", last]


def test_ops_beside_activations_need_a_line() -> None:
    b = Builder(x=(4, 8)).within()
    value = b.call("sin", "x")
    for number, line in enumerate(("x = x * 2", "x *= 2", "x.mul_(2)", "x = f(x)")):
        b.stack = (SourceLine("m.py", number, "forward", line),)
        value = b.call("mul.Tensor", value, 2)
    graph: Graph = replace(b.graph(b.call("sum", value)), inplace_known=False)
    assert [o.target for o in in_place(graph, "most").ops[1:5]] == [
        "aten::mul.Tensor", "aten::mul_.Tensor", "aten::mul_.Tensor", "aten::mul.Tensor",
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "target"), [((4, 8), "aten::add_.Tensor"), ((1, 8), "aten::add.Tensor")])
def test_a_sum_larger_than_its_first_operand_is_not_in_place(first: tuple[int, ...], target: str) -> None:
    b = Builder(x=(4, 8), w=first).within()
    scaled = b.call("mul.Tensor", "w", 2.0, name="scaled")
    total = b.call("add.Tensor", scaled, Ref("x"), name="total")
    values = {"scaled": Value("scaled", dtypes.float32, first), "total": Value("total", dtypes.float32, (4, 8))}
    graph: Graph = replace(b.graph(b.call("sum", total)), inplace_known=False, values=values)
    assert in_place(graph, "most").ops[1].target == target


def activated(conv: str, activation: str, *rest: float, cls: str = "", norm: bool = False) -> str:
    """The target of an activation between two convolutions, as an ONNX file without lines has it."""
    b = Builder(x=(2, 4, 8, 8)).within(f"m:{cls}")
    h = b.call(conv, "x", "w")
    h = b.call("instance_norm", h, None, None, None, None, True, 0.1, 1e-5, True) if norm else h
    b.call(conv, b.call(activation, h, *rest, name="a"), "w")
    graph: Graph = in_place(replace(b.graph(Ref("a")), inplace_known=False, outputs=()), "auto")
    return next(op.target for op in graph.ops if "a" in op.outputs)


@pytest.mark.parametrize(("target", "given"), [
    ("aten::relu_", activated("conv2d", "relu")),
    ("aten::relu", activated("conv1d", "relu")),  # of signals and points
    ("aten::leaky_relu_", activated("conv2d", "leaky_relu", 0.2)),
    ("aten::leaky_relu", activated("conv2d", "leaky_relu", 0.01)),  # `nn.LeakyReLU()`
    ("aten::leaky_relu_", activated("conv3d", "leaky_relu", 0.01, norm=True)),  # nnU-Net
    ("aten::silu", activated("conv2d", "silu")),
    ("aten::silu_", activated("conv2d", "silu", cls="timm.layers.norm_act.BatchNormAct2d")),
])  # fmt: skip
def test_habits_decide_what_no_line_says(target: str, given: str) -> None:
    assert given == target
