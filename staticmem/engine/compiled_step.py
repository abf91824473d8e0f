"""The compiled regions of a step: which there are, what they did, and the notes on them.

The regions of a graph that `torch.compile` compiles: where the step reaches one, it is compiled for the tensors that
are there, and `compiled_code` runs it in the place of the ops. What cannot be compiled runs by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from staticmem.compiler.aot.joint import NotTracedError
from staticmem.compiler.checkpoints import Checkpointed
from staticmem.compiler.plan import NO_TRACE, CompiledCall, Kernels
from staticmem.compiler.region import compile_region
from staticmem.eager.strides import Form, contiguous_strides
from staticmem.eager.tensor import Storage, Tensor
from staticmem.engine.compiled_code import CompiledStretch
from staticmem.engine.features import Feature
from staticmem.engine.interpreter import Interpreter
from staticmem.ir.graph import NO_KWARGS, Arg, Graph, Note, Op, Ref, Region
from staticmem.ir.record import record
from staticmem.ops.dispatch import BAD_ARGUMENTS
from staticmem.ops.size_arithmetic import SIZE_OPS
from staticmem.passes.requested.regions import breaks_of, compile_regions, ddp_cuts
from staticmem.scenario.checkpointing import Policy
from staticmem.scenario.compiling import AUTOTUNED
from staticmem.scenario.step import Scenario

MOST_REFUSED = 32  # targets of a region whose ops run by themselves; with more of them the rest does too

# The plans of the ops [start, end) of a graph: of the forms of what they read from outside, and the names of what needs
# a gradient
Compile = Callable[[Graph, int, int, Mapping[str, Form], Collection[str]], CompiledCall]


class CompiledRegion:
    """The ops [start, end) of a graph as compiled code, compiled where they run first.

    Ops that cannot be compiled run by themselves between stretches that are. Attributes:
        calls: what was compiled, in order.
        refused: the ops that were not, with why.
    """

    def __init__(
        self, start: int, end: int, name: str, compile_stretch: Compile, cuda_graphs: bool = False, begin: int = -1
    ) -> None:
        """`begin` is the first op of the graph that this is a part of, where it was cut; -1: its own."""
        self.start, self.end, self.name, self.compile = start, end, name, compile_stretch
        self.cuda_graphs, self.begin = cuda_graphs, start if begin < 0 else begin
        self.calls: list[CompiledStretch] = []
        self.refused: dict[int, str] = {}
        self.sizes: dict[str, int] = {}  # that it computes for later ops

    def run(self, interpreter: Interpreter) -> None:
        """Runs the forward in the place of the ops."""
        if self.calls or self.refused:
            interpreter.env.update(self.sizes)
            at = self.start
            for stretch in self.calls:
                interpreter.run_eager(at, stretch.start)
                stretch.run(interpreter)
                at = stretch.end
            interpreter.run_eager(at, self.end)
            return
        ops, targets = interpreter.graph.ops, set[str]()
        at = self.start
        while at < self.end:
            eager = self.end
            if targets:  # what was refused once is refused again
                eager = next((k for k in range(at, self.end) if ops[k].target in targets), self.end)
            while at < eager:
                compiled = self._compiled(interpreter, at, eager)
                if compiled is None:
                    interpreter.run_eager(at, eager)
                    at = eager
                    break
                if not isinstance(compiled, int):
                    self.calls.append(compiled)
                    compiled.run(interpreter)
                    at = compiled.end
                    break
                eager = compiled  # what comes before it, then the op by itself
                targets.add(ops[eager].target)
            after = eager + 1 if len(targets) < MOST_REFUSED else self.end
            interpreter.run_eager(at, min(after, self.end))
            at = after

    def with_kernels(self, kernels: Kernels) -> CompiledRegion:
        """The same region, which has run, with plans of other kernels (`compiler.inductor.plan`)."""
        other = copy(self)
        other.calls = []
        for stretch in self.calls:
            again = copy(stretch)
            graphs = stretch.call.graphs
            if graphs is not None:
                forward, backward = graphs.plans(kernels)
                again.call = replace(stretch.call, forward=forward, backward=backward)
            other.calls.append(again)
        return other

    def _compiled(self, interpreter: Interpreter, start: int, end: int) -> CompiledStretch | int | None:
        """The stretch of these ops, or the op among them that is refused; None where all of them are."""
        graph = with_sizes(interpreter, start, end, self.sizes)
        produced: set[str] = set()
        forms: dict[str, Form] = {}
        needs_grad: set[str] = set()
        for op in graph.ops[start:end]:
            for name in graph.reads(op):
                if name not in produced and name not in forms:
                    value = interpreter.value(name, op)
                    if isinstance(value, Tensor):
                        forms[name] = value.form
                        if value.requires_grad:
                            needs_grad.add(name)
            produced.update(op.outputs)
        try:
            call = self.compile(graph, start, end, forms, needs_grad)
            return CompiledStretch(graph, call, self.name, self.cuda_graphs and not call.written_inputs, self.begin)
        except NotTracedError as error:
            refused = min(max(error.op, start), end - 1)
            self.refused[refused] = error.reason
            return refused
        except (ValueError, AssertionError, *BAD_ARGUMENTS) as error:  # a graph that contradicts itself
            self.refused[start] = f"{type(error).__name__}: {error}"
            return None


def with_sizes(interpreter: Interpreter, start: int, end: int, given: dict[str, int]) -> Graph:
    """The graph with the sizes that the ops [start, end) read from outside, or compute for later ops, as numbers:
    Dynamo specialises a graph for them. The interpreter, and `given`, have those that were computed."""
    graph, env = interpreter.graph, interpreter.env
    ops = graph.ops[start:end]
    results = {name for op in ops for name in op.outputs}
    sizes = {name: env[name] for op in ops for name in op.refs() if name not in results and type(env.get(name)) is int}
    left_out = set()
    for index, op in enumerate(ops):
        scalar = SIZE_OPS.get(op.target) or SIZE_OPS.get(op.base)
        if scalar is None or not op.outputs or graph.last_read.get(op.outputs[0], -1) < end:
            continue
        args = [_size_argument(arg, env, graph) for arg in op.args]
        if None not in args:
            given[op.outputs[0]] = sizes[op.outputs[0]] = env[op.outputs[0]] = scalar(*args)
            left_out.add(index)
    if not sizes:
        return graph
    changed = [_NOTHING if index in left_out else _fill_in_numbers(op, sizes) for index, op in enumerate(ops)]
    return replace(graph, ops=(*graph.ops[:start], *changed, *graph.ops[end:]))


_NOTHING = Op("size", "aten::item", (), NO_KWARGS, ())


def _size_argument(arg: Arg, env: Mapping[str, Any], graph: Graph) -> Any:
    """An argument of arithmetic of sizes; None where it is not known before the ops run."""
    if not isinstance(arg, Ref) or arg.name in env:
        return env[arg.name] if isinstance(arg, Ref) else arg
    value = graph.values.get(arg.name)
    if value is None or value.shape is None:
        return None
    return Tensor(Storage(-1, 0), value.shape, contiguous_strides(value.shape), value.dtype)


def _fill_in_numbers(op: Op, sizes: Mapping[str, int]) -> Op:
    if sizes.keys().isdisjoint(op.refs()):
        return op
    kwargs = {name: _filled(arg, sizes) for name, arg in op.kwargs.items()}
    return op.changed(args=tuple([_filled(arg, sizes) for arg in op.args]), kwargs=kwargs)


def _filled(arg: Arg, sizes: Mapping[str, int]) -> Arg:
    if isinstance(arg, Ref):
        return sizes.get(arg.name, arg)
    return tuple([_filled(a, sizes) for a in arg]) if isinstance(arg, tuple) else arg


VERSION = "2.15"  # the PyTorch whose compiler is followed
# what decides plans; other options change the step around them
DECIDE = (
    "compile compile_mode activation_memory_budget mode dtype amp sdpa torch "
    "checkpoint checkpoint_every checkpoint_save checkpoint_segments checkpoint_sequential input_grad retain_graph ddp"
).split()


@record(frozen=True)
class CompiledStep:
    """What was compiled, as the release `torch` does it.

    `regions`: the stretches of ops between breaks, each by the path of its module, "" for the whole model. `graphs`:
    how many stretches were compiled. `saved_bytes` are those of their buffers that wait for the backward,
    `recomputed_bytes` those of values that the backward computes again and would read from memory else.
    """

    torch: str
    regions: tuple[Region, ...]
    graphs: int
    saved_bytes: int
    recomputed_bytes: int
    recomputed_flops: int
    breaks: tuple[int, ...]  # ops at which torch.compile breaks the graph, as indices
    unpredicted: tuple[int, ...]  # ops that run by themselves because their compiled code cannot be predicted
    as_eager: tuple[int, ...]  # ops that Inductor takes apart; here each is one call, which does what eager code does
    padded: Mapping[int, int]  # bytes that padding of the op's matrix product would take while it runs
    notes: tuple[Note, ...]


class Sizes:
    """Sizes of the inputs that Dynamo has seen in calls of one class, whose modules share their code.

    A size that differs from that of the first compilation is a symbol from then on; those of parameters and buffers are
    not (torch/_dynamo/pgo.py and variables/builder.py, `automatic_dynamic_shapes`, `force_parameter_static_shapes`).
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def differ(self, graph: Graph, forms: Mapping[str, Form]) -> bool:
        """Whether a size of the inputs is a symbol now."""
        owned = {p.value.name for p in (*graph.parameters, *graph.buffers)}
        shapes = [form.shape for name, form in forms.items() if name not in owned]
        new = shapes[len(self.shapes) :]
        differs = any(a != b for a, b in zip(self.shapes, shapes, strict=False))
        self.shapes += new
        return differs


class CompiledRegions:
    """The regions of a graph under a scenario. They are kept with the graph, so that each is compiled once, and do not
    refer to it."""

    def __init__(self, graph: Graph, scenario: Scenario, checkpoints: Sequence[Region]) -> None:
        wanted = compile_regions(graph, scenario)
        self.mode, self.cuda_graphs = scenario.compile_mode, scenario.cuda_graphs
        self.breaks: list[int] = []
        self.regions: list[CompiledRegion] = []
        self.within = [c for c in checkpoints if any(w.start <= c.start and c.end <= w.end for w in wanted)]
        self.checkpoints = Checkpointed(self.within) if self.within else None
        self.cuts = 0
        trained = _trained_bytes(graph, scenario) if scenario.ddp else {}
        outer = self.checkpoints.outer if self.checkpoints is not None else ()
        seen: dict[tuple[str, int], Sizes] = {}
        for region in wanted:
            frames = graph.ops[region.start].modules[: region.depth] if region.name else ()
            first = len(self.regions)
            start = region.start
            for at in (*breaks_of(graph, region), region.end):
                cuts = ddp_cuts(graph, start, at, trained, outer) if trained else []
                self.cuts += len(cuts)
                for begin, end in pairwise((start, *cuts, at)):
                    if begin < end:
                        key = (frames[-1].cls or region.name, len(self.regions) - first) if frames else None
                        sizes = seen.setdefault(key, Sizes()) if key is not None else None
                        compile_stretch = partial(_compile, scenario, self.checkpoints, sizes)
                        part = CompiledRegion(begin, end, region.name, compile_stretch, scenario.cuda_graphs, start)
                        self.regions.append(part)
                start = at + 1
                if at < region.end:
                    self.breaks.append(at)

    def outside(self, checkpoints: Sequence[Region]) -> tuple[Region, ...]:
        """The checkpoints that eager code calls: others are inside of compiled code."""
        return tuple([c for c in checkpoints if c not in self.within])

    def policies(self) -> Collection[Policy]:
        """Those of selective checkpoints inside of compiled code."""
        return self.checkpoints.policies.values() if self.checkpoints is not None else ()

    def with_kernels(self, kernels: Kernels) -> CompiledRegions:
        """The same regions, which have run, with plans of other kernels."""
        other = copy(self)
        other.regions = [region.with_kernels(kernels) for region in self.regions]
        return other

    def done(self, graph: Graph) -> CompiledStep:
        """What the step has compiled."""
        calls = [stretch.call for region in self.regions for stretch in region.calls]
        refused = {op: why for region in self.regions for op, why in region.refused.items()}
        compiled = {index for call in calls for index in range(call.start, call.end)}
        every = {index for region in self.regions for index in range(region.start, region.end)}
        untraced = {text for call in calls for code, text in call.notes if code == NO_TRACE}
        return CompiledStep(
            torch=VERSION,
            regions=tuple([Region(region.start, region.end, 0, region.name) for region in self.regions]),
            graphs=len(calls),
            saved_bytes=sum(map(_saved, calls)),
            recomputed_bytes=sum(call.recomputed_bytes for call in calls),
            recomputed_flops=sum(call.recomputed_flops for call in calls),
            breaks=tuple(self.breaks),
            unpredicted=tuple(sorted(every - compiled)),
            as_eager=tuple(sorted(index for index in compiled if graph.ops[index].base in untraced)),
            padded={op: nbytes for call in calls for op, nbytes in call.padded},
            notes=tuple(self._notes(graph, calls, refused)),
        )

    def _notes(self, graph: Graph, calls: Sequence[CompiledCall], refused: Mapping[int, str]) -> Iterator[Note]:
        ops = graph.ops
        text = (
            f"compiled code is predicted from the graph by the rules of PyTorch {VERSION}, whatever --torch-version "
            "says, which is for eager ops and the device; other releases save and order a little differently"
        )
        yield Note("assumption", "SM343", text, len(calls))
        for target, count in sorted(Counter(ops[index].target for index in self.breaks).items()):
            text = (
                f"torch.compile breaks the graph at {target}, whose result follows from data: it runs by itself, and "
                "the ops before and after it are compiled for themselves"
            )
            yield Note("assumption", "SM344", text, count)
        if self.cuts:
            text = (
                "under DDP Dynamo cuts compiled graphs where a bucket of gradients is full (1 MiB, then 25 MiB), and "
                "compiles each part for itself (docs/compile.md#ddp)"
            )
            yield Note("assumption", "SM290", text, self.cuts)
        if refused:
            first = next(iter(refused))
            text = (
                f"compiled code could not be predicted for {_listed({ops[index].target for index in refused})} "
                f"({refused[first][:120]}): these ops run eagerly "
                "here, between compiled stretches; the band is from nothing saved for them to the eager step"
            )
            yield Note("warning", "SM204", text, len(refused))
        counts = Counter(note for call in calls for note in dict.fromkeys(call.notes))
        extern = {text: count for (code, text), count in counts.items() if code == NO_TRACE}
        if extern:
            text = (
                f"what compiled code makes of {_listed(extern)} is not known: each is one call that does what eager "
                "code does; the band is from nothing saved for them to the eager step"
            )
            yield Note("warning", "SM205", text, sum(extern.values()))
        for (code, text), count in counts.items():
            if code != NO_TRACE:
                yield Note("assumption", "SM345", text, count)
        if self.cuda_graphs:
            yield from _note_cuda_graphs(calls)
        if self.mode in AUTOTUNED:
            text = (
                f"--compile-mode {self.mode} measures kernels on the card: which products become Triton's, with what "
                "is fused around them and without a workspace of cuBLAS, and which are divided into partial results, "
                "is not known. They are as without it; the band of the peak has both ends"
            )
            yield Note("warning", "SM347", text)


class CompiledCode(Feature):
    """The compiled regions of a step, in the place of the ops and of the checkpoints that are inside of them."""

    def place(self) -> None:
        step = self.step
        self.regions = regions_of_step(step.graph, step.scenario, step.checkpoints, step.kernels)
        step.interpreter.compiled = self.regions.regions
        step.checkpoints = self.regions.outside(step.checkpoints)

    def notes(self) -> Sequence[Note]:
        compiled = self.regions.done(self.step.graph)
        self.step.compiled, self.step.compiled_policies = compiled, self.regions.policies()
        return compiled.notes


def _trained_bytes(graph: Graph, scenario: Scenario) -> dict[str, int]:
    """Bytes of the parameters that are trained, by the names of their values."""
    sizes: dict[str, int] = {}
    for p in graph.parameters:
        if p.trainable:
            cast = scenario.dtype if p.cast and p.value.dtype.is_floating_point else None
            dtype = cast or p.value.dtype
            sizes[p.value.name] = dtype.nbytes(p.value.numel)
    return sizes


def _note_cuda_graphs(calls: Sequence[CompiledCall]) -> Iterator[Note]:
    """What is recorded as CUDA graphs, and what is not."""
    written = sorted({name for call in calls for name in call.written_inputs})
    recorded = sum(not call.written_inputs for call in calls)
    if recorded:
        text = (
            "compiled code runs as CUDA graphs in a pool of their own: the first step warms up in it, the second is "
            "recorded, later ones allocate nothing there; what the driver takes for a recorded graph is not counted"
        )
        yield Note("assumption", "SM346", text, recorded)
    if written:
        text = (
            f"Inductor records no CUDA graph of code that writes to its inputs ({_listed(written)}): predicted without "
            "one; a backward that is recorded all the same copies what the forward saved"
        )
        yield Note("warning", "SM346", text, len(calls) - recorded)
    unsafe = sorted({op for call in calls for op in call.unsafe_ops})
    if unsafe:
        text = (
            f"a CUDA graph cannot record {_listed(unsafe)}: PyTorch 2.15 cuts the graph there, and copies what the op "
            "returns; predicted as one graph"
        )
        yield Note("warning", "SM346", text, len(unsafe))


def regions_of_step(
    graph: Graph, scenario: Scenario, checkpoints: Sequence[Region], kernels: Kernels = "expected"
) -> CompiledRegions:
    """The regions of a step, which are worked out once for each graph and what decides them. `kernels`: of a step that
    has run, with other kernels than those that are expected (`compiler.inductor.plan`)."""
    key = "compiled " + " ".join([repr(getattr(scenario, name)) for name in DECIDE])
    regions: CompiledRegions | None = graph.derived.get(key)
    if regions is None:
        regions = graph.derived[key] = CompiledRegions(graph, scenario, checkpoints)
    return regions if kernels == "expected" else regions.with_kernels(kernels)


def _compile(
    scenario: Scenario,
    checkpoints: Checkpointed | None,
    sizes: Sizes | None,
    graph: Graph,
    start: int,
    end: int,
    forms: Mapping[str, Form],
    needs_grad: Collection[str],
) -> CompiledCall:
    dynamic = sizes is not None and sizes.differ(graph, forms)
    return compile_region(graph, start, end, forms, needs_grad, scenario, checkpoints, dynamic)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _saved(call: CompiledCall) -> int:
    plan = call.forward
    saved = {output.storage for output in plan.outputs[len(call.outputs) :] if output is not None}
    return sum(plan.buffers[number - plan.inputs].form.nbytes for number in saved if number >= plan.inputs)
