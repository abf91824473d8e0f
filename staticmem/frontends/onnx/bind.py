"""From a model and sizes to a `Graph` of ATen ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from staticmem.errors import DimensionError
from staticmem.frontends.onnx import branches, loops, sequences, shapes, weights
from staticmem.frontends.onnx.convert import Converter, array, tensor_value, with_metadata
from staticmem.frontends.onnx.fold import Folder
from staticmem.frontends.onnx.rebind import Rebinder
from staticmem.ir.graph import Graph, Note, Parameter, Value, count_bases
from staticmem.ir.model_file import Binding
from staticmem.ir.onnx_graph import Net, Node, Recovered
from staticmem.ops import kinds_of
from staticmem.passes import recover

if TYPE_CHECKING:
    from staticmem.frontends.onnx.model import OnnxModel


_STRUCTURED = frozenset((*branches.OPERATORS, *loops.OPERATORS, *sequences.OPERATORS))


def bind(model: OnnxModel, binding: Binding) -> Graph:
    """The ATen graph at these sizes."""
    assert model.body is not None
    guessed = endless = made = 0
    proto: Any = None  # most graphs need no message of their own
    if binding.rebound or not _STRUCTURED.isdisjoint(model.body.operators):
        proto = model.body.proto(binding.shapes)
    net, extra = _net(model, proto, binding, model.nodes)
    for turn in range(branches.MAX_ROUNDS if proto is not None else 0):
        structured = branches.has_branches(proto.graph) or loops.has_loops(proto.graph)
        listed = sequences.has_sequences(proto.graph) and not any(node.fx for node in net.nodes)
        if not structured and not listed:
            break
        if turn == 0:  # later nodes have what these had
            with_metadata(proto.graph, model.nodes)
        net.filled()
        guessed += branches.inline(proto.graph, net.consts, net.values, model.opset)[1]
        turned = loops.unroll(proto.graph, net.consts, net.values, model.opset, made)
        endless, made = endless + turned.guessed, made + turned.made
        if not structured and not sequences.flatten(proto.graph, net.consts, net.values):
            break
        converter = Converter()
        net, extra = _net(model, proto, binding, tuple(converter.node(n) for n in proto.graph.node))
    names = net.weights
    if binding.rebound:
        extra.notes.append(_rebind(model, binding, net, proto, extra.contents))
    found = recover(net)
    notes = [*extra.notes, *found.notes]
    if guessed:
        notes.append(
            Note(
                "assumption",
                "SM256",
                "the larger branch of If was taken, its condition depends on data",
                guessed,
            )
        )
    if endless:
        text = "Loop or Scan whose number of turns is in the data: one turn was taken, training needs more"
        notes.append(Note("warning", "SM266", text, endless))
    if origin := converted_from(model.producer):
        text = f"the file was converted from {origin}: figures are of PyTorch running these operators"
        notes.append(Note("assumption", "SM270", text))
    by_data = sum(count for base, count in count_bases(found.ops).items() if "data_sized" in kinds_of(base))
    if by_data:
        text = "sizes that are in the data (NonZero, Unique, masks) were taken as large as they can get"
        notes.append(Note("assumption", "SM267", text, by_data))
    for name in found.restored:
        value = extra.constants.pop(name, None)
        if value is not None:
            extra.parameters[name] = value
    counters = weights.lost_buffers(net.nodes, extra, model.signature)
    assumed = [c for c in counters if c.fqn not in model.signature.kinds]
    if assumed:
        notes.append(
            Note(
                "assumption",
                "SM250",
                "PyTorch's BatchNorm keeps num_batches_tracked (8 bytes) beside its statistics; the file leaves it out",
                len(assumed),
            )
        )
    kinds = model.signature.kinds
    used: set[str] = set()
    if net.consts or extra.constants:
        used = {name for op in found.ops for name in op.refs()}
        used.difference_update(*[op.outputs for op in found.ops])
    results = {name for op in found.ops for name in op.outputs} if extra.buffers else frozenset[str]()
    constants = {name: contents for name, contents in net.consts.items() if name in used}
    constant_values = {name: value for name, value in extra.constants.items() if name in used}
    for name, contents in constants.items():
        if name not in constant_values and name not in names and name in net.values:
            constant_values[name] = Value(name, net.values[name].dtype, tuple(int(s) for s in contents.shape))
    return Graph(
        name=model.name,
        format="onnx",
        producer=model.producer,
        inputs=tuple(Value(s.name, s.dtype, binding.shapes[s.name]) for s in model.inputs),
        parameters=_parameters(extra, found, kinds),
        buffers=(
            *(Parameter(v, v.name, trainable=False) for v in extra.buffers.values() if v.name not in results),
            *(Parameter(v, n, trainable=False) for n, v in found.added.items() if kinds.get(n) == "BUFFER"),
            *counters,
        ),
        ops=tuple(found.ops),
        outputs=found.outputs,
        values=net.values,
        constants=constants,
        constant_values=constant_values,
        notes=tuple(notes),
        inplace_known=False,
        module_tree_known=found.module_tree_known,
    )


_CONVERTERS = {
    "tf2onnx": "TensorFlow", "keras2onnx": "Keras", "paddle": "PaddlePaddle", "coreml": "Core ML", "mxnet": "MXNet",
    "caffe2": "Caffe2", "cntk": "CNTK", "skl2onnx": "scikit-learn", "onnxmltools": "another library",
}  # fmt: skip


def converted_from(producer: str) -> str:
    """The framework that a file's converter is for, where it is not PyTorch; the converters name themselves."""
    found = producer.lower()
    return next((origin for name, origin in _CONVERTERS.items() if name in found), "")


def _rebind(model: OnnxModel, binding: Binding, net: Net, proto: Any, contents: dict[str, Any]) -> Note:
    """Sizes at dimensions that the file fixes to other values.

    Raises:
        DimensionError: constants in the graph contradict them.
    """
    own = {
        spec.name: tuple(binding.symbols.get(d, 1) if isinstance(d, str) else d for d in spec.shape or ())
        for spec in model.inputs
    }
    old_proto = shapes.bound_proto(proto, own)
    old, _ = _net(model, old_proto, binding, tuple(net.nodes))
    old.filled()
    changed = ", ".join(binding.rebound)
    start = {v.name: v for v in (*(net.values[i] for i in net.inputs), *_tensors(proto))}
    failed: DimensionError | None = None
    for keep_ones in (True, False):
        trial = replace(net, values=dict(start), consts=dict(contents), fold=None)
        copy = shapes.bound_proto(proto, binding.shapes)
        rebinder = Rebinder(trial, copy, old, changed, keep_ones)
        try:
            rebinder.run()
        except DimensionError as error:
            failed = failed or error
            continue
        net.values, net.consts, net.nodes = trial.values, trial.consts, trial.nodes
        net.fold, net.rebound = None, True
        text = f"sizes that the export fixed were changed ({changed}); constants in the graph that follow"
        return Note("assumption", "SM258", text, max(rebinder.followed, 1))
    raise failed if failed is not None else DimensionError(f"{changed} cannot be changed")


def _tensors(proto: Any) -> list[Value]:
    return [tensor_value(t) for t in proto.graph.initializer]


def _net(model: OnnxModel, proto: Any, binding: Binding, nodes: tuple[Node, ...]) -> tuple[Net, weights.Weights]:
    """The graph that recovery reads, with sizes as far as inference gets, and the tensors that the model owns. `proto`:
    a bound ModelProto, None for that of the file."""
    assert model.body is not None
    owned = model.weights
    consts = dict(owned.contents)
    body, sizes = model.body, binding.shapes
    if proto is not None:
        values, complete = shapes.infer(proto), False
    else:
        values, complete = shapes.infer_body(body, sizes, nodes, consts)
    extra = weights.Weights(
        dict(owned.parameters), dict(owned.buffers), dict(owned.constants), dict(owned.contents), list(owned.notes)
    )
    known = extra.all
    for tensor in proto.graph.initializer if proto is not None else model.body.late:  # of branches that were inlined
        if tensor.name not in known:
            extra.constants[tensor.name] = tensor_value(tensor)
            contents = array(tensor)
            if contents is not None:
                extra.contents[tensor.name] = contents
    weights.of_nodes(nodes, values, extra, model.producer)
    nodes = weights.merge_copies(nodes, extra)
    net = Net(
        nodes=nodes,
        inputs=tuple(spec.name for spec in model.inputs),
        outputs=model.outputs,
        values=values,
        consts={**extra.contents, **consts},
        weights=frozenset((*extra.parameters, *extra.buffers)),
        aliases=model.signature.aliases,
        opset=model.opset,
        producer=model.producer,
    )
    folder = Folder(net, proto if proto is not None else model.body)
    net.fold = folder.fold if complete else folder.run
    return net, extra


def _parameters(owned: weights.Weights, found: Recovered, kinds: Mapping[str, str]) -> tuple[Parameter, ...]:
    """Parameters with the sizes that PyTorch stores (linear weights are [out, in]) and the names of the module."""
    result: list[Parameter] = []
    first: dict[str, str] = {}
    used: set[str] = set()
    if kinds:
        used = {name for op in found.ops for name in op.refs()}.difference(*[op.outputs for op in found.ops])
    for value in owned.parameters.values():
        if kinds and value.name not in kinds and value.name not in used:
            continue  # made by an optimiser, and its place was taken by what it was made of
        shape = value.shape
        fqn = found.restored.get(value.name, value.name)
        if value.name in found.transposed and shape is not None:
            shape = tuple(reversed(shape))
        elif value.name in found.restored and shape is not None and len(shape) > 1:
            squeezed = tuple(s for s in shape if s != 1)
            shape = squeezed if len(squeezed) == 1 else shape  # a norm's weight, shaped for broadcasting
        alias = first.setdefault(fqn, value.name)
        same = alias if alias != value.name else None
        if shape is not value.shape:
            value = Value(value.name, value.dtype, shape)
        result.append(Parameter(value, fqn, alias_of=same))
    result.extend(Parameter(v, n) for n, v in found.added.items() if kinds.get(n) != "BUFFER")
    return tuple(result)
