"""Files with the habits of other converters: no metadata, no module paths, layouts of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper
from onnx_models import ints, model, node, scalar, value, weight

import staticmem
from staticmem.frontends.onnx.decode import converted_from
from staticmem.report.model import Report

MS = "com.microsoft"
BATCH = 8


def tf2onnx(prefix: str = "StatefulPartitionedCall/model/") -> Any:
    """NHWC at the boundary with a Transpose, weights by the names of variables, a bias that is reshaped first."""
    p = prefix
    nodes = [
        node("Transpose", ["input_1"], [f"{p}conv2d/Conv2D__6:0"], name=f"{p}conv2d/Conv2D__6", perm=[0, 3, 1, 2]),
        node(
            "Conv", [f"{p}conv2d/Conv2D__6:0", f"{p}conv2d/Conv2D/ReadVariableOp:0"], [f"{p}conv2d/Conv2D:0"],
            name=f"{p}conv2d/Conv2D", strides=[2, 2], auto_pad="SAME_UPPER", kernel_shape=[3, 3],
        ),
        node(
            "BatchNormalization", [f"{p}conv2d/Conv2D:0", *(f"{p}bn/{k}:0" for k in ("gamma", "beta", "mean", "var"))],
            [f"{p}bn/FusedBatchNormV3:0"], name=f"{p}bn/FusedBatchNormV3", epsilon=1e-3,
        ),
        node("Relu", [f"{p}bn/FusedBatchNormV3:0"], [f"{p}re_lu/Relu:0"], name=f"{p}re_lu/Relu"),
        node("Transpose", [f"{p}re_lu/Relu:0"], [f"{p}Relu__7:0"], name=f"{p}re_lu/Relu__7", perm=[0, 2, 3, 1]),
        node("ReduceMean", [f"{p}Relu__7:0"], [f"{p}Mean:0"], name=f"{p}pool/Mean", axes=[1, 2], keepdims=0),
        node("MatMul", [f"{p}Mean:0", f"{p}dense/MatMul/ReadVariableOp:0"], [f"{p}dense:0"], name=f"{p}dense/MatMul"),
        node("Add", [f"{p}dense:0", f"{p}dense/BiasAdd/ReadVariableOp:0"], ["Identity:0"], name=f"{p}dense/BiasAdd"),
    ]  # fmt: skip
    tensors = [
        weight(f"{p}conv2d/Conv2D/ReadVariableOp:0", 16, 3, 3, 3),
        *(weight(f"{p}bn/{k}:0", 16) for k in ("gamma", "beta", "mean", "var")),
        weight(f"{p}dense/MatMul/ReadVariableOp:0", 16, 10),
        weight(f"{p}dense/BiasAdd/ReadVariableOp:0", 10),
    ]
    made = model(nodes, [value("input_1", ["unk__4", 32, 32, 3])], ["Identity:0"], tensors)
    made.producer_name, made.producer_version = "tf2onnx", "1.16.1"
    return made


def keras2onnx() -> Any:
    """Layers' names as prefixes, a domain of its own, biases inside of Conv."""
    nodes = [
        node("Transpose", ["input_1"], ["adjusted_input1"], name="Transpose1", perm=[0, 3, 1, 2]),
        node("Conv", ["adjusted_input1", "conv2d/kernel:0", "conv2d/bias:0"], ["convolution_output1"], name="conv2d",
             kernel_shape=[3, 3], auto_pad="VALID"),
        node("Relu", ["convolution_output1"], ["conv2d/Relu:0"], name="Relu"),
        node("MaxPool", ["conv2d/Relu:0"], ["pooling_output"], name="max_pooling2d", kernel_shape=[2, 2],
             strides=[2, 2]),
        node("Transpose", ["pooling_output"], ["max_pooling2d/MaxPool:0"], name="Transpose3", perm=[0, 2, 3, 1]),
        node("Reshape", ["max_pooling2d/MaxPool:0", "const_shape"], ["flatten/Reshape:0"], name="Reshape"),
        node("Gemm", ["flatten/Reshape:0", "dense/kernel:0", "dense/bias:0"], ["dense"], name="dense"),
    ]  # fmt: skip
    tensors = [
        weight("conv2d/kernel:0", 16, 3, 3, 3), weight("conv2d/bias:0", 16),
        weight("dense/kernel:0", 15 * 15 * 16, 10), weight("dense/bias:0", 10), ints("const_shape", -1, 15 * 15 * 16),
    ]  # fmt: skip
    made = model(nodes, [value("input_1", ["N", 32, 32, 3])], ["dense"], tensors)
    made.producer_name = "keras2onnx"
    return made


def paddle2onnx() -> Any:
    """Tensors by the names of Paddle's parameters, nodes by number, NCHW, a product and its bias apart."""
    nodes = [
        node("Conv", ["x", "conv2d_0.w_0"], ["conv2d_0.tmp_0"], name="p2o.Conv.0", kernel_shape=[3, 3],
             pads=[1, 1, 1, 1], strides=[2, 2], dilations=[1, 1], group=1),
        node("BatchNormalization", ["conv2d_0.tmp_0", "batch_norm_0.w_0", "batch_norm_0.b_0", "batch_norm_0.w_1",
             "batch_norm_0.w_2"], ["batch_norm_0.tmp_2"], name="p2o.BatchNormalization.0"),
        node("Clip", ["batch_norm_0.tmp_2", "p2o.helper.constant.0", "p2o.helper.constant.1"], ["relu6_0.tmp_0"],
             name="p2o.Clip.0"),
        node("GlobalAveragePool", ["relu6_0.tmp_0"], ["pool2d_0.tmp_0"], name="p2o.GlobalAveragePool.0"),
        node("Flatten", ["pool2d_0.tmp_0"], ["flatten_0.tmp_0"], name="p2o.Flatten.0"),
        node("MatMul", ["flatten_0.tmp_0", "linear_0.w_0"], ["linear_0.tmp_0"], name="p2o.MatMul.0"),
        node("Add", ["linear_0.tmp_0", "linear_0.b_0"], ["linear_0.tmp_1"], name="p2o.Add.0"),
    ]  # fmt: skip
    tensors = [
        weight("conv2d_0.w_0", 16, 3, 3, 3), *(weight(f"batch_norm_0.{k}", 16) for k in ("w_0", "b_0", "w_1", "w_2")),
        weight("linear_0.w_0", 16, 10), weight("linear_0.b_0", 10),
        scalar("p2o.helper.constant.0", 0.0), scalar("p2o.helper.constant.1", 6.0),
    ]  # fmt: skip
    made = model(nodes, [value("x", [-1, 3, 32, 32])], ["linear_0.tmp_1"], tensors)
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "x_dim_0"
    made.producer_name = "PaddlePaddle"
    return made


CONVERTERS = {"tf2onnx": tf2onnx, "keras2onnx": keras2onnx, "paddle2onnx": paddle2onnx}
# bytes of float32: the parameters, and per sample what the convolution and the activation make
PARAMETERS = {
    "tf2onnx": 432 + 2 * 16 + 160 + 10,
    "keras2onnx": 432 + 16 + 36000 + 10,
    "paddle2onnx": 432 + 32 + 160 + 10,
}
PLANE = {"tf2onnx": 16 * 16 * 16, "keras2onnx": 16 * 30 * 30, "paddle2onnx": 16 * 16 * 16}


def analyzed(proto: Any, folder: Path, **words: Any) -> Report:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return staticmem.analyze(str(path), batch=BATCH, **words)


def codes(report: Report) -> set[str]:
    return {note.code for note in (*report.notes, *report.assumptions, *report.warnings)}


@pytest.mark.parametrize("converter", CONVERTERS)
def test_inference(converter: str, tmp_path: Path) -> None:
    """Two planes are alive where one op reads one and makes the other; with the input there may be three."""
    report = analyzed(CONVERTERS[converter](), tmp_path, mode="infer")
    plane, owned = 4 * BATCH * PLANE[converter], 4 * PARAMETERS[converter]
    assert owned + plane < report.peak.live_bytes < owned + 3 * plane + 8192
    assert "SM270" in codes(report)
    assert not codes(report) & {"SM201", "SM257"}, "everything has a meaning"


@pytest.mark.parametrize("converter", CONVERTERS)
def test_training(converter: str, tmp_path: Path) -> None:
    """Parameters, momentum and gradients; the convolution's result, the activation's, their gradients, and the input,
    which padding may copy."""
    report = analyzed(CONVERTERS[converter](), tmp_path, optimizer="sgd", momentum=0.9, loss="cross-entropy")
    plane, owned = 4 * BATCH * PLANE[converter], 4 * PARAMETERS[converter]
    assert report.parameters.count == PARAMETERS[converter]
    assert 2 * owned + 2 * plane < report.peak.live_bytes < 3 * owned + 4 * plane + 2 * 4 * BATCH * 3 * 33 * 33 + 16384
    assert "SM202" not in codes(report), "something is trained"
    assert not codes(report) & {"SM201", "SM257"}


def test_batch_scales(tmp_path: Path) -> None:
    small = analyzed(tf2onnx(), tmp_path, mode="infer").peak.live_bytes
    path = tmp_path / "model.onnx"
    large = staticmem.analyze(str(path), batch=2 * BATCH, mode="infer").peak.live_bytes
    fixed = 4 * PARAMETERS["tf2onnx"]
    assert 1.9 < (large - fixed) / (small - fixed) < 2.1


@pytest.mark.parametrize(
    ("producer", "origin"),
    [("tf2onnx 1.16.1", "TensorFlow"), ("PaddlePaddle ", "PaddlePaddle"), ("pytorch 2.13.0", ""), ("", ""),
     ("onnx.quantize 0.1.0", "")],
)  # fmt: skip
def test_producers(producer: str, origin: str) -> None:
    assert converted_from(producer) == origin


# -- operators on integers --------------------------------------------------------------------------------------------


def quantized() -> Any:
    """What onnxruntime.quantization writes in its QOperator format, joined in ways that need sizes of its own."""
    y = ["ys", "yz"]

    def ms(op: str, inputs: list[str], outputs: list[str], **attrs: Any) -> Any:
        return onnx(op, inputs, outputs, domain=MS, **attrs)

    def onnx(op: str, inputs: list[str], outputs: list[str], **attrs: Any) -> Any:
        return node(op, inputs, outputs, name=f"{op}_{outputs[0]}_quant", **attrs)

    nodes = [
        onnx("QuantizeLinear", ["x", "ys", "yz"], ["x_quantized"]),
        onnx("QLinearConv", ["x_quantized", *y, "w", "ws", "wz", *y, "b"], ["c"], pads=[1] * 4, kernel_shape=[3, 3]),
        onnx("QLinearConv", ["c", *y, "w2", "ws", "wz", *y], ["d"], pads=[1] * 4, kernel_shape=[3, 3]),
        ms("QLinearAdd", ["c", *y, "d", *y, *y], ["s"]),
        ms("QLinearConcat", [*y, "c", *y, "s", *y], ["j"], axis=1),
        ms("QLinearGlobalAveragePool", ["j", *y, *y], ["p"], channels_last=0),
        onnx("Flatten", ["p"], ["f"]),
        onnx("QLinearMatMul", ["f", *y, "fc", "ws", "wz", *y], ["m"]),
        ms("QGemm", ["m", *y, "g", "ws", "wz", "gb", *y], ["q"], transB=1),
        onnx("DequantizeLinear", ["q", *y], ["y"]),
    ]
    int8, int32 = TensorProto.INT8, TensorProto.INT32
    tensors = [
        *(weight(name) for name in ("ys", "ws")), weight("yz", dtype=TensorProto.UINT8), weight("wz", dtype=int8),
        weight("w", 16, 3, 3, 3, dtype=int8), weight("b", 16, dtype=int32), weight("w2", 16, 16, 3, 3, dtype=int8),
        weight("fc", 32, 64, dtype=int8), weight("g", 10, 64, dtype=int8), weight("gb", 10, dtype=int32),
    ]  # fmt: skip
    made = model(nodes, [value("x", ["N", 3, 32, 32])], ["y"], tensors)
    made.opset_import.append(helper.make_opsetid(MS, 1))
    return made


def test_integers_in_inference(tmp_path: Path) -> None:
    """At the join `c`, `s` and `j` are alive: 16, 16 and 32 planes of a byte, beside the input in float32."""
    report = analyzed(quantized(), tmp_path, mode="infer")
    planes = BATCH * 32 * 32
    owned = 16 * 27 + 16 * 144 + 32 * 64 + 64 * 10 + 4 * 26
    at_join = (16 + 16 + 32) * planes + 4 * 3 * planes
    assert at_join + owned < report.peak.live_bytes <= at_join + owned + 16 * 512
    assert "SM269" in codes(report)
    assert not codes(report) & {"SM201", "SM257"}


def test_integers_in_training(tmp_path: Path) -> None:
    report = analyzed(quantized(), tmp_path, optimizer="sgd", loss="cross-entropy")
    assert {"SM202", "SM269"} <= codes(report), "it is said that nothing is trained"
