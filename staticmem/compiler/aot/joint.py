"""Traces a stretch of a graph: its ops forward, under autocast as they run, then the backward of what it returns.

In-place ops are functional here, as after AOTAutograd's functionalization (`writes`).

Casts of arguments under `torch.autocast`, for the lists of aten/src/ATen/autocast_mode.h (`ops.registry.Autocast`).

A trace keeps no copies of weights (`disable_autocast_cache` of torch/fx/experimental/proxy_tensor.py): equal casts
become one when equal nodes are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from staticmem.compiler.aot import fallback
from staticmem.compiler.aot.functionalization import Storages
from staticmem.compiler.checkpoints import Checkpointed, Marks
from staticmem.compiler.graphs import JointGraph
from staticmem.eager.strides import Form
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import FUNCTION, REQUIRES_GRAD, Frame, Graph, Op, Ref
from staticmem.ops import registry as rules
from staticmem.ops.dispatch import autocast_arguments
from staticmem.ops.registry import Autocast
from staticmem.ops.size_arithmetic import SIZE_OPS
from staticmem.ops.traces.casts import to_copy
from staticmem.ops.traces.registry import lookup
from staticmem.ops.whole_model_cast import cast_of
from staticmem.tracing.nodes import PLACEHOLDER, Node
from staticmem.tracing.tracer import Gradients, Tracer

# What a call may raise whose arguments do not fit
REFUSALS = (ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError)


class NotTracedError(Exception):
    """An op that the table lacks, or that does not fit its arguments: the region is not compiled. `op`: its index."""

    def __init__(self, op: int, reason: str) -> None:
        super().__init__(reason)
        self.op, self.reason = op, reason


def trace(
    graph: Graph,
    start: int,
    end: int,
    forms: Mapping[str, Form],
    needs_grad: Collection[str],
    outputs: Sequence[str],
    training: bool,
    amp: DType | None = None,
    checkpoints: Checkpointed | None = None,
    sdpa: str = "auto",
    cast: DType | None = None,
) -> JointGraph:
    """The joint graph of the ops [start, end); of inference, it has no backward.

    `forms` are those of all values that the ops read from outside; `checkpoints` are those inside of the ops; `cast`
    is the dtype of a model that is cast as a whole.

    Raises:
        NotTracedError: an op cannot be traced.
    """
    t = Tracer(training)
    t.sdpa, t.autocast = sdpa, amp is not None
    run = _Trace(graph, t, amp, cast)
    run.place(graph.ops[start:end], forms, needs_grad)
    marks = Marks(checkpoints) if checkpoints is not None else None
    for index in range(start, end):
        op = graph.ops[index]
        t.op, t.region = index, checkpoints.number(index) if checkpoints is not None else 0
        first = len(t.nodes)
        t.grad_enabled = training and op.grad
        try:
            run.call(op)
        except REFUSALS as error:
            raise NotTracedError(index, str(error)) from error
        if marks is not None and t.region:
            marks.mark(t.nodes[first:], t.region, op.base)
    try:
        return run.finish(outputs)
    except REFUSALS as error:  # the backward of an op
        raise NotTracedError(max(run.t.op, start), str(error)) from error


class _Trace:
    def __init__(
        self, graph: Graph, t: Tracer, amp: DType | None, cast: DType | None = None, of_backward: bool = False
    ) -> None:
        """`of_backward`: it is that of a custom function, all of which runs under autocast as the forward does
        (`backward_pass_autocast` of torch/_functorch/config.py)."""
        self.graph, self.t, self.amp, self.of_backward = graph, t, amp, of_backward
        self.cast = cast_of(graph, cast)
        self.outside: dict[str, tuple[tuple[Frame, ...], Any]] = {}  # see `_upcast`
        self.with_history: set[str] | None = None  # what ops read that have one; see `_changes_nothing`
        self.owned: list[Node] = []  # placeholders of parameters and buffers
        self.storages = Storages(self.t)
        self.env = self.storages.env

    def place(self, ops: Sequence[Op], forms: Mapping[str, Form], needs_grad: Collection[str]) -> None:
        """Placeholders in the order in which ops first read them, what the module owns before others in one op
        (Dynamo lifts a parameter where the module's code asks for it)."""
        owned = {p.value.name: p.alias_of for p in (*self.graph.parameters, *self.graph.buffers)}
        for op in ops:
            for name in sorted(dict.fromkeys(self.graph.reads(op)), key=lambda name: name not in owned):
                if name not in forms or name in self.env:
                    continue
                first = owned.get(name) or name  # a second name of a tied weight
                if first not in self.env or self.env[first].form is not forms[name]:
                    self.env[name] = self.t.placeholder(name, forms[name], name in needs_grad)
                    self.owned += [self.env[name]] if name in owned else []
                    self.env.setdefault(first, self.env[name])
                else:
                    self.env[name] = self.env[first]

    def call(self, op: Op) -> None:
        if op.base == FUNCTION:
            self._function(op)
            return
        if op.target == REQUIRES_GRAD and self._changes_nothing(op):
            return
        scalar = SIZE_OPS.get(op.target) or SIZE_OPS.get(op.base)
        args = [self._resolve(arg, op) for arg in op.args]
        kwargs = {name: self._resolve(value, op) for name, value in op.kwargs.items()}
        given = kwargs.pop("out", None)  # the tensor that takes the result
        if scalar is not None:
            self.env[op.outputs[0]] = scalar(*args)
            return
        rule = rules.lookup(op.target)
        if rule is not None and rule.state == "transparent":
            return
        if self.cast is not None and self.cast.applies(op):
            if self.cast.is_upcast(op, args, kwargs):
                self._upcast(op, args, kwargs)
                return
            args, kwargs = self.cast.arguments(op, args, kwargs)
        target, writes = op.target, rules.in_place(op.base)
        if writes and not self.t.training and str(getattr(op.args[0], "name", "")).endswith("num_batches_tracked"):
            return  # model.eval(): batch norm does not count
        function = lookup(target)
        if function is None and writes:
            base, _, overload = target.partition(".")
            function = lookup(f"{base[:-1]}.{overload}" if overload else base[:-1])
        if function is None and rule is None:
            raise LookupError(f"{op.target} has no trace and no rule")
        dtype = self.amp if op.amp is True or (self.of_backward and not op.amp) else op.amp or None
        if dtype is not None and rule is not None and rule.autocast and not writes and sees(target):
            args, kwargs = cast_arguments(self.t, rule.autocast, dtype, args, kwargs)
        start = len(self.t.nodes)
        try:
            results = _listed(function(self.t, *args, **kwargs)) if function is not None else None
        except REFUSALS:  # arguments that the function does not know
            if rule is None:
                raise
            results = None
        if results is None:
            results = self._fallback(op, args, kwargs)
        if "view" in rules.kinds_of(op.base) and function is not None:
            if writes:
                results[0] = self.storages.rename(args[0], results[0])
            else:
                again = lambda source: _listed(function(self.t, source, *args[1:], **kwargs))  # noqa: E731
                self.storages.view_of(args[0], results, again)
        elif writes or given is not None:
            old = args[0] if given is None else given
            results[0] = self.storages.write(old, self.t.written(results[0], old.dtype))
        else:
            self.storages.view_within(results, self.t.nodes[start:])
        for name, value in zip(op.outputs, results, strict=False):
            if name:
                self.env[name] = value

    def _changes_nothing(self, op: Op) -> bool:
        """Whether the tensor that `op` makes require a gradient is read without a history alone: the forwards of custom
        functions make views that say so."""
        if self.with_history is None:
            ops = [other for other in self.graph.ops if other.grad and other.base != FUNCTION]
            self.with_history = {name for other in ops for name in other.refs()}
        return self.with_history.isdisjoint(op.refs())

    def _function(self, op: Op) -> None:
        """The history of a custom autograd function, whose forward has been traced without one: its backward is traced
        in its place, and what that reads of the forward is saved or not as all else
        (`autograd_function_apply` of torch/_functorch/autograd_function.py)."""
        assert self.graph.recorded is not None
        t, function = self.t, self.graph.recorded.functions[op.name]
        inputs = [self.storages.value(name) for name in function.inputs if name]
        results = [self.storages.value(name) for name in function.results if name]
        for k, result in enumerate(results):
            if any(result is node for node in inputs):
                if not t.needs_grad(result):
                    raise LookupError(f"{function.name} gives back an input, which it may have written to")
                results[k] = t.view(result, result.shape)
                self.storages.view_of(result, [results[k]], lambda source: [t.view(source, source.shape)])
        for name, result in zip(filter(None, op.outputs), results, strict=True):
            self.env[name] = result
        if not t.grad_enabled or not t.needs_grad(*inputs):
            return
        body = function.backward
        if body is None:
            raise LookupError(f"the backward of {function.name} was not recorded")
        read = {*self.graph.reads(op), *body.outputs}
        reads = {name: self.storages.value(name) for name in read if name in self.env}
        incoming = [name for name in function.incoming if name]
        for name in function.attributes:
            if name in reads:
                reads[name].on_ctx = True
        of_inputs = [name for given, name in zip(function.inputs, function.gradients, strict=True) if given]

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            inner = _Trace(body, t, self.amp, of_backward=True)
            for name, value in reads.items():
                inner.env[name] = value
            for name, grad, result in zip(incoming, grads, results, strict=True):
                inner.env[name] = t.full(result.shape, 0, result.dtype) if grad is None else grad
            for of_body in body.ops:
                inner.call(of_body)
            return [inner.storages.value(name) if name and n else None for name, n in zip(of_inputs, need, strict=True)]

        t.record(results, inputs, gradient)

    def _fallback(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """An extern call, as the op's rule describes it: that of the op without a write, where the op writes."""
        target = op.target
        if rules.in_place(op.base):
            base, _, overload = target.partition(".")
            target = f"{base[:-1]}.{overload}" if overload else base[:-1]
        rule = rules.lookup(target)
        if rule is None and target is not op.target:  # nothing but a tensor like the one that it writes to
            return [self.t.node(target, tuple(args), args[0].form, kwargs)]
        assert rule is not None
        return [*fallback.call(self.t, rule, target, args, kwargs)]

    def finish(self, outputs: Sequence[str]) -> JointGraph:
        t = self.t
        t.op, t.region = -1, 0
        values = [self.outside[name][1] if name in self.outside else self.storages.value(name) for name in outputs]
        returned = [value if isinstance(value, Node) else None for value in values]
        primals = tuple([node for node in t.nodes if node.target == PLACEHOLDER])
        gradients: dict[Node, Node] = {}
        tangents: list[Node] = []
        if t.training:
            roots = [(name, n) for name, n in zip(outputs, returned, strict=True) if n is not None and t.needs_grad(n)]
            tangents = [t.placeholder(name, _tangent(node)) for name, node in roots]
            gradients = t.backward([(node, tangent) for (_, node), tangent in zip(roots, tangents, strict=True)])
        t.op = -1
        for placeholder, value in t.writes.items():
            t.node("aten::copy_", (placeholder, value), placeholder.form)
        nodes = (*primals, *tangents, *[node for node in t.nodes if node.target != PLACEHOLDER])
        every = (*returned, *[gradients.get(node) for node in primals])
        owned, count = tuple(self.owned), len(returned)
        return JointGraph(nodes, every, count, primals, tuple(tangents), owned, t.fallbacks, t.choices)

    def _upcast(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A cast to float32 that did nothing in the export: inside the module its name is the copy, outside the input
        (as in `engine.interpreter`)."""
        name, function = op.outputs[0], lookup(op.target)
        assert function is not None
        self.env[name] = function(self.t, *args, **kwargs)
        self.outside[name] = (op.modules, args[0])

    def _resolve(self, arg: Any, op: Op) -> Any:
        if isinstance(arg, Ref):
            rebound = self.outside.get(arg.name)
            if rebound is not None and op.modules[: len(rebound[0])] != rebound[0]:
                return rebound[1]
            return self.storages.value(arg.name)
        return tuple([self._resolve(a, op) for a in arg]) if isinstance(arg, tuple) else arg


def _listed(result: Any) -> list[Any]:
    return [result] if isinstance(result, Node) else list(result or ())


def _tangent(output: Node) -> Form:
    """Tangents are traced with the strides of their outputs (`guess_tangent_strides_as_outputs`)."""
    return output.tensor


def sees(target: str) -> bool:
    """False for `upsample_bilinear2d.vec` and its like: eager code casts in the call that they make, compiled code
    decomposes them before (`py_impl(DispatchKey.Autograd)` in torch/_decomp/decompositions.py)."""
    return not (target.endswith(".vec") and "upsample" in target)


def cast_arguments(
    t: Tracer, rule: Autocast, amp: DType, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call under autocast to `amp`."""
    return autocast_arguments(rule, amp, Node, partial(to_copy, t), args, kwargs)
