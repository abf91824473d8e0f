"""How the graphs of session_graphs.py are written: a net that collects nodes and weights, and the register."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, shape_inference

FLOAT, HALF, INT32, INT64, BOOL = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL,
)  # fmt: skip
MS = "com.microsoft"
GRAPHS: dict[str, tuple[str, Callable[[Net], Any]]] = {}


class Net:
    """Collects the nodes and weights of one graph."""

    def __init__(self, name: str, prefix: str = "") -> None:
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.prefix = prefix
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.inputs: list[Any] = []

    def size(self, low: int, high: int, step: int = 1) -> int:
        return int(self.rng.integers(low, high + 1)) * step

    def const(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"{self.prefix}w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype=dtype), name))
        return name

    def weight(self, *shape: int, dtype: Any = np.float32) -> str:
        if np.dtype(dtype).kind in "iu":
            info = np.iinfo(dtype)
            return self.const(self.rng.integers(info.min // 2, info.max // 2, shape), dtype)
        return self.const(self.rng.standard_normal(shape) * 0.1, dtype)

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def input(self, name: str, shape: Sequence[int | str], kind: int = FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        names = [f"{self.prefix}v{len(self.nodes)}_{i}" for i in range(outputs)]
        label = f"{self.prefix}{kind}_{len(self.nodes)}_n"
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=label, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def body(self, inputs: Sequence[Any], results: Sequence[tuple[str, int, Sequence[Any]]]) -> Any:
        final = [helper.make_tensor_value_info(n, kind, list(shape)) for n, kind, shape in results]
        return helper.make_graph(self.nodes, f"{self.prefix}body", list(inputs), final, self.weights)

    def model(self, *results: tuple[str, int, int], opset: int = 17) -> Any:
        """The model of (value, element type, rank) results."""
        final = []
        for number, (name, kind, rank) in enumerate(results):
            self.nodes.append(helper.make_node("Identity", [name], [f"y{number}"], name=f"result{number}"))
            final.append(helper.make_tensor_value_info(f"y{number}", kind, [f"y{number}_{a}" for a in range(rank)]))
        graph = helper.make_graph(self.nodes, "net", self.inputs, final, self.weights)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def graph(family: str, *variants: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a maker of graphs under its name; `variants` are its last arguments, one graph for each."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        for number, variant in enumerate(variants or ((),)):
            arguments = variant if isinstance(variant, tuple) else (variant,)
            name = make.__name__ + (f"-{number}" if variants else "")
            GRAPHS[name] = (family, lambda net, arguments=arguments: make(net, *arguments))
        return make

    return register


def make(name: str) -> Any:
    """The ModelProto of a name in `GRAPHS`. Every second file has shapes written into it, as exporters leave them."""
    model = GRAPHS[name][1](Net(name))
    with_shapes = list(GRAPHS).index(name) % 2
    return shape_inference.infer_shapes(model, data_prop=True) if with_shapes else model
