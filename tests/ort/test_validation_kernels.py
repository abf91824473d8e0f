"""The in-place table against the ONNX Runtime: one chain of operators, each behind a value that nothing else reads.

Without reuse of freed buffers a result that needs no memory of its own is one in its input's buffer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnxruntime_graphs import Net, image

from staticmem.ort.options import SessionOptions
from staticmem.ort.validation import validation
from staticmem.ort.validation.validation import validate_session
from staticmem.scenario.request import Request

OWN = (
    "Abs", "Neg", "Floor", "Ceil", "Round", "Sqrt", "Reciprocal", "Exp", "Sin", "Cos", "Atan", "Erf", "Sign", "Gelu",
    "HardSwish", "Mish", "Hardmax", "Dropout", "Transpose",
)  # fmt: skip
IN_PLACE = (
    "Relu", "Sigmoid", "Tanh", "Elu", "LeakyRelu", "Selu", "Softplus", "Softsign", "HardSigmoid", "ThresholdedRelu",
    "Celu", "Shrink", "Softmax", "LogSoftmax", "Identity", "Trilu", "Flatten",
)  # fmt: skip


@pytest.mark.skipif(not validation.installed(), reason="onnxruntime is not installed: pip install onnxruntime")
def test_the_table_of_kernels(tmp_path: Path) -> None:
    net = Net()
    value = "x"
    for kind in (*OWN, *IN_PLACE):
        value = net.op(kind, net.op("Exp", value))
    for kind, inputs in (
        ("Clip", (net.scalar(0.0, np.float32), net.scalar(1.0, np.float32))),
        ("Add", (net.scalar(0.5, np.float32),)),
        ("Pow", (net.scalar(0.5, np.float32),)),
        ("PRelu", (net.weight(1, 48),)),
        ("LayerNormalization", (net.weight(48),)),
        ("CumSum", (net.scalar(1, np.int64),)),
        ("Expand", (net.ints(48, 48),)),
        ("Slice", (net.ints(0), net.ints(48))),
    ):
        value = net.op(kind, net.op("Exp", value), *inputs)
    for target in (TensorProto.INT32, TensorProto.DOUBLE, TensorProto.FLOAT):
        value = net.op("Cast", net.op("Abs", value), to=target)
    path = tmp_path / "kernels.onnx"
    onnx.save(net.model([image(48, 48)], [(value, TensorProto.FLOAT, 2)], opset=20), path)
    options = SessionOptions(
        graph_optimization_level="disable", enable_mem_reuse=False, enable_mem_pattern=False, intra_op_num_threads=1
    )
    record = validate_session(str(path), Request(), options, "cpu")
    assert record.verdict == "exact", (record.explanations, record.nodes.worst)
