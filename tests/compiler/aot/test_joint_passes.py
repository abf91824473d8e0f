"""Joint-graph passes against those of Inductor, on the same graphs: PyTorch's joint graphs of small programs."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from typing import Any

import pytest
from observe import Case, Program, Spec, f, h, i

from staticmem.compiler.aot.joint_passes import run_joint_passes
from staticmem.compiler.graphs import NodeGraph
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.tracing.nodes import PLACEHOLDER, Node

marks: list[pytest.MarkDecorator] = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("torch") is not None:
    import joint_case
    from fx import nodes_of
pytestmark = marks


def program(name: str, run: Program, *inputs: Spec) -> Case:
    return Case(name, run, inputs, ())


def _copies(op: Any, x: Any) -> Any:
    y = op("aten::clone", op("aten::relu", op("aten::clone", x)))
    return op("aten::tanh", op("aten::alias", y))


def _neutral(op: Any, x: Any, y: Any) -> Any:
    ones = op("aten::ones_like", x)
    x = op("aten::sub.Tensor", op("aten::div.Tensor", x, ones), op("aten::zeros_like", x))
    return op("aten::add.Tensor", op("aten::mul.Tensor", x, y), op("aten::zeros", (4, 6), dtype=dtypes.bfloat16))


def _wider(op: Any, x: Any) -> Any:
    """A zero of another dtype: what is left is a conversion."""
    return op("aten::relu", op("aten::add.Tensor", x, op("aten::zeros", (4, 6), dtype=dtypes.float32)))


def _mask(op: Any, x: Any) -> Any:
    ones = op("aten::full", (4, 1), 1.0, dtype=dtypes.float32)
    mask = op("aten::sub.Tensor", op("aten::expand", ones, (4, 6)), 1.0)
    return op("aten::add.Tensor", x, op("aten::mul.Tensor", mask, -10000.0))


def _two_masks(op: Any, x: Any) -> Any:
    """Views of one constant that other calls read too."""
    zero = op("aten::full", (4, 1), 0.5, dtype=dtypes.float32)
    y = op("aten::mul.Tensor", x, op("aten::expand", zero, (4, 6)))
    return op("aten::add.Tensor", y, zero)


def _integers(op: Any, x: Any) -> Any:
    count = op("aten::add.Tensor", op("aten::ones", (4, 6), dtype=dtypes.int64), 2)
    return op("aten::mul.Tensor", x, op("aten::to.dtype", op("aten::gt.Scalar", count, 1), dtypes.float32))


def _views(op: Any, x: Any, y: Any) -> Any:
    flat = op("aten::view", op("aten::relu", x), (24,))
    again = op("aten::view", op("aten::view", flat, (2, 12)), (24,))
    turned = op("aten::permute", op("aten::permute", y, (1, 0)), (1, 0))
    return op("aten::mul.Tensor", op("aten::view", again, (4, 6)), op("aten::view", turned, (4, 6)))


def _linear_weights(op: Any, x: Any, w: Any) -> Any:
    return op("aten::relu", op("aten::mm", x, op("aten::t", w)))


def _casts(op: Any, x: Any) -> Any:
    up = op("aten::to.dtype", op("aten::relu", x), dtypes.float32)
    down = op("aten::to.dtype", op("aten::to.dtype", up, dtypes.bfloat16), dtypes.float32)
    return op("aten::to.dtype", op("aten::to.dtype", op("aten::relu", down), dtypes.float64), dtypes.bfloat16)


def _empty_calls(op: Any, x: Any) -> Any:
    x = op("aten::constant_pad_nd", op("aten::relu", x), (0, 0), 0.0)
    x = op("aten::slice.Tensor", op("aten::repeat", x, (1, 1)), 0, 0, 9)
    return op("aten::relu", op("aten::cat", (x,), 0))


def _scaled(scale: str, factor: Any) -> Program:
    def run(op: Any, x: Any, *factors: Any) -> Any:
        scaled = op(scale, x, factors[0] if factors else factor)
        return op("aten::softmax.int", scaled, -1)

    return run


def _returned_twice(op: Any, x: Any) -> Any:
    y = op("aten::relu", x)
    return [y, op("aten::clone", y)]


def _loss(op: Any, x: Any, y: Any) -> Any:
    return op("aten::cross_entropy_loss", x, y)


CASES = [
    program("copies", _copies, f(4, 6)),
    program("neutral operands", _neutral, f(4, 6), h(4, 6)),
    program("a wider zero", _wider, h(4, 6)),
    program("a folded mask", _mask, f(4, 6)),
    program("views of a constant", _two_masks, f(4, 6)),
    program("integers", _integers, f(4, 6)),
    program("views and permutes", _views, f(4, 6), f(4, 6)),
    program("weights of a product", _linear_weights, f(4, 6), f(3, 6)),
    program("casts", _casts, h(4, 6)),
    program("calls that do nothing", _empty_calls, f(4, 6)),
    program("returned twice", _returned_twice, f(4, 6)),
    program("cross entropy", _loss, f(4, 6), i(4)),
    program("scaled softmax", _scaled("aten::mul.Tensor", 0.125), f(4, 6)),
    program("divided softmax", _scaled("aten::div.Tensor", 8.0), f(4, 6)),
    program("negative softmax", _scaled("aten::mul.Tensor", -0.5), h(4, 6)),
    program("softmax with a temperature", _scaled("aten::div.Tensor", None), f(4, 6), f(4, 1).fixed),
    program("half scores by a float temperature", _scaled("aten::mul.Tensor", None), h(4, 6), f(4, 1).fixed),
    program("scaled by columns", _scaled("aten::mul.Tensor", None), f(4, 6), f(6).fixed),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """PyTorch logs its graphs for tools that nobody has asked for."""
    logging.getLogger("torch.__trace").setLevel(logging.ERROR)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_graph_is_that_of_inductor(case: Case, training: bool) -> None:
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    pattern = tuple(training and spec.dtype.is_differentiable and spec.grad is not False for spec in case.flat)
    module, _, _ = joint_case.traced_module(case, pattern, "cpu")
    found = joint_case.text(*_ours(module))
    fake = next(
        (n.meta["val"].fake_mode for n in module.graph.nodes if hasattr(n.meta.get("val"), "fake_mode")),
        FakeTensorMode(),
    )
    with V.set_fake_mode(fake):
        joint_graph.joint_graph_passes(module)
    expected = joint_case.text(*nodes_of(module.graph))
    difference = "\n".join(difflib.unified_diff(expected, found, "PyTorch", "ours", n=99, lineterm=""))
    assert not difference, f"\n{difference}"


def _ours(module: Any) -> Any:
    nodes, outputs = nodes_of(module.graph)
    made = run_joint_passes(NodeGraph(tuple(nodes), outputs))
    return made.nodes, made.outputs


def test_numbers_that_change_nothing() -> None:
    """2.15 takes away `x * 1` and `x + 0` with numbers too; 2.13 only with tensors."""
    form = form_of((4,), (1,), dtypes.float32)
    x = Node(PLACEHOLDER, (), form, name="x")
    product = Node("aten::mul.Tensor", (x, 1.0), form)
    total = Node("aten::add.Tensor", (0, product), form)
    half = Node("aten::div.Tensor", (total, 2), form)
    made = run_joint_passes(NodeGraph((x, product, total, half), (half,)))
    assert made.nodes == (x, half)
    assert half.args == (x, 2)


def test_a_product_of_one_batch() -> None:
    """`bmm_to_mm`, which is for GPUs."""
    forms = [form_of(shape, contiguous_strides(shape), dtypes.float32) for shape in ((1, 2, 3), (1, 3, 4), (1, 2, 4))]
    a, b = Node(PLACEHOLDER, (), forms[0], name="a"), Node(PLACEHOLDER, (), forms[1], name="b")
    product = Node("aten::bmm", (a, b), forms[2])
    made = run_joint_passes(NodeGraph((a, b, product), (product,)))
    targets = [node.target for node in made.nodes[2:]]
    assert targets == ["aten::squeeze.dim", "aten::squeeze.dim", "aten::mm", "aten::unsqueeze"]
    result = made.outputs[0]
    assert result is not None
    assert (result.shape, result.strides) == (forms[2].shape, forms[2].strides)
