"""What the runtime knows of the contents of shapes when it plans.

The expected sizes are what sessions of onnxruntime 1.31.1 gave for their results (`get_outputs`); the last test asks an
installed runtime again.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from staticmem.ort.memory.build import build
from staticmem.ort.memory.graph import Dim

CONSTANTS = {
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "three": np.array(3), "minus": np.array(-1),
    "first": np.array([0]), "third": np.array([2]), "pair": np.array([2, 3]), "v2": np.array([2]),
    "from": np.array([1]), "to": np.array([3]),
}  # fmt: skip
Op = tuple[str, ...]
SHAPE: Op = ("Shape", "x", "s")
D0: Op = ("Gather", "s zero", "d0")
D2: Op = ("Gather", "s two", "d2")
FILL: Op = ("ConstantOfShape", "u", "y")
RANGE: Op = ("Range", "zero q one", "y")
V: Op = ("Gather", "s third", "v")

# x is [2, 3, 8, 8], or [batch, 3, 8, 8] for the cases of `OPEN`
CLOSED: dict[str, tuple[list[Op], list[Dim]]] = {
    "one size": ([SHAPE, D2, ("Unsqueeze", "d2 first", "u"), FILL], [8]),
    "last size": ([SHAPE, ("Gather", "s minus", "d"), ("Unsqueeze", "d first", "u"), FILL], [8]),
    "one size as a vector": ([SHAPE, ("Gather", "s third", "u"), FILL], [8]),
    "two sizes": ([SHAPE, ("Gather", "s pair", "u"), FILL], [None, None]),
    "slice": ([SHAPE, ("Slice", "s from to", "u"), FILL], [None, None]),
    "constant": ([("ConstantOfShape", "pair", "y")], [2, 3]),
    "constant made a vector": ([("Unsqueeze", "two first", "u"), FILL], [None]),
    "joined": ([SHAPE, V, ("Gather", "s first", "w"), ("Concat", "v w", "u"), FILL], [8, 2]),
    "joined with a constant": ([SHAPE, V, ("Concat", "v v2", "u"), FILL], [None, None]),
    "sum": ([SHAPE, D0, D2, ("Add", "d2 d0", "q"), RANGE], [10]),
    "difference": ([SHAPE, D0, D2, ("Sub", "d2 d0", "q"), RANGE], [6]),
    "product": ([SHAPE, D0, D2, ("Mul", "d2 d0", "q"), RANGE], [16]),
    "quotient": ([SHAPE, D0, D2, ("Div", "d2 d0", "q"), RANGE], [4]),
    "product with a constant": ([SHAPE, D2, ("Mul", "d2 two", "q"), RANGE], [None]),
    "product of vectors": ([SHAPE, V, ("Mul", "v v", "u"), FILL], [64]),
    "product of longer vectors": ([SHAPE, ("Gather", "s pair", "v"), ("Mul", "v v", "u"), FILL], [None, None]),
    "maximum": ([SHAPE, D0, D2, ("Max", "d2 d0", "q"), RANGE], [None]),
    "cast": ([SHAPE, D2, ("Cast", "d2", "q"), RANGE], [None]),
    "identity": ([SHAPE, ("Identity", "s", "u"), FILL], [None] * 4),
    "squeezed": ([SHAPE, V, ("Squeeze", "v first", "q"), RANGE], [8]),
    "squeezed without axes": ([SHAPE, V, ("Squeeze", "v", "q"), RANGE], [8]),
    "size of a shape is its product": ([SHAPE, ("Size", "s", "q"), RANGE], [384]),
    "size of data": ([("Size", "x", "q"), RANGE], [None]),
}
OPEN: dict[str, tuple[list[Op], list[Dim]]] = {
    "known size of a shape that is open": ([SHAPE, D2, ("Unsqueeze", "d2 first", "u"), FILL], [None]),
    "known end of a shape": ([("Shape", "x", "u", "start=1"), FILL], [3, 8, 8]),
    "whole shape": ([SHAPE, ("ConstantOfShape", "s", "y")], [None] * 4),
}
CASES = {name: (*case, 2) for name, case in CLOSED.items()} | {name: (*case, "batch") for name, case in OPEN.items()}


def model_of(ops: list[Op], batch: int | str) -> Any:
    nodes = []
    for kind, inputs, result, *attributes in ops:
        words: dict[str, Any] = {"axis": 0} if kind == "Concat" else {"to": TensorProto.INT64} if kind == "Cast" else {}
        words |= {name: int(value) for name, value in (a.split("=") for a in attributes)}
        nodes.append(helper.make_node(kind, inputs.split(), [result], **words))
    used = {name for node in nodes for name in node.input}
    constants = [numpy_helper.from_array(v.astype(np.int64), n) for n, v in CONSTANTS.items() if n in used]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 8, 8])
    graph = helper.make_graph(nodes, "contents", [x], [ValueInfoProto(name="y")], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_follow_from_contents(name: str) -> None:
    ops, expected, batch = CASES[name]
    kind = build(model_of(ops, batch)).planned("y")
    assert kind is not None
    assert list(kind.dims or ()) == expected


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="pip install onnxruntime")
@pytest.mark.parametrize("name", CASES)
def test_the_runtime_says_the_same(name: str) -> None:
    import onnxruntime as ort

    ops, expected, batch = CASES[name]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    text = model_of(ops, batch).SerializeToString()
    session = ort.InferenceSession(text, options, providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].shape == expected
