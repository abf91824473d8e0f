"""Sizes of com.microsoft's operators: each entry of the table against the ONNX Runtime, where it has a CPU kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from staticmem.frontends.onnx.convert import Converter
from staticmem.ir import dtypes
from staticmem.ir.graph import Value
from staticmem.ops import onnx as table
from staticmem.ops.registry import load_until

F, H, U8, I8, I32, I64 = np.float32, np.float16, np.uint8, np.int8, np.int32, np.int64


def f(*shape: int) -> Any:
    return np.ones(shape, F)


def u(*shape: int, kind: Any = U8) -> Any:
    return np.ones(shape, kind)


ONE, ZERO, IZERO = f(), u(), u(kind=I8)
QX = {"x": u(2, 3, 8, 8), "s": ONE, "z": ZERO}
# operator: inputs in order, names of results, attributes; the sizes of those that the runtime has no kernel for
Case = tuple[dict[str, Any], int, dict[str, Any]]
CASES: dict[str, Case] = {
    "Attention": ({"x": f(2, 6, 32), "w": f(32, 96), "b": f(96)}, 1, {"num_heads": 4}),
    "Attention widths": (
        {"x": f(2, 6, 32), "w": f(32, 80), "b": f(80)}, 1, {"num_heads": 4, "qkv_hidden_sizes": [32, 32, 16]},
    ),
    "BiasGelu": ({"x": f(2, 6, 32), "b": f(32)}, 1, {}),
    "FastGelu": ({"x": f(2, 6, 32), "b": f(32)}, 1, {}),
    "Gelu": ({"x": f(2, 6, 32)}, 1, {}),
    "QuickGelu": ({"x": f(2, 6, 32)}, 1, {}),
    "FusedConv": ({"x": f(2, 3, 9, 9), "w": f(5, 3, 3, 3), "b": f(5)}, 1, {"strides": [2, 2], "activation": "Relu"}),
    "FusedConv same": ({"x": f(2, 3, 9, 9), "w": f(5, 3, 3, 3)}, 1, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "FusedConv wide": ({"x": f(2, 3, 9, 9), "w": f(5, 3, 3, 3)}, 1, {"dilations": [2, 2], "pads": [1, 0, 1, 0]}),
    "FusedGemm": ({"a": f(4, 6), "b": f(4, 5), "c": f(5)}, 1, {"transA": 1, "activation": "Relu"}),
    "FusedMatMul": ({"a": f(2, 6, 8), "b": f(2, 7, 8)}, 1, {"transB": 1}),
    "FusedMatMul broadcast": ({"a": f(1, 3, 6, 8), "b": f(2, 1, 8, 7)}, 1, {}),
    "TransposeMatMul": ({"a": f(2, 8, 6), "b": f(2, 8, 7)}, 1, {"transA": 1}),
    "EmbedLayerNormalization": (
        {"i": u(2, 6, kind=I32), "s": u(2, 6, kind=I32), "we": f(50, 32), "pe": f(16, 32), "se": f(2, 32),
         "g": f(32), "b": f(32)}, 2, {},
    ),
    "GroupQueryAttention": (
        {"q": f(2, 6, 32), "k": f(2, 6, 16), "v": f(2, 6, 16), "pk": f(2, 2, 0, 8), "pv": f(2, 2, 0, 8),
         "n": np.full((2,), 5, I32), "t": np.array(6, I32)}, 3, {"num_heads": 4, "kv_num_heads": 2},
    ),
    "MultiHeadAttention": ({"q": f(2, 6, 32), "k": f(2, 9, 32), "v": f(2, 9, 16)}, 1, {"num_heads": 4}),
    "Inverse": ({"x": np.stack([np.eye(4, dtype=F)] * 3)}, 1, {}),
    "MatMulNBits": ({"x": f(2, 6, 32), "w": u(48, 1, 16), "s": f(48, 1)}, 1,
                    {"K": 32, "N": 48, "bits": 4, "block_size": 32}),
    "QuantizeLinear": ({"x": f(2, 6), "s": ONE, "z": ZERO}, 1, {}),
    "DequantizeLinear": ({"x": u(2, 6), "s": ONE, "z": ZERO}, 1, {}),
    "MatMulIntegerToFloat": ({"a": u(2, 6, 8), "b": u(8, 7), "as": ONE, "bs": ONE}, 1, {}),
    "DynamicQuantizeMatMul": ({"a": f(2, 6, 8), "b": u(8, 7), "bs": ONE}, 1, {}),
    "DynamicQuantizeLSTM": (
        {"x": f(5, 2, 8), "w": u(2, 8, 64), "r": u(2, 16, 64), "b": f(2, 128), "": None, "h": f(2, 2, 16),
         "c": f(2, 2, 16), " ": None, "ws": f(2), "wz": u(2), "rs": f(2), "rz": u(2)}, 3,
        {"hidden_size": 16, "direction": "bidirectional"},
    ),
    "QAttention": (
        {"x": u(2, 6, 32), "w": u(32, 96), "b": f(96), "xs": ONE, "ws": ONE, "": None, "xz": ZERO, "wz": ZERO}, 1,
        {"num_heads": 4},
    ),
    "QGemm": ({"a": u(4, 6), "as": ONE, "az": ZERO, "b": u(6, 5), "bs": ONE, "bz": ZERO}, 1, {}),
    "QLinearAdd": ({"a": u(2, 6), "as": ONE, "az": ZERO, "b": u(6), "bs": ONE, "bz": ZERO, "cs": ONE, "cz": ZERO},
                   1, {}),
    "QLinearMul": ({"a": u(1, 6), "as": ONE, "az": ZERO, "b": u(4, 1), "bs": ONE, "bz": ZERO, "cs": ONE, "cz": ZERO},
                   1, {}),
    "QLinearAveragePool": ({**QX, "ys": ONE, "yz": ZERO}, 1, {"kernel_shape": [3, 3], "strides": [2, 2]}),
    "QLinearGlobalAveragePool": ({**QX, "ys": ONE, "yz": ZERO}, 1, {"channels_last": 0}),
    "QLinearConcat": ({"ys": ONE, "yz": ZERO, "a": u(2, 3), "as": ONE, "az": ZERO, "b": u(2, 4), "bs": ONE, "bz": ZERO},
                      1, {"axis": 1}),
    "QLinearLeakyRelu": ({**QX, "ys": ONE, "yz": ZERO}, 1, {}),
    "QLinearSigmoid": ({**QX, "ys": ONE, "yz": ZERO}, 1, {}),
    "QLinearSoftmax": ({**QX, "ys": ONE, "yz": ZERO}, 1, {"opset": 13}),
    "QLinearWhere": (
        {"c": np.ones((2, 6), bool), "a": u(2, 6), "as": ONE, "az": ZERO, "b": u(2, 6), "bs": ONE, "bz": ZERO,
         "ys": ONE, "yz": ZERO}, 1, {},
    ),
    "RotaryEmbedding": ({"x": f(2, 6, 32), "p": np.zeros((2, 6), I64), "c": f(16, 4), "s": f(16, 4)}, 1,
                        {"num_heads": 4}),
    "SkipLayerNormalization": ({"x": f(2, 6, 32), "k": f(2, 6, 32), "g": f(32), "b": f(32)}, 1, {}),
    "SkipSimplifiedLayerNormalization": ({"x": f(2, 6, 32), "k": f(2, 6, 32), "g": f(32)}, 1, {}),
    "Trilu": ({"x": f(2, 6, 6)}, 1, {}),
    "MoE": ({"x": f(6, 8), "r": f(6, 4), "w1": f(4, 16, 8), "": None, "w2": f(4, 8, 16)}, 1,
            {"k": 2, "activation_type": "relu"}),
}  # fmt: skip
# of operators without a kernel on the CPU, from onnxruntime/docs/ContribOperators.md
DEFINED: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, ...]]]] = {
    "BiasAdd": ({"x": f(2, 6, 32), "b": f(32), "k": f(2, 6, 32)}, {}, [(2, 6, 32)]),
    "BiasDropout": ({"x": f(2, 6, 32), "b": f(32)}, {}, [(2, 6, 32)]),
    "BiasSoftmax": ({"x": f(2, 6, 32), "b": f(1, 6, 32)}, {"axis": 2, "is_inner_broadcast": 0}, [(2, 6, 32)]),
    "BiasSplitGelu": ({"x": f(2, 6, 32), "b": f(32)}, {}, [(2, 6, 16)]),
    "GroupNorm": ({"x": f(2, 8, 8, 32), "g": f(32), "b": f(32)}, {"groups": 4}, [(2, 8, 8, 32)]),
    "LayerNormalization": ({"x": f(2, 6, 32), "g": f(32)}, {}, [(2, 6, 32)]),
    "NhwcFusedConv": ({"x": f(2, 9, 9, 3), "w": f(5, 3, 3, 3)}, {"strides": [2, 2]}, [(2, 4, 4, 5)]),
    "QLinearReduceMean": ({**QX, "ys": ONE, "yz": ZERO}, {"axes": [2, 3], "keepdims": 0}, [(2, 3)]),
    "QMoE": ({"x": f(6, 8), "r": f(6, 4)}, {"k": 2}, [(6, 8)]),
    "RMSNormalization": ({"x": f(2, 6, 32), "g": f(32)}, {}, [(2, 6, 32)]),
    "SimplifiedLayerNormalization": ({"x": f(2, 6, 32), "g": f(32)}, {}, [(2, 6, 32)]),
}  # fmt: skip


def built(case: str, arrays: dict[str, Any], count: int, attrs: dict[str, Any]) -> Any:
    names = [name.strip() for name in arrays]
    proto = helper.make_node(case.split()[0], names, [f"y{i}" for i in range(count)], "n", domain="com.microsoft")
    proto.attribute.extend(helper.make_attribute(key, value) for key, value in attrs.items())
    return proto


def found(proto: Any, arrays: dict[str, Any]) -> dict[str, Value]:
    values = {
        name: Value(name, dtypes.ONNX_CODES[helper.np_dtype_to_tensor_dtype(array.dtype)], array.shape)
        for name, array in arrays.items()
        if array is not None
    }
    return {value.name: value for value in table.sized_results(Converter().node(proto), values)}


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_those_of_the_runtime(case: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    arrays, count, attrs = CASES[case]
    proto = built(case, arrays, count, attrs)
    # weights of quantised operators have to be constants
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items() if a is not None]
    graph = helper.make_graph([proto], "g", [], [helper.make_empty_tensor_value_info(n) for n in proto.output], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    sized = found(proto, arrays)
    for name, array in zip(proto.output, session.run(None, {}), strict=True):
        if name in sized:
            assert (sized[name].shape, sized[name].dtype.itemsize) == (array.shape, array.dtype.itemsize), name
    assert proto.output[0] in sized


@pytest.mark.parametrize("case", DEFINED)
def test_sizes_are_those_of_the_definition(case: str) -> None:
    arrays, attrs, shapes = DEFINED[case]
    sized = found(built(case, arrays, len(shapes), attrs), arrays)
    assert [value.shape for value in sized.values()] == shapes


def test_every_entry_has_a_case() -> None:
    load_until(lambda: False)
    assert set(table.SIZES) - {case.split()[0] for case in (*CASES, *DEFINED)} == set()
