"""The regions of a graph that `torch.compile` compiles: where the step reaches one, it is compiled for the tensors that
are there, and `compiled_code` runs it in the place of the ops. What cannot be compiled runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from staticmem.compiler.aot.joint import NotTracedError
from staticmem.compiler.plan import CompiledCall, Kernels
from staticmem.eager.strides import Form, contiguous_strides
from staticmem.eager.tensor import Storage, Tensor
from staticmem.engine.compiled_code import CompiledStretch
from staticmem.engine.interpreter import Interpreter
from staticmem.ir.graph import NO_KWARGS, Arg, Graph, Op, Ref
from staticmem.ops.dispatch import BAD_ARGUMENTS
from staticmem.ops.size_arithmetic import SIZE_OPS

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
    changed = [_NOTHING if index in left_out else _with_numbers(op, sizes) for index, op in enumerate(ops)]
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


def _with_numbers(op: Op, sizes: Mapping[str, int]) -> Op:
    if sizes.keys().isdisjoint(op.refs()):
        return op
    kwargs = {name: _filled(arg, sizes) for name, arg in op.kwargs.items()}
    return op.changed(args=tuple([_filled(arg, sizes) for arg in op.args]), kwargs=kwargs)


def _filled(arg: Arg, sizes: Mapping[str, int]) -> Arg:
    if isinstance(arg, Ref):
        return sizes.get(arg.name, arg)
    return tuple([_filled(a, sizes) for a in arg]) if isinstance(arg, tuple) else arg
