"""Small ONNX models for tests, made with onnx.helper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from staticmem.frontends.onnx import open_onnx
from staticmem.ir.graph import Graph, Ref
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind

Shape = Sequence[int | str | None]


def value(name: str, shape: Shape, dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, list(shape))


def weight(name: str, *shape: int, dtype: int = TensorProto.FLOAT) -> Any:
    """An initializer of zeros."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    return onnx.numpy_helper.from_array(np.zeros(shape, kind), name)


def ints(name: str, *numbers: int) -> Any:
    return onnx.numpy_helper.from_array(np.array(numbers, np.int64), name)


def scalar(name: str, number: float | int | bool) -> Any:
    kind = np.bool_ if isinstance(number, bool) else np.int64 if isinstance(number, int) else np.float32
    return onnx.numpy_helper.from_array(np.array(number, kind), name)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> Any:
    name = attrs.pop("name", f"/{outputs[0] if outputs else op}/{op}")
    return helper.make_node(op, list(inputs), list(outputs), name=name, **attrs)


def fx(proto: Any, text: str, scopes: Sequence[str] = (), classes: Sequence[str] = ()) -> Any:
    """Adds the metadata of the dynamo exporter to a node."""
    for key, content in (
        ("fx_node", text),
        ("name_scopes", repr(list(scopes))),
        ("class_hierarchy", repr(list(classes))),
    ):
        entry = proto.metadata_props.add()
        entry.key, entry.value = f"pkg.torch.onnx.{key}", content
    return proto


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[str],
    tensors: Sequence[Any] = (),
    producer: str = "pytorch",
    opset: int = 17,
) -> Any:
    graph = helper.make_graph(
        list(nodes), "g", list(inputs), [helper.make_empty_tensor_value_info(o) for o in outputs], list(tensors)
    )
    for out in graph.output:
        out.type.tensor_type.elem_type = TensorProto.FLOAT
    return helper.make_model(graph, producer_name=producer, opset_imports=[helper.make_opsetid("", opset)])


def bound(proto: Any, folder: Path, batch: int | None = None, **dims: int) -> Graph:
    """The graph of a model that went through a file."""
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    opened = open_onnx(str(path))
    return bind(opened, resolve(opened, batch=batch, dims=dims))


def targets(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops]


def names(graph: Graph, index: int) -> list[str]:
    """Tensors that an op reads."""
    return [a.name for a in graph.ops[index].args if isinstance(a, Ref)]
