"""Which tensors of a file the model owns: parameters, buffers, and constants that belong to neither.

PyTorch's exporters say it (`InputSpec.kind`). Elsewhere it follows from use: what BatchNormalization reads as mean and
variance is a buffer, integers do not learn, and a floating-point tensor in the place of a weight is a parameter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from staticmem.frontends.onnx.convert import array, sizes_of, tensor_value
from staticmem.frontends.onnx.metadata import Signature
from staticmem.ir import dtypes
from staticmem.ir.graph import Note, Parameter, Value
from staticmem.ir.onnx_graph import Node

# operator -> positions of inputs that hold weights (onnx/docs/Operators.md)
ROLES: Mapping[str, tuple[int, ...]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "ConvInteger": (1,), "QLinearConv": (3, 8), "DeformConv": (1, 3),
    "Gemm": (0, 1, 2), "MatMul": (0, 1), "MatMulInteger": (1,), "QLinearMatMul": (3,), "Einsum": (0, 1),
    "BatchNormalization": (1, 2), "LayerNormalization": (1, 2), "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2), "SimplifiedLayerNormalization": (1,), "RMSNormalization": (1,),
    "SkipLayerNormalization": (2, 3, 4), "SkipSimplifiedLayerNormalization": (2, 3),
    "Gather": (0,), "PRelu": (1,), "LSTM": (1, 2, 3), "GRU": (1, 2, 3), "RNN": (1, 2, 3),
    "Attention": (1, 2), "EmbedLayerNormalization": (2, 3, 4, 5, 6), "FusedMatMul": (1,), "BiasGelu": (1,),
    "MatMulNBits": (1, 2, 3), "Transpose": (0,), "DequantizeLinear": (0,),
}  # fmt: skip
# operator -> positions of inputs that hold numbers of the operator itself, whatever their names look like
NUMBERS: Mapping[str, tuple[int, ...]] = {
    "Resize": (1, 2), "Upsample": (1,), "Clip": (1, 2), "Pad": (2,), "Dropout": (1,), "OneHot": (2,),
}  # fmt: skip
TABLE = 256  # elements: integer constants of this size are tables, smaller ones are sizes and axes
LARGE = 1024  # elements: smaller tensors under generated names are numbers of operators
_GENERATED = re.compile(r"onnx::|/|val_\d|_val_|const|Constant|\d+$|_to_copy|t_\d|initializer_\d", re.IGNORECASE)
# words of names that buffers have and parameters do not: masks of attention, tables of frequencies and positions
_OF_BUFFERS = frozenset("mask freq freqs cos sin cached anchors grid".split())
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+$")


@dataclass(slots=True)
class Weights:
    """Tensors of a file by what they are. `contents` has the small ones."""

    parameters: dict[str, Value] = field(default_factory=dict)
    buffers: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, Value] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    initializers: dict[str, Value] = field(default_factory=dict)  # those among them, in the order of the file

    @property
    def all(self) -> dict[str, Value]:
        return {**self.parameters, **self.buffers, **self.constants}


def collect(graph: Any, nodes: Sequence[Node], signature: Signature) -> Weights:
    """Sorts initializers, weight inputs and constant nodes of a GraphProto into parameters, buffers and constants."""
    weights, kinds = Weights(), signature.kinds
    roles, stats = roles_of(nodes)
    names = {name: name for name in roles}  # one object for each
    numbers = {n for node in nodes if node.op in NUMBERS for p in NUMBERS[node.op] for n in node.inputs[p : p + 1]}
    numbers -= roles
    for tensor in graph.initializer:
        name = tensor.name
        if not name:
            continue
        name = names.get(name, name)
        kind = kinds.get(name) or ("CONSTANT_TENSOR" if name in numbers else None)
        value = weights.initializers[name] = tensor_value(tensor, name)
        _place(weights, value, kind, roles, stats)
        contents = array(tensor)
        if contents is not None:
            weights.contents[name] = contents
    named = sum(
        name not in kinds and value.dtype.is_floating_point and _is_named_as_buffer(name)
        for name, value in weights.buffers.items()
    )
    if named:
        text = "tensors that have the names of masks and tables are taken for buffers, which are not trained"
        weights.notes.append(Note("assumption", "SM335", text, named))
    for sparse in graph.sparse_initializer:
        dtype = dtypes.ONNX_CODES.get(sparse.values.data_type, dtypes.float32)
        value = Value(sparse.values.name, dtype, sizes_of(sparse, sparse.values.name))
        _place(weights, value, signature.kinds.get(value.name), roles, stats)
    return weights


def of_branches(values: Iterable[Value], nodes: Sequence[Node], weights: Weights) -> None:
    """Tensors that branches of If bring, added to `found`: those of the branch that is taken have readers among the
    nodes; of the others only weights are here."""
    roles, stats = roles_of(nodes)
    for value in values:
        _place(weights, value, None, roles, stats)


def roles_of(nodes: Iterable[Node]) -> tuple[set[str], set[str]]:
    """Names in the place of a weight, and names in the place of running statistics."""
    roles: set[str] = set()
    stats: set[str] = set()
    for node in nodes:
        if node.op not in ROLES:
            continue
        for position in ROLES[node.op]:
            if position < len(node.inputs):
                roles.add(node.inputs[position])
        if node.op == "BatchNormalization":
            stats.update(node.inputs[3:5])
    return roles, stats


def _place(weights: Weights, value: Value, kind: str | None, roles: set[str], stats: set[str]) -> None:
    if kind is None:
        kind = _kind(value, roles, stats)
    if kind == "PARAMETER":
        weights.parameters[value.name] = value
    elif kind == "BUFFER":
        weights.buffers[value.name] = value
    else:
        weights.constants[value.name] = value


def _kind(value: Value, roles: set[str], stats: set[str]) -> str:
    name = value.name
    if name in stats or (name.endswith(_STATISTICS) and name.rpartition(".")[2] in _STATISTICS):
        return "BUFFER"
    floating = value.dtype.is_floating_point
    if floating and name not in roles and _is_named_as_buffer(name):
        return "BUFFER"
    if floating and name in roles and value.numel > 1:
        return "PARAMETER"
    named = bool(_MODULE_NAME.match(name)) and not _GENERATED.match(name)
    if not floating:
        if name in roles and value.dtype.bits <= 8 and value.dtype.kind == "int":
            return "BUFFER"  # quantised weights: memory, but no gradient
        return "BUFFER" if named else "CONSTANT_TENSOR"
    if named or (value.numel > 1 and not _GENERATED.match(name)):
        return "PARAMETER"
    return "PARAMETER" if value.numel >= LARGE else "CONSTANT_TENSOR"


def _is_named_as_buffer(name: str) -> bool:
    return "." in name and not _OF_BUFFERS.isdisjoint(name.rpartition(".")[2].split("_"))


def of_inputs(graph: Any, nodes: Sequence[Node], signature: Signature, weights: Weights) -> set[str]:
    """Graph inputs that are weights without contents (`include_initializers=False`), added to `found`."""
    from staticmem.frontends.onnx.convert import type_value

    roles: set[str] = set()
    stats: set[str] = set()
    first: set[str] | None = None
    names: set[str] = set()
    placed = set(weights.all)
    for proto in graph.input:
        if proto.name in placed:
            names.add(proto.name)
            continue
        value = type_value(proto.name, proto.type)
        if value is None or value.shape is None:
            continue
        kind = signature.kinds.get(proto.name)
        named = bool(_MODULE_NAME.match(proto.name)) and proto.name.rpartition(".")[2] not in ("input", "x")
        if kind is None and not named:
            continue
        if first is None:
            roles, stats = roles_of(nodes)
            first = {p for node in nodes for p in node.inputs[:1]}
        used = proto.name in stats or (proto.name in roles and proto.name not in first)
        if kind is None and not (used or _leaf_of_weight(proto.name)):
            continue
        _place(weights, value, kind, roles, stats)
        placed.add(proto.name)
        names.add(proto.name)
    return names


def _leaf_of_weight(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked") or leaf.endswith(
        ("_weight", "_bias")
    )


def of_nodes(nodes: Sequence[Node], values: Mapping[str, Value], weights: Weights, producer: str = "") -> None:
    """Weights that are made by Constant and ConstantOfShape nodes, added to `found`.

    PyTorch's exporters write parameters as initializers. Its constants are tensors that the trace met and no module
    registered: attributes, literals, and what the code computes of nothing else. None of them is trained: the tracer
    refuses "a Tensor that requires grad as a constant" (torch/csrc/jit/frontend/tracer.cpp, `getValue`). Only a module
    that torch.jit.freeze took has all of its weights there; so have files of some other converters.
    """
    # ones and zeros of an InstanceNormalization are how a group norm is written
    constants = [node for node in nodes if node.op in ("Constant", "ConstantOfShape") and node.outputs]
    if not constants:
        return
    placed = set(weights.all)
    fixed = bool(weights.parameters) and producer.startswith("pytorch")
    counted = 0
    absent = _absent(nodes, constants, placed)
    if fixed:
        absent |= _written(nodes) | _measured(nodes)
    roles, stats = roles_of([node for node in nodes if node.op != "InstanceNormalization"])
    for node in constants:
        name = node.outputs[0]
        value = values.get(name)
        if value is None or value.shape is None or name in placed or name in absent:
            continue
        placed.add(name)
        if name in stats and value.dtype.is_floating_point:
            weights.buffers[name] = value
        elif node.op == "Constant" and not value.dtype.is_floating_point and value.numel >= TABLE:
            weights.buffers[name] = value  # tables of positions and indices that the exporter wrote into the graph
        elif value.dtype.is_floating_point and value.numel > 1 and (name in roles or value.numel >= LARGE):
            if node.op == "ConstantOfShape" and name not in roles:
                continue  # zeros that the model computes, such as an initial state
            if fixed and node.op == "Constant":
                weights.buffers[name] = value
                counted += 1
            else:
                weights.parameters[name] = value
    if counted:
        text = "constants that no module registered (tables, masks, literals of the code) are not trained, and count as"
        weights.notes.append(Note("assumption", "SM335", f"{text} if they always existed", counted))


def _written(nodes: Sequence[Node]) -> set[str]:
    """What only an assignment reads: `out = x.new_zeros(...)` is a constant for the tracer, and made in each step."""
    into = {node.inputs[0] for node in nodes if node.op == "ScatterND"}
    users = [node for node in nodes if node.op not in ("Shape", "Size")] if into else []
    reads = Counter(name for node in users for name in node.inputs if name in into)
    return {name for name in into if reads[name] == 1}


def _measured(nodes: Sequence[Node]) -> set[str]:
    """Constants that are asked for their sizes only: the part of a constant that an assignment goes to, which is a
    view, is folded into one."""
    asked = {node.inputs[0] for node in nodes if node.op in ("Shape", "Size")}
    asked.intersection_update(node.outputs[0] for node in nodes if node.op == "Constant" and node.outputs)
    if asked:
        asked.difference_update(*(node.inputs for node in nodes if node.op not in ("Shape", "Size")))
    return asked


def _absent(nodes: Sequence[Node], constants: Sequence[Node], placed: set[str]) -> set[str]:
    """Constants in the place of a batch norm's weight and bias where PyTorch has none: the TorchScript exporter writes
    ones and zeros (symbolic_helper.py, `_batchnorm_helper`)."""
    contents = {node.outputs[0]: node.attrs.get("value") for node in constants if node.op == "Constant"}
    absent: set[str] = set()
    for node in nodes:
        if node.op != "BatchNormalization" or len(node.inputs) < 5:
            continue
        computed = not any(name in placed or name in contents for name in node.inputs[3:5])
        for position, number in ((1, 1.0), (2, 0.0)):
            name = node.inputs[position]
            if name in contents and (computed or _all_are(contents[name], number)):
                absent.add(name)
    return absent


def _all_are(array: Any, number: float) -> bool:
    return hasattr(array, "size") and array.size > 0 and bool((array == number).all())


def lost_buffers(nodes: Sequence[Node], weights: Weights, signature: Signature) -> list[Parameter]:
    """Buffers that exports leave out because no result needs them.

    `num_batches_tracked` of each BatchNorm is an int64 scalar that PyTorch registers beside the running statistics
    (torch/nn/modules/batchnorm.py, `_NormBase.__init__`); transformers keeps `original_inv_freq` beside `inv_freq`.
    """
    added: dict[str, Parameter] = {}
    owned = weights.all
    for name, kind in signature.kinds.items():
        if kind != "BUFFER" or name in owned:
            continue
        path, dot, leaf = name.rpartition(".")
        like = owned.get(path + dot + leaf.removeprefix("original_"))
        if leaf == "num_batches_tracked":
            added[name] = Parameter(Value(name, dtypes.int64, ()), name, trainable=False)
        elif like is not None:
            added[name] = Parameter(Value(name, like.dtype, like.shape), name, trainable=False)
    for node in nodes:
        if node.op != "BatchNormalization" or len(node.inputs) < 5 or node.inputs[3] not in owned:
            continue  # statistics that the graph computes: a norm without running ones
        prefix = node.inputs[3].rpartition(".")[0] or node.name or node.outputs[0]
        name = f"{prefix}.num_batches_tracked"
        if name not in owned and name not in added:
            added[name] = Parameter(Value(name, dtypes.int64, ()), name, trainable=False)
    return list(added.values())


def merge_copies(nodes: tuple[Node, ...], weights: Weights) -> tuple[Node, ...]:
    """Readers of `Identity(weight)` read the weight: that is how exporters write that two weights are one tensor."""
    owned = weights.all
    copies: dict[str, str] = {}
    for node in nodes:
        if node.op == "Identity" and not node.domain and node.inputs:
            source = copies.get(node.inputs[0], node.inputs[0])
            if source in owned:
                copies[node.outputs[0]] = source
    if not copies:
        return nodes
    return tuple(
        replace(node, inputs=tuple(copies.get(n, n) for n in node.inputs))
        if any(n in copies for n in node.inputs)
        else node
        for node in nodes
    )
