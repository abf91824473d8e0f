"""What an ONNX exporter may have stored in the place of the module's own tensors, and by how much that moves a peak.

Exporters compute what depends on weights and constants alone (`table[index]`, a mask), give the result a name of their
own, and leave out what it was made from; in PyTorch it may exist for a moment only. And they write one tensor for
several of equal contents (norm weights of ones, masks of layers). Tensors of the module live through the whole step, so
that each moves the peak by its size, with the gradient and the optimizer state of a parameter.

Source: onnxscript/optimizer/_constant_folding.py, onnx_ir/passes/common/initializer_deduplication.py;
torch/csrc/jit/passes/onnx/constant_fold.cpp, deduplicate_initializers.cpp.
"""

from __future__ import annotations

import re
from collections import Counter

from staticmem.eager.trace import Trace
from staticmem.ir.graph import Graph
from staticmem.ops import lookup
from staticmem.passes.lost_gradients import is_published

_RESULT = re.compile(r"([a-z]\w*?)(?:_\d+)?$")


def moved_by_stored_tensors(graph: Graph, trace: Trace) -> tuple[int, int]:
    """Bytes by which the peak may be lower and higher."""
    if graph.format != "onnx":
        return 0, 0
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
    return less, sum(sizes[owned[name]] * count for name, count in others.items())


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
