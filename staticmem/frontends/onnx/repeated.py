"""Sizes of the values of a large graph: onnx infers each node that differs from those before, once.

Large graphs repeat few nodes many times. What sizes a node gives follows from its operator and attributes, from the
types and sizes of its inputs and from the contents of small ones, so what is known of one node holds for all like it.
Inference of the whole graph does each of them anew, and writes the graph once more to hand the sizes over. Contents of
small results are worked out on the way, so that nothing is left open that `fold` would have to fill.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from staticmem.frontends.onnx import isolation
from staticmem.frontends.onnx.convert import type_value
from staticmem.frontends.onnx.fold import FOLDED, Folder
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Net, Node, Subgraph

if TYPE_CHECKING:
    import numpy as np

SHARE = 12  # of so many nodes one may be new: inferring one takes as long as inferring eight within a graph

# Operators whose results' sizes depend on no contents (https://onnx.ai/onnx/operators)
_PLAIN = frozenset({
    "Add", "AveragePool", "BatchNormalization", "Cast", "Concat", "Conv", "ConvTranspose", "Div", "Dropout", "Equal",
    "Erf", "Flatten", "Gather", "Gelu", "Gemm", "GlobalAveragePool", "Identity", "LayerNormalization", "MatMul",
    "MaxPool", "Mul", "Neg", "Pow", "Relu", "Shape", "Sigmoid", "Softmax", "Sqrt", "Sub", "Tanh", "Transpose",
})  # fmt: skip
_CODES = {dtype.name: code for code, dtype in dtypes.ONNX_CODES.items()}

Form = tuple[DType, tuple[int, ...]]


class Repeated:
    """Types and sizes of results, node by node in order.

    `values` starts with inputs and weights, `consts` with the contents of small ones; both are filled.
    """

    def __init__(
        self, model: Any, nodes: Sequence[Node], values: dict[str, Value], consts: dict[str, np.ndarray]
    ) -> None:
        """`model` has the versions of operators as `opset_import`."""
        self.nodes, self.values, self.consts = nodes, values, consts
        self.folder = Folder(Net(nodes, (), (), values, consts, frozenset()), model)
        self.forms: list[Form] = []
        self.numbers: dict[Form, int] = {}
        self.kinds: dict[str, int] = {"": -1}  # of values: the place of their form in `forms`

    def run(self) -> bool:
        """Whether all results are known now. Where not, inference of the whole graph may know more."""
        import numpy as np

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return self._run()

    def _run(self) -> bool:
        values, consts, kinds, forms = self.values, self.consts, self.kinds, self.forms
        for name, value in values.items():
            if not self._learn(name, value):
                return False
        most = len(self.nodes) // SHARE
        results_of: dict[Any, list[int]] = {}
        for node in self.nodes:
            op = node.op
            if op in FOLDED:
                self.folder.contents(node)
                if node.outputs and node.outputs[0] in consts:
                    if not all(name in values and self._learn(name, values[name]) for name in node.outputs if name):
                        return False
                    continue
            try:
                # attributes are one object for all nodes that have the same (Converter), and nodes outlive this
                inputs = [kinds[name] for name in node.inputs]
            except KeyError:
                return False
            read = () if op in _PLAIN else tuple([_contents(consts.get(name)) for name in node.inputs])
            key = (op, node.domain, id(node.attrs), len(node.outputs), read, *inputs)
            results = results_of.get(key)
            if results is None:
                inferred = self._inferred(node) if len(results_of) < most else None
                if inferred is None:
                    return False
                results = results_of[key] = inferred
            for name, number in zip(node.outputs, results, strict=True):
                if name:
                    kinds[name] = number
                    dtype, shape = forms[number]
                    values[name] = Value(name, dtype, shape)
        return True

    def _learn(self, name: str, value: Value) -> bool:
        if value.shape is None:
            return False
        self.kinds[name] = self._number((value.dtype, value.shape))
        return True

    def _number(self, form: Form) -> int:
        number = self.numbers.get(form)
        if number is None:
            number = self.numbers[form] = len(self.forms)
            self.forms.append(form)
        return number

    def _inferred(self, node: Node) -> list[int] | None:
        """What onnx infers of one node: forms of its results; that of an absent one is never used."""
        import onnx

        version = self.folder.versions.get(node.domain, self.folder.versions.get("ai.onnx"))
        if version is None or any(map(_nested, node.attrs.values())):
            return None
        tensor = onnx.numpy_helper.from_array
        types: dict[str, Any] = {}
        data: dict[str, Any] = {}
        try:
            attrs = {name: tensor(value) if hasattr(value, "dtype") else value for name, value in node.attrs.items()}
            proto = onnx.helper.make_node(node.op, node.inputs, node.outputs, domain=node.domain, **attrs)
            for name in filter(None, node.inputs):
                dtype, shape = self.forms[self.kinds[name]]
                types[name] = onnx.helper.make_tensor_type_proto(_CODES[dtype.name], shape)
                if name in self.consts:
                    data[name] = tensor(self.consts[name])
            inferred = isolation.infer_node(proto, version, types, data, self.folder.versions)
        except (RuntimeError, ValueError, TypeError, KeyError, OverflowError):  # `RefusedError` is a ValueError
            return None
        forms: list[int] = []
        for name in node.outputs:
            value = type_value(name, inferred[name]) if name in inferred else None
            if name and (value is None or value.shape is None):
                return None
            forms.append(-1 if value is None or value.shape is None else self._number((value.dtype, value.shape)))
        return forms


def _contents(array: np.ndarray | None) -> Any:
    return None if array is None else (array.dtype.str, array.shape, array.tobytes())


def _nested(value: Any) -> bool:
    return isinstance(value, Subgraph) or (isinstance(value, tuple) and any(map(_nested, value)))
