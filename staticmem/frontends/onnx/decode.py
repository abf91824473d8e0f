"""An ONNX file at concrete sizes: nodes with plain attributes, sizes of all values, and the tensors of the model."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from staticmem.errors import DimensionError
from staticmem.frontends.onnx import shapes, weights
from staticmem.frontends.onnx.convert import Converter, array, tensor_value, with_metadata
from staticmem.frontends.onnx.fold import Folder
from staticmem.frontends.onnx.metadata import Signature
from staticmem.frontends.onnx.model import LARGE, OnnxModel
from staticmem.frontends.onnx.ordering import NUMBERED, in_order_of_code
from staticmem.frontends.onnx.reader import guarded
from staticmem.ir.graph import Note, Value
from staticmem.ir.model_file import Binding
from staticmem.ir.onnx_graph import Net, Node

# operators that other nodes take the place of, in `inlining`, `loops` and `sequences`
_STRUCTURED = frozenset(
    "If Loop Scan SequenceEmpty SequenceConstruct SequenceInsert SequenceErase SequenceAt SequenceLength "
    "ConcatFromSequence SplitToSequence".split()
)

CONTROL_FLOW = ("If", "Loop", "Scan")


@dataclass(slots=True)
class Decoded:
    """An ONNX file at bound sizes: its nodes with the sizes of all values, and the tensors that the model owns."""

    name: str
    net: Net
    inputs: tuple[Value, ...]
    tensors: weights.Weights
    signature: Signature
    late_notes: list[Note]  # what was assumed of control flow and of the producer; `tensors.notes` has the rest

    @property
    def large(self) -> bool:
        """Whether the memory of what was decoded is worth giving back."""
        return len(self.net.nodes) > LARGE

    @property
    def has_fx_texts(self) -> bool:
        """Whether most nodes say which FX node they come from."""
        nodes = self.net.nodes
        return sum(1 for node in nodes if node.fx) * 2 > len(nodes)


def decode(model: OnnxModel, binding: Binding) -> Decoded:
    """The nodes and values at these sizes.

    Raises:
        DimensionError: a size that was asked for contradicts a shape that is fixed in the file.
    """
    with guarded(model.path):
        model.read_again()
        try:
            return _decoded(model, binding)
        finally:
            model.let_go()


def _decoded(model: OnnxModel, binding: Binding) -> Decoded:
    assert model.body is not None
    guessed = endless = long = 0
    structured = not _STRUCTURED.isdisjoint(model.body.operators)
    # most graphs need no message of their own
    proto: Any = model.body.proto(binding.shapes) if binding.rebound or structured else None
    net, tensors = _net(model, proto, binding, model.nodes)
    given = net
    if structured:
        net, tensors, guessed, endless, long = _unrolled(model, proto, binding, net, tensors)
    if binding.rebound:
        tensors.notes.append(_rebind(model, binding, net, proto, tensors.contents))
    notes = [*model.notes]
    if model.producer.startswith("pytorch") and net is given and (order := in_order_of_code(net.nodes)):
        net.filled()  # which goes by the order of the file
        net.nodes = order
        notes = [NUMBERED]  # in place of that nodes were sorted
    if guessed:
        text = "the larger branch of If was taken, its condition depends on data"
        notes.append(Note("assumption", "SM256", text, guessed))
    if endless:
        text = "Loop or Scan whose number of turns is in the data: one turn was taken, training needs more"
        notes.append(Note("warning", "SM266", text, endless))
    if long:
        text = "Loop or Scan of so many turns that they are too many nodes to unroll: one turn was taken, all need more"
        notes.append(Note("warning", "SM266", text, long))
    if origin := converted_from(model.producer):
        text = f"the file was converted from {origin}: figures are of PyTorch running these operators"
        notes.append(Note("assumption", "SM270", text))
    inputs = tuple([Value(s.name, s.dtype, binding.shapes[s.name]) for s in model.inputs])
    return Decoded(model.name, net, inputs, tensors, model.signature, notes)


def _unrolled(
    model: OnnxModel, proto: Any, binding: Binding, net: Net, tensors: weights.Weights
) -> tuple[Net, weights.Weights, int, int, int]:
    """The graph without If, Loop, Scan and sequences; how many branches and numbers of turns were guessed, and how many
    loops were too long."""
    from staticmem.frontends.onnx import inlining, loops, sequences

    guessed = endless = long = added = 0
    owned: set[str] = set()  # by branches
    for turn in range(inlining.MAX_ROUNDS):
        structured = any(n.op_type in CONTROL_FLOW and n.domain in ("", "ai.onnx") for n in proto.graph.node)
        listed = sequences.has_sequences(proto.graph) and not any(node.fx for node in net.nodes)
        if not structured and not listed:
            break
        if turn == 0:  # later nodes have what these had
            with_metadata(proto.graph, model.nodes)
        net.filled()
        guessed += inlining.inline(
            # a loop has copied branches for each of its turns, and the module has one
            proto.graph, net.consts, net.values, model.opset, owned if not added else None
        )[1]  # fmt: skip
        turned = loops.unroll(proto.graph, net.consts, net.values, model.opset, added)
        endless, long, added = endless + turned.guessed, long + turned.long, added + turned.added
        if not structured and not sequences.flatten(proto.graph, net.consts, net.values):
            break
        converter = Converter()
        net, tensors = _net(model, proto, binding, tuple(converter.node(n) for n in proto.graph.node), owned)
    return net, tensors, guessed, endless, long


_CONVERTERS = {
    "tf2onnx": "TensorFlow", "keras2onnx": "Keras", "paddle": "PaddlePaddle", "coreml": "Core ML", "mxnet": "MXNet",
    "caffe2": "Caffe2", "cntk": "CNTK", "skl2onnx": "scikit-learn", "onnxmltools": "another library",
}  # fmt: skip


def converted_from(producer: str) -> str:
    """The framework that a file's converter is for, where it is not PyTorch; the converters name themselves."""
    lowered = producer.lower()
    return next((origin for name, origin in _CONVERTERS.items() if name in lowered), "")


def _rebind(model: OnnxModel, binding: Binding, net: Net, proto: Any, contents: dict[str, Any]) -> Note:
    """Sizes at dimensions that the file fixes to other values.

    Raises:
        DimensionError: constants in the graph contradict them.
    """

    from staticmem.frontends.onnx import rebind

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
        rebinder = rebind.Rebinder(trial, copy, old, changed, keep_ones)
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


def _net(
    model: OnnxModel, proto: Any, binding: Binding, nodes: tuple[Node, ...], of_branches: Container[str] = ()
) -> tuple[Net, weights.Weights]:
    """The graph that recovery reads, with sizes as far as inference gets, and the tensors that the model owns. `proto`:
    a bound ModelProto, None for that of the file. `of_branches`: tensors of branches that were put into it."""
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
    declared = extra.all
    late = proto.graph.initializer if proto is not None else model.body.late  # of branches that were inlined
    added = [tensor for tensor in late if tensor.name not in declared]
    if added:
        for tensor in added:
            if tensor.name not in of_branches:
                extra.constants[tensor.name] = tensor_value(tensor)
            contents = array(tensor)
            if contents is not None:
                extra.contents[tensor.name] = contents
    weights.of_nodes(nodes, values, extra, model.producer)
    brought = [tensor_value(tensor) for tensor in added if tensor.name in of_branches]
    weights.of_branches(brought, nodes, extra)
    nodes = weights.merge_copies(nodes, extra)
    net = Net(
        nodes=nodes,
        inputs=tuple(spec.name for spec in model.inputs),
        outputs=model.outputs,
        values=values,
        consts={**extra.contents, **consts},
        weights=frozenset((*extra.parameters, *extra.buffers)),
        fixed=frozenset(extra.buffers),
        aliases=model.signature.aliases,
        opset=model.opset,
        producer=model.producer,
    )
    folder = Folder(net, proto if proto is not None else model.body)
    net.fold = folder.fold if complete else folder.run
    return net, extra
