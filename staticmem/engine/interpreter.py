"""Runs the ops of a graph as a module's forward: values, module frames, and what the caller's frames hold.

A value lives until its last use; a module's inputs live until the module returns, because the caller's frame (and
`Module._call_impl`) holds them. A frame holds a value that comes from outside it: the outermost frame below the common
prefix of the producer's and the reader's module stacks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import contiguous_strides
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine.call_records import CallRecords, Signature, filled, records_of_modes, run_call, signature_of
from staticmem.errors import DimensionError, ModelFileError
from staticmem.ir import dtypes
from staticmem.ir.graph import OF_RECORDINGS, Frame, Graph, Op, Ref, Value
from staticmem.ir.record import record
from staticmem.ir.stacks import Stack, common_depth
from staticmem.ops import lookup
from staticmem.ops.dispatch import BAD_ARGUMENTS, call, fallback
from staticmem.ops.registry import Rule, in_place
from staticmem.ops.size_arithmetic import SIZE_OPS
from staticmem.passes.variables.releases import Releases, releases_of

if TYPE_CHECKING:
    from staticmem.ops.whole_model_cast import WholeModelCast

_RESOLVED = (Ref, tuple)
_BATCHES = "_functorch.predispatch._add_batch_dim"  # torch/_functorch/predispatch.py, called by vmap
# its rule asks whether query, key and value are one tensor, which the key of a record does not say
_NEVER_RECORDED = frozenset({"aten::_native_multi_head_attention"})


class Checkpointing(Protocol):
    """`torch.utils.checkpoint`: it starts and ends checkpoints between ops."""

    def before(self, interpreter: Interpreter, index: int) -> None:
        """Op `index` is about to run; the number of ops at the end."""


class Compiled(Protocol):
    """A region [start, end) that runs as compiled code (`engine.compiled_step`)."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    def run(self, interpreter: Interpreter) -> None: ...


@record(frozen=True)
class Coverage:
    """How often each op was run by its rule, and which ops have none. What runs again adds to `unknown_kept` alone."""

    covered: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    unknown_bytes: Counter[str] = field(default_factory=Counter)  # of results
    # those whose inputs and results are kept for backward, with the bytes of these and of their gradients
    unknown_kept: Counter[str] = field(default_factory=Counter)


class Interpreter:
    """Executes a graph's ops once. `env` maps names to tensors and integers."""

    def __init__(
        self, e: Eager, graph: Graph, cast: WholeModelCast | None = None, releases: Releases | None = None
    ) -> None:
        self.e, self.graph, self.cast = e, graph, cast
        # results of up-casts that only a cast model has, each with its module: outside of it the name means the input
        self.outside: dict[str, tuple[Stack, Tensor]] = {}
        self.env: dict[str, Any] = {}
        self.lasting: set[str] = set()
        self.owners: dict[str, tuple[Tensor, int]] = {}  # of values that live: the tensor and the hold of the name
        self.produced_in: dict[str, Stack] = {}
        self.copies: dict[int, list[tuple[Tensor, int]]] = {}
        self.checkpoints: Checkpointing | None = None
        self.compiled: Sequence[Compiled] = ()  # in order
        self.autocast = e.autocast  # that of the step, where an op may run without
        self.model = Owner(Reason.MODEL, "")  # has the parameters and buffers
        self.attributes: dict[str, Owner] = {}  # results that a module keeps as an attribute
        self.assigned_after: dict[int, list[str]] = {}  # names of such results, by the op that ends their statement
        self.keeps_values = True  # `env` has them after their last use
        self.made_leaves = Owner(Reason.AUTOGRAD, "leaves")  # tensors that a hook of a module made require a gradient
        self.code_leaves: list[Tensor] = []  # those that the code made require one: the graph of the loss may have them
        self.index = 0
        self.reruns = False  # ops that a checkpoint recomputes
        self.signatures: list[Signature | Literal[False] | None] = [None] * len(graph.ops)
        self.rules: dict[str, Rule | Literal[False]] = {}  # by target; False: not run by `_run`
        self.records: dict[bool, CallRecords] = {}  # by grad mode
        self.frames: list[tuple[Frame, Owner, set[str]]] = []
        self.stack: Stack = ()
        self.coverage = Coverage()
        self.guesses: set[str] | None = None  # names of values whose sizes are guessed, once somebody asks
        if releases is None:
            releases = releases_of(graph, "expected", e.training)
        self.last_use, self.held_by_frames, self.released_after = releases.last_use, releases.frames, releases.after
        self.recorded = graph.recorded  # then it says what frames hold

    def define(self, name: str, tensor: Tensor, lasting: bool = False) -> None:
        """A tensor that someone else owns (parameters, inputs) under a name. `lasting`: to the end, whatever runs, so
        that no frame needs to hold it."""
        self.env[name] = tensor
        if lasting:
            self.lasting.add(name)

    def assign(self, names: Iterable[str]) -> None:
        """Gives results to the modules that keep them, which let go of what they had."""
        for name in names:
            tensor = self.env.get(name)
            if isinstance(tensor, Tensor):
                self.e.release(self.attributes[name])
                self.e.hold(tensor, self.attributes[name])

    def keep(self, name: str, tensor: Tensor) -> None:
        """A tensor that the module has from the call before, until the code lets go of it."""
        self.env[name] = tensor
        if name in self.attributes:
            self.e.hold(tensor, self.attributes[name])
        else:
            self.owners[name] = (tensor, self.e.take(tensor, Reason.MODULE, name))

    def kept_view(self, base: str, shape: tuple[int, ...]) -> Tensor:
        """One that shares the storage of another."""
        return self.e.alias(self.env[base], shape, contiguous_strides(shape))

    def forward(self, rest: int = 0, decode: Sequence[int] = ()) -> list[Tensor]:
        """Runs all ops but the last `rest`, and returns the outputs that there are; the caller's frame holds them under
        their names. `decode`: the index of the op that begins the decode phase, where there is one."""
        start = 0
        if self.recorded is not None:
            for value, _ in self.recorded.kept:
                if self.last_use.get(value.name, 0) < 0:  # the code lets go of it before its first op
                    self._forget(value.name)
        for index in decode:
            self._list_outputs(start, index)
            self.e.trace.begin("decode")
            start = index
        return self._list_outputs(start, len(self.graph.ops) - rest)

    def forward_rest(self, rest: int) -> list[Tensor]:
        """Runs the last `rest` ops, which are those of the training loop, and returns all outputs."""
        end = len(self.graph.ops)
        return self._list_outputs(end - rest, end)

    def _list_outputs(self, start: int, end: int) -> list[Tensor]:
        try:
            self.run_ops(start, end)
        except AssertionError as error:
            if self.recorded is None:
                raise
            from staticmem.frontends.recording_format import damaged  # on errors only

            op = self.graph.ops[self.index].name
            raise damaged(self.graph.name, f"{op} reads a value that Python has let go of: {error}") from error
        return [self.env[name] for name in self.graph.outputs if isinstance(self.env.get(name), Tensor)]

    def run_ops(self, start: int, end: int) -> None:
        """Runs the ops of [start, end) and leaves the module frames. Checkpoints start and end between them."""
        e, checkpoints = self.e, self.checkpoints
        grad_enabled, self.autocast = e.grad_enabled, e.autocast
        for region in self.compiled:
            if start <= region.start and region.end <= end:
                self.run_eager(start, region.start)
                if checkpoints is not None:
                    checkpoints.before(self, region.start)
                region.run(self)
                start = region.end
        self.run_eager(start, end)
        e.grad_enabled = grad_enabled
        if checkpoints is not None:
            checkpoints.before(self, end)
        e.trace.op = -1
        self._leave(0)

    def run_eager(self, start: int, end: int) -> None:
        """Runs the ops of [start, end) one by one."""
        e, at = self.e, start
        for region in self.graph.autocast_regions:
            if region.start < end and region.end > at:
                first, last = max(region.start, at), min(region.end, end)
                self._run_stretch(at, first)
                e.autocast = self.autocast if region.amp is True else region.amp or None
                self._run_stretch(first, last)
                if region.clears and self._clears_copies():
                    e.clear_autocast_cache()
                e.autocast, at = self.autocast, last
        self._run_stretch(at, end)

    def _clears_copies(self) -> bool:
        """Whether copies of weights go where a region of the code ends: the region of the step, if it has one, and that
        which a checkpoint recomputes in are around those of the code. A recording has counted the step's."""
        if self.reruns:
            return False
        return self.autocast is None or (self.recorded is not None and self.graph.marks_autocast)

    def _run_stretch(self, start: int, end: int) -> None:
        """Runs the ops of [start, end), in all of which autocast is the same."""
        e, checkpoints = self.e, self.checkpoints
        released_after, assigned = self.released_after, self.assigned_after
        grad_enabled = e.grad_enabled
        ops, trace, env, owners, copies = self.graph.ops, e.trace, self.env, self.owners, self.copies
        keeps, frames, frame_of = self.keeps_values or checkpoints is not None, self.frames, self.held_by_frames
        produced, enters = self.produced_in, self.recorded is None and self.graph.generated is None
        again = self.recorded.read_again if self.recorded is not None else ()
        self.records, signatures = records_of_modes(e), self.signatures
        for index in range(start, end):
            op = ops[index]
            if checkpoints is not None:
                e.grad_enabled = grad_enabled
                checkpoints.before(self, index)
            trace.op = self.index = index
            if op.modules and enters:  # shape arithmetic carries no module: stay where we are
                self.enter(op)
            e.grad_enabled = grad_enabled and op.grad
            signature = signatures[index]
            if signature is None:
                signature = signatures[index] = self._signature(op)
            if signature is False or e.saved_hooks:
                self._run_alone(op)
            else:
                self._run(op, signature)
            if assigned and index in assigned:
                self.assign(assigned[index])
            names = released_after[index]
            if names is not None:
                for name in (names,) if type(names) is str else names:
                    held = owners.pop(name, None)
                    if held is None:
                        continue
                    depth = frame_of.get(name)
                    if depth is not None and depth < len(frames):
                        e.hold(held[0], frames[depth][1])
                    e.end(*held)
                    if not keeps and name not in again:  # small tables are faster
                        env.pop(name, None)
                        produced.pop(name, None)
            if copies:
                for held in copies.pop(index, ()):
                    e.end(*held)
        e.grad_enabled = grad_enabled

    def for_rerun(self, names: Mapping[str, Any], start: int) -> Interpreter:
        """An interpreter that runs some of the ops again, from op `start` on, with `names` as its values.

        It shares the graph alone. Results that later ops read live until `finish`, as the function returns them.
        """
        other = copy.copy(self)
        other.env = dict(names)
        other.owners, other.copies, other.frames, other.stack = {}, {}, [], ()
        other.produced_in = {name: self.produced_in[name] for name in names if name in self.produced_in}
        other.outside = {}
        other.coverage = Coverage(unknown_kept=self.coverage.unknown_kept)
        other.index = start
        other.reruns = True
        return other

    def value(self, name: str, op: Op) -> Any:
        """The value that a name has where an op reads it."""
        if self.outside:
            rebound = self.outside.get(name)
            if rebound is not None and not inside(op.modules, rebound[0]):
                return rebound[1]
        try:
            return self.env[name]
        except KeyError:
            raise self._nothing_produces(name, op) from None

    def finish(self) -> None:
        """Drops all that this run holds."""
        self._leave(0)
        for held in [*self.owners.values(), *(h for copies in self.copies.values() for h in copies)]:
            self.e.end(*held)
        self.owners, self.copies = {}, {}

    def forget_outputs(self, kept: Collection[str] = ()) -> None:
        """The caller drops the model's outputs, but for those `kept`."""
        left = self.graph.outputs if self.recorded is None else tuple(self.owners)
        for name in dict.fromkeys(left):
            if name not in kept:
                self._forget(name)

    # -- frames --------------------------------------------------------------------------------------------------

    def enter(self, op: Op) -> None:
        modules, frames = op.modules, self.frames
        if modules is not self.stack:
            common = common_depth(self.stack, modules)
            if common < len(frames):
                self._leave(common)
            for frame in modules[common:]:
                frames.append((frame, Owner(Reason.FRAME, frame.path), set()))
            self.stack = modules
        produced, lasting = self.produced_in, self.lasting
        for name in op.refs():
            producer_stack = produced.get(name)
            if producer_stack is modules or name in lasting:
                continue
            depth = common_depth(producer_stack, modules) if producer_stack else 0
            if depth < len(modules):
                _, owner, held = frames[depth]
                if name in held:
                    continue
                rebound = self.outside.get(name)
                tensor = self.env.get(name) if rebound is None or inside(modules, rebound[0]) else rebound[1]
                if isinstance(tensor, Tensor):
                    held.add(name)
                    self.e.hold(tensor, owner)

    def _leave(self, depth: int) -> None:
        while len(self.frames) > depth:
            _, owner, _ = self.frames.pop()
            self.e.release(owner)
        self.stack = self.stack[:depth]

    # -- ops -----------------------------------------------------------------------------------------------------

    def _signature(self, op: Op) -> Signature | Literal[False]:
        """The signature of an op; False for one that `_run_alone` runs."""
        target = op.target
        rule = self.rules.get(target)
        if rule is None:
            scalar = target in SIZE_OPS or op.base in SIZE_OPS
            alone = scalar or op.base in _NEVER_RECORDED or (self.cast is not None and self.cast.applies(op))
            rule = self.rules[target] = False if alone else lookup(target) or False
        if rule is False or "out" in op.kwargs:  # its result exists already
            return False
        return signature_of(op, rule) or False

    def _run(self, op: Op, signature: Signature) -> None:
        """Runs the rule of an op, or repeats its record."""
        e = self.e
        if self.outside:
            values = [self.value(name, op) for name in op.refs()]
        else:
            env = self.env
            try:
                values = [env[name] for name in op.refs()]
            except KeyError as missing:
                raise self._nothing_produces(missing.args[0], op) from None
        depth = e.depth
        try:
            if signature.sliced and _takes_all(filled(op, values)[0]):
                self.bind(op.outputs[0], values[0], op)  # Python indexing returns the tensor itself
                return
            results, scoped = run_call(e, self.records[e.grad_enabled], signature, op, values)
            self.coverage.covered[op.target] += 1
        except (ValueError, *BAD_ARGUMENTS) as error:
            if not self._reads_guesses(op):
                raise self.explained(op, error) from error
            e.close_scopes(depth)
            e.open_scope()
            results, scoped = self._unknown(op, values), True
        outputs = op.outputs
        if len(outputs) == 1 and len(results) == 1 and type(results[0]) is Tensor and outputs[0]:
            self.bind(outputs[0], results[0], op)
        else:
            for name, tensor in zip(outputs, results, strict=False):
                if name and isinstance(tensor, Tensor):
                    self.bind(name, tensor, op)
        if scoped:
            e.close_scope()

    def _run_alone(self, op: Op) -> None:
        """Runs an op without records: arithmetic of sizes, casts of a cast model, unknown ops, ops under saved-tensor
        hooks."""
        e, target, base = self.e, op.target, op.base
        if base in OF_RECORDINGS:
            from staticmem.engine.recorded_ops import RUNS  # few graphs have one

            RUNS[base](self, op)
            return
        scalar = SIZE_OPS.get(target) or SIZE_OPS.get(base)
        args = self.arguments(op)
        kwargs = {k: self._resolve(v, op) for k, v in op.kwargs.items()} if op.kwargs else {}
        if scalar is not None:
            try:
                self.env[op.outputs[0]] = scalar(*args)
            except (ValueError, *BAD_ARGUMENTS) as error:
                raise self.explained(op, error) from error
            return
        if self.cast is not None and self.cast.applies(op):
            if self.cast.is_upcast(op, args, kwargs):
                self._upcast(op, args, kwargs)
                return
            args, kwargs = self.cast.arguments(op, args, kwargs)
        e.open_scope()
        rule = lookup(target)
        try:
            if base == "aten::slice" and _takes_all(args):
                result = args[0]  # Python indexing returns the tensor itself
            elif rule is not None:
                self.coverage.covered[target] += 1
                result = call(e, rule, args, kwargs)
            else:
                result = self._unknown(op, [*args, *kwargs.values()])
            results = [result] if isinstance(result, Tensor) else list(result or ())
        except (ValueError, *BAD_ARGUMENTS) as error:
            raise self.explained(op, error) from error
        for name, tensor in zip(op.outputs, results, strict=False):
            if name and isinstance(tensor, Tensor):
                self.bind(name, tensor, op)
        e.close_scope()

    def _upcast(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Inside the module the name is the float32 copy, until its last use there; outside it is the input. A name
        that ends with the module is a variable of its own, which has the copy."""
        name, source, e, rule = op.outputs[0], args[0], self.e, lookup(op.target)
        assert rule is not None
        e.open_scope()
        self.bind(name, call(e, rule, args, kwargs), op)
        e.close_scope()
        last, end = self.index, len(self.graph.ops)
        for index in range(self.index + 1, end):
            later = self.graph.ops[index]
            if later.modules and not inside(later.modules, op.modules):
                end = index
                break
            if name in later.refs():
                last = index
        if self.last_use.get(name, end) >= end:
            self.copies.setdefault(last, []).append(self.owners[name])
            self.owners[name] = (source, e.take(source, Reason.VALUE, name))
            self.outside[name] = (op.modules, source)

    def bind(self, name: str, tensor: Tensor, op: Op) -> None:
        self.env[name] = tensor
        self.produced_in[name] = op.modules or self.stack
        hold = self.e.take(tensor, Reason.VALUE, name)
        if name in self.owners:
            self._forget(name)  # assigned again: the old value is released
        self.owners[name] = (tensor, hold)
        if self.recorded is not None and name in self.attributes:
            self.e.release(self.attributes[name])
            self.e.hold(tensor, self.attributes[name])
        names, id = self.e.trace.buffers.names, tensor.storage.id
        if not names[id]:
            names[id] = name

    def _forget(self, name: str) -> None:
        held = self.owners.pop(name, None)
        if held is not None:
            self.e.end(*held)

    def arguments(self, op: Op) -> list[Any]:
        """The positional arguments of an op, values in place of their names."""
        return [self._resolve(a, op) if type(a) in _RESOLVED else a for a in op.args]

    def _resolve(self, arg: Any, op: Op) -> Any:
        if isinstance(arg, Ref):
            return self.value(arg.name, op)
        if isinstance(arg, tuple):
            for item in arg:
                if type(item) in _RESOLVED:
                    return tuple([self._resolve(a, op) for a in arg])
        return arg

    def _nothing_produces(self, name: str, op: Op) -> ModelFileError:
        return ModelFileError(
            f"op '{op.name}' reads '{name}', which nothing produces",
            "A value is an input, a parameter or an earlier op's result: the file lacks it, or staticmem lost it.",
            "Export the model again; if it persists, report the op.",
            code="SM119",
        )

    def _unknown(self, op: Op, args: Sequence[Any]) -> list[Tensor]:
        if self.graph.recorded is not None and op.base.endswith("_backward") and self.e.training:
            raise ModelFileError(
                f"the training step of this model cannot be predicted: its code differentiates gradients ({op.base})",
                "It runs torch.autograd.grad with create_graph=True; what a backward of a backward keeps is not known.",
                "A file of torch.export.export or torch.onnx.export without a recording has a peak with a band.",
                code="SM176",
            )
        if op.target.endswith(_BATCHES) and isinstance(args[0], Tensor) and args[0].dtype.is_floating_point:
            raise ModelFileError(
                f"the graph runs torch.func.vmap over floating-point tensors ({op.name})",
                "Its ops have the sizes of one sample, so the graph does not tell the sizes that exist.",
                "Write the batched computation out (torch.bmm, torch.einsum, grouped convolutions) and export again.",
                code="SM178",
            )
        values = [self._described(name, args) for name in op.outputs]
        if self._writes_over(op, args, values):
            self.e.kernel(op.target)
            outs = [args[0]]
        else:
            outs = fallback(self.e, op.target, args, values)
        self.coverage.unknown[op.target] += 1
        self.coverage.unknown_bytes[op.target] += sum(t.nbytes for t in outs)
        if any(t.grad_fn is not None for t in outs):
            inputs = [a for a in args if isinstance(a, Tensor)]
            gradients = [t for t in inputs if self.e.needs_grad(t)]
            self.coverage.unknown_kept[op.target] += sum(t.nbytes for t in (*outs, *inputs, *gradients))
        return outs

    def _writes_over(self, op: Op, args: Sequence[Any], values: Sequence[Value]) -> bool:
        """Whether an op without a rule writes its only result over its first argument, as its name says, and has no
        history: then it makes no tensor but what its kernel holds."""
        if not in_place(op.base) or len(values) != 1 or not args or not isinstance(args[0], Tensor):
            return False
        of_result, tensors = values[0], [arg for arg in args if isinstance(arg, Tensor)]
        same = (of_result.shape, of_result.dtype) == (args[0].shape, args[0].dtype)
        return same and not self.e.needs_grad(*tensors)

    def _reads_guesses(self, op: Op) -> bool:
        """Whether what an op reads follows from a result whose sizes data decide: those are a guess (`_described`), so
        an op that they do not fit is no error. Its results are then guessed too."""
        if self.graph.recorded is not None:
            return False
        if self.guesses is None:
            self.guesses, values = set(), self.graph.values
            for other in self.graph.ops:
                sized = lookup(other.target) is not None or other.target in SIZE_OPS or other.base in SIZE_OPS
                if not sized:
                    sized = all((value := values.get(n)) is not None and value.shape is not None for n in other.outputs)
                if not sized or not self.guesses.isdisjoint(other.refs()):
                    self.guesses.update(other.outputs)
        return not self.guesses.isdisjoint(op.refs())

    def _described(self, name: str, args: Sequence[Any]) -> Value:
        """The result's shape from the file; else that of the largest input (the coverage says so)."""
        value = self.graph.values.get(name)
        if value is not None and value.shape is not None:
            return value
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not tensors:
            return Value(name, value.dtype if value else dtypes.float32, ())
        largest = max(tensors, key=lambda t: t.numel)
        return Value(name, value.dtype if value else largest.dtype, largest.shape)

    def explained(self, op: Op, error: Exception) -> DimensionError | ModelFileError:
        """The error of an op's rule for sizes or arguments that do not fit, as one that names the node."""
        if isinstance(error, ValueError):
            where = f" in {op.modules[-1].path}" if op.modules and op.modules[-1].path else ""
            return DimensionError(
                f"node '{op.name}' ({op.target}{where}) does not fit these sizes",
                f"Reason: {error}.",
                "The model's code may not take these sizes (a U-Net takes multiples of 8 or 32), or the export fixed "
                "one: choose others, or export at these.",
                code="SM118",
            )
        return ModelFileError(
            f"node '{op.name}' calls {op.target} with arguments that it does not take",
            f"Reason: {error}.",
            "Export the model again; if it persists, report the node.",
            code="SM122",
        )


def inside(stack: Stack, frame: Stack) -> bool:
    """Whether a module stack is within a frame (or the frame itself)."""
    return stack[: len(frame)] == frame


def _takes_all(args: Sequence[Any]) -> bool:
    """Whether a slice is the whole tensor: `x[:]`."""
    tensor = args[0]
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = (*args[1:], *defaults[len(args) - 1 :])
    size = tensor.shape[tensor.dim(dim)]
    return step == 1 and start in (None, 0) and (end is None or end >= size)
