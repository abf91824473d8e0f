"""The layer table: a row for each module of the model, with what it holds, keeps, computes and moves.

Every figure exists twice: `own`, of the ops and parameters that belong to the module itself, and `total`, with the
modules in it. `total` of the root is that of the model, and `total` = `own` + the sum over the children's `total`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from staticmem.eager.reasons import Reason
from staticmem.engine.shapes import ValueInfo
from staticmem.ir.graph import Graph, Op
from staticmem.liveness import Lifetimes
from staticmem.liveness.why import module_of, short
from staticmem.ops import flops, in_place

SCHEMA = "staticmem.layers/1"


@dataclass(slots=True)
class Figures:
    """`macs` are multiply-adds of the forward, 2 FLOPs each. All sizes in bytes.

    `parameters`, `trainable_parameters`: elements; `parameter_bytes`: as in the file, not rounded. `activation_bytes`:
    what the forward allocates, `saved_bytes`: what of it autograd keeps until backward, `peak_bytes`: what is alive at
    the peak, each buffer rounded up to 512. `read_bytes`, `write_bytes`: what the forward's ops read and write, views
    nothing.
    """

    parameters: int = 0
    trainable_parameters: int = 0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    saved_bytes: int = 0
    macs: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    peak_bytes: int = 0

    def add(self, other: Figures) -> None:
        for name in NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


NAMES = tuple(f.name for f in fields(Figures))


@dataclass(slots=True)
class Layer:
    """A module: `path` as in the model (empty for the whole), `calls` how often the step's forward calls it.

    `inputs` and `outputs` are shapes in elements, those of its first call.
    """

    path: str
    cls: str
    depth: int
    calls: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    own: Figures = field(default_factory=Figures)
    total: Figures = field(default_factory=Figures)


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Layers in the order in which the forward enters them; the first is the whole model.

    `by` is "module", or "op" for a file that has no modules. `mode` is that of the step ("train" or "infer").
    """

    schema: str
    model: str
    mode: str
    by: str
    peak_bytes: int
    layers: tuple[Layer, ...]


def layer_table(
    model: str, graph: Graph, lifetimes: Lifetimes, values: Mapping[str, ValueInfo], mode: str
) -> LayerTable:
    """The table of a step. `values` are `engine.shapes.value_infos` of the same graph."""
    by = "module" if any(op.modules and op.modules[-1].path for op in graph.ops) else "op"
    tree = _Tree(graph, values, by)
    tree.parameters()
    tree.forward(lifetimes)
    tree.peak(lifetimes)
    return LayerTable(SCHEMA, model, mode, by, lifetimes.peak_bytes, tree.done())


class _Tree:
    def __init__(self, graph: Graph, values: Mapping[str, ValueInfo], by: str) -> None:
        self.graph, self.values, self.by = graph, values, by
        self.owned = {p.value.name for p in (*graph.parameters, *graph.buffers)} | set(graph.constant_values)
        self.layers: dict[str, Layer] = {"": Layer("", graph.name, 0, 1, self._sizes(v.name for v in graph.inputs), ())}
        self.calls: dict[str, set[int]] = {}
        self._enter_modules()
        self._shapes()

    def _enter_modules(self) -> None:
        for index, op in enumerate(self.graph.ops):
            if self.by == "op":
                self.layers[self.path(index)] = Layer(self.path(index), short(op.target), 1, 1, (), ())
            for frame in op.modules if self.by == "module" else ():
                if frame.path not in self.layers:
                    depth = len([p for p in self.layers if p and frame.path.startswith(f"{p}.")]) + 1
                    self.layers[frame.path] = Layer(frame.path, frame.cls.rpartition(".")[2], depth, 0, (), ())
                elif not frame.path:
                    self.layers[""].cls = frame.cls.rpartition(".")[2] or self.layers[""].cls
                self.calls.setdefault(frame.path, set()).add(frame.call)
        for path, calls in self.calls.items():
            self.layers[path].calls = len(calls)

    def path(self, index: int) -> str:
        """The layer that an op of the graph belongs to; "" for the loss and the optimizer."""
        if not 0 <= index < len(self.graph.ops):
            return ""
        op = self.graph.ops[index]
        if self.by == "op":
            return op.name
        return op.modules[-1].path if op.modules else ""

    def nearest(self, path: str) -> Layer:
        """The layer of a module path, else of the closest module around it that runs."""
        while path not in self.layers:
            path = path.rpartition(".")[0]
        return self.layers[path]

    def _sizes(self, names: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.values[name].shape for name in dict.fromkeys(names) if name in self.values)

    def _shapes(self) -> None:
        """What enters and leaves each module in its first call."""
        reads: dict[tuple[str, int], list[str]] = {}
        makes: dict[tuple[str, int], list[str]] = {}
        for op in self.graph.ops:
            frames = [(f.path, f.call) for f in op.modules] if self.by == "module" else [(op.name, 0)]
            for frame in frames:
                outputs = makes.setdefault(frame, [])
                internal = {*self.owned, *outputs}
                reads.setdefault(frame, []).extend(name for name in op.refs() if name not in internal)
                outputs.extend(op.outputs)
        last_frames: dict[str, set[tuple[str, int]]] = {}
        for op in self.graph.ops:
            frames = [(f.path, f.call) for f in op.modules] if self.by == "module" else [(op.name, 0)]
            for name in op.refs():
                seen = last_frames.get(name)
                last_frames[name] = set(frames) if seen is None else seen & set(frames)
        results = set(self.graph.outputs)
        for (path, call), names in makes.items():
            layer = self.layers[path]
            if path and (layer.inputs or layer.outputs):
                continue
            inside = set(names)
            leaving = [n for n in names if n in results or (path, call) not in last_frames.get(n, {(path, call)})]
            layer.inputs = self._sizes(n for n in reads[path, call] if n not in inside)
            layer.outputs = self._sizes(leaving)
        self.layers[""].outputs = self._sizes(self.graph.outputs)

    def parameters(self) -> None:
        shared = {p.value.name for p in self.graph.parameters if p.alias_of is not None}
        for p in self.graph.parameters:
            if p.value.name in shared:
                continue
            path = p.fqn.rpartition(".")[0] if self.by == "module" else self._first_reader(p.value.name)
            own = self.nearest(path).own
            own.parameters += p.count
            own.trainable_parameters += p.count if p.trainable else 0
            own.parameter_bytes += p.value.dtype.nbytes(p.value.numel)

    def _first_reader(self, name: str) -> str:
        return next((op.name for op in self.graph.ops if name in op.refs()), "")

    def forward(self, lifetimes: Lifetimes) -> None:
        trace = lifetimes.trace
        end = trace.marks.get("forward_end", lifetimes.ticks)
        saved = {
            h.buffer for h in trace.holds if h.kind is Reason.SAVED and h.start < end and (h.end is None or h.end > end)
        }
        for buffer in trace.buffers:
            kernel = trace.kernels[buffer.kernel] if buffer.kernel >= 0 else None
            if kernel is None or kernel.phase != "forward":
                continue
            own = self.layers[self.path(kernel.op)].own
            own.activation_bytes += buffer.size
            own.saved_bytes += buffer.size if buffer.id in saved else 0
        shapes = {name: value.shape for name, value in self.values.items()}
        for index, op in enumerate(self.graph.ops):
            own = self.layers[self.path(index)].own
            own.macs += flops(op, shapes) // 2
            read, written = self._moved(op)
            own.read_bytes += read
            own.write_bytes += written

    def _moved(self, op: Op) -> tuple[int, int]:
        """Bytes that an op reads and writes; a view moves none."""
        inputs = [self.values[n] for n in dict.fromkeys(op.refs()) if n in self.values]
        outputs = [self.values[n] for n in op.outputs if n in self.values]
        writes = in_place(op.base)
        written = [v for v in outputs if v.fresh or writes]
        if not written:
            return 0, 0
        return sum(v.nbytes for v in inputs), sum(v.nbytes for v in written)

    def peak(self, lifetimes: Lifetimes) -> None:
        for buffer in lifetimes.alive(lifetimes.peak_tick):
            if self.by == "op":
                kernel = lifetimes.trace.kernels[buffer.kernel] if buffer.kernel >= 0 else None
                path = self.path(kernel.op) if kernel is not None else ""
            else:
                path = module_of(self.graph, buffer.category, buffer.name, lifetimes.trace.kernels[buffer.kernel].op)
            self.nearest(path).own.peak_bytes += buffer.size

    def done(self) -> tuple[Layer, ...]:
        for path, layer in self.layers.items():
            layer.total.add(layer.own)
            while path:
                path = path.rpartition(".")[0] if self.by == "module" else ""
                if path in self.layers:
                    self.layers[path].total.add(layer.own)
        return tuple(self.layers.values())


def down_to(table: LayerTable, depth: int | None) -> LayerTable:
    """The table without deeper layers; 1 is the model's own children."""
    if depth is None:
        return table
    return replace(table, layers=tuple(layer for layer in table.layers if layer.depth <= depth))
