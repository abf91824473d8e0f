"""Seeded small ONNX graphs by family, for session_exactness.py: recurrent, quantised, half precision, control flow,
fused, data-dependent, float, and single operators."""

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


# -- recurrent ---------------------------------------------------------------------------------------------------------

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(
    net: Net, x: str, kind: str, features: int, hidden: int, direction: str = "forward", bias: bool = True, **more: Any
) -> Any:
    two = 2 if direction == "bidirectional" else 1
    rows = GATES[kind] * hidden
    inputs = [x, net.weight(two, rows, features), net.weight(two, rows, hidden)]
    inputs.append(net.weight(two, 2 * rows) if bias else "")
    inputs += more.pop("further", [])
    while not inputs[-1]:
        inputs.pop()
    count = 3 if kind == "LSTM" else 2
    return net.op(kind, *inputs, outputs=count, hidden_size=hidden, direction=direction, **more)


@graph("recurrent", *((k, d, b) for k in GATES for d in ("forward", "reverse", "bidirectional") for b in (True, False)))
def one_layer(net: Net, kind: str, direction: str, bias: bool) -> Any:
    length, features, hidden = net.size(3, 20), net.size(10, 300), net.size(10, 200)
    x = net.input("x", (length, net.size(1, 5), features))
    y = recurrent(net, x, kind, features, hidden, direction, bias)
    return net.model((y[0], FLOAT, 4), (y[1], FLOAT, 3))


@graph("recurrent", "LSTM", "GRU", "RNN")
def stacked(net: Net, kind: str) -> Any:
    features, hidden = 512, 256
    x = net.input("x", ("length", "batch", features))
    for layer in range(3):
        y = recurrent(net, x, kind, features if layer == 0 else hidden, hidden)
        x = net.op("Squeeze", y[0], net.ints(1))
    x = net.op("MatMul", x, net.weight(hidden, 40))
    return net.model((x, FLOAT, 3))


@graph("recurrent", "LSTM", "GRU", "RNN")
def lengths_and_states(net: Net, kind: str) -> Any:
    hidden, features, batch = 96, 80, 3
    x = net.input("x", (12, batch, features))
    lengths = net.const([12, 7, 3], np.int32)
    states = [net.weight(1, batch, hidden)] * (2 if kind == "LSTM" else 1)
    more: dict[str, Any] = {"further": [lengths, *states]}
    if kind == "GRU":
        more["linear_before_reset"] = 1
    y = recurrent(net, x, kind, features, hidden, "forward", True, **more)
    return net.model((y[1], FLOAT, 3))


@graph("recurrent")
def lstm_without_sequence(net: Net) -> Any:
    """Only the last state is taken."""
    x = net.op("Transpose", net.input("x", (4, 9, 60)), perm=[1, 0, 2])
    inputs = [x, net.weight(1, 4 * 64, 60), net.weight(1, 4 * 64, 64), net.weight(1, 8 * 64)]
    net.nodes.append(helper.make_node("LSTM", inputs, ["", "last"], name="lstm", hidden_size=64))
    y = net.op("Gemm", net.op("Squeeze", "last", net.ints(0)), net.weight(64, 10), net.weight(10))
    return net.model((y, FLOAT, 2))


@graph("recurrent")
def speech(net: Net) -> Any:
    x = net.input("x", (1, 1, 40, 60))
    x = net.op("Relu", net.op("Conv", x, net.weight(8, 1, 3, 3), net.weight(8), pads=[1, 1, 1, 1], strides=[2, 2]))
    x = net.op("Transpose", x, perm=[3, 0, 1, 2])
    x = net.op("Reshape", x, net.ints(30, 1, 160))
    y = recurrent(net, x, "GRU", 160, 128, "bidirectional")
    x = net.op("Reshape", net.op("Transpose", y[0], perm=[0, 2, 1, 3]), net.ints(30, 1, 256))
    x = net.op("LogSoftmax", net.op("Add", net.op("MatMul", x, net.weight(256, 30)), net.weight(30)), axis=-1)
    return net.model((x, FLOAT, 3))


# -- quantised ---------------------------------------------------------------------------------------------------------


def scale(net: Net, value: float = 0.02) -> str:
    return net.const(value, np.float32)


def quantised(net: Net, x: str, dtype: Any = np.uint8) -> str:
    """QuantizeLinear and DequantizeLinear behind each other."""
    step, zero = scale(net), net.const(0 if dtype is np.int8 else 128, dtype)
    return net.op("DequantizeLinear", net.op("QuantizeLinear", x, step, zero), step, zero)


def stored(net: Net, *shape: int, axis: int | None = None, dtype: Any = np.int8) -> str:
    """A quantised weight and its DequantizeLinear."""
    weight = net.weight(*shape, dtype=dtype)
    if axis is None:
        return net.op("DequantizeLinear", weight, scale(net, 0.01), net.const(0, dtype))
    steps, zeros = net.const([0.01] * shape[axis]), net.const([0] * shape[axis], dtype)
    return net.op("DequantizeLinear", weight, steps, zeros, axis=axis)


def stored_bias(net: Net, count: int) -> str:
    return net.op(
        "DequantizeLinear", net.weight(count, dtype=np.int32), net.const(0.0002, np.float32), net.const(0, np.int32)
    )


@graph("static QDQ", (np.uint8, False), (np.uint8, True), (np.int8, False), (np.int8, True))
def qdq_cnn(net: Net, dtype: Any, channelwise: bool) -> Any:
    x, channels = quantised(net, net.input("x", ("batch", 3, 32, 32)), dtype), 3
    for _ in range(3):
        width = net.size(2, 6, 8)
        weight = stored(net, width, channels, 3, 3, axis=0 if channelwise else None)
        if channelwise:
            bias = net.op(
                "DequantizeLinear", net.weight(width, dtype=np.int32), net.const([0.0002] * width),
                net.const([0] * width, np.int32), axis=0,
            )  # fmt: skip
        else:
            bias = stored_bias(net, width)
        x = net.op("Conv", x, weight, bias, pads=[1, 1, 1, 1])
        x = quantised(net, net.op("Relu", x), dtype)
        x = quantised(net, net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), dtype)
        channels = width
    x = quantised(net, net.op("GlobalAveragePool", x), dtype)
    x = quantised(net, net.op("Flatten", x), dtype)
    x = quantised(net, net.op("Gemm", x, stored(net, 10, channels), stored_bias(net, 10), transB=1), dtype)
    return net.model((x, FLOAT, 2))


@graph("static QDQ", np.uint8, np.int8)
def qdq_residual(net: Net, dtype: Any) -> Any:
    x = quantised(net, net.input("x", (2, 16, 16, 16)), dtype)
    for groups in (1, 16, 1):
        y = net.op(
            "Conv", x, stored(net, 16, 16 // groups, 3, 3), stored_bias(net, 16), pads=[1, 1, 1, 1], group=groups
        )
        y = quantised(net, net.op("Relu", y), dtype)
        x = quantised(net, net.op("Add", x, y), dtype)
    x = quantised(net, net.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), dtype)
    x = quantised(net, net.op("Concat", x, quantised(net, net.op("Sigmoid", x), dtype), axis=1), dtype)
    return net.model((x, FLOAT, 4))


@graph("static QDQ", np.uint8, np.int8)
def qdq_mlp(net: Net, dtype: Any) -> Any:
    width = 100
    x = quantised(net, net.input("x", ("batch", 20, width)), dtype)
    for _ in range(3):
        wide = net.size(30, 200)
        x = quantised(net, net.op("MatMul", x, stored(net, width, wide)), dtype)
        x = quantised(net, net.op("Add", x, stored(net, wide)), dtype)
        x, width = quantised(net, net.op("LeakyRelu", x, alpha=0.1), dtype), wide
    x = quantised(net, net.op("Softmax", x, axis=-1), dtype)
    return net.model((x, FLOAT, 3))


def dynamic_product(net: Net, x: str, rows: int, columns: int, dtype: Any = np.int8, channelwise: bool = False) -> str:
    """What quantize_dynamic makes of a MatMul."""
    a, step, zero = net.op("DynamicQuantizeLinear", x, outputs=3)
    zeros = [0] * columns if channelwise else 0
    steps = net.const([0.01] * columns) if channelwise else scale(net, 0.01)
    y = net.op("MatMulInteger", a, net.weight(rows, columns, dtype=dtype), zero, net.const(zeros, dtype))
    return net.op("Mul", net.op("Cast", y, to=FLOAT), net.op("Mul", step, steps))


@graph("dynamic", (np.int8, False), (np.uint8, False), (np.int8, True))
def dynamic_mlp(net: Net, dtype: Any, channelwise: bool) -> Any:
    width = 256
    x = net.input("x", ("batch", width))
    for _ in range(3):
        wide = net.size(16, 100, 4)
        x = net.op("Relu", net.op("Add", dynamic_product(net, x, width, wide, dtype, channelwise), net.weight(wide)))
        width = wide
    return net.model((x, FLOAT, 2))


@graph("dynamic")
def dynamic_mlp_1024(net: Net) -> Any:
    x = net.input("x", (8, 1024))
    for _ in range(4):
        x = net.op("Relu", dynamic_product(net, x, 1024, 1024))
    return net.model((x, FLOAT, 2))


@graph("dynamic", False, True)
def dynamic_transformer(net: Net, shared: bool) -> Any:
    width, heads = 64, 4
    x = net.input("x", ("batch", 24, width))
    for _ in range(2):
        parts = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            y = net.op("Add", dynamic_product(net, x, width, width), net.weight(width))
            parts.append(net.op("Transpose", net.op("Reshape", y, net.ints(0, 0, heads, width // heads)), perm=perm))
        scores = net.op("Div", net.op("MatMul", parts[0], parts[1]), net.const(4.0))
        y = net.op("MatMul", net.op("Softmax", scores, axis=-1), parts[2])
        y = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.ints(0, 0, width))
        y = net.op("Add", dynamic_product(net, y, width, width), net.weight(width))
        x = net.op("LayerNormalization", net.op("Add", x, y), net.weight(width), net.weight(width))
    return net.model((x, FLOAT, 3))


@graph("dynamic", np.int8, np.uint8)
def dynamic_conv(net: Net, dtype: Any) -> Any:
    x, channels = net.input("x", (1, 8, 20, 20)), 8
    for width in (16, 24):
        a, step, zero = net.op("DynamicQuantizeLinear", x, outputs=3)
        weight = net.weight(width, channels, 3, 3, dtype=np.uint8)
        y = net.op("ConvInteger", a, weight, zero, net.const(128, np.uint8), pads=[1, 1, 1, 1])
        y = net.op("Mul", net.op("Cast", y, to=FLOAT), net.op("Mul", step, scale(net)))
        x, channels = net.op("Relu", y), width
    return net.model((x, FLOAT, 4))


@graph("dynamic", "forward", "bidirectional")
def dynamic_lstm(net: Net, direction: str) -> Any:
    two = 2 if direction == "bidirectional" else 1
    features, hidden = 64, 48
    x = net.input("x", (10, 2, features))
    inputs = [
        x, net.weight(two, features, 4 * hidden, dtype=np.int8), net.weight(two, hidden, 4 * hidden, dtype=np.int8),
        net.weight(two, 8 * hidden), "", "", "", "", net.const([0.01] * two), net.const([0] * two, np.int8),
        net.const([0.01] * two), net.const([0] * two, np.int8),
    ]  # fmt: skip
    y = net.op("DynamicQuantizeLSTM", *inputs, outputs=3, domain=MS, hidden_size=hidden, direction=direction)
    return net.model((y[0], FLOAT, 4), (y[1], FLOAT, 3))


@graph("QLinear", (np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8))
def qlinear_cnn(net: Net, dtype: Any, weights: Any) -> Any:
    def numbers() -> tuple[str, str]:
        return scale(net), net.const(0 if dtype is np.int8 else 128, dtype)

    step, zero = numbers()
    x, channels = net.op("QuantizeLinear", net.input("x", ("batch", 4, 24, 24)), step, zero), 4
    for width, strides in ((16, [1, 1]), (20, [2, 2]), (32, [1, 1])):
        zeros = net.const(128 if weights is np.uint8 else 0, weights)
        weight = [net.weight(width, channels, 3, 3, dtype=weights), scale(net, 0.01), zeros]
        bias = net.weight(width, dtype=np.int32)
        y = net.op("QLinearConv", x, step, zero, *weight, step, zero, bias, pads=[1, 1, 1, 1], strides=strides)
        x, channels = y, width
    y = net.op("QLinearAdd", x, step, zero, x, step, zero, step, zero, domain=MS)
    y = net.op("QLinearSigmoid", y, step, zero, step, zero, domain=MS)
    y = net.op("QLinearGlobalAveragePool", y, step, zero, step, zero, domain=MS)
    y = net.op("Flatten", y)
    y = net.op("QLinearMatMul", y, step, zero, net.weight(32, 10, dtype=np.int8), scale(net, 0.01),
               net.const(0, np.int8), step, zero)  # fmt: skip
    return net.model((net.op("DequantizeLinear", y, step, zero), FLOAT, 2))


@graph("QLinear", (1, 512, 3), (16, 96, 3), (1, 600, 1))
def qlinear_wide(net: Net, groups: int, width: int, window: int) -> Any:
    """Weights of a megabyte and more, and of many groups."""
    step, zero = scale(net), net.const(128, np.uint8)
    x = net.op("QuantizeLinear", net.input("x", (1, width, 12, 12)), step, zero)
    for signed in (True, False):
        dtype = np.int8 if signed else np.uint8
        weight = net.weight(width, width // groups, window, window, dtype=dtype)
        inputs = [x, step, zero, weight, scale(net), net.const(0 if signed else 3, dtype), step, zero]
        x = net.op("QLinearConv", *inputs, net.weight(width, dtype=np.int32), pads=[window // 2] * 4, group=groups)
    return net.model((net.op("DequantizeLinear", x, step, zero), FLOAT, 4))


@graph("QLinear", 0, 1, 2)
def qlinear_mlp(net: Net, number: int) -> Any:
    dtype = np.uint8 if number % 2 else np.int8
    step, zero = scale(net), net.const(0, dtype)
    width = net.size(10, 300)
    x = net.op("QuantizeLinear", net.input("x", (net.size(1, 9), 6, width)), step, zero)
    for _ in range(3):
        wide = net.size(10, 300)
        weight = [net.weight(width, wide, dtype=np.int8), scale(net, 0.01), net.const(0, np.int8)]
        x, width = net.op("QLinearMatMul", x, step, zero, *weight, step, zero), wide
    return net.model((net.op("DequantizeLinear", x, step, zero), FLOAT, 3))


@graph("QLinear")
def qlinear_gemm(net: Net) -> Any:
    step, zero, width = scale(net), net.const(128, np.uint8), 90
    x = net.op("QuantizeLinear", net.input("x", (7, width)), step, zero)
    for wide in (120, 64, 33):
        weight = [net.weight(wide, width, dtype=np.int8), scale(net, 0.01), net.const(0, np.int8)]
        bias = net.weight(wide, dtype=np.int32)
        x = net.op("QGemm", x, step, zero, *weight, bias, step, zero, domain=MS, transB=1)
        width = wide
    return net.model((net.op("DequantizeLinear", x, step, zero), FLOAT, 2))


# -- half precision ----------------------------------------------------------------------------------------------------

F16 = np.float16


@graph("half", 0, 1)
def half_mlp(net: Net, number: int) -> Any:
    width = 128
    x = net.input("x", ("batch", width), HALF if number else FLOAT)
    x = x if number else net.op("Cast", x, to=HALF)
    for _ in range(3):
        wide = net.size(4, 30, 8)
        x = net.op("Add", net.op("MatMul", x, net.weight(width, wide, dtype=F16)), net.weight(wide, dtype=F16))
        x, width = net.op("Relu" if number else "Tanh", x), wide
    x = x if number else net.op("Cast", x, to=FLOAT)
    return net.model((x, HALF if number else FLOAT, 2))


@graph("half", 0, 1)
def half_cnn(net: Net, number: int) -> Any:
    x, channels = net.input("x", ("batch", 3, 40, 40), HALF), 3
    for _ in range(3):
        width = net.size(1, 4, 8)
        y = net.op("Conv", x, net.weight(width, channels, 3, 3, dtype=F16), net.weight(width, dtype=F16),
                   pads=[1, 1, 1, 1])  # fmt: skip
        x = net.op("Relu", y)
        if number:
            x = net.op("Add", x, net.op("Sigmoid", y))
        x, channels = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), width
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    x = net.op("Gemm", x, net.weight(channels, 10, dtype=F16), net.weight(10, dtype=F16))
    return net.model((x, HALF, 2))


def attention(net: Net, x: str, width: int, heads: int, dtype: Any = np.float32) -> str:
    parts = []
    for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        y = net.op("Add", net.op("MatMul", x, net.weight(width, width, dtype=dtype)), net.weight(width, dtype=dtype))
        parts.append(net.op("Transpose", net.op("Reshape", y, net.ints(0, 0, heads, width // heads)), perm=perm))
    scores = net.op("Mul", net.op("MatMul", parts[0], parts[1]), net.const(0.25, dtype))
    y = net.op("MatMul", net.op("Softmax", scores, axis=-1), parts[2])
    y = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.ints(0, 0, width))
    return net.op("Add", net.op("MatMul", y, net.weight(width, width, dtype=dtype)), net.weight(width, dtype=dtype))


def norm(net: Net, x: str, width: int, dtype: Any = np.float32) -> str:
    return net.op("LayerNormalization", x, net.weight(width, dtype=dtype), net.weight(width, dtype=dtype), axis=-1)


def gelu(net: Net, x: str, dtype: Any = np.float32) -> str:
    y = net.op("Erf", net.op("Div", x, net.const(1.4142135, dtype)))
    return net.op("Mul", net.op("Mul", x, net.op("Add", y, net.const(1.0, dtype))), net.const(0.5, dtype))


def transformer(net: Net, dtype: Any, blocks: int) -> Any:
    width, kind = 64, HALF if dtype is F16 else FLOAT
    x = net.op("Gather", net.weight(50, width, dtype=dtype), net.input("ids", ("batch", 20), INT64))
    for _ in range(blocks):
        x = norm(net, net.op("Add", x, attention(net, x, width, 4, dtype)), width, dtype)
        y = net.op(
            "Add", net.op("MatMul", x, net.weight(width, 4 * width, dtype=dtype)), net.weight(4 * width, dtype=dtype)
        )
        y = net.op("MatMul", gelu(net, y, dtype), net.weight(4 * width, width, dtype=dtype))
        x = norm(net, net.op("Add", x, net.op("Add", y, net.weight(width, dtype=dtype))), width, dtype)
    return net.model((x, kind, 3))


@graph("half", 1, 2)
def half_transformer(net: Net, blocks: int) -> Any:
    return transformer(net, F16, blocks)


@graph("half", "LSTM", "GRU")
def half_recurrent(net: Net, kind: str) -> Any:
    """As converters write it: floats within, casts around."""
    x = net.op("Cast", net.op("Relu", net.input("x", (6, 2, 40), HALF)), to=FLOAT)
    y = recurrent(net, x, kind, 40, 56)
    return net.model((net.op("Relu", net.op("Cast", y[0], to=HALF)), HALF, 4))


@graph("half")
def half_mixed(net: Net) -> Any:
    x = net.input("x", (4, 60))
    y = net.op("Cast", x, to=HALF)
    y = net.op("Concat", net.op("Mul", y, y), net.op("Abs", y), axis=1)
    y = net.op("Softmax", net.op("Transpose", y, perm=[1, 0]), axis=0)
    y = net.op("ReduceMean", net.op("Where", net.op("Greater", y, net.const(0.1, F16)), y, net.const(0, F16)), axes=[0])
    return net.model((net.op("Cast", y, to=FLOAT), FLOAT, 2))


import session_graphs_more  # noqa: E402, F401  the other families register themselves
