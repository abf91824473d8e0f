"""What exporters lose of calls of modules: their numbers, regions that they ran in, calls that were merged, last turns.

Repeated calls of one module have the same path in a file of the dynamo exporter.

torch.export keeps a region of `torch.no_grad()` as a graph of its own; the ONNX exporter runs that graph, and writes
what it does in line, without the region and without the modules. The source lines of these ops are those of the
generated code (`<eval_with_key>`), which says what ran in place. A region of `torch.autocast()` is taken apart the same
way. On a machine without CUDA each region of `torch.autocast("cuda")` is exported as one that is not enabled.

The TorchScript exporter merges equal nodes into one. Modules of a list that begin with the same call of the same tensor
(`F.leaky_relu(x)` in each residual block of a vocoder) have one node for it, which stands in the first of them. PyTorch
runs the call in each, and each result lives as long as its own module needs it.

And exporters of ONNX drop what the last turn of a loop computes for a turn that never comes.
`for block in self.blocks: y = block(x); x = x + y[:, :c]; skip = skip + y[:, c:]` computes an `x` in its last turn that
nobody reads. PyTorch runs that, and the variable has it until the function returns. The sign is a module of a list
after which its frame runs ops in each turn that the last turn lacks, where all others are the same. Code may as well
leave them out (`if block is not self.blocks[-1]`), so that only a band has them.

Sources: torch/_export/passes/replace_set_grad_with_hop_pass.py, replace_autocast_with_hop_pass.py;
torch/csrc/jit/passes/common_subexpression_elimination.cpp, which torch.onnx.export runs (torch/onnx/utils.py,
`_optimize_graph`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import is_

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Note, Op, Ref
from staticmem.ir.stacks import Stack, common_depth, general_path
from staticmem.passes.edit import reading_instead
from staticmem.passes.restoring.inplace import may_be_in_place
from staticmem.scenario.step import Scenario


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
                op = _read_casts(op, graph, key, casts, new_ops)
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


def _read_casts(op: Op, graph: Graph, key: str, casts: dict[tuple[str, str], str], ops: list[Op]) -> Op:
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


_FEWEST_TURNS = 3  # two whole ones show what a turn is


def ends_of_loops(graph: Graph, scenario: Scenario) -> tuple[Graph, Graph] | None:
    """The graph as it is, and with the ops that exporters may have dropped from last turns; None where there are
    none."""
    inserted: dict[int, list[Op]] = {}  # by the index that they come before
    for frame, starts in _turns(graph).items():
        turns = [_take_turn(graph, frame, start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        end, added = _missing(graph.ops, len(frame), *turns[-3:])
        if added:
            inserted[end] = added
    if not inserted:
        return None
    ops = [each for index, op in enumerate(graph.ops) for each in (*inserted.get(index, ()), op)]
    return graph, replace(graph, ops=(*ops, *inserted.get(len(graph.ops), ())))


def _turns(graph: Graph) -> dict[Stack, list[int]]:
    """By the frame that runs a loop over a list of modules: the first op of each turn. The first list tells turns."""
    lists: dict[Stack, str] = {}
    starts: dict[Stack, dict[str, int]] = {}
    for index, op in enumerate(graph.ops):
        for level in range(len(op.modules) - 1):
            path, _, number = op.modules[level + 1].path.rpartition(".")
            frame = op.modules[: level + 1]
            if number.isdigit() and path != frame[-1].path and lists.setdefault(frame, path) == path:
                starts.setdefault(frame, {}).setdefault(number, index)
    return {frame: list(turns.values()) for frame, turns in starts.items() if len(turns) >= _FEWEST_TURNS}


def _take_turn(graph: Graph, frame: Stack, start: int, end: int | None) -> list[int]:
    """The ops of a turn."""
    within = range(start, len(graph.ops) if end is None else end)
    return [index for index in within if graph.ops[index].modules[: len(frame)] == frame]


def _missing(
    ops: Sequence[Op], depth: int, before: list[int], whole: list[int], last: list[int]
) -> tuple[int, list[Op]]:
    """The ops of a whole turn that the last one lacks, made of what that has, and the index that they come before."""
    keys = [_key(ops[index]) for index in whole]
    if keys != [_key(ops[index]) for index in before]:
        return 0, []
    carried = zip(before, whole, strict=True)
    own = {old: new for a, b in carried for old, new in zip(ops[a].outputs, ops[b].outputs, strict=True)}
    added: list[Op] = []
    end, rest = last[0], iter(last)
    index = next(rest)
    for key, place in zip(keys, whole, strict=True):
        op, given = ops[place], ops[index]
        if _key(given) == key and _reads_the_same(op, given, own):
            own.update(zip(op.outputs, given.outputs, strict=True))
            end, index = index + 1, next(rest, index)
            continue
        if len(op.modules) != depth:  # a module that does not run: its parameters are unread
            return 0, []
        outputs = tuple(f"{name} of the last turn" for name in op.outputs)
        added.append(replace(reading_instead(op, own), name=outputs[0], outputs=outputs, clears=False))
        own.update(zip(op.outputs, outputs, strict=True))
    return end, added


def _reads_the_same(op: Op, given: Op, own: Mapping[str, str]) -> bool:
    """Whether an op of the last turn reads what one of another turn does, or a parameter instead of a parameter."""
    return all(own.get(name, other) == other for name, other in zip(op.refs(), given.refs(), strict=True))


def _key(op: Op) -> tuple[object, ...]:
    """What an op of a turn has in common with that of another turn."""
    numbers = tuple(arg for arg in op.args if not isinstance(arg, Ref | tuple))
    paths = tuple([general_path(frame.path) for frame in op.modules])
    return op.target, numbers, paths, len(op.refs()), len(op.outputs)


@dataclass(slots=True)
class _Calls:
    """What runs in each module call."""

    reads: dict[Stack, set[str]] = field(default_factory=dict)
    makes: dict[Stack, set[str]] = field(default_factory=dict)


def run_in_each(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph with a call of its own in each of the modules."""
    calls = _what_calls_do(graph)
    maker = {name: op for op in graph.ops for name in op.outputs}
    again: dict[tuple[str, Stack], str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        names: dict[str, str] = {}
        for name in op.refs():
            first = maker.get(name)
            depth = common_depth(first.modules, op.modules) if first is not None else 0
            if first is None or not _is_merged(first, op, depth, calls):
                continue
            call = op.modules[: depth + 1]
            if (name, call) not in again:
                again[name, call] = f"{name}::{call[-1].path}"
                ops.append(first.changed(outputs=(again[name, call],), modules=_within(first.modules, call)))
            names[name] = again[name, call]
        ops.append(reading_instead(op, names) if names else op)
    if not again:
        return graph, ()
    values = {new: replace(graph.values[old], name=new) for (old, _), new in again.items() if old in graph.values}
    text = "calls that the exporter merged run again in each module of a list"
    changed = replace(graph, ops=tuple(ops), values={**graph.values, **values})
    return changed, [Note("assumption", "SM271", text, len(again))]


def _what_calls_do(graph: Graph) -> _Calls:
    calls = _Calls()
    for op in graph.ops:
        for depth in range(1, len(op.modules) + 1):
            call = op.modules[:depth]
            calls.reads.setdefault(call, set()).update(op.refs())
            calls.makes.setdefault(call, set()).update(op.outputs)
    return calls


def _is_merged(maker: Op, reader: Op, depth: int, calls: _Calls) -> bool:
    """Whether what a module reads is an inner result of another of its list, which it has the input of as well."""
    if len(maker.modules) <= depth or len(reader.modules) <= depth or len(maker.outputs) != 1:
        return False
    first, later = maker.modules[depth], reader.modules[depth]
    if first.path == later.path or general_path(first.path) != general_path(later.path):
        return False
    own, other = maker.modules[: depth + 1], reader.modules[: depth + 1]
    inputs = maker.refs()
    is_inner = maker.outputs[0] in calls.reads[own] and len(calls.makes[own]) > 1
    return bool(inputs) and is_inner and calls.makes[own].isdisjoint(inputs) and calls.reads[other].issuperset(inputs)


def _within(modules: Stack, call: Stack) -> Stack:
    """The modules of an op as they are in another call."""
    old, new = modules[len(call) - 1].path, call[-1].path
    return (*call, *(Frame(new + frame.path[len(old) :], frame.cls, frame.call) for frame in modules[len(call) :]))
