"""Sizes of every value in a run, bodies of If and Loop included, for the graph as the runtime executes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from staticmem.errors import DimensionError
from staticmem.frontends.onnx.convert import Converter, array, tensor_value, type_value
from staticmem.frontends.onnx.fold import Folder
from staticmem.ir import dtypes
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Net, Node
from staticmem.ort.memory.contrib import CONTRIB, NCHWC, block_size, with_block
from staticmem.ort.memory.graph import PlannedType

MAX_ELEMENTS = 1 << 16  # of a sequence
MAX_ITERATIONS = 256  # of a Loop whose sizes are worked out one by one
MAX_RUNS = 20_000  # of bodies in one run of a model: loops in loops multiply


@dataclass(slots=True)
class BodyRun:
    """One execution of a body: which attribute it is, and its sizes."""

    body: str
    sizes: RunSizes


@dataclass(slots=True)
class RunSizes:
    """Sizes of one execution of a graph. `bodies` has the executions of each If or Loop by the name of its first
    result; `guessed` counts branches and iterations that data decides; `sequences` has the elements of those that
    SplitToSequence makes, `lengths` how many turns a Scan makes. `left` has how many more bodies may run, one number
    for all graphs of a model; `runs` is how many run here."""

    values: dict[str, Value]
    consts: dict[str, Any]
    bodies: dict[str, list[BodyRun]] = field(default_factory=dict)
    guessed: list[str] = field(default_factory=list)
    sequences: dict[str, list[Value]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=lambda: [MAX_RUNS])
    runs: int = 1

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Sizes of a value, None where they depend on data."""
        value = self.values.get(name)
        return None if value is None else value.shape


class Sizer(Folder):
    """Works out sizes node by node; goes into bodies and knows the runtime's own operators."""

    def __init__(self, net: Net, graph: Any, opsets: Sequence[Any]) -> None:
        super().__init__(net, _Model(graph, opsets))
        self.opsets = opsets
        self.result = RunSizes(net.values, net.consts)
        convolutions = [n for n in net.nodes if n.domain == NCHWC and n.op == "Conv"]
        self.block = block_size([_planned_type(net.values.get(n.inputs[1])) for n in convolutions])

    def _sizes(self, node: Node, proto: Any) -> None:
        if proto.op_type in ("If", "Loop", "Scan") and not node.domain:
            {"If": self._if, "Loop": self._loop, "Scan": self._scan}[proto.op_type](node, proto)
            return
        if node.op == "SplitToSequence" and not node.domain:
            elements = split_elements(node, self.net.values.get(node.inputs[0]), self.net.consts)
            if elements is not None:
                self.result.sequences[node.outputs[0]] = elements
            return
        if node.op == "SequenceAt" and not node.domain and self._element(node):
            return
        contrib = CONTRIB.get((node.domain, node.op))
        if contrib is not None:
            inputs = [_planned_type(self.net.values.get(n)) if n else None for n in node.inputs]
            for name, kind in zip(node.outputs, contrib(with_block(node, self.block), inputs), strict=False):
                if name and kind is not None and kind.dims is not None:
                    sizes = tuple(d for d in kind.dims if isinstance(d, int))
                    if len(sizes) == len(kind.dims):
                        self.net.values[name] = Value(name, kind.dtype, sizes)
            return
        super()._sizes(node, proto)

    def _element(self, node: Node) -> bool:
        elements, index = self.result.sequences.get(node.inputs[0]), self.net.consts.get(node.inputs[1])
        if elements is None or index is None or index.size != 1:
            return False
        at = int(index.reshape(-1)[0])
        if not -len(elements) <= at < len(elements):
            return False
        self.net.values[node.outputs[0]] = Value(node.outputs[0], elements[at].dtype, elements[at].shape)
        return True

    def _if(self, node: Node, proto: Any) -> None:
        branches = {a.name: a.g for a in proto.attribute if a.type == 5}
        yes, no = branches.get("then_branch"), branches.get("else_branch")
        if yes is None or no is None:
            return
        condition = self.net.consts.get(node.inputs[0])
        if condition is not None and condition.size == 1:
            choice = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
        else:
            choice = "then_branch" if len(yes.node) >= len(no.node) else "else_branch"
            self.result.guessed.append(f"If {node.name or node.outputs[0]}")
        inner = self._body(branches[choice], {}, {})
        for mine, theirs in zip(node.outputs, branches[choice].output, strict=False):
            self._copy(mine, inner, theirs.name)
        self.result.bodies[node.outputs[0]] = [BodyRun(choice, inner)]

    def _loop(self, node: Node, proto: Any) -> None:
        body = next((a.g for a in proto.attribute if a.name == "body"), None)
        if body is None:
            return
        trips = self._trips(node)
        limit = min(trips if trips is not None else 1, MAX_ITERATIONS)
        carried = list(node.inputs[2:])
        values = {p.name: self.net.values.get(n) for p, n in zip(body.input[2:], carried, strict=False)}
        consts = {p.name: self.net.consts.get(n) for p, n in zip(body.input[2:], carried, strict=False)}
        runs: list[BodyRun] = []
        scalars = [(0, dtypes.int64), (1, dtypes.bool_)]
        for iteration in range(limit):
            for index, dtype in scalars:
                if index < len(body.input):
                    values[body.input[index].name] = Value(body.input[index].name, dtype, ())
            if body.input:
                consts[body.input[0].name] = np.asarray(iteration, dtype=np.int64)
            inner = self._body(body, values, consts)
            runs.append(BodyRun("body", inner))
            keep = inner.consts.get(body.output[0].name)
            if keep is not None and keep.size == 1 and not bool(keep.reshape(-1)[0]):
                trips = iteration + 1
                break
            if (keep is None and trips is None) or self.result.left[0] <= 0:
                trips = None if iteration + 1 < limit else trips
                break
            results = body.output[1 : 1 + len(carried)]
            names = [p.name for p in body.input[2:]]
            values = {p: inner.values.get(r.name) for p, r in zip(names, results, strict=False)}
            consts = {p: inner.consts.get(r.name) for p, r in zip(names, results, strict=False)}
        if trips is None:
            self.result.guessed.append(f"Loop {node.name or node.outputs[0]}")
        self.result.bodies[node.outputs[0]] = runs
        if not runs:
            for mine, source in zip(node.outputs, carried, strict=False):
                value = self.net.values.get(source)
                if value is not None:
                    self.net.values[mine] = Value(mine, value.dtype, value.shape)
            return
        for number, mine in enumerate(node.outputs):
            theirs = body.output[1 + number].name
            if number < len(carried):
                self._copy(mine, runs[-1].sizes, theirs)
                continue
            parts = [run.sizes.values.get(theirs) for run in runs]
            first = parts[0]
            if first is not None and first.shape is not None and len(runs) == (trips or 0):
                self.net.values[mine] = Value(mine, first.dtype, (len(runs), *first.shape))

    def _scan(self, node: Node, proto: Any) -> None:
        """All turns of a Scan have the same sizes. Before opset 9 it is another operator."""
        body = next((a.g for a in proto.attribute if a.name == "body"), None)
        version = next((o.version for o in self.opsets if o.domain in ("", "ai.onnx")), 0)
        if body is None or version < 9:
            return
        attributes = {a.name: a for a in proto.attribute}
        scans = attributes["num_scan_inputs"].i if "num_scan_inputs" in attributes else 0
        states = len(node.inputs) - scans
        if scans < 1 or states < 0 or len(body.input) < len(node.inputs) or len(body.output) < len(node.outputs):
            return
        axes = _axes(attributes.get("scan_input_axes"), scans)
        values: dict[str, Value | None] = {}
        length = None
        for number, (outer, inner) in enumerate(zip(node.inputs, body.input, strict=False)):
            value = self.net.values.get(outer)
            if value is None or value.shape is None:
                return
            shape = value.shape
            if number >= states:
                axis = axes[number - states]
                if not -len(shape) <= axis < len(shape):
                    return
                axis %= len(shape)
                length, shape = shape[axis], (*shape[:axis], *shape[axis + 1 :])
            values[inner.name] = Value(inner.name, value.dtype, shape)
        assert length is not None, "there is a scanned input"
        turn = self._body(body, values, {i.name: None for i in body.input})
        turns = min(length, MAX_ITERATIONS, 1 + max(self.result.left[0], 0) // turn.runs)
        self.result.bodies[node.outputs[0]] = [BodyRun("body", turn)] * turns
        self._count((turns - 1) * turn.runs)
        self.result.lengths[node.outputs[0]] = length
        out_axes = _axes(attributes.get("scan_output_axes"), len(node.outputs) - states)
        for number, mine in enumerate(node.outputs):
            value = turn.values.get(body.output[number].name)
            if not mine or value is None or value.shape is None:
                continue
            shape = value.shape
            if number >= states:
                axis = out_axes[number - states]
                axis = axis + len(shape) + 1 if axis < 0 else axis
                shape = (*shape[:axis], length, *shape[axis:])
            self.net.values[mine] = Value(mine, value.dtype, shape)

    def _trips(self, node: Node) -> int | None:
        """How often a Loop runs, None where data decides."""
        count = self.net.consts.get(node.inputs[0]) if node.inputs and node.inputs[0] else None
        start = self.net.consts.get(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
        if start is not None and start.size == 1 and not bool(start.reshape(-1)[0]):
            return 0
        if count is None or count.size != 1:
            return None
        return max(int(count.reshape(-1)[0]), 0)

    def _body(self, proto: Any, values: Mapping[str, Value | None], consts: Mapping[str, Any]) -> RunSizes:
        values_inside = dict(self.net.values)
        contents = dict(self.net.consts)
        for name, value in values.items():
            values_inside.pop(name, None)
            if value is not None:
                values_inside[name] = Value(name, value.dtype, value.shape)
        for name, content in consts.items():
            contents.pop(name, None)
            if content is not None:
                contents[name] = content
        inner = run_sizes(proto, self.opsets, values_inside, contents, self.result)
        self._count(inner.runs)
        return inner

    def _count(self, runs: int) -> None:
        self.result.runs += runs
        self.result.left[0] -= runs

    def _copy(self, mine: str, inner: RunSizes, theirs: str) -> None:
        value = inner.values.get(theirs)
        if mine and value is not None:
            self.net.values[mine] = Value(mine, value.dtype, value.shape)
        content = inner.consts.get(theirs)
        if mine and content is not None:
            self.net.consts[mine] = content


def _axes(attribute: Any, count: int) -> list[int]:
    axes = list(attribute.ints) if attribute is not None else []
    return axes if len(axes) >= count else [0] * count


def split_elements(node: Node, data: Value | None, consts: Mapping[str, Any]) -> list[Value] | None:
    """The tensors that SplitToSequence makes, None where their sizes depend on data."""
    if data is None or data.shape is None or not data.shape:
        return None
    attrs = node.attrs
    axis, keep = attrs.get("axis", 0), attrs.get("keepdims", 1)
    if not isinstance(axis, int) or not -len(data.shape) <= axis < len(data.shape):
        return None
    axis %= len(data.shape)
    size = data.shape[axis]
    given = len(node.inputs) > 1 and bool(node.inputs[1])
    split = consts.get(node.inputs[1]) if given else None
    if given and split is None:
        return None
    if split is not None and split.ndim == 1:
        parts = [int(n) for n in split]
    else:
        step = int(split.reshape(-1)[0]) if split is not None else 1
        if step < 1 or size // step > MAX_ELEMENTS:
            return None
        parts = [min(step, size - start) for start in range(0, size, step)]
    if len(parts) > MAX_ELEMENTS or any(n < 0 for n in parts):
        return None
    drop = not given and not keep
    before, after = data.shape[:axis], data.shape[axis + 1 :]
    name = node.outputs[0]
    return [Value(name, data.dtype, (*before, *(() if drop else (n,)), *after)) for n in parts]


def _planned_type(value: Value | None) -> PlannedType | None:
    return None if value is None else PlannedType(value.dtype, value.shape)


@dataclass(slots=True)
class _Model:
    """What `Folder` reads of a ModelProto."""

    graph: Any
    opset_import: Sequence[Any]


def run_sizes(
    graph: Any, opsets: Sequence[Any], values: dict[str, Value], consts: dict[str, Any], outer: RunSizes | None = None
) -> RunSizes:
    """Sizes of a GraphProto whose inputs and outer values are known. Results of nodes are worked out anew.

    `outer`: of the graph that this is a body of; they share what is guessed, and what may still run.
    """
    converter = Converter()
    nodes = tuple(converter.node(n) for n in graph.node)
    for tensor in graph.initializer:
        values[tensor.name] = tensor_value(tensor)
        content = array(tensor)
        if content is not None:
            consts[tensor.name] = content
    for node in nodes:
        for name in node.outputs:
            values.pop(name, None)
            consts.pop(name, None)
    net = Net(nodes, (), (), values, consts, frozenset())
    sizer = Sizer(net, graph, opsets)
    if outer is not None:
        sizer.result.guessed, sizer.result.left = outer.guessed, outer.left
    sizer.run()
    return sizer.result


def bound_sizes(model: Any, shapes: Mapping[str, tuple[int, ...]], symbols: Mapping[str, int]) -> RunSizes:
    """Sizes of a ModelProto whose inputs have `shapes`. What inference leaves open is taken from the shapes that the
    file gives with its symbols replaced (`symbols`), as they are in models that the runtime saved."""
    values: dict[str, Value] = {}
    for proto in model.graph.input:
        value = type_value(proto.name, proto.type)
        dtype = value.dtype if value is not None else dtypes.float32
        values[proto.name] = Value(proto.name, dtype, shapes.get(proto.name))
    result = run_sizes(model.graph, model.opset_import, values, {})
    _check_reshapes(model.graph, result)
    for proto in (*model.graph.value_info, *model.graph.output):
        old = result.values.get(proto.name)
        if old is None or old.shape is None:
            filled = _substituted(proto, symbols)
            if filled is not None:
                result.values[proto.name] = filled
    return result


def _check_reshapes(graph: Any, sizes: RunSizes) -> None:
    """Refuses a Reshape that cannot be at these sizes: the runtime ends the run with an error. Only what follows from
    the sizes of inputs and from stored numbers is looked at, and nothing where branches or turns were guessed.

    Raises:
        DimensionError: the tensor has another number of elements than the shape that it is given (SM502).
    """
    if sizes.guessed:
        return
    for node in graph.node:
        if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx") or len(node.input) < 2:
            continue
        shape, target = sizes.shape(node.input[0]), sizes.consts.get(node.input[1])
        if shape is None or target is None or any(a.name == "allowzero" and a.i for a in node.attribute):
            continue
        asked = [int(size) for size in target.reshape(-1)]
        if any(size < -1 for size in asked):
            continue
        wanted = [shape[at] if size == 0 and at < len(shape) else size for at, size in enumerate(asked)]
        count, elements = prod(shape), prod(size for size in wanted if size != -1)
        fits = elements > 0 and count % elements == 0 if -1 in wanted else count == elements
        if fits or not count:
            continue
        raise DimensionError(
            f"the ONNX Runtime refuses to run node '{node.name or node.output[0]}' at these sizes",
            f"It reshapes {list(shape)}, of {count:,} elements, to {asked}: the export fixed that shape.",
            "Choose the sizes that the file was exported with, or export it with that dimension dynamic.",
            code="SM502",
        )


def _substituted(proto: Any, symbols: Mapping[str, int]) -> Value | None:
    import onnx

    if proto.type.WhichOneof("value") != "tensor_type" or not proto.type.tensor_type.HasField("shape"):
        return None
    kind = onnx.TypeProto()
    kind.CopyFrom(proto.type)
    for dim in kind.tensor_type.shape.dim:
        if dim.WhichOneof("value") == "dim_param" and dim.dim_param in symbols:
            dim.dim_value = symbols[dim.dim_param]
    return type_value(proto.name, kind)
