"""What an ONNX exporter may have stored in the place of the module's own tensors, and by how much that moves a peak.

Exporters compute what depends on weights and constants alone (`table[index]`, a mask), give the result a name of their
own, and leave out what it was made from; in PyTorch it may exist for a moment only, and what a table was made from all
the time. And they write one tensor for several of equal contents (norm weights of ones, masks of layers). Tensors of
the module live through the whole step, so that each moves the peak by its size, with the gradient and the optimizer
state of a parameter.

They also compute once what several modules compute alike (a mask, the activation of an embedding): a result that a
module's own code makes, and several other calls of its class read, may be made in each of them, for as long as it is
needed. One that a single other call reads is taken for a second result of the module. So may one be that several
modules of a list read: code that computes it in its loop over them (`conv(F.leaky_relu(x))`).

Source: onnxscript/optimizer/_constant_folding.py; onnx_ir/passes/common, initializer_deduplication.py and
common_subexpression_elimination.py;
torch/csrc/jit/passes/onnx/constant_fold.cpp, deduplicate_initializers.cpp.
"""

from __future__ import annotations

import re
from collections import Counter

from staticmem.eager.trace import Trace
from staticmem.ir.graph import Frame, Graph, Op
from staticmem.ir.stacks import Stack, call_ends, common_depth, general_path, is_published
from staticmem.ops import lookup

_RESULT = re.compile(r"([a-z]\w*?)(?:_\d+)?$")


def moved_by_stored_tensors(graph: Graph, trace: Trace) -> tuple[int, int]:
    """Bytes by which the peak may be lower and higher."""
    if graph.format != "onnx":
        return 0, 0
    merged = _merged(graph)
    bytes_of: Counter[str] = Counter()
    for buffer in trace.buffers if merged else ():
        if buffer.name in merged and buffer.category == "activation":
            bytes_of[buffer.name] = buffer.size
    less, more = _of_stored(graph, trace)
    return less + sum(bytes_of.values()), more + sum(bytes_of[name] * count for name, count in merged.items())


def _merged(graph: Graph) -> dict[str, int]:
    """Results that may have been computed in several calls, with the number of the others."""
    ends = call_ends(graph)
    maker_of: dict[str, Op] = {}
    calls: dict[str, set[Stack]] = {}
    in_lists: dict[str, dict[str, set[Stack]]] = {}  # the modules that read a result, by their list
    for index, op in enumerate(graph.ops):
        for name in op.refs():
            maker = maker_of.get(name)
            if maker is None or maker.modules is op.modules:
                continue
            depth = common_depth(maker.modules, op.modules)
            if depth < len(op.modules) and (place := general_path(path := op.modules[depth].path)) != path:
                in_lists.setdefault(name, {}).setdefault(place, set()).add(op.modules[: depth + 1])
            if depth < min(len(maker.modules), len(op.modules)):
                other = next((f for f in op.modules[depth:] if _alike(f, maker.modules[-1])), None)
                if other is not None:
                    calls.setdefault(name, set()).add(op.modules[: op.modules.index(other) + 1])
        if op.modules and ends.get(op.modules) != index and not is_published(op):
            maker_of.update(dict.fromkeys(op.outputs, op))
    merged = {name: len(others) for name, others in calls.items() if len(others) > 1}
    for name, lists in in_lists.items():
        repeated = max(map(len, lists.values())) - 1
        if repeated:
            merged[name] = max(merged.get(name, 0), repeated)
    return merged


def _alike(a: Frame, b: Frame) -> bool:
    """Whether two modules are of one class, or of one place in a list."""
    return a.cls == b.cls if a.cls or b.cls else general_path(a.path) == general_path(b.path)


def _of_stored(graph: Graph, trace: Trace) -> tuple[int, int]:
    """By the module's own tensors."""
    owned = {p.value.name: p.fqn for p in (*graph.parameters, *graph.buffers) if p.alias_of is None}
    small = {p.value.name for p in graph.parameters if sum(size > 1 for size in p.value.shape or ()) < 2}
    stored = {name for name, fqn in owned.items() if _is_result(fqn) or _is_result(name)} | graph.constant_values.keys()
    owned |= {name: value.name for name, value in graph.constant_values.items()}
    modules: dict[str, set[str]] = {}  # that read a tensor
    for op in graph.ops:
        if op.modules and not is_published(op):
            for name in op.refs():
                if name in stored or name in small:
                    modules.setdefault(name, set()).add(op.modules[-1].path)
    others: Counter[str] = Counter()  # tensors that one stands for, besides itself
    for name, paths in modules.items():
        owner = owned[name].rpartition(".")[0]
        others[name] = len(paths) - 1 if name in stored else sum(not _related(owner, path) for path in paths)
    stored &= modules.keys()
    if not stored and not any(others.values()):
        return 0, 0
    sizes = _sizes(trace, {owned[name] for name in (*stored, *others)})
    less = sum(sizes[owned[name]] for name in stored)
    fixed = stored.difference(p.value.name for p in graph.parameters)  # a weight is what its layer holds, turned or not
    sources = sum(sizes[owned[name]] for name in fixed)  # if the module has what it is made of, beside the result
    return less, sources + sum(sizes[owned[name]] * count for name, count in others.items())


def _is_result(fqn: str) -> bool:
    """Whether a name is that of a node: the TorchScript exporter's, or the FX node's of an ATen op."""
    if "/" in fqn or "::" in fqn:
        return True
    match = _RESULT.match(fqn)
    return match is not None and match[1] is not None and lookup(f"aten::{match[1]}") is not None


def _related(owner: str, path: str) -> bool:
    """Whether one of two modules is in the other, or both are the same."""
    return f"{owner}.".startswith(f"{path}." if path else "") or path.startswith(f"{owner}." if owner else "")


def _sizes(trace: Trace, names: set[str]) -> Counter[str]:
    """Bytes that tensors of the module take, with gradient and state."""
    sizes: Counter[str] = Counter()
    for buffer in trace.buffers:
        if buffer.category not in ("parameter", "buffer", "gradient", "optimizer_state"):
            continue
        name = buffer.name if buffer.name in names else buffer.name.rpartition(".")[0]
        if name in names:
            sizes[name] += buffer.size
    return sizes
