"""Written-out attention: where Inductor puts one call in its place.

What it does in bfloat16 training and inference was recorded with PyTorch 2.15 on fake CUDA tensors, and the decisions
for contiguous inputs with 2.13 on the CPU (`counters["inductor"]["fuse_attention"]`). With automatic mixed precision
CUDA's softmax is one of float32, and its backward is not that of any pattern.
"""

from __future__ import annotations

import pytest

from staticmem.compiler.aot import joint
from staticmem.compiler.aot.joint_passes import run_joint_passes
from staticmem.compiler.graphs import JointGraph
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir.dtypes import DType, bfloat16, float32
from staticmem.ir.graph import Arg, Graph, Op, Ref, Value


def attention(kind: str, dtype: DType, training: bool, amp: DType | None = None) -> JointGraph:
    """Heads that a projection makes: views of it, or copies ("copied"); scores are divided ("div") or multiplied."""
    ops: list[Op] = []

    def call(target: str, *args: Arg, results: int = 1) -> list[Ref]:
        names = tuple([f"{len(ops)}.{k}" for k in range(results)])
        ops.append(Op(f"op{len(ops)}", f"aten::{target}", args, {}, names, amp=amp or True))
        return [Ref(name) for name in names]

    (x,) = call("linear", Ref("x"), Ref("w"))
    (x,) = call("view", x, (2, 32, 3, 4, 16))
    parts = [call("transpose.int", part, 1, 2)[0] for part in call("unbind.int", x, 2, results=3)]
    if "copied" in kind:
        parts = [call("contiguous", part)[0] for part in parts]
    (turned,) = call("transpose.int", parts[1], -2, -1)
    (a,) = call("matmul", parts[0], turned)
    (a,) = call("div.Tensor", a, 4.0) if "div" in kind else call("mul.Tensor", a, 0.25)
    if "mask" in kind:
        (a,) = call("add.Tensor", a, Ref("mask"))
    (a,) = call("softmax.int", a, -1)
    if "read" in kind:
        call("relu", a)
    weights = a
    if "drop" in kind:
        (a,) = call("dropout", a, 0.1, training)
    (out,) = call("matmul", a, parts[2])
    outputs = (out.name, *((weights.name,) if "read" in kind else ()))
    shapes = {"x": (2, 32, 64), "w": (192, 64), "mask": (1, 1, 32, 32)}
    forms = {name: form_of(shape, contiguous_strides(shape), dtype) for name, shape in shapes.items()}
    values = tuple([Value(name, dtype, shape) for name, shape in shapes.items()])
    graph = Graph("case", "pt2", "", values, (), (), tuple(ops), outputs)
    traced = joint.trace(graph, 0, len(ops), forms, {"w"} if training else set(), outputs, training, amp)
    return run_joint_passes(traced)


def kernels(made: JointGraph) -> list[str]:
    names = [node.base.removeprefix("aten::_scaled_dot_product_") for node in made.nodes]
    return [name for name in names if "attention" in name]


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("div", "cudnn"), ("div drop", "flash"), ("div mask", "cudnn"), ("mul drop", "flash"), ("mul", None),
     ("mul mask", None), ("copied div", "cudnn"), ("copied mul", "cudnn"), ("copied mul drop", "flash"),
     ("copied div mask", "cudnn"), ("copied div mask drop", "efficient"), ("div read", None)],
)  # fmt: skip
def test_training_in_bfloat16(kind: str, kernel: str | None) -> None:
    made = attention(kind, bfloat16, training=True)
    expected = [] if kernel is None else [f"{kernel}_attention", f"{kernel}_attention_backward"]
    assert kernels(made) == expected
    assert [what.split()[3] for what, _ in made.choices] == ([] if kernel is None else [kernel])
    if kernel is not None:
        assert "aten::amax" not in [node.target for node in made.nodes]
        seen = set()
        for node in made.nodes:
            assert all(read in seen for read in node.inputs), f"{node} stands before what it reads"
            seen.add(node)


@pytest.mark.parametrize(("kind", "is_fused"), [("div", True), ("mul", True), ("div mask", True), ("mul mask", False)])
def test_inference_in_bfloat16(kind: str, is_fused: bool) -> None:
    assert kernels(attention(kind, bfloat16, training=False)) == (["cudnn_attention"] if is_fused else [])


@pytest.mark.parametrize("kind", ["div", "div drop", "div mask", "mul"])
def test_neither_float32_nor_training_with_autocast(kind: str) -> None:
    assert kernels(attention(kind, float32, training=True)) == []
    assert kernels(attention(kind, float32, training=False)) == []
    assert kernels(attention(kind, float32, training=True, amp=bfloat16)) == []
