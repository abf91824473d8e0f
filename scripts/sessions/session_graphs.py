"""Seeded small ONNX graphs by family, for session_exactness.py: recurrent, quantised, half precision, control flow,
fused, data-dependent, float, and single operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from session_nets import BOOL, FLOAT, GRAPHS, HALF, INT32, INT64, MS, Net, graph

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


# -- control flow ------------------------------------------------------------------------------------------------------


def typed(name: str, shape: Sequence[Any], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


@graph("control flow", True, False)
def if_of_a_constant(net: Net, value: bool) -> Any:
    x = net.op("Relu", net.input("x", (4, 64)))
    wide, plain = Net("wide", "a_"), Net("plain", "b_")
    y = wide.op("MatMul", wide.op("MatMul", x, wide.weight(64, 256)), wide.weight(256, 64))
    z = plain.op("Mul", x, plain.const(2.0))
    branches = {
        "then_branch": wide.body([], [(y, FLOAT, (4, 64))]),
        "else_branch": plain.body([], [(z, FLOAT, (4, 64))]),
    }
    y = net.op("If", net.const(value, np.bool_), **branches)
    return net.model((net.op("Exp", y), FLOAT, 2))


@graph("control flow", (), ("fixed",))
def if_of_data(net: Net, *fixed: str) -> Any:
    shape = (4, 64) if fixed else ("n", 64)
    x = net.op("Relu", net.input("x", shape))
    condition = net.op("Greater", net.op("ReduceSum", x, keepdims=0), net.const(0.0))
    one, two = Net("one", "a_"), Net("two", "b_")
    y = one.op("Exp", one.op("MatMul", x, one.weight(64, 64)))
    z = two.op("Neg", two.op("MatMul", x, two.weight(64, 64)))
    branches = {"then_branch": one.body([], [(y, FLOAT, shape)]), "else_branch": two.body([], [(z, FLOAT, shape)])}
    return net.model((net.op("Exp", net.op("If", condition, **branches)), FLOAT, 2))


@graph("control flow", 1, 5, 12)
def loop_of_a_constant(net: Net, turns: int) -> Any:
    x = net.op("Exp", net.input("x", (6, 48)))
    body = Net("loop body", "b_")
    y = body.op("Tanh", body.op("MatMul", "b_state", body.weight(48, 48)))
    go = body.op("Identity", "b_go")
    inputs = [typed("b_i", (), INT64), typed("b_go", (), BOOL), typed("b_state", (6, 48))]
    scanned = body.op("ReduceMax", y, axes=[1], keepdims=0)
    proto = body.body(inputs, [(go, BOOL, ()), (y, FLOAT, (6, 48)), (scanned, FLOAT, (6,))])
    last, every = net.op("Loop", net.const(turns, np.int64), net.const(True, np.bool_), x, outputs=2, body=proto)
    return net.model((net.op("Abs", last), FLOAT, 2), (every, FLOAT, 2))


@graph("control flow")
def loop_of_data(net: Net) -> Any:
    """An input says how many turns there are."""
    x = net.op("Exp", net.input("x", (6, 48)))
    turns = net.op("Squeeze", net.op("Cast", net.input("turns", (1,), INT32), to=INT64), net.ints(0))
    body = Net("loop of data", "b_")
    y = body.op("Sin", body.op("Mul", "b_state", body.const(0.9)))
    go = body.op("Identity", "b_go")
    inputs = [typed("b_i", (), INT64), typed("b_go", (), BOOL), typed("b_state", (6, 48))]
    proto = body.body(inputs, [(go, BOOL, ()), (y, FLOAT, (6, 48))])
    return net.model((net.op("Loop", turns, net.const(True, np.bool_), x, body=proto), FLOAT, 2))


@graph("control flow", (0, 0), (1, 0), (0, 1))
def scan(net: Net, in_axis: int, out_axis: int) -> Any:
    shape: list[Any] = [9, 5]
    if in_axis:
        shape.reverse()
    x = net.op("Exp", net.input("x", (*shape, 32)))
    state = net.op("Relu", net.input("state", (5, 40)))
    body = Net("scan body", "b_")
    y = body.op("Add", body.op("MatMul", "b_x", body.weight(32, 40)), body.op("MatMul", "b_s", body.weight(40, 40)))
    y = body.op("Tanh", y)
    copy = body.op("Identity", y)
    proto = body.body([typed("b_s", (5, 40)), typed("b_x", (5, 32))], [(y, FLOAT, (5, 40)), (copy, FLOAT, (5, 40))])
    last, every = net.op("Scan", state, x, outputs=2, body=proto, num_scan_inputs=1, scan_input_axes=[in_axis],
                         scan_output_axes=[out_axis])  # fmt: skip
    return net.model((net.op("Abs", last), FLOAT, 2), (net.op("Neg", every), FLOAT, 3))


@graph("control flow")
def recurrent_in_a_branch(net: Net) -> Any:
    x = net.op("Relu", net.input("x", (5, 2, 32)))
    one, two = Net("one r", "a_"), Net("two r", "b_")
    y = one.op("Squeeze", recurrent(one, x, "LSTM", 32, 32)[0], one.ints(1))
    z = two.op("Neg", x)
    shape = (5, 2, 32)
    branches = {"then_branch": one.body([], [(y, FLOAT, shape)]), "else_branch": two.body([], [(z, FLOAT, shape)])}
    return net.model((net.op("If", net.const(True, np.bool_), **branches), FLOAT, 3))


@graph("control flow")
def loop_in_a_branch(net: Net) -> Any:
    x = net.op("Exp", net.input("x", (6, 48)))
    inner, one, two = Net("inner", "c_"), Net("one l", "a_"), Net("two l", "b_")
    y = inner.op("Sigmoid", inner.op("Add", "c_state", inner.const(1.0)))
    inputs = [typed("c_i", (), INT64), typed("c_go", (), BOOL), typed("c_state", (6, 48))]
    proto = inner.body(inputs, [(inner.op("Identity", "c_go"), BOOL, ()), (y, FLOAT, (6, 48))])
    y = one.op("Loop", one.const(3, np.int64), one.const(True, np.bool_), x, body=proto)
    z = two.op("Neg", x)
    branches = {
        "then_branch": one.body([], [(y, FLOAT, (6, 48))]), "else_branch": two.body([], [(z, FLOAT, (6, 48))]),
    }  # fmt: skip
    return net.model((net.op("If", net.const(True, np.bool_), **branches), FLOAT, 2))


# -- fused -------------------------------------------------------------------------------------------------------------


@graph("fused", 1, 2)
def gelu_transformer(net: Net, blocks: int) -> Any:
    return transformer(net, np.float32, blocks)


@graph("fused", 0, 1)
def conv_add_relu(net: Net, number: int) -> Any:
    """Fused convolutions; with widths of 16 in the blocked layout at the highest level."""
    width = 16 if number else 12
    x = net.input("x", ("batch", width, 28, 28))
    for _ in range(2):
        y = net.op("Conv", x, net.weight(width, width, 3, 3), net.weight(width), pads=[1, 1, 1, 1])
        y = net.op("Conv", net.op("Relu", y), net.weight(width, width, 3, 3), pads=[1, 1, 1, 1])
        x = net.op("Relu", net.op("Add", net.op("BatchNormalization", y, *norms(net, width)), x))
    return net.model((net.op("AveragePool", x, kernel_shape=[4, 4], strides=[4, 4]), FLOAT, 4))


def norms(net: Net, width: int) -> list[str]:
    return [net.weight(width), net.weight(width), net.weight(width), net.const(np.ones(width))]


@graph("fused")
def products(net: Net) -> Any:
    """Transposes and scales that products take in."""
    a, b = net.input("a", (2, 30, 40)), net.input("b", (2, 50, 40))
    y = net.op("MatMul", a, net.op("Transpose", b, perm=[0, 2, 1]))
    y = net.op("Mul", y, net.const(0.5))
    y = net.op("Relu", net.op("Gemm", net.op("Reshape", y, net.ints(60, 50)), net.weight(50, 20), net.weight(20)))
    y = net.op("MatMul", net.op("Transpose", y, perm=[1, 0]), net.weight(60, 33))
    return net.model((y, FLOAT, 2))


@graph("fused")
def contrib_activations(net: Net) -> Any:
    x = net.input("x", ("batch", 10, 64))
    x = net.op("Gelu", x, domain=MS)
    x = net.op("BiasGelu", x, net.weight(64), domain=MS)
    x = net.op("FastGelu", x, net.weight(64), domain=MS)
    x = net.op("QuickGelu", x, domain=MS)
    x = net.op("SkipLayerNormalization", x, net.op("Neg", x), net.weight(64), net.weight(64), net.weight(64), domain=MS)
    x = net.op("FusedMatMul", x, net.weight(32, 64), domain=MS, transB=1, alpha=0.5)
    return net.model((x, FLOAT, 3))


@graph("fused", False, True)
def contrib_attention(net: Net, masked: bool) -> Any:
    x = net.input("x", (2, 12, 48))
    inputs = [x, net.weight(48, 144), net.weight(144)]
    if masked:
        inputs.append(net.input("mask", (2, 12), INT32))
    x = net.op("Attention", *inputs, domain=MS, num_heads=4)
    return net.model((net.op("Neg", x), FLOAT, 3))


@graph("fused", 4, 8)
def contrib_blockwise(net: Net, bits: int) -> Any:
    """MatMulNBits: weights of four or eight bits."""
    rows, columns, block = 128, 96, 32
    data = net.const(net.rng.integers(0, 255, (columns, rows // block, block * bits // 8)), np.uint8)
    x = net.op("Relu", net.input("x", ("batch", 7, rows)))
    x = net.op("MatMulNBits", x, data, net.weight(columns * rows // block), domain=MS, K=rows, N=columns, bits=bits,
               block_size=block)  # fmt: skip
    return net.model((net.op("Tanh", x), FLOAT, 3))


@graph("fused")
def squeeze_and_excitation(net: Net) -> Any:
    x = net.op("Conv", net.input("x", (1, 3, 32, 32)), net.weight(16, 3, 3, 3), net.weight(16), strides=[2, 2])
    x = net.op("Mul", x, net.op("Sigmoid", x))
    y = net.op("GlobalAveragePool", x)
    y = net.op("Conv", net.op("Relu", net.op("Conv", y, net.weight(4, 16, 1, 1))), net.weight(16, 4, 1, 1))
    x = net.op("Mul", x, net.op("HardSigmoid", y))
    x = net.op("Conv", x, net.weight(16, 1, 3, 3), group=16, pads=[1, 1, 1, 1])
    x = net.op("HardSwish", net.op("Conv", x, net.weight(24, 16, 1, 1), net.weight(24)))
    return net.model((x, FLOAT, 4), opset=18)


# -- data-dependent ----------------------------------------------------------------------------------------------------


@graph("data-dependent")
def nonzero(net: Net) -> Any:
    x = net.op("Relu", net.input("x", (20, 30)))
    y = net.op("Transpose", net.op("NonZero", net.op("Greater", x, net.const(0.5))), perm=[1, 0])
    return net.model((net.op("GatherND", x, y), FLOAT, 1))


@graph("data-dependent")
def compress(net: Net) -> Any:
    x = net.op("Exp", net.input("x", (60, 30)))
    y = net.op("Compress", x, net.op("Greater", net.op("ReduceMax", x, axes=[1], keepdims=0), net.const(6.0)), axis=0)
    return net.model((net.op("MatMul", y, net.weight(30, 8)), FLOAT, 2))


@graph("data-dependent")
def detections(net: Net) -> Any:
    boxes = net.op("Sigmoid", net.input("boxes", (1, 100, 4)))
    scores = net.op("Sigmoid", net.input("scores", (1, 3, 100)))
    kept = net.op("NonMaxSuppression", boxes, scores, net.ints(10), net.const([0.5]), net.const([0.4]))
    rows = net.op("Gather", kept, net.const(2, np.int64), axis=1)
    return net.model((net.op("Gather", net.op("Squeeze", boxes, net.ints(0)), rows), FLOAT, 2))


@graph("data-dependent")
def unique(net: Net) -> Any:
    x = net.input("ids", (40,), INT64)
    y = net.op("Unique", x, outputs=4)
    return net.model((net.op("Gather", net.weight(50, 16), y[0]), FLOAT, 2), (y[2], INT64, 1))


@graph("data-dependent")
def sliced_by_data(net: Net) -> Any:
    x = net.op("Exp", net.input("x", (40, 12)))
    end = net.op("Cast", net.op("Add", net.input("n", (1,), INT32), net.const([3], np.int32)), to=INT64)
    y = net.op("Slice", x, net.ints(0), end, net.ints(0))
    return net.model((net.op("Neg", net.op("MatMul", y, net.weight(12, 12))), FLOAT, 2))


@graph("data-dependent")
def largest(net: Net) -> Any:
    """TopK of a fixed number is no such case: its sizes are known."""
    values, rows = net.op("TopK", net.op("Exp", net.input("x", ("batch", 90))), net.ints(12), outputs=2, axis=1)
    return net.model((net.op("Neg", values), FLOAT, 2), (rows, INT64, 2))


@graph("data-dependent")
def shapes_of_shapes(net: Net) -> Any:
    x = net.op("Exp", net.input("x", ("batch", "length", 32)))
    shape = net.op("Shape", x)
    head = net.op("Slice", shape, net.ints(0), net.ints(2), net.ints(0))
    y = net.op("Reshape", x, net.op("Concat", head, net.ints(4, 8), axis=0))
    y = net.op("Expand", net.op("ReduceMean", y, axes=[1], keepdims=1), net.op("Shape", y))
    filled = net.op("ConstantOfShape", head, value=helper.make_tensor("v", FLOAT, [1], [1.0]))
    return net.model((net.op("Transpose", y, perm=[0, 2, 1, 3]), FLOAT, 4), (filled, FLOAT, 2))


# -- float -------------------------------------------------------------------------------------------------------------


@graph("float", 0, 1, 2, 3)
def cnn(net: Net, number: int) -> Any:
    x, channels = net.input("x", ("batch", 3, 48, 48)), 3
    for layer in range(3):
        width = net.size(1, 6, 8)
        x = net.op("Conv", x, net.weight(width, channels, 3, 3), net.weight(width), pads=[1, 1, 1, 1])
        if number in (1, 3):
            x = net.op("BatchNormalization", x, *norms(net, width))
        x = net.op("Clip", x, net.const(0.0), net.const(6.0)) if number == 2 else net.op("Relu", x)
        if layer < 2 or number == 3:
            x = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
        channels = width
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    return net.model((net.op("Gemm", x, net.weight(10, channels), net.weight(10), transB=1), FLOAT, 2))


@graph("float", 0, 1)
def unet(net: Net, number: int) -> Any:
    x = net.input("x", (1, 4, 32, 32))
    skip = net.op("Relu", net.op("Conv", x, net.weight(16, 4, 3, 3), pads=[1, 1, 1, 1]))
    y = net.op("MaxPool", skip, kernel_shape=[2, 2], strides=[2, 2])
    y = net.op("Relu", net.op("Conv", y, net.weight(32, 16, 3, 3), net.weight(32), pads=[1, 1, 1, 1]))
    if number:
        y = net.op("ConvTranspose", y, net.weight(32, 16, 2, 2), net.weight(16), strides=[2, 2])
    else:
        y = net.op("Resize", y, "", net.const([1, 1, 2, 2]), mode="nearest")
        y = net.op("Conv", y, net.weight(16, 32, 1, 1))
    y = net.op("Concat", y, skip, axis=1)
    return net.model((net.op("Conv", y, net.weight(2, 32, 1, 1), net.weight(2)), FLOAT, 4))


@graph("float", 0, 1, 2)
def mlp(net: Net, number: int) -> Any:
    width = net.size(20, 200)
    x = net.input("x", ("batch", width))
    for kind in ("Relu", "Tanh", "Sigmoid"):
        wide = net.size(20, 400)
        x, width = net.op(kind, net.op("Gemm", x, net.weight(wide, width), net.weight(wide), transB=1)), wide
    if number == 1:
        x = net.op("LayerNormalization", x, net.weight(width), net.weight(width))
    if number == 2:
        x = net.op("Softmax", x, axis=1)
    return net.model((x, FLOAT, 2))


# -- single operators --------------------------------------------------------------------------------------------------


def pair(
    make_node: Callable[[Net, str], Any], shape: Sequence[Any], rank: int, kind: int = FLOAT
) -> Callable[..., Any]:
    def build(net: Net) -> Any:
        return net.model((make_node(net, net.op("Exp", net.input("x", shape))), kind, rank), opset=18)

    return build


_SINGLE: dict[str, Callable[..., Any]] = {
    "where": pair(lambda n, x: n.op("Where", n.op("Greater", x, n.const(1.0)), x, n.const(0.0)), (30, 40), 2),
    "softmax_axis": pair(lambda n, x: n.op("Neg", n.op("Softmax", x, axis=1)), (6, 30, 40), 3),
    "instance_norm": pair(lambda n, x: n.op("InstanceNormalization", x, n.weight(8), n.weight(8)), (2, 8, 20, 20), 4),
    "einsum": pair(lambda n, x: n.op("Einsum", x, n.weight(4, 40, 20), equation="bij,bjk->bik"), (4, 30, 40), 3),
    "pads_and_tiles": pair(
        lambda n, x: n.op("Tile", n.op("Pad", x, n.ints(0, 1, 0, 2)), n.ints(2, 3)), (12, 40), 2),
    "reductions": pair(
        lambda n, x: n.op("Add", n.op("ReduceSum", x, n.ints(1)), n.op("ReduceL2", x, n.ints(0, 2))), (5, 30, 40), 3),
    "arg_max": pair(lambda n, x: n.op("ArgMax", n.op("Neg", x), axis=1), (5, 300, 7), 3, INT64),
    "depth_to_space": pair(lambda n, x: n.op("DepthToSpace", x, blocksize=2), (1, 32, 16, 16), 4),
    "conv_1d": pair(lambda n, x: n.op("Conv", x, n.weight(20, 12, 5), n.weight(20), dilations=[2]), (2, 12, 200), 3),
    "conv_3d": pair(lambda n, x: n.op("Conv", x, n.weight(8, 4, 3, 3, 3), pads=[1] * 6), (1, 4, 8, 16, 16), 5),
    "resize_linear": pair(
        lambda n, x: n.op("Resize", x, "", n.const([1, 1, 2, 2]), mode="linear"), (1, 6, 20, 20), 4),
    "resize_cubic": pair(
        lambda n, x: n.op("Resize", x, "", n.const([1, 1, 2, 2]), mode="cubic"), (1, 6, 20, 20), 4),
    "grouped": pair(lambda n, x: n.op("Conv", x, n.weight(24, 6, 3, 3), group=4, strides=[2, 2]), (1, 24, 30, 30), 4),
    "local_response": pair(lambda n, x: n.op("LRN", x, size=5), (1, 24, 14, 14), 4),
    "split_and_join": pair(
        lambda n, x: n.op("Concat", *reversed(n.op("Split", x, n.ints(10, 30), outputs=2, axis=1)), axis=1),
        (8, 40, 6), 3),
    "cumulative": pair(lambda n, x: n.op("CumSum", x, n.const(1, np.int64)), (8, 200), 2),
}  # fmt: skip
_LARGE = (96, 4096)  # 1.5 MiB: memory that a kernel takes for itself grows the arena


def _unary(*kinds: str, **attributes: Any) -> Callable[..., Any]:
    """A chain of operators of one input."""

    def build(net: Net) -> Any:
        value = net.input("x", _LARGE)
        for kind in kinds:
            value = net.op(kind, value, **attributes)
        return net.model((value, FLOAT, 2), opset=20)

    return build


def _binary(*kinds: str, result: int = FLOAT) -> Callable[..., Any]:
    """Operators of two inputs; the second is a row."""

    def build(net: Net) -> Any:
        x, row = net.op("Exp", net.input("x", _LARGE)), net.op("Exp", net.input("row", (1, _LARGE[1])))
        values = [net.op(kind, x, row) for kind in kinds]
        return net.model(*((value, result, 2) for value in values), opset=20)

    return build


def _reduced(*kinds: str, axis: int = 1) -> Callable[..., Any]:
    def build(net: Net) -> Any:
        x = net.op("Exp", net.input("x", (24, 128, 128)))
        indices = [kind.startswith("Arg") for kind in kinds]
        values = [
            net.op(kind, x, axis=axis) if index else net.op(kind, x, net.ints(axis), keepdims=1)
            for kind, index in zip(kinds, indices, strict=True)
        ]
        return net.model(*((v, INT64 if i else FLOAT, 3) for v, i in zip(values, indices, strict=True)), opset=20)

    return build


_PICTURE = (1, 24, 128, 128)


def _moved(net: Net, x: str) -> Any:
    y = net.op("Pad", net.op("Tile", x, net.ints(1, 2)), net.ints(0, 3, 2, 0))
    y = net.op("Slice", y, net.ints(1, 2), net.ints(90, 4000), net.ints(0, 1))
    y = net.op("Expand", net.op("Unsqueeze", y, net.ints(0)), net.ints(2, 1, 1))
    return net.op("Trilu", net.op("Transpose", y, perm=[0, 2, 1]))


def _indexed(net: Net, x: str) -> Any:
    rows = net.const(net.rng.integers(0, 90, (200,)), np.int64)
    y = net.op("Gather", x, rows)
    y = net.op("GatherND", y, net.const(net.rng.integers(0, 150, (100, 1)), np.int64))
    y = net.op("ScatterND", y, net.const([[3], [5]], np.int64), net.weight(2, _LARGE[1]))
    places = net.const(net.rng.integers(0, 90, (50, _LARGE[1])), np.int64)
    y = net.op("ScatterElements", y, places, net.weight(50, _LARGE[1]), axis=0)
    return net.op("GatherElements", y, places, axis=0)


def _pictures(net: Net, x: str) -> Any:
    y = net.op("DepthToSpace", net.op("SpaceToDepth", x, blocksize=2), blocksize=2)
    y = net.op("InstanceNormalization", y, net.weight(24), net.weight(24))
    y = net.op("LpPool", y, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y = net.op("AveragePool", y, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y = net.op("MaxPool", y, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    return net.op("PRelu", net.op("Resize", y, "", net.const([1, 1, 1.5, 1.5]), mode="nearest"), net.weight(24, 1, 1))


def _integers(net: Net, x: str) -> Any:
    y = net.op("QuantizeLinear", x, scale(net), net.const(3, np.uint8))
    y = net.op("BitwiseXor", net.op("BitwiseAnd", y, net.const(60, np.uint8)), net.op("BitwiseNot", y))
    y = net.op("BitShift", net.op("BitwiseOr", y, net.const(1, np.uint8)), net.const(1, np.uint8), direction="LEFT")
    return net.op("DequantizeLinear", y, scale(net), net.const(3, np.uint8))


def _truths(net: Net, x: str) -> Any:
    y = net.op("Or", net.op("IsNaN", x), net.op("And", net.op("IsInf", x), net.op("Less", x, net.const(2.0))))
    return net.op("Cast", net.op("Xor", net.op("Not", y), net.op("Equal", x, net.const(1.0))), to=FLOAT)


def _sorted(net: Net, x: str) -> Any:
    return net.op("TopK", net.op("CumSum", x, net.const(1, np.int64)), net.ints(2000), outputs=2, axis=1)[0]


def _normed(net: Net, x: str) -> Any:
    y = net.op("LayerNormalization", x, net.weight(_LARGE[1]), net.weight(_LARGE[1]))
    y = net.op("LpNormalization", y, axis=-1)
    return net.op("Hardmax", net.op("Dropout", y), axis=-1)


def _reversed(net: Net, x: str) -> Any:
    return net.op("ReverseSequence", x, net.const([5] * _LARGE[1], np.int64), time_axis=0, batch_axis=1)


def _transposed(net: Net, x: str) -> Any:
    return net.op("ConvTranspose", x, net.weight(24, 10, 3, 3), net.weight(20), group=2, strides=[2, 2])


_SINGLE |= {
    "unary_1": _unary(*"Abs Neg Floor Ceil Round Sqrt Reciprocal Exp Log Erf Sign Sin Cos Tan".split()),
    "unary_2": _unary(*"Tanh Asin Acos Atan Sinh Cosh Asinh Acosh Atanh".split()),
    "unary_3": _unary(*"Relu Sigmoid Elu Selu Softplus Softsign LeakyRelu HardSigmoid ThresholdedRelu Celu".split()),
    "unary_4": _unary(*"Gelu HardSwish Mish Shrink Identity Softmax LogSoftmax Clip".split()),
    "binary_1": _binary("Add", "Sub", "Mul", "Div", "Pow", "PRelu"),
    "binary_2": _binary("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", result=BOOL),
    "binary_3": _binary("Max", "Min", "Sum", "Mean"),
    "reduced_last": _reduced(*"ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2".split(), axis=2),
    "reduced_middle": _reduced(*"ReduceSum ReduceMean ReduceMax ReduceLogSum ReduceLogSumExp ArgMax ArgMin".split()),
    "reduced_first": _reduced(*"ReduceSum ReduceMean ReduceMin ReduceSumSquare ReduceL2 ArgMax".split(), axis=0),
    "moved": pair(_moved, _LARGE, 3),
    "indexed": pair(_indexed, _LARGE, 2),
    "pictures": pair(_pictures, _PICTURE, 4),
    "integers": pair(_integers, _LARGE, 2),
    "truths": pair(_truths, _LARGE, 2),
    "sorted": pair(_sorted, _LARGE, 2),
    "normed": pair(_normed, _LARGE, 2),
    "reversed": pair(_reversed, _LARGE, 2),
    "transposed": pair(_transposed, (1, 24, 40, 40), 4),
    "three": pair(lambda n, x: n.op("Max", x, n.const(0.1), n.op("Neg", x)), _LARGE, 2),
    "hardmax_axis": pair(lambda n, x: n.op("Hardmax", x, axis=0), _LARGE, 2),
    "conv_batch": pair(lambda n, x: n.op("Conv", x, n.weight(40, 24, 3, 3), strides=[2, 2]), (5, 24, 60, 60), 4),
    "conv_depthwise": pair(lambda n, x: n.op("Conv", x, n.weight(24, 1, 7, 7), group=24, pads=[3] * 4), _PICTURE, 4),
    "conv_multiplied": pair(
        lambda n, x: n.op("Conv", x, n.weight(48, 1, 7, 7), group=24, pads=[3] * 4, strides=[2, 2]), _PICTURE, 4),
    "conv_deep": pair(lambda n, x: n.op("Conv", x, n.weight(600, 64, 3, 3)), (1, 64, 14, 14), 4),
    "conv_pointwise": pair(lambda n, x: n.op("Conv", x, n.weight(7, 24, 1, 1)), _PICTURE, 4),
    "conv_one_row": pair(lambda n, x: n.op("Conv", x, n.weight(9, 1, 1, 40)), (2, 1, 30, 40), 4),
    "upsample_linear": pair(
        lambda n, x: n.op("Resize", x, "", "", n.ints(1, 24, 200, 300), mode="linear"), _PICTURE, 4),
}  # fmt: skip


@graph("operators", np.float64, np.int64)
def other_numbers(net: Net, dtype: Any) -> Any:
    """Doubles and integers, whose weights are not packed."""
    kind = TensorProto.DOUBLE if dtype is np.float64 else INT64
    x = net.op("MatMul", net.input("x", (300, 200), kind), net.weight(200, 400, dtype=dtype))
    if dtype is np.float64:
        x = net.op("Gemm", x, net.weight(400, 250, dtype=dtype), net.weight(250, dtype=dtype))
    x = net.op("Sub", net.op("Mul", x, x), net.op("ReduceSum", x, net.ints(0)))
    if dtype is np.float64:
        x = net.op("Tanh", net.op("Softmax", x, axis=0))
    x = net.op("Where", net.op("Greater", x, net.const(0, dtype)), x, net.const(1, dtype))
    return net.model((net.op("Concat", x, net.op("Neg", x), axis=0), kind, 2))


@graph("operators")
def rarer(net: Net) -> Any:
    x = net.op("Exp", net.input("x", _LARGE))
    count = net.op("Cast", net.op("Size", x), to=FLOAT)
    eye = net.op("EyeLike", net.op("Slice", x, net.ints(0), net.ints(96), net.ints(1)))
    steps = net.op("Range", net.const(0.0), net.const(4096.0), net.const(1.0))
    y = net.op("Mod", net.op("Add", x, steps), net.op("Div", count, net.const(7.0)), fmod=1)
    y = net.op("MatMul", eye, y)
    y = net.op("Reshape", y, net.ints(1, 96, 64, 64))
    y = net.op("Mul", y, net.op("GlobalMaxPool", y))
    square = net.op("ReduceMean", net.op("Pow", y, net.const(2.0)), axes=[-1])
    y = net.op("Div", y, net.op("Sqrt", net.op("Add", square, net.const(1e-5))))
    return net.model((net.op("Mul", y, net.weight(64)), FLOAT, 4))


@graph("QLinear", np.uint8, np.int8)
def qlinear_others(net: Net, dtype: Any) -> Any:
    step, zero = scale(net), net.const(1, dtype)
    x = net.op("QuantizeLinear", net.input("x", (2, 24, 96, 96)), step, zero)
    y = net.op("QLinearLeakyRelu", x, step, zero, step, zero, domain=MS, alpha=0.1)
    y = net.op("QLinearMul", x, step, zero, y, step, zero, step, zero, domain=MS)
    y = net.op("QLinearConcat", step, zero, x, step, zero, y, step, zero, domain=MS, axis=1)
    y = net.op("QLinearSoftmax", y, step, zero, step, zero, domain=MS, axis=-1, opset=13)
    y = net.op("QLinearAveragePool", y, step, zero, step, zero, domain=MS, kernel_shape=[3, 3])
    return net.model((net.op("DequantizeLinear", y, step, zero), FLOAT, 4))


@graph("operators", 8, 11)
def older_opsets(net: Net, opset: int) -> Any:
    """Operators in the form that they had."""
    x = net.op("Conv", net.input("x", ("batch", 3, 40, 40)), net.weight(16, 3, 3, 3), net.weight(16))
    x = net.op("Relu", net.op("BatchNormalization", x, *norms(net, 16)))
    if opset < 11:
        x = net.op("Upsample", x, mode="nearest", scales=[1.0, 1.0, 2.0, 2.0])
        x = net.op("Clip", x, min=0.0, max=6.0)
    x = net.op("Dropout", net.op("Softmax", net.op("Transpose", x, perm=[0, 2, 3, 1]), axis=2))
    x = net.op("ReduceMean", net.op("Pad", x, pads=[0, 1, 0, 0] * 2, mode="constant") if opset < 11 else x, axes=[1])
    x = net.op("Squeeze", net.op("Unsqueeze", x, axes=[0]), axes=[0])
    return net.model((net.op("Flatten", x), FLOAT, 2), opset=opset)


for _name, _build in _SINGLE.items():
    GRAPHS[_name] = ("operators", _build)
