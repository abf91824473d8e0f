"""Contents of small tensors (shapes, sizes, indices) and the sizes that onnx's inference leaves open.

onnx propagates data through some operators only (not through Squeeze, Where, Mod or ScatterND), so exports with
symbolic sizes leave holes. Here every node is visited in order: contents are computed where all inputs are known,
and where a result has no sizes yet, onnx's inference of that one operator is asked again with the contents known.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from staticmem.frontends.onnx import isolation
from staticmem.frontends.onnx.convert import type_value
from staticmem.frontends.onnx.evaluate import EVALUATE, LIMIT, constant
from staticmem.ir import dtypes
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Net, Node

_NUMPY = {
    "bool": "bool", "int64": "int64", "int32": "int32", "float32": "float32", "float64": "float64",
    "float16": "float16", "uint8": "uint8", "int8": "int8", "int16": "int16",
}  # fmt: skip
FOLDED = frozenset((*EVALUATE, "Constant", "Shape", "Size"))  # what `_contents` knows
_CODES = {dtype.name: code for code, dtype in dtypes.ONNX_CODES.items()}


class Folder:
    """Evaluates size computations of a bound graph, in order. `model` is the ModelProto with the same nodes, or has its
    `graph` and `opset_import`."""

    def __init__(self, net: Net, model: Any) -> None:
        self.net, self.model = net, model
        self.versions = {o.domain: o.version for o in model.opset_import}

    def fold(self) -> None:
        """Fills `net.consts`, where all sizes are known."""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            for node in [node for node in self.net.nodes if node.op in FOLDED]:
                self.contents(node)

    def run(self) -> None:
        """Fills `net.consts` and the holes in `net.values`."""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            values = self.net.values
            for index, node in enumerate(self.net.nodes):
                if node.op in FOLDED:
                    self.contents(node)
                for name in node.outputs:
                    if not name:
                        continue
                    value = values.get(name)
                    if value is None or value.shape is None:
                        self._sizes(node, self.model.graph.node[index])
                        self.contents(node)
                        break

    def contents(self, node: Node) -> None:
        """Computes results whose inputs are known."""
        consts = self.net.consts
        op = node.op
        if node.domain or not node.outputs or node.outputs[0] in consts:
            return
        if op == "Constant":
            array = constant(node)
            if array is not None and array.size <= LIMIT:
                self._put(node.outputs[0], array)
            return
        if op in ("Shape", "Size"):
            self._shape(node)
            return
        function = EVALUATE.get(op)
        if function is None:
            return
        inputs = []
        for position, name in enumerate(node.inputs):
            array = consts.get(name) if name else None
            if array is None and name:
                if op != "CastLike" or position != 1:
                    return
                array = self._like(name)
                if array is None:
                    return
            inputs.append(array)
        try:
            result = function(node, inputs)
        except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, AttributeError):
            return
        results = result if isinstance(result, list) else [result]
        for name, array in zip(node.outputs, results, strict=False):
            if name and array.size <= LIMIT:
                self._put(name, np.asarray(array))

    def _like(self, name: str) -> Any:
        value = self.net.values.get(name)
        dtype = _NUMPY.get(value.dtype.name) if value is not None else None
        return np.empty(0, dtype) if dtype is not None else None

    def _shape(self, node: Node) -> None:
        value = self.net.values.get(node.inputs[0])
        if value is None or value.shape is None:
            return
        if node.op == "Size":
            self._put(node.outputs[0], np.asarray(value.numel, dtype=np.int64))
            return
        start, end = node.attrs.get("start", 0), node.attrs.get("end", len(value.shape))
        if isinstance(start, int) and isinstance(end, int):
            self._put(node.outputs[0], np.asarray(value.shape[start:end], dtype=np.int64))

    def _put(self, name: str, array: Any) -> None:
        self.net.consts[name] = array
        old = self.net.values.get(name)
        shape = tuple(int(s) for s in array.shape)
        if old is not None:
            if old.shape != shape:
                self.net.values[name] = Value(name, old.dtype, shape)
            return
        dtype = dtypes.ALL.get(array.dtype.name)
        if dtype is not None:
            self.net.values[name] = Value(name, dtype, shape)

    def _sizes(self, node: Node, proto: Any) -> None:
        """onnx's inference of one node, given what is known now."""
        import onnx

        if node.domain == "com.microsoft" or node.op == "SimplifiedLayerNormalization":
            from staticmem.ops.onnx import sized_results  # few files have such operators

            for result in sized_results(node, self.net.values):
                self.net.values.setdefault(result.name, result)
            return
        version = self.versions.get(proto.domain, self.versions.get("ai.onnx"))
        if version is None:
            return
        types: dict[str, Any] = {}
        data: dict[str, Any] = {}
        for name in proto.input:
            value = self.net.values.get(name)
            if name and value is not None:
                types[name] = onnx.helper.make_tensor_type_proto(_CODES.get(value.dtype.name, 1), value.shape)
            array = self.net.consts.get(name)
            if array is not None and array.dtype.name in _NUMPY:
                data[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(array))
        try:
            inferred = isolation.infer_node(proto, version, types, data, self.versions)
        except isolation.RefusedError:
            return
        for name, kind in inferred.items():
            value = type_value(name, kind)
            if value is not None and (value.shape is not None or name not in self.net.values):
                self.net.values[name] = value
