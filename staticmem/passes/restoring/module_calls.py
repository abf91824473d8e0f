"""What the dynamo exporter loses of calls: their numbers, and regions of `torch.no_grad()` and `torch.autocast()`.

Repeated calls of one module have the same path in the file.

torch.export keeps a region of `torch.no_grad()` as a graph of its own; the ONNX exporter runs that graph, and writes
what it does in line, without the region and without the modules. The source lines of these ops are those of the
generated code (`<eval_with_key>`), which says what ran in place. A region of `torch.autocast()` is taken apart the same
way. On a machine without CUDA each region of `torch.autocast("cuda")` is exported as one that is not enabled.

Source: torch/_export/passes/replace_set_grad_with_hop_pass.py, replace_autocast_with_hop_pass.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from operator import is_

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Note, Op, Ref
from staticmem.passes.restoring.inplace import may_be_in_place


def number_calls(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph with `Frame.call` set: a path that is entered again after it was left is another call."""
    entered: Counter[str] = Counter()
    stack: list[Frame] = []
    last: tuple[Frame, ...] = ()  # modules of the op before, in the file and with calls
    modules: tuple[Frame, ...] = ()
    result: list[Op] = []
    for op in graph.ops:
        if not op.modules:  # size arithmetic and the like, without a module: no call ends there
            result.append(op)
            continue
        if op.modules is not last:
            last, depth = op.modules, 0
            while depth < min(len(stack), len(last)) and _same(stack[depth], last[depth]):
                depth += 1
            del stack[depth:]
            for frame in last[depth:]:
                call = entered[frame.path]
                stack.append(frame if frame.call == call else replace(frame, call=call))
                entered[frame.path] += 1
            modules = tuple(stack)
            if all(map(is_, modules, last)):
                modules = last
        result.append(op if modules is last else op.changed(modules=modules))
    return replace(graph, ops=tuple(result)), ()


def _same(a: Frame, b: Frame) -> bool:
    return a is b or (a.path == b.path and a.cls == b.cls)


_GENERATED = "<eval_with_key>"
_CALL = re.compile(r"torch\.ops\.aten\.(\w+?)_\.\w+\(")
_OPERANDS = re.compile(r"torch\.ops\.aten\.[\w.]+\(([^\[\]()]*)")
_UNNAMED = re.compile(r"\barg\d+_1\b")  # an input of a region whose inputs the exporter did not give names
_CAST = re.compile(r"(?:to|type_as)(?:_\d+)?$")


def regions_without_grad(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph, ops of regions with `grad` or `amp` False, in place where they were, and without lines of generated
    code.

    The exporter names the inputs of a region of set_grad_enabled by the values around it, and those of a region of
    autocast not (torch/_export/utils.py, `_name_hoo_subgraph_placeholders`). These show in the lines of ops that read
    an input; elsewhere the parameters tell. A model that is a traced graph itself has such lines only: nothing is known
    of it.
    """
    ops = graph.ops
    keys = [op.stack[-1].file if op.stack and op.stack[-1].file.startswith(_GENERATED) else "" for op in ops]
    if not any(keys) or all(key for key, op in zip(keys, ops, strict=True) if op.stack):
        return graph, ()
    regions = _regions(graph, keys)
    settled = _without_gradient_in_any_case(graph, keys, regions)
    modules = _modules_by_weights(graph, keys)
    new_ops: list[Op] = []
    casts: dict[tuple[str, str], str] = {}  # a region's name of a cast -> the value that it makes
    without_grad = without_autocast = 0
    for index, (op, key) in enumerate(zip(ops, keys, strict=True)):
        if key:
            grad, amp = regions[key]
            target, overload = op.base, op.target[len(op.base) :]
            called = _CALL.search(op.stack[-1].text)
            if called is not None and op.base == f"aten::{called[1]}" and may_be_in_place(op.base):
                target = f"{op.base}_"
            without_grad += not grad and key not in settled
            without_autocast += not amp
            if not amp:
                op = _with_casts(op, graph, key, casts, new_ops)
            op = replace(op, target=target + overload, grad=op.grad and grad, amp=amp, stack=(), modules=modules[index])
        new_ops.append(op)
    notes = []
    if without_grad:
        text = (
            "ops whose code the exporter generated itself are taken to run under torch.no_grad(), which it leaves out"
        )
        notes.append(Note("assumption", "SM262", text, without_grad))
    if without_autocast:
        text = "ops are taken to run inside of torch.autocast(enabled=False), which the exporter leaves out"
        notes.append(Note("assumption", "SM263", text, without_autocast))
    return number_calls(replace(graph, ops=tuple(new_ops)), source)[0], notes


def _modules_by_weights(graph: Graph, keys: Sequence[str]) -> dict[int, tuple[Frame, ...]]:
    """The modules of ops in regions, by their index, within the module that runs the region: an op that reads a weight
    runs in the module that owns it, any other in the module around that of the weight before. What holds numbered
    modules is taken for a list, which runs nothing itself."""
    results = {name for op in graph.ops for name in op.outputs}.union(value.name for value in graph.inputs)
    classes = {frame.path: frame.cls for stack in {op.modules for op in graph.ops} for frame in stack}
    root = next((op.modules[:1] for op in graph.ops if op.modules and not op.modules[0].path), ())
    modules: dict[int, tuple[Frame, ...]] = {}
    around: dict[str, tuple[Frame, ...]] = {}
    for index, (op, key) in enumerate(zip(graph.ops, keys, strict=True)):
        if not key:
            continue
        outer = op.modules if op.modules and not op.modules[0].path else root
        own = next((name.rpartition(".")[0] for name in op.refs() if name not in results), "")
        if own:
            parts, outer_path = own.split("."), outer[-1].path if outer else ""
            lists = {".".join(parts[:n]) for n, part in enumerate(parts) if part.isdigit()}
            paths = [path for n in range(len(parts)) if (path := ".".join(parts[: n + 1])) not in lists]
            paths = [path for path in paths if len(path) > len(outer_path) and path.startswith(outer_path)]
            inner = (*outer, *(Frame(path, classes.get(path, "")) for path in paths))
            around[key] = inner[:-1]
            modules[index] = inner
        else:
            modules[index] = around.get(key, op.modules)
    return modules


def _without_gradient_in_any_case(
    graph: Graph, keys: Sequence[str], regions: Mapping[str, tuple[bool, bool]]
) -> set[str]:
    """Regions of set_grad_enabled, by the names of their inputs, that read no value with a gradient: a checkpoint with
    use_reentrant=True computes no gradients there either (torch/utils/checkpoint.py, `check_backward_validity`)."""
    region_of = dict.fromkeys((value.name for value in graph.inputs), "")  # in which region
    flows: set[str] = set()
    named: set[str] = set()
    reached: set[str] = set()
    for op, key in zip(graph.ops, keys, strict=True):
        flows.update(name for name in op.refs() if name not in region_of and _is_weight(graph, name))
        outside = [name for name in op.refs() if name in region_of and region_of[name] != key]
        if key and not regions[key][0]:
            if outside and not _UNNAMED.search(op.stack[-1].text):
                named.add(key)
            if any(name in flows for name in outside):
                reached.add(key)
        elif any(name in flows for name in op.refs()):
            flows.update(op.outputs)
        region_of.update(dict.fromkeys(op.outputs, key))
    return named - reached


def _regions(graph: Graph, keys: Sequence[str]) -> dict[str, tuple[bool, bool]]:
    """For the generated code of each region: whether autograd and the step's autocast apply to its ops.

    A region inside of another one has both: its ops run between those of the outer one.
    """
    spans: dict[str, tuple[int, int]] = {}
    of_autocast: set[str] = set()
    for index, (op, key) in enumerate(zip(graph.ops, keys, strict=True)):
        if key:
            spans[key] = (spans.get(key, (index, index))[0], index)
            half = any(graph.values[name].dtype in dtypes.HALVES for name in op.outputs if name in graph.values)
            if half or _UNNAMED.search(op.stack[-1].text):
                of_autocast.add(key)
    of_autocast |= _needed_for_gradients(graph, keys, spans.keys() - of_autocast)
    regions = {}
    for key, (first, last) in spans.items():
        around = [outer for outer, (start, end) in spans.items() if start <= first and last <= end]
        regions[key] = all(o in of_autocast for o in around), of_autocast.isdisjoint(around)
    return regions


def _needed_for_gradients(graph: Graph, keys: Sequence[str], regions: Set[str]) -> set[str]:
    """Regions that read no weight, without which a parameter that ops outside of them read would never get a gradient:
    autograd applies to them, so they are of autocast. Those that read weights may be networks whose results are
    targets, or checkpoints with use_reentrant=True."""
    results = {name for op in graph.ops for name in op.outputs}.union(value.name for value in graph.inputs)
    weighty: set[str] = set()
    for op, key in zip(graph.ops, keys, strict=True):
        if key in regions and any(name not in results and _is_weight(graph, name) for name in op.refs()):
            weighty.add(key)
    regions = regions - weighty
    if not regions:
        return set()
    inside = {name for op, key in zip(graph.ops, keys, strict=True) if key in weighty for name in op.refs()}
    reached = _reached(graph, keys, weighty) - inside
    if reached <= _reached(graph, keys, {*weighty, *regions}):
        return set()
    return {region for region in regions if not reached <= _reached(graph, keys, {*weighty, region})}


def _is_weight(graph: Graph, name: str) -> bool:
    value = graph.values.get(name)
    return value is not None and value.dtype.is_floating_point and value.numel > 1


def _reached(graph: Graph, keys: Sequence[str], without: Set[str]) -> set[str]:
    """Tensors that no op makes and that the outputs depend on by floating-point values, past these regions."""
    needed, results = set(graph.outputs), set[str]()
    for op, key in zip(reversed(graph.ops), reversed(keys), strict=True):
        results.update(op.outputs)
        if key not in without and any(name in needed and _floating(graph, name) for name in op.outputs):
            needed.update(op.refs())
    return needed - results


def _floating(graph: Graph, name: str) -> bool:
    value = graph.values.get(name)
    return value is None or value.dtype.is_floating_point


def _with_casts(op: Op, graph: Graph, key: str, casts: dict[tuple[str, str], str], ops: list[Op]) -> Op:
    """The op, reading the results of casts to float32 of its region: they return their input in a float32 export, which
    leaves them out, and copy it where autocast around the region has made it half."""
    operands = _OPERANDS.search(op.stack[-1].text)
    args = list(op.args)
    for index, name in enumerate(operands[1].split(", ") if operands is not None else ()):
        arg = args[index] if index < len(args) else None
        if not isinstance(arg, Ref) or not _CAST.match(name):
            continue
        value, cast = graph.values.get(arg.name), casts.get((key, name))
        if cast is None and value is not None and value.dtype is dtypes.float32 and not _CAST.match(arg.name):
            cast = casts[key, name] = f"{arg.name}::{name}"
            ops.append(Op(cast, "aten::to.dtype", (arg, dtypes.float32), {}, (cast,), op.modules, amp=False))
        if cast is not None:
            args[index] = Ref(cast)
    return op if casts == {} else replace(op, args=tuple(args))
