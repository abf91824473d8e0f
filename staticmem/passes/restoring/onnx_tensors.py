"""The tensors of a graph from ONNX: those of the module, under its names and in its sizes, and stored results as calls.

onnxscript computes what depends on nothing that a caller gives and stores the result in the file
(onnxscript/optimizer/_constant_folding.py): these become the calls that eager PyTorch makes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from staticmem.eager.strides import contiguous_strides
from staticmem.frontends.onnx.decode import Decoded
from staticmem.frontends.onnx.weights import LARGE, lost_buffers, roles_of
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Frame, Graph, Note, Op, Parameter, Ref, Value
from staticmem.ir.onnx_graph import Net, Translated
from staticmem.ops import kinds_of, lookup
from staticmem.passes.edit import Ops


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
            name=self.decoded.name,
            format="onnx",
            producer=net.producer,
            inputs=self.decoded.inputs,
            parameters=(),
            buffers=(),
            ops=tuple(translated.ops),
            outputs=translated.outputs,
            values=net.values,
            notes=(*self.decoded.tensors.notes, *translated.notes),
            inplace_known=False,
            output_names=net.outputs if len(net.outputs) == len(translated.outputs) else (),
        )


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


# names that torch/fx/graph.py makes of the call's: `aten.new_zeros.default` -> `new_zeros`, `new_zeros_1`
_NAMED = re.compile(r"((?:new_)?(?:zeros|ones|full|empty)|[a-z_][a-z0-9_]*?)(?:_like)?(?:_\d+)?\Z")
_FACTORY = re.compile(r"(?:new_)?(zeros|ones|full|empty)\Z")
_INNER = ("val", "initializer")  # names of what is within a call: a weight that the exporter has transposed
_REPEATING = ("expand", "expand_copy", "broadcast_to")


def stored_tensors(graph: Graph, source: FromOnnx) -> tuple[Graph, Sequence[Note]]:
    """The calls whose results the exporter's optimiser computed and stored in the file, each before its first reader.

    `torch.zeros(n, 64)` in a model's code makes a tensor in every step; with fixed sizes it is a constant of the file,
    under the name that the FX graph gave it (`zeros`, `new_zeros_1`). So is what the code computes of buffers, small
    parameters and numbers (`cos`, `linear_4`, a table of biases): no parameter, and made anew in every step. A view is
    of what its module owns, if that is in the file in no other form; so is what is computed of a parameter, such as a
    masked weight. What belongs to a module is in the graph's signature.
    """
    ops, net, kinds = graph.ops, source.net, source.decoded.signature.kinds
    owned = {*net.inputs, *net.aliases.values(), *kinds, *source.translated.restored}
    names = owned.union(*(op.outputs for op in ops))
    readers: dict[str, list[Op]] = {}
    for op in ops:
        for name in dict.fromkeys(op.refs()):
            if name not in names and (match := _NAMED.match(name)) and (kinds or _FACTORY.match(match[1])):
                readers.setdefault(name, []).append(op)
    if not readers:
        return graph, ()
    gone = _LostTensors(source, ops)
    calls: dict[str, list[Op]] = {}
    first = sorted(readers, key=lambda name: (not gone.is_named(readers[name][0]), not _is_view(name)))
    for name in first:  # what these leave is for the others
        calls[name] = _stored(name, readers[name], net, gone)
    for whole, parts in gone.slices.items():
        if len(parts) == 1:  # all that is known of its size
            gone.seen_as[parts[0]] = whole
            calls[parts[0]] = []
    before: dict[int, list[Op]] = {}
    for index, op in enumerate(ops):
        for name in [n for n in dict.fromkeys(op.refs()) if n in calls]:
            for call in calls.pop(name):
                before.setdefault(_entered(ops, index, len(call.modules)), []).append(call)
    all_ops: list[Op] = []
    for index, op in enumerate(ops):
        all_ops += [*before.get(index, ()), op]
    if gone.seen_as:
        edited = Ops(all_ops)
        edited.renamed = gone.seen_as
        all_ops = edited.done()
    return replace(graph, ops=tuple(all_ops)), ()


class _LostTensors:
    """Tensors of modules that the file has in no form, and what takes their place."""

    def __init__(self, source: FromOnnx, ops: Sequence[Op]) -> None:
        self.translated: Translated = source.translated
        self.kinds: dict[str, str] = source.decoded.signature.kinds
        self.roles, _ = roles_of(source.net.nodes)
        there = {*source.decoded.tensors.all, *self.translated.restored.values(), *self.translated.added}
        self.modules: dict[str, list[str]] = {}  # names by the path of their module
        for name in self.kinds:
            if name not in there and not name.endswith("num_batches_tracked"):
                self.modules.setdefault(name.rpartition(".")[0], []).append(name)
        self.slices: dict[str, list[str]] = {}  # the stored ones of a tensor
        self.ran = {frame.path for op in ops for frame in op.modules}
        self.seen_as: dict[str, str] = {}  # stored views of all of a tensor: the tensor

    def of(self, op: Op, stored: Value, view: bool = True) -> str | None:
        """The tensor that a stored result of this kind and size is of: one that a module around its reader owns. What
        is no view is of a parameter of the innermost module."""
        floating = stored.dtype.is_floating_point
        text = _text(op)
        frames = reversed(op.modules) if view else op.modules[-1:]
        names = [name for frame in frames for name in self.modules.get(frame.path, ())]
        if view and op.modules:  # those of a ParameterDict or ParameterList
            below = self._below(op.modules[-1].path)
            names += [name for name in below if name.rpartition(".")[2] not in ("weight", "bias")]
        for name in sorted(names, key=lambda name: not _mentions(text, name)):
            if not floating if self.kinds[name] == "PARAMETER" else not view:
                continue
            present: Value | None = self.translated.added.get(name)
            if present is None:
                self.translated.added[name] = Value(name, stored.dtype, stored.shape)
            elif (present.dtype, present.shape) != (stored.dtype, stored.shape):
                continue
            return name
        return None

    def with_part(self, op: Op, part: Value) -> str | None:
        """The tensor that a stored slice is of: a buffer rather than a parameter, and one for all slices that differ in
        one axis, as large as the largest."""
        text, sizes = _text(op), part.shape or ()
        names = [name for frame in reversed(op.modules) for name in self.modules.get(frame.path, ())]
        for name in sorted(names, key=lambda name: (not _mentions(text, name), self.kinds[name] == "PARAMETER")):
            present = self.translated.added.get(name)
            whole = sizes if present is None else present.shape or ()
            if self.kinds[name] == "PARAMETER" and not part.dtype.is_floating_point:
                continue
            if not _alike(whole, sizes):
                continue
            if present is None or present.dtype is part.dtype:
                self.translated.added[name] = Value(name, part.dtype, tuple(map(max, whole, sizes)))
                self.slices.setdefault(name, []).append(part.name)
                return name
        return None

    def is_of_buffer(self, op: Op, stored: Value) -> bool:
        """Whether a stored result is probably computed of slices of a buffer that are stored as well."""
        names = [name for name in self.modules.get(op.modules[-1].path, ()) if self.kinds[name] == "BUFFER"]
        buffers = [self.translated.added[name] for name in names if name in self.slices]
        return any(buffer.dtype is stored.dtype and _alike(buffer.shape, stored.shape) for buffer in buffers)

    def _below(self, path: str) -> list[str]:
        """Names of modules within one, of which no op is left: all that they computed is stored."""
        inner = f"{path}." if path else ""
        modules = (module for module in self.modules if module.startswith(inner) and module not in self.ran)
        return [name for module in modules for name in self.modules[module]]

    def source(self, op: Op, rank: int, dtype: DType) -> str | None:
        """A parameter that is gone and a stored result is probably computed of: one of the modules that its reader, or
        the caller of that, has. Its size is not known; it is small, or the optimiser would have left it in the file."""
        names: list[str]
        for frame in reversed(op.modules[-2:]):
            names = [*self.modules.get(frame.path, ()), *(self._below(frame.path) if frame.path else ())]
            for name in names:
                if self.kinds[name] == "PARAMETER" and name not in self.translated.added:
                    self.translated.added[name] = Value(name, dtype, (1,) * rank)
                    return name
        return None

    def is_named(self, op: Op) -> bool:
        """Whether the line of an op reads an attribute that is gone."""
        text = _text(op)
        return any(_mentions(text, name) for frame in op.modules for name in self.modules.get(frame.path, ()))


def _alike(a: Sequence[int] | None, b: Sequence[int] | None) -> bool:
    """Whether sizes differ in one axis at most."""
    a, b = a or (), b or ()
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) < 2


def _text(op: Op) -> str:
    return op.stack[-1].text if op.stack else ""


def _mentions(text: str, name: str) -> bool:
    """Whether a line reads `self.latents`, of `latents` or `encoder.latents`."""
    return re.search(rf"\.{re.escape(name.rpartition('.')[2])}\b", text) is not None


def _is_view(name: str) -> bool:
    match = _NAMED.match(name)
    return match is not None and (match[1] == "select" or "view" in kinds_of(f"aten::{match[1]}"))


def _stored(name: str, readers: list[Op], net: Net, gone: _LostTensors) -> list[Op]:
    value, match = net.values.get(name), _NAMED.match(name)
    if value is None or value.shape is None or value.numel < 2 or match is None:
        return []
    factory, around = _FACTORY.match(match[1]), _around(readers)
    first = readers[0]
    stack = first.stack[: max(len(first.stack) - len(first.modules) + len(around), 0)]

    def call(target: str, *args: Arg, output: str = name, **kwargs: Arg) -> Op:
        return Op(output, f"aten::{target}", args, kwargs, (output,), around, "", stack)

    whole: str | None = None
    if factory is not None:
        args = (value.shape, 0) if factory[1] == "full" else (value.shape,)
        return [replace(call(factory[1], *args, dtype=value.dtype), stack=())]
    if match[1] in _INNER:  # a large result of something that the exporter wrote as several nodes
        computed = value.dtype.is_floating_point and value.numel >= LARGE and name not in gone.roles
        if computed and gone.is_named(first) and (whole := gone.of(first, value)) is not None:
            gone.seen_as[name] = whole  # the first step of what the exporter wrote for `self.latents.repeat(...)`
            return []
        return [call("empty", value.shape, dtype=value.dtype)] if computed else []
    if lookup(f"aten::{match[1]}") is None:
        return []
    sizes = owned = value.shape
    if match[1] == "slice" and (whole := gone.with_part(first, value)) is not None:
        return [call("as_strided", Ref(whole), value.shape, contiguous_strides(value.shape))]
    if _is_view(name):
        if match[1] in _REPEATING:
            sizes, owned = _repeated(value, first, net)
        whole = gone.of(first, Value(name, value.dtype, owned))
        if whole is not None and sizes == owned:
            gone.seen_as[name] = whole
            return []
        if whole is not None:
            return [call("expand", Ref(whole), sizes)]
    elif first.modules and gone.is_of_buffer(first, value):
        return [call("empty", value.shape, dtype=value.dtype)]
    elif _has_same_size(f"aten::{match[1]}") and (whole := gone.of(first, value, view=False)) is not None:
        return [call("clone", Ref(whole))]
    inner = name if sizes == owned else f"{name}::repeated"
    small = gone.source(first, len(owned), value.dtype) if value.dtype.is_floating_point else None
    if small is not None:  # so it requires a gradient
        maker = call("repeat", Ref(small), owned, output=inner)
    else:
        maker = call("empty", owned, output=inner, dtype=value.dtype)
    return [maker] if inner == name else [maker, call("expand", Ref(inner), sizes)]


def _has_same_size(base: str) -> bool:
    """Whether a result is as large as the parameter that it is computed of, unless the other operand is larger."""
    from staticmem.ops.tags import tagged  # few files have stored results of parameters

    return base in tagged("pointwise") or "softmax" in kinds_of(base) or base in ("aten::tril", "aten::triu")


def _repeated(value: Value, reader: Op, net: Net) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a stored `expand`, and of what it repeats: in the leading axes that it has in common with the tensor
    that it meets, where the contents do not tell. The first axis of that tensor is the batch that is asked for."""
    stored, shown = value.shape or (), net.const(value.name)
    base = list(stored)
    met = (shape for n in reader.refs() if n != value.name and (shape := net.shape(n)) and len(shape) == len(stored))
    other = next(met, None)
    for axis, size in enumerate(stored):
        if shown is not None:
            base[axis] = 1 if size > 1 and (shown == shown.take([0], axis)).all() else size
        elif other is None and axis == 0 and len(stored) > 2 and size == _batch(net):
            base[0] = 1  # what repeats a tensor for each sample, in front of a module of which the text is not here
        elif other is None or axis > len(stored) - 2 or not (other[axis] == size or (axis == 0 and net.rebound)):
            break
        else:
            base[axis] = 1
    sizes = (other[0], *stored[1:]) if other and net.rebound and base[:1] == [1] else stored
    return sizes, tuple(base)


def _batch(net: Net) -> int | None:
    """The first size of all inputs; None where they differ, or where another one than the file's is asked for."""
    firsts = {shape[0] for name in net.inputs if (shape := net.shape(name))}
    return firsts.pop() if len(firsts) == 1 and not net.rebound else None


def _entered(ops: Sequence[Op], index: int, depth: int) -> int:
    """The first op of the module that runs op `index` and that a frame of this depth has called: what the frame makes
    for it exists before."""
    called = ops[index].modules[: depth + 1]
    first = index
    while len(called) > depth and index and ops[index - 1].modules[: depth + 1] in (called, ()):
        index -= 1
        first = index if ops[index].modules else first
    return first


def _around(readers: list[Op]) -> tuple[Frame, ...]:
    """The modules that enclose all readers."""
    modules = readers[0].modules
    for op in readers[1:]:
        modules = tuple(
            x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(modules, op.modules, strict=False))
        )
    return modules
