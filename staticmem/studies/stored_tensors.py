"""Tensors that live otherwise than a file shows, and by how much that moves a peak: stored by exporters, kept by code.

ONNX exporters compute what depends on weights and constants alone (`table[index]`, a mask), give the result a name of
their own, and leave out what it was made from; in PyTorch it may exist for a moment only, and what a table was made
from all the time. And they write one tensor for several of equal contents (norm weights of ones, masks of layers).
Tensors of the module live through the whole step, so that each moves the peak by its size, with the gradient and the
optimizer state of a parameter.

They also compute once what several modules compute alike (a mask, the activation of an embedding): a result that a
module's own code makes, and several other calls of its class read, may be made in each of them, for as long as it is
needed. One that a single other call reads is taken for a second result of the module. So may one be that several
modules of a list read: code that computes it in its loop over them (`conv(F.leaky_relu(x))`).

Source: onnxscript/optimizer/_constant_folding.py; onnx_ir/passes/common, initializer_deduplication.py and
common_subexpression_elimination.py;
torch/csrc/jit/passes/onnx/constant_fold.cpp, deduplicate_initializers.cpp.

And masks, positions and tables of rotary embeddings depend on sizes, constants and buffers alone. Code that keeps such
a tensor (an attribute, `functools.lru_cache`, a closure) computes it in its first call, and has it in all later ones;
an export shows the first. Either the tensors that its computation takes do not exist at the peak, or the result exists
in the whole step.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import zip_longest

from staticmem.eager.trace import Trace
from staticmem.ir.graph import Frame, Graph, Op
from staticmem.ir.stacks import Stack, call_ends, common_depth, general_path, is_published, is_published_line
from staticmem.liveness import Lifetimes
from staticmem.ops import kinds_of, lookup
from staticmem.ops.registry import FREE_PRODUCTS
from staticmem.passes.variables.policy import attention_weights
from staticmem.passes.variables.releases import kept_by_modules

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
    less, more = _bound_stored(graph, trace)
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


def _bound_stored(graph: Graph, trace: Trace) -> tuple[int, int]:
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


_ATTRIBUTE = re.compile(r"\s*(?:[\w.* ]+,\s*)*self\.\w+\s*(?:,[\w.*, ]+|:[^=]+)?=(?!=)")


def moved_by_kept_tensors(graph: Graph, lifetimes: Lifetimes, training: bool) -> tuple[int, int]:
    """Bytes by which the peak may be lower and higher."""
    less, more = _bound_constants(graph, lifetimes)
    return less, more + _bound_attributes(graph, lifetimes, training)


def _bound_attributes(graph: Graph, lifetimes: Lifetimes, training: bool) -> int:
    """Bytes of what attributes may keep beside what lines say: in training those of the call before exist while the
    forward runs."""
    decided = {attribute.after for attribute in kept_by_modules(graph).values()}
    pairs = enumerate(zip_longest(graph.ops, graph.ops[1:]))
    assigned = [op for index, (op, after) in pairs if index not in decided and _ends_assignment(op, after)]
    read = {*graph.outputs, *graph.last_read}
    assigned += [op for op in graph.ops if read.isdisjoint(op.outputs) and _is_for_code(op)]
    weights = set() if any(op.stack for op in graph.ops) else _weights_for_code(graph, training)
    if not assigned and not weights:
        return 0
    needed = {*graph.outputs, *(b.value.name for b in graph.buffers)}
    dead: dict[str, Op] = {}
    for op in reversed(graph.ops):
        if needed.isdisjoint(op.outputs) and not (op.base.endswith("_") and needed.intersection(op.refs())):
            dead.update(dict.fromkeys(op.outputs, op))
        else:
            needed.update(op.refs())
    kept = weights
    waiting = list(assigned)
    while waiting:
        op = waiting.pop()
        kept.update(op.outputs)
        if training and not dead.keys().isdisjoint(op.outputs):
            waiting += [dead[name] for name in op.refs() if name in dead and name not in kept]
            kept.update(op.refs())
    sizes: Counter[str] = Counter()
    for name, category, size in zip(
        lifetimes.trace.buffers.names, lifetimes.trace.buffers.categories, lifetimes.sizes, strict=True
    ):
        if name in kept and category == "activation":
            sizes[name] = max(sizes[name], size)
    return sum(sizes.values()) * (2 if training else 1)


def _ends_assignment(op: Op, after: Op | None) -> bool:
    """Whether an op is the last one of a line of the model's own code that assigns to an attribute."""
    number = next((n for n, line in enumerate(op.stack) if _ATTRIBUTE.match(line.text)), None)
    if number is None or any(map(is_published_line, op.stack[: number + 1])):
        return False
    return after is None or after.stack[: number + 1] != op.stack[: number + 1]


def _is_for_code(op: Op) -> bool:
    """Whether what no op reads may be for statements that run none, which no file shows (`self.last = aux`)."""
    return not is_published(op) and kinds_of(op.base).isdisjoint(("check", "view"))


def _weights_for_code(graph: Graph, training: bool) -> set[str]:
    """Weights of attention, which code keeps to plot them: where no line shows whether it does."""
    weights = attention_weights(graph)
    if not weights:
        return set()
    products = (op for op in graph.ops if op.base in FREE_PRODUCTS and not is_published(op))
    kept = {name for op in products for name in op.refs() if name in weights}
    if not training:  # a dropout gives its input
        dropouts = (op for op in reversed(graph.ops) if op.base == "aten::dropout")
        kept.update(op.refs()[0] for op in dropouts if not kept.isdisjoint(op.outputs))
    return kept


def _bound_constants(graph: Graph, lifetimes: Lifetimes) -> tuple[int, int]:
    names = _constants(graph)
    if not names:
        return 0, 0
    trace, tick = lifetimes.trace, lifetimes.peak_tick
    start = dict(trace.phases)["forward"]
    less = more = 0
    rows = zip(trace.buffers.names, trace.buffers.categories, lifetimes.sizes, strict=True)
    for index, (name, category, size) in enumerate(rows):
        if name in names and category == "activation" and lifetimes.born[index] >= start:
            if lifetimes.born[index] <= tick < lifetimes.died[index]:
                less += size
            else:
                more += size
    return less, more


def _constants(graph: Graph) -> set[str]:
    """Results of the model's own code that depend on no input, no parameter and no noise, and take memory."""
    changing = {p.value.name for p in graph.parameters} | {value.name for value in graph.inputs}
    constant: set[str] = set()
    for op in graph.ops:
        if not changing.isdisjoint(op.refs()) or _is_random(op.base):
            changing.update((*op.outputs, *(op.refs() if op.base.endswith("_") else ())))
        elif _is_own(op):
            constant.update(op.outputs)
    return constant - changing


def _is_random(base: str) -> bool:
    from staticmem.ops.tags import tagged  # few graphs have an op that reads neither inputs nor parameters

    return base in tagged("nondeterministic_seeded")


def _is_own(op: Op) -> bool:
    if is_published(op) or "view" in kinds_of(op.base):
        return False
    return not op.stack or not is_published_line(op.stack[-1])
