"""The tensors of a graph that came from ONNX, under the names and in the sizes that the module has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from staticmem.frontends.onnx.decode import Decoded
from staticmem.frontends.onnx.weights import lost_buffers
from staticmem.ir.graph import Graph, Note, Parameter, Value
from staticmem.ir.onnx_graph import Net, Translated


@dataclass(slots=True)
class FromOnnx:
    """What passes over a graph from ONNX may ask: the file that was decoded, and what its translation found."""

    decoded: Decoded
    translated: Translated

    @property
    def net(self) -> Net:
        return self.decoded.net

    def graph(self) -> Graph:
        """The graph before passes. Its tensors are those of the file until `own_tensors`."""
        net, translated = self.net, self.translated
        return Graph(
            name=self.decoded.name, format="onnx", producer=net.producer, inputs=self.decoded.inputs, parameters=(),
            buffers=(), ops=tuple(translated.ops), outputs=translated.outputs, values=net.values,
            notes=(*self.decoded.tensors.notes, *translated.notes), inplace_known=False,
            output_names=net.outputs if len(net.outputs) == len(translated.outputs) else (),
        )  # fmt: skip


def own_tensors(graph: Graph, source: FromOnnx) -> tuple[Graph, Sequence[Note]]:
    """The graph with its parameters, buffers and constants; what no op reads any more is not among them."""
    decoded, translated, net = source.decoded, source.translated, source.net
    tensors, kinds = decoded.tensors, decoded.signature.kinds
    for name in translated.restored:
        value = tensors.constants.pop(name, None)
        if value is not None:
            tensors.parameters[name] = value
    counters = lost_buffers(net.nodes, tensors, decoded.signature)
    assumed = sum(counter.fqn not in kinds for counter in counters)
    notes = [*translated.late_notes, *decoded.late_notes]
    if assumed:
        text = "PyTorch's BatchNorm keeps num_batches_tracked (8 bytes) beside its statistics; the file leaves it out"
        notes.append(Note("assumption", "SM250", text, assumed))
    read: set[str] = set()
    if net.consts or tensors.constants or kinds:
        read = {name for op in graph.ops for name in op.refs()}.difference(*[op.outputs for op in graph.ops])
    results = {name for op in graph.ops for name in op.outputs} if tensors.buffers else frozenset[str]()
    constants = {name: contents for name, contents in net.consts.items() if name in read}
    constant_values = {name: value for name, value in tensors.constants.items() if name in read}
    for name, contents in constants.items():
        if name not in constant_values and name not in net.weights and name in net.values:
            constant_values[name] = Value(name, net.values[name].dtype, tuple(int(s) for s in contents.shape))
    owned = replace(
        graph,
        parameters=_parameters(source, read),
        buffers=(
            *[Parameter(v, v.name, trainable=False) for v in tensors.buffers.values() if v.name not in results],
            *[Parameter(v, n, trainable=False) for n, v in translated.added.items() if kinds.get(n) == "BUFFER"],
            *counters,
        ),
        constants=constants,
        constant_values=constant_values,
        module_tree_known=any(op.modules for op in graph.ops),
    )
    return owned, notes


def _parameters(source: FromOnnx, read: set[str]) -> tuple[Parameter, ...]:
    """Parameters with the sizes that PyTorch stores (linear weights are [out, in]) and the names of the module."""
    kinds, translated = source.decoded.signature.kinds, source.translated
    result: list[Parameter] = []
    first: dict[str, str] = {}
    for value in source.decoded.tensors.parameters.values():
        if kinds and value.name not in kinds and value.name not in read:
            continue  # made by an optimiser, and its place was taken by what it was made of
        shape = value.shape
        fqn = translated.restored.get(value.name, value.name)
        if value.name in translated.transposed and shape is not None:
            shape = tuple(reversed(shape))
        elif value.name in translated.restored and shape is not None and len(shape) > 1:
            squeezed = tuple(s for s in shape if s != 1)
            shape = squeezed if len(squeezed) == 1 else shape  # a norm's weight, shaped for broadcasting
        alias = first.setdefault(fqn, value.name)
        same = alias if alias != value.name else None
        if shape is not value.shape:
            value = Value(value.name, value.dtype, shape)
        result.append(Parameter(value, fqn, alias_of=same))
    result.extend(Parameter(v, n) for n, v in translated.added.items() if kinds.get(n) != "BUFFER")
    return tuple(result)
