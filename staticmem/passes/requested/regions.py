"""Regions of a graph: ops that run under a checkpoint, and those that `torch.compile` compiles.

Of checkpoints there are those that a scenario asks for, and those that the model's code calls. Asked for are modules by
class or path, groups of them, and segments of a Sequential.

An export inlines a call in the model's own code, `x = checkpoint(block, x)`: its ops look like all others. Only the
source lines of stack traces show it, where the line is in a `forward` (torch.export keeps the frames of no other
function). A file without traces cannot tell.

A line such as `x = self.encode(x)` stands for a method, and a loop in it may run `checkpoint(block, x)`: the lower end
of a band has those (`hidden_checkpoints`). What code calls so, by habit and in the documentation of
torch.utils.checkpoint, are the repeated modules of a list: numbered modules of one class, of several ops each. Code of
published libraries checkpoints nothing unless it is asked to.

A checkpoint with use_reentrant=True has a `forward` of its own, whose frame is in the traces, and runs its function
under no_grad. A line that decides whether it calls one, `x = checkpoint(b, x) if self.ck else b(x)`, does not tell
which branch ran: it is taken not to have called it, and the lower bound of the peak is that of a checkpoint.

Source: torch/utils/checkpoint.py (`checkpoint`, `checkpoint_sequential`: all segments but the last are checkpoints;
`CheckpointFunction.forward`).

Compiled is the whole model, or the modules that a scenario names, each for itself. Dynamo ends a graph at an op whose
sizes, or whose branches, follow from the contents of a tensor, runs it by itself, and begins another graph behind it.

Under DistributedDataParallel it cuts each graph where a bucket of gradients is full, so that buckets can be reduced
while the backward still runs.

Source: torch/_dynamo/config.py (`capture_dynamic_output_shape_ops`, `capture_scalar_outputs`: False), the tags
`dynamic_output_shape` and `data_dependent_output` of aten/src/ATen/native/native_functions.yaml;
torch/_dynamo/backends/distributed.py (`DDPOptimizer.compile_fn`) (PyTorch 2.15).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from staticmem.errors import UsageError, did_you_mean
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Note, Op, Ref, Region
from staticmem.ir.module_spans import Call, by_parent, calls_of, region_of, selected
from staticmem.ir.record import record
from staticmem.ir.stacks import Stack, is_published_line
from staticmem.passes.restoring.custom_functions import functions
from staticmem.passes.variables.source_lines import is_checkpoint_function
from staticmem.passes.variables.unseen_code import Line, line_at, lines_of_methods
from staticmem.scenario.checkpointing import NO_CHECKPOINTS, SQRT
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.step import DDP_BUCKET, DDP_FIRST_BUCKET, Scenario

_CALL = re.compile(r"(?<!\w)(?:checkpoint|(?P<segments>checkpoint_sequential))\((?P<rest>.*)")
_DECIDED = re.compile(r"(?<!\w)if\b.+\belse\b")  # an expression, of which one branch ran
# where `CheckpointFunction.forward` calls its function; its copies have the name too (fairscale, DeepSpeed)
_FUNCTION = re.compile(r"\s*([A-Za-z_][\w.]*)")
_SEGMENTS = re.compile(r"\s*[\w.]+\s*,\s*(?:segments\s*=\s*)?(\d{1,4})\s*,")


def all_regions(graph: Graph, scenario: Scenario, policy: str = "expected") -> tuple[tuple[Region, ...], list[Note]]:
    """The checkpoints of the scenario, and those of the code that do not contradict them; notes of the latter.

    `policy` is one of `variables.policy.POLICIES`: "last-use" has all that the code may have called, and others than
    "expected" those alone that it certainly called.
    """
    asked = regions_of(graph, scenario)
    if graph.recorded is not None:
        written, notes = list(graph.recorded.regions), list[Note]()
    else:
        written, notes = written_regions(graph, policy, amp=scenario.amp is not None)
        if policy in ("expected", "last-use"):
            written += [f for f in function_regions(graph) if not any(f.crosses(w) for w in written)]
        if policy == "last-use":
            written += [h for h in hidden_checkpoints(graph) if all(_apart(h, w) for w in (*asked, *written))]
    regions = _order_regions({*asked, *(w for w in written if not any(w.crosses(a) for a in asked))})
    return _find_unread_values(graph, regions), notes


def _find_unread_values(graph: Graph, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """The regions, each with those alone of its unread values that there are where it starts, and with what regions
    inside of it keep of them: these run again from what it keeps."""
    if graph.recorded is None or not any(region.unread for region in regions):
        return regions
    asked = {name for region in regions for name in region.unread}
    made_at = {name: index for index, op in enumerate(graph.ops) for name in op.outputs if name in asked}
    ends = graph.recorded.last_held
    kept: list[dict[str, None]] = []
    around: list[int] = []
    for number, region in enumerate(regions):
        while around and regions[around[-1]].end <= region.start:
            around.pop()
        around.append(number)
        kept.append({})
        alive = [n for n in region.unread if made_at.get(n, region.start) < region.start <= ends.get(n, region.start)]
        for outer in around:
            kept[outer].update((name, None) for name in alive if made_at[name] < regions[outer].start)
    return tuple(replace(region, unread=tuple(names)) for region, names in zip(regions, kept, strict=True))


def _apart(a: Region, b: Region) -> bool:
    return a.end <= b.start or b.end <= a.start


def regions_of(graph: Graph, scenario: Scenario) -> tuple[Region, ...]:
    """The checkpoints of a scenario in order, outer ones before those inside them.

    Raises:
        UsageError: a name that no module has, or no Sequential with that many modules.
    """
    if scenario.checkpoint in ((), NO_CHECKPOINTS) and not scenario.checkpoint_segments:
        return ()
    calls = calls_of(graph)
    regions: set[Region] = set()
    if scenario.checkpoint not in ((), NO_CHECKPOINTS):
        chosen = selected(calls, scenario.checkpoint, "--checkpoint")
        asked = _groups(graph, chosen, scenario.checkpoint_every)
        regions.update(replace(region, saves=tuple(scenario.checkpoint_save)) for region in asked)
    if scenario.checkpoint_segments:
        regions.update(_segments(graph, calls, scenario.checkpoint_segments, scenario.checkpoint_sequential))
    return _order_regions(regions)


def _order_regions(regions: set[Region]) -> tuple[Region, ...]:
    return tuple(sorted(regions, key=lambda r: (r.start, r.depth, -r.end)))


# -- by class or path --------------------------------------------------------------------------------------------


def _make_checkpoint(graph: Graph, row: Sequence[Call]) -> Region:
    """The checkpoint around these calls, which keeps what they are given, also where no op reads it."""
    region = region_of(row)
    if graph.recorded is None or not graph.recorded.unread:
        return region
    unread = [name for call in row for name in graph.recorded.unread.get(call.stack[-1], ())]
    return replace(region, unread=tuple(dict.fromkeys(unread)))


def _groups(graph: Graph, calls: Sequence[Call], every: int) -> Iterator[Region]:
    """`every` calls that follow each other in one parent are one region."""
    for row in by_parent(calls).values():
        for first in range(0, len(row), every):
            yield _make_checkpoint(graph, row[first : first + every])


# -- segments ----------------------------------------------------------------------------------------------------


def _segments(graph: Graph, calls: Sequence[Call], segments: int | str, path: str | None) -> Iterator[Region]:
    """`checkpoint_sequential`: all segments but the last, which takes what the division leaves, are checkpoints."""
    for sequential, children in _sequentials(calls, path):
        length = _length(children)
        wanted = max(1, round(length**0.5)) if segments == SQRT else int(segments)
        size = length // wanted
        if size == 0:
            what = f"--checkpoint-segments {wanted} is more than '{sequential.path}' has modules"
            raise UsageError(what, f"It has {length}.", f"Use at most {length}, or {SQRT}.", code="SM164")
        for start in range(0, size * (wanted - 1), size):
            row = [c for k, c in enumerate(children) if start <= _position(c, k) < start + size]
            if row:
                yield _make_checkpoint(graph, row)


def _sequentials(calls: Sequence[Call], path: str | None) -> list[tuple[Call, list[Call]]]:
    """The calls of the Sequential at `path`, or of the one with the most modules, each with its children in order."""
    children = by_parent(calls)
    every = [(c, children[c.stack]) for c in calls if c.stack in children and _is_sequential(c, children[c.stack])]
    if path is None and every:
        path = max(every, key=lambda pair: _length(pair[1]))[0].path
    chosen = [pair for pair in every if pair[0].path == path]
    if chosen:
        return chosen
    paths = sorted({call.path for call, _ in every})
    what = "this model has no Sequential" if not paths else f"'{path}' is not a Sequential of this model"
    hint = did_you_mean(path or "", paths) if paths else "Use --checkpoint with the class of its blocks."
    raise UsageError(what, "--checkpoint-segments divides the modules of a torch.nn.Sequential.", hint, code="SM164")


def _is_sequential(call: Call, children: Sequence[Call]) -> bool:
    """By class, or where a file has no classes, by children that are numbered."""
    if call.cls:
        return call.cls.rpartition(".")[2] == "Sequential"
    return all(child.path.rpartition(".")[2].isdigit() for child in children)


def _position(call: Call, index: int) -> int:
    """A module's place in its Sequential: its number; modules that run no op are not in the graph."""
    name = call.path.rpartition(".")[2]
    return int(name) if name.isdigit() and len(name) < 6 else index


def _length(children: Sequence[Call]) -> int:
    return max((_position(c, k) for k, c in enumerate(children)), default=-1) + 1


# -- in the model's code -----------------------------------------------------------------------------------------


@record(frozen=True)
class _Line:
    """A line with a checkpoint, in one call of the module whose `forward` it is in: the ops [start, end)."""

    frames: Stack
    text: str
    certain: bool
    reentrant: bool
    start: int
    end: int


def undo_no_grad(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph with the gradients of checkpoints with use_reentrant=True, and of what follows them.

    Such a checkpoint turns autograd off, calls its function, and turns on again what it found; as it runs inside of an
    autograd function, that was off too. The exporter sees no more, so that all that follows is under no_grad up to the
    next line that turns it on. Without traces such a checkpoint is seen where the output is made under no_grad, and not
    everything before it.
    """
    ops = graph.ops
    start = next((index for index, op in enumerate(ops) if not op.grad and _is_reentrant(op)), None)
    notes = []
    if start is None:
        start = end = max((i + 1 for i, op in enumerate(ops) if graph.outputs[:1] == op.outputs[:1]), default=0)
        while start and not ops[start - 1].grad:
            start -= 1
        trained = {p.value.name for p in graph.parameters if p.trainable}
        if start == end or not any(op.grad and not trained.isdisjoint(op.refs()) for op in ops[:start]):
            return graph, ()
        text = (
            "the output is made under no_grad: taken for what a checkpoint with use_reentrant=True leaves in a file. "
            "Its border is not in the file: each block is taken to run in one (--checkpoint says which do)"
        )
        notes.append(Note("warning", "SM319", text, end - start))
        ops = (*ops[:start], *_restore_blocks(graph, ops[start:end]), *ops[end:])
    changed = (*ops[:start], *(op if op.grad else replace(op, grad=True) for op in ops[start:]))
    return replace(graph, ops=changed), notes


_BLOCK = re.compile(r"(?:\w+\.)*?\d+(?=\.)")
_GUESSED = "torch.utils.checkpoint"  # class of a frame that stands for a checkpoint


def _restore_blocks(graph: Graph, ops: Sequence[Op]) -> Iterator[Op]:
    """Ops whose modules an export has lost, in frames of the numbered modules whose parameters they read.

    What reads no parameter belongs to the block before it; the last of several equal blocks ends as they do.
    """
    names = {p.value.name: p.fqn for p in graph.parameters}
    around = next((op.modules[:1] for op in graph.ops if op.modules and not op.modules[0].path), ())
    blocks: list[tuple[str, list[Op]]] = [("", [])]
    for op in ops:
        read = [match for name in op.refs() if name in names and (match := _BLOCK.match(names[name] + "."))]
        block = blocks[-1][0] if names.keys().isdisjoint(op.refs()) else ""
        if read:
            block = read[0][0]
        if block != blocks[-1][0]:
            blocks.append((block, []))
        blocks[-1][1].append(op)
    before: list[str] = []
    for block, run in blocks:
        targets = [op.target for op in run]
        inside = len(before) if before and targets[: len(before)] == before else len(run)
        before = targets
        for index, op in enumerate(run):
            frame = (Frame(block, _GUESSED),) if block and index < inside else ()
            yield op.changed(modules=(*around, *frame, *(frame for frame in op.modules if frame.path)))


def _is_reentrant(op: Op) -> bool:
    return any(map(is_checkpoint_function, op.stack))


def function_regions(graph: Graph) -> list[Region]:
    """The calls of custom autograd functions that PyTorch could differentiate itself.

    Most such functions save their inputs and compute the rest again, as a checkpoint does (torch/autograd/function.py,
    `save_for_backward`; the memory-efficient swish is the best known).
    """
    return [region for region, differentiable in functions(graph) if differentiable]


def has_open_regions(graph: Graph, amp: bool) -> bool:
    """Whether it is not certain which checkpoints the code called, or, under autocast, what they run again."""
    if graph.recorded is not None:
        return False
    if _GUESSED in graph.classes:
        return True
    if any(not line.certain or (amp and _is_copy(graph, line)) for line in _lines(graph)):
        return True
    return bool(hidden_checkpoints(graph))


def written_regions(graph: Graph, policy: str = "expected", amp: bool = False) -> tuple[list[Region], list[Note]]:
    """The checkpoints that source lines show, and what a report has to say of them.

    Under autocast copies of PyTorch's function are not among those that are certain (the policy "most"): some run again
    without autocast, or in another dtype.
    """
    regions: list[Region] = []
    notes: list[Note] = []
    lost = undecided = 0
    for line in _lines(graph):
        if not line.certain:
            undecided += 1
            if policy != "last-use":
                continue
        if amp and policy == "most" and _is_copy(graph, line):
            continue
        of_line = [replace(region, reentrant=line.reentrant) for region in _written(graph, line)]
        regions += of_line
        lost += not of_line
    if _GUESSED in graph.classes and policy in ("expected", "last-use"):
        calls = [call for call in calls_of(graph) if call.cls == _GUESSED]
        regions += [replace(region_of([call]), reentrant=True) for call in calls]
    if regions:
        names = list(dict.fromkeys(region.name or "the model" for region in regions))
        text = (
            "the model's code calls torch.utils.checkpoint, which was followed: "
            f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        )
        notes.append(Note("assumption", "SM316", text, len(regions)))
    if undecided:
        text = (
            "lines of the code call torch.utils.checkpoint or not, which they do not show: taken as not called, "
            "the lower end of the band is with checkpoints (--checkpoint says which modules run in one)"
        )
        notes.append(Note("warning", "SM318", text, undecided))
    if lost:
        text = (
            "the model's code calls checkpoint_sequential with a number of segments that its line does not show: its "
            "ops are taken to save everything, so that the peak is too high (--checkpoint-segments says how many)"
        )
        notes.append(Note("warning", "SM317", text, lost))
    return regions, notes


def _is_copy(graph: Graph, line: _Line) -> bool:
    """Whether the function that a line calls is a library's own, after PyTorch's."""
    stack = graph.ops[line.start].stack if line.reentrant else ()
    return any(is_checkpoint_function(each) and not each.file.endswith("torch/utils/checkpoint.py") for each in stack)


def _lines(graph: Graph) -> Iterator[_Line]:
    """Runs of ops under one line; ops without a trace (shape arithmetic) belong to what is around them."""
    current: tuple[Stack, str, int, str, bool, bool] | None = None
    start = last = 0
    for index, op in enumerate(graph.ops):
        if not op.stack:
            continue
        line = _checkpoint_line(op)
        if line != current:
            if current is not None:
                yield _Line(current[0], *current[3:], start, last + 1)
            current, start = line, index
        last = index
    if current is not None:
        yield _Line(current[0], *current[3:], start, last + 1)


def _checkpoint_line(op: Op) -> tuple[Stack, str, int, str, bool, bool] | None:
    """The outermost line of an op that calls a checkpoint: module frames down to it, file, line, text, whether it
    certainly did, and with use_reentrant=True."""
    depth = 0
    for number, line in enumerate(op.stack):
        depth += line.function == "forward"
        called = "checkpoint" in line.text and _CALL.search(line.text) and not line.text.lstrip().startswith("def ")
        inner = op.stack[number + 1] if number + 1 < len(op.stack) else None
        if inner is not None and is_checkpoint_function(inner):
            return op.modules[:depth], line.file, line.line, line.text, True, True
        if called:
            decided = _DECIDED.search(line.text)
            if decided and "use_reentrant" not in line.text.replace("use_reentrant=True", ""):
                return None  # the variant with a frame of its own, which was not called
            return op.modules[:depth], line.file, line.line, line.text, not decided, False
    return None


def _written(graph: Graph, line: _Line) -> Iterator[Region]:
    """The regions of a line; none where it does not show the number of segments."""
    match = _CALL.search(line.text)
    depth = len(line.frames)
    parts = _split_by_child(graph, line)
    if match is None:  # a function of another name calls the checkpoint
        for child, start, end in parts:
            yield Region(start, end, depth + (child is not None), _path(child))
    elif match["segments"]:
        segments = _SEGMENTS.match(match["rest"])
        count = int(segments[1]) if segments is not None else 0
        size = len(parts) // count if count else 0
        for first in range(0, size * (count - 1), size or 1):
            row = parts[first : first + size]
            yield Region(row[0][1], row[-1][2], depth, f"{_path(row[0][0])} to {_path(row[-1][0])}")
    elif _are_modules(line, parts, match["rest"]):
        for child, start, end in parts:
            yield Region(start, end, depth + 1, _path(child))
    else:
        yield Region(line.start, line.end, depth, line.frames[-1].path if line.frames else "")


def _path(frame: Frame | None) -> str:
    return frame.path if frame is not None else ""


def _split_by_child(graph: Graph, line: _Line) -> list[tuple[Frame | None, int, int]]:
    """The ops of a line by the child module that runs; None for those of the frame itself."""
    depth = len(line.frames)
    parts: list[tuple[Frame | None, int, int]] = []
    for index in range(line.start, line.end):
        op = graph.ops[index]
        child = op.modules[depth] if len(op.modules) > depth else None
        if parts and (not op.modules or parts[-1][0] == child):  # shape arithmetic has no modules
            parts[-1] = (*parts[-1][:2], index + 1)
        else:
            parts.append((child, index, index + 1))
    return parts


def _are_modules(line: _Line, parts: Sequence[tuple[Frame | None, int, int]], rest: str) -> bool:
    """Whether each call runs one child module: `checkpoint(self.block, x)`, or a loop over children of one list.

    A function or a method (`checkpoint(self._inner, x)`) is one call that may run several.
    """
    children = [child.path for child, _, _ in parts if child is not None]
    if len(children) < len(parts):
        return False
    if len(children) == 1:
        return True
    given = _FUNCTION.match(rest)
    own = line.frames[-1].path if line.frames else ""
    if given is not None and given[1].startswith("self."):
        named = f"{own}.{given[1][5:]}" if own else given[1][5:]
        return all(path == named or path.startswith(named + ".") for path in children)
    lists = {path.rpartition(".")[0] for path in children}
    return len(lists) == 1 and all(path.rpartition(".")[2].isdigit() for path in children)


def hidden_checkpoints(graph: Graph) -> tuple[Region, ...]:
    """The module calls that hidden code may run in checkpoints; worked out once for each graph."""
    key = "hidden checkpoints"
    regions: tuple[Region, ...] | None = graph.derived.get(key)
    if regions is None:
        regions = _hidden(graph)
        graph.derived[key] = regions
    return regions


def _hidden(graph: Graph) -> tuple[Region, ...]:
    lines = lines_of_methods(graph) if any(op.stack for op in graph.ops) else set()
    if not lines:
        return ()
    alike: dict[tuple[object, ...], list[Call]] = {}  # by caller, list and class
    for call in calls_of(graph):
        owner, _, number = call.path.rpartition(".")
        if number.isdigit() and call.end - call.start > 1 and _is_hidden(graph, call, lines):
            alike.setdefault((call.stack[:-1], owner, call.cls), []).append(call)
    return tuple(region_of([call]) for several in alike.values() if len(several) > 1 for call in several)


def _is_hidden(graph: Graph, call: Call, lines: Set[Line]) -> bool:
    """Whether the line that runs the call is that of a method which no trace shows."""
    level = len(call.stack) - 2
    first = next((op for op in graph.ops[call.start : call.end] if len(op.stack) >= len(op.modules) > level + 1), None)
    if first is None or level < 0:
        return False
    source = line_at(first, level)
    return not is_published_line(source) and (call.stack[:-1], source.file, source.line) in lines


def compile_regions(graph: Graph, scenario: Scenario) -> tuple[Region, ...]:
    """The regions that are compiled, in order; none is inside of another.

    Raises:
        UsageError: a name that no module has.
    """
    if WHOLE in scenario.compile:
        return (Region(0, len(graph.ops), 0, ""),)
    regions: list[Region] = []
    for call in selected(calls_of(graph), scenario.compile, "--compile"):
        if not regions or call.start >= regions[-1].end:
            regions.append(region_of([call]))
    return tuple(regions)


def breaks_of(graph: Graph, region: Region) -> Iterator[int]:
    """The ops of a region at which Dynamo breaks the graph."""
    from staticmem.ops.tags import graph_breaks  # few steps are compiled

    bases, breaking = graph.bases, graph_breaks()
    if breaking.isdisjoint(bases) and "aten::index" not in bases and "aten::repeat_interleave" not in bases:
        return
    for index in range(region.start, region.end):
        op = graph.ops[index]
        if op.base in breaking or _is_mask(graph, op) or _repeats_by_tensor(op):
            yield index


def _is_mask(graph: Graph, op: Op) -> bool:
    """`x[mask]`: as many elements as the mask has True."""
    if op.base != "aten::index" or len(op.args) < 2 or not isinstance(op.args[1], tuple):
        return False
    values = [graph.values.get(arg.name) for arg in op.args[1] if isinstance(arg, Ref)]
    return any(value is not None and value.dtype is dtypes.bool_ for value in values)


def _repeats_by_tensor(op: Op) -> bool:
    """`repeat_interleave(x, repeats)` with a tensor of repeats, whose sum nobody gives (`output_size`)."""
    if op.base != "aten::repeat_interleave" or op.kwargs.get("output_size") is not None:
        return False
    return op.target.endswith(".Tensor") or (len(op.args) > 1 and isinstance(op.args[1], Ref))


def ddp_cuts(graph: Graph, start: int, end: int, nbytes: Mapping[str, int], checkpoints: Sequence[Region]) -> list[int]:
    """The ops before which DDPOptimizer cuts the graph of the ops [start, end), in order.

    It goes backwards through the calls and adds up the parameters that each reads, as often as they are read; a call
    that fills the bucket is the first of its graph. Calls before the first parameter join the graph behind them. A
    checkpoint is one call. `nbytes` has the bytes of trained parameters by the names of their values, and `checkpoints`
    the outermost ones within these ops.
    """
    begin_at = {index: region.start for region in checkpoints for index in range(region.start, region.end)}
    cuts: list[int] = []
    filled, limit, index = 0, DDP_FIRST_BUCKET, end
    while index > start:
        if filled >= limit:
            cuts.append(index)
            filled, limit = 0, DDP_BUCKET
        last = index - 1
        index = max(begin_at.get(last, last), start)
        if index == last:
            filled += sum(nbytes.get(arg.name, 0) for arg in graph.ops[last].args if isinstance(arg, Ref))
        else:
            read = {name for op in graph.ops[index : last + 1] for name in op.refs()}
            filled += sum(nbytes.get(name, 0) for name in read)
    if cuts and not filled:
        cuts.pop()
    return cuts[::-1]
