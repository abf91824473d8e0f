"""Operators without a CPU kernel in their element type: refused where the ONNX Runtime refuses them."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from staticmem.errors import ModelFileError
from staticmem.ort.memory.session import predict_session
from staticmem.ort.options import SessionOptions

DOUBLE, BFLOAT16, FLOAT, HALF = TensorProto.DOUBLE, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.FLOAT16

TYPED = [("Erf", 1), ("MatMul", 2), ("Add", 2), ("Concat", 2)]


def one(op: str, dtype: int, inputs: int = 1, shape: tuple[int, ...] = (1, 2, 4, 4)) -> Any:
    names = [f"x{index}" for index in range(inputs)]
    values = [helper.make_tensor_value_info(name, dtype, shape) for name in names]
    y = helper.make_tensor_value_info("y", dtype, None)
    graph = helper.make_graph([helper.make_node(op, names, ["y"], name=f"/{op}")], "one", values, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def is_predicted(model: onnx.ModelProto, provider: str = "cpu") -> bool:
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in model.graph.input}
    try:
        predict_session(model, shapes, {}, SessionOptions(graph_optimization_level="disable", provider=provider))
    except ModelFileError as error:
        return error.code != "SM502"
    return True


def is_run(model: onnx.ModelProto) -> bool:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return "Could not find an implementation" not in str(error)
    return True


@pytest.mark.parametrize(
    ("op", "inputs", "dtype"),
    [
        *[(op, count, dtype) for op, count in TYPED for dtype in (DOUBLE, BFLOAT16, FLOAT, HALF)],
        *[("Conv", 2, dtype) for dtype in (DOUBLE, FLOAT, HALF)],  # opset 21 has none of bfloat16
    ],
)
def test_sessions_are_refused_as_by_the_runtime(op: str, inputs: int, dtype: int) -> None:
    model = one(op, dtype, inputs)
    if op == "Concat":
        model.graph.node[0].attribute.append(helper.make_attribute("axis", 1))
    assert is_predicted(model) == is_run(model)


def test_kernels_of_another_provider_are_its_own() -> None:
    assert is_predicted(one("Erf", DOUBLE), "cuda")


def test_the_message_names_the_node_and_the_type() -> None:
    with pytest.raises(ModelFileError) as error:
        predict_session(one("Erf", DOUBLE), {"x0": (1, 2, 4, 4)}, {}, SessionOptions())
    assert "Erf in float64" in error.value.what
    assert "'/Erf'" in error.value.why
