"""Activation checkpointing as `torch.utils.checkpoint.checkpoint` runs it.

Under a checkpoint autograd's nodes save nothing; the checkpoint keeps its inputs. The first node that needs a tensor
makes it run the ops again, under grad mode and the autocast of the forward, up to the last tensor that was saved (early
stop). Each recomputed tensor waits for its node and dies with the node's `apply`; the inputs die when every node has
run or died. A checkpoint within a checkpoint keeps its inputs through the outer one, so that both run again.

With use_reentrant=True all of the function runs again, within one node, which has the gradients of its results and
the recomputed results until the backward of them is done.

Source: torch/utils/checkpoint.py (`CheckpointFunction`, `_CheckpointFrame`, `_checkpoint_hook`,
`_recomputation_hook`). The states of random number generators (`preserve_rng_state`) are CPU tensors: they take no
device memory.

Selective checkpoints: what the forward keeps for the recomputation, which takes it in place of calling again.

Every result of a kept call stays from the forward to its place in the recomputation, whether the backward reads it or
not; what nobody took ends with the checkpoint.

Source: torch/utils/checkpoint.py (`_CachingTorchDispatchMode`, `_CachedTorchDispatchMode`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Node, Owner, Packed, Selecting, Tensor, attributes_of_ctx
from staticmem.engine.features import Feature, RunningStep
from staticmem.engine.interpreter import Interpreter
from staticmem.engine.notes import notes_of_selection
from staticmem.ir.graph import Note, Ref, Region
from staticmem.ops import in_place
from staticmem.scenario.checkpointing import Policy


class _StopRecomputationError(Exception):
    """The last tensor that the forward saved has been recomputed (early stop). `ran`: so has the op that saved it."""

    def __init__(self, ran: bool) -> None:
        super().__init__()
        self.ran = ran


class _Holder:
    """Stands for one saved tensor. `owner` holds the recomputed one until its node has used it."""

    __slots__ = ("alive", "owner")

    def __init__(self, who: str, op: int) -> None:
        self.owner = Owner(Reason.RECOMPUTED, who, op)
        self.alive = True


class _Saves:
    """The saved tensors of one node, or the inputs of an inner checkpoint."""

    __slots__ = ("checkpoint", "holders", "saved")

    def __init__(self, checkpoint: _Checkpoint, holders: list[_Holder], saved: Sequence[Tensor] = ()) -> None:
        self.checkpoint, self.holders, self.saved = checkpoint, holders, saved

    def unpack(self, e: Eager, gradients: Sequence[Tensor | None]) -> None:
        self.checkpoint.recompute(e, gradients)

    def tensors(self) -> list[tuple[Tensor, Owner]]:
        return [(holder.owner.held[0][0], holder.owner) for holder in self.holders if holder.owner.held]

    def owners(self) -> list[Owner]:
        return [*(holder.owner for holder in self.holders), *self.checkpoint.owners()]

    def applied(self, e: Eager) -> None:
        for holder in self.holders:
            e.leave_all_to_scope(holder.owner)

    def release(self, e: Eager) -> None:
        for holder in self.holders:
            e.release(holder.owner)
            if holder.alive:
                holder.alive = False
                self.checkpoint.forget(e)


class _NoSaves:
    """A node that saves nothing, in a checkpoint with use_reentrant=True, which ends when all of its nodes have run."""

    saved: Sequence[Tensor] = ()

    def __init__(self, checkpoint: _Checkpoint) -> None:
        self.checkpoint = checkpoint

    def unpack(self, e: Eager, gradients: Sequence[Tensor | None]) -> None:
        self.checkpoint.recompute(e, gradients)

    def tensors(self) -> list[tuple[Tensor, Owner]]:
        return []

    def owners(self) -> list[Owner]:
        return self.checkpoint.owners()

    def applied(self, e: Eager) -> None:
        pass

    def release(self, e: Eager) -> None:
        self.checkpoint.forget(e)


class _Checkpoint:
    """One call of `checkpoint`: `_CheckpointFrame` with its hooks. It dies with the last holder."""

    def __init__(self, caller: Checkpoints, interpreter: Interpreter, region: Region) -> None:
        self.caller, self.interpreter, self.region = caller, interpreter, region
        e = interpreter.e
        self.autocast = interpreter.autocast
        produced = interpreter.produced_in
        self.inputs = _inputs(interpreter, region)
        self.arguments = [name for name in self.inputs if isinstance(self.inputs[name], Tensor) and name in produced]
        self.saved_args = Owner(Reason.CHECKPOINT, region.name, region.start)
        self.inner_backward = Owner(Reason.CHECKPOINT, region.name, region.start)
        self.of_recomputed = attributes_of_ctx()
        self.without_graph = region.reentrant
        self.packed_args: Packed | None = None
        self.slots: list[_Saves] = []
        self.recomputed = False
        self.refs = 1  # the running call; then one for each holder
        self.selection = Selection(caller.policy(region), region.name, region.start) if region.saves else None
        tensors = [self.inputs[name] for name in self.arguments]
        if not e.saved_hooks:
            for tensor in tensors:
                e.hold(_saved(tensor, tensor), self.saved_args)
        elif tensors:
            self.packed_args = e.saved_hooks[-1].pack(e, Node("checkpoint", 0, region.start), tensors, ())

    def separate_leaves(self) -> None:
        """With use_reentrant=True a backward of its own accumulates the gradients of parameters, before others come."""
        if self.region.reentrant:
            for value in self.inputs.values():
                if isinstance(value, Tensor) and value.grad_fn is None:
                    value.accumulate = None

    def overwrites(self) -> bool:
        """Whether an op changes an input in place, after which the saved one has another version."""
        arguments = set(self.arguments)
        for op in self.interpreter.graph.ops[self.region.start : self.region.end]:
            if in_place(op.base) and op.args and isinstance(op.args[0], Ref) and op.args[0].name in arguments:
                return True
        return False

    def outputs(self) -> list[str]:
        """The values of the region that are read after it."""
        graph, end = self.interpreter.graph, self.region.end
        results = [name for op in graph.ops[self.region.start : end] for name in op.outputs]
        return [name for name in results if graph.last_read.get(name, 0) >= end or name in graph.outputs]

    def pack(
        self, e: Eager, node: Node, saves: Sequence[Tensor], results: Sequence[Tensor]
    ) -> _Saves | _NoSaves | None:
        """In the forward: makes a holder for every tensor, and keeps none of them."""
        if not saves:
            if not self.region.reentrant:
                return None
            self.refs += 1
            return _NoSaves(self)
        packed = _Saves(self, [_Holder(node.name, node.op) for _ in saves], saves)
        self.slots.append(packed)
        self.refs += len(saves)
        return packed

    def owners(self) -> list[Owner]:
        """Who has what the checkpoint keeps: the first three let go when it is forgotten."""
        outer = self.packed_args.owners() if self.packed_args is not None else ()
        return [self.saved_args, self.inner_backward, self.of_recomputed, *outer]

    def forget(self, e: Eager) -> None:
        """A holder died, or the call returned."""
        self.refs -= 1
        if self.refs == 0:
            owners = self.owners()[:3]
            if self.region.reentrant and self.recomputed:  # one node has them until its own backward returns
                e.held_by_node.extend(owners)
            else:
                for owner in owners:
                    e.release(owner)
            if self.packed_args is not None:
                self.packed_args.release(e)
            if self.selection is not None:
                self.selection.release(e)
            self.inputs = {}

    def recompute(self, e: Eager, gradients: Sequence[Tensor | None]) -> None:
        """Runs the region's ops again, once in a backward. `gradients` are those of the node that needs a tensor."""
        if self.recomputed:
            return
        self.recomputed = True
        inputs = self.inputs
        if self.packed_args is not None:
            self.packed_args.unpack(e, gradients)
            inputs = inputs | self._unpacked(self.packed_args)
        region, first, op = self.region, len(e.trace.buffers), e.trace.op
        state = e.grad_enabled, e.autocast, e.autocast_cache, e.autocast_owner, e.saved_hooks, e.choices, e.selection
        e.selection = self.selection
        if e.selection is not None:
            e.selection.recompute()
        e.grad_enabled, e.autocast, e.autocast_cache = True, self.autocast, {}
        e.autocast_owner, e.choices = Owner(Reason.AUTOCAST, "weight cache"), Counter()
        of_forward, e.of_graph = e.of_graph, attributes_of_ctx()
        e.saved_hooks = [_Recomputation(self, len(e.trace.kernels))]
        depth = e.depth
        rerun = self.interpreter.for_rerun(inputs, region.start)
        arguments = Owner(Reason.CHECKPOINT, region.name, region.start)
        for name in self.arguments:
            e.hold(inputs[name], arguments)
        rerun.checkpoints = self.caller.within(region)
        end = region.end
        try:
            rerun.run_ops(region.start, region.end)
        except _StopRecomputationError as stop:
            e.close_scopes(depth)  # no inner checkpoint is open: while one runs, its own hook packs
            end = rerun.index + stop.ran
        if region.reentrant:  # `CheckpointFunction.backward` has both until the backward of what it recomputed is done
            results = [rerun.env.get(name) for name in self.outputs()]
            for tensor in (*gradients, *results):
                if isinstance(tensor, Tensor):
                    e.hold(tensor, self.inner_backward)
        rerun.finish()
        self.of_recomputed, e.of_graph = e.of_graph, of_forward
        if not region.reentrant:  # else its nodes run before they die
            e.release(self.of_recomputed)
        skipped = self.selection.skipped if self.selection is not None else ()
        self.caller.recomputed.extend([op for op in range(region.start, end) if op not in skipped])
        e.release(arguments)
        e.release(e.autocast_owner)
        e.grad_enabled, e.autocast, e.autocast_cache, e.autocast_owner, e.saved_hooks, e.choices, e.selection = state
        e.trace.op = op
        if self.packed_args is not None:
            self.packed_args.applied(e)
        categories = e.trace.buffers.categories
        categories[first:] = ["activation"] * (len(categories) - first)

    def _unpacked(self, packed: Packed) -> dict[str, Any]:
        """The inputs that the outer checkpoint has recomputed, or that came back from the CPU, with the `grad_fn` of
        the forward's ones."""
        inputs: dict[str, Any] = {}
        for name, (present, _) in zip(self.arguments, packed.tensors(), strict=True):
            inputs[name] = _saved(self.inputs[name], present)
        return inputs


class _Recomputation:
    """The hook of a recomputation: gives each saved tensor to the holder that the forward made for it.

    The recomputed node saves the tensor too. It dies with its results, unless a module keeps one of them as an
    attribute.
    """

    without_graph = False

    def __init__(self, checkpoint: _Checkpoint, first_kernel: int) -> None:
        self.checkpoint, self.position, self.first_kernel = checkpoint, 0, first_kernel

    def pack(self, e: Eager, node: Node, saves: Sequence[Tensor], results: Sequence[Tensor]) -> _Saves | None:
        if not saves:
            return None
        slots = self.checkpoint.slots
        for tensor, holder in zip(saves, slots[self.position].holders, strict=True):
            if holder.alive:
                e.hold(_detached(tensor), holder.owner)
        self.position += 1
        if self.position == len(slots) and not self.checkpoint.region.reentrant:
            self._stop(e, node, saves, results)
        if self.checkpoint.region.reentrant:  # its backward runs through the recomputed nodes, which let go as they run
            return _Saves(self.checkpoint, [])
        own = _Holder(node.name, node.op)
        own.alive = False  # not one that the checkpoint waits for
        for tensor in saves:
            e.hold(_detached(tensor), own.owner)
        return _Saves(self.checkpoint, [own])

    def _stop(self, e: Eager, node: Node, saves: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Stops. The kernel has not run if the last saved tensor is an input: inputs are saved before the kernel runs,
        results after it."""
        ran = True
        if results:
            kernels = e.trace.buffers.kernels
            kernel = max(kernels[t.storage.id] for t in results)
            selection = self.checkpoint.selection
            if selection is not None and kernel < self.first_kernel:  # its results were kept
                if {t.storage for t in saves}.isdisjoint(t.storage for t in results):
                    selection.give_back(e)
            elif all(kernels[t.storage.id] < kernel for t in saves):
                ran = not e.undo(kernel)
        e.abandon(node)
        raise _StopRecomputationError(ran)


class Checkpoints:
    """Starts and ends the checkpoints of an interpreter's run; ops that run again are added to `recomputed`."""

    def __init__(
        self, e: Eager, regions: Sequence[Region], within: Region | None = None, recomputed: list[int] | None = None
    ) -> None:
        self.e, self.regions = e, regions
        self.recomputed: list[int] = [] if recomputed is None else recomputed
        self.overwritten: list[str] = []  # checkpoints that change an input in place
        self.policies: dict[tuple[str, ...], Policy] = {}
        self.running: list[tuple[int, _Checkpoint, Selecting | None]] = []  # the last: what it took the place of
        self.starts: dict[int, list[Region]] = {}
        for region in regions:  # outer ones first
            if within is None or region.is_within(within):
                self.starts.setdefault(region.start, []).append(region)

    def policy(self, region: Region) -> Policy:
        """What a selective checkpoint keeps."""
        return self.policies.setdefault(region.saves, Policy(region.saves))

    def within(self, region: Region) -> Checkpoints:
        """Those of the recomputation of a region."""
        inner = Checkpoints(self.e, self.regions, region, self.recomputed)
        inner.policies = self.policies
        return inner

    def before(self, interpreter: Interpreter, index: int) -> None:
        while self.running and self.running[-1][0] <= index:
            _, checkpoint, self.e.selection = self.running.pop()
            self.e.saved_hooks.pop()
            checkpoint.separate_leaves()
            checkpoint.forget(self.e)
        if self.e.grad_enabled:
            for region in self.starts.get(index, ()):
                checkpoint = _Checkpoint(self, interpreter, region)
                if checkpoint.overwrites():
                    self.overwritten.append(region.name)
                self.e.saved_hooks.append(checkpoint)
                checkpoint.separate_leaves()
                self.running.append((region.end, checkpoint, self.e.selection))
                self.e.selection = checkpoint.selection or self.e.selection


class CheckpointedCode(Feature):
    """The checkpoints of a step that eager code calls."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self.running: Checkpoints | None = None  # of the micro-batch that has run last

    def begin_forward(self) -> None:
        if self.step.checkpoints:  # else all are inside of compiled code
            self.running = self.step.interpreter.checkpoints = Checkpoints(self.e, self.step.checkpoints)

    def end_backward(self) -> None:
        if self.running is not None:
            self.step.recomputed = tuple(self.running.recomputed)
            self.step.overwritten = len(self.running.overwritten)

    def notes(self) -> Sequence[Note]:
        names = self.step.scenario.checkpoint_save
        if not names:
            return ()
        policies = self.running.policies.values() if self.running is not None else ()
        return [*notes_of_selection(names, [*policies, *self.step.compiled_policies])]


def _inputs(interpreter: Interpreter, region: Region) -> dict[str, Any]:
    """The values from outside that a region reads, as its ops see them, and those that it is only given."""
    produced: set[str] = set()
    inputs: dict[str, Any] = {}
    for op in interpreter.graph.ops[region.start : region.end]:
        for name in op.refs():
            if name not in produced and name not in inputs and name in interpreter.env:
                value = interpreter.value(name, op)
                copied = isinstance(value, Tensor) and name in interpreter.produced_in  # parameters stay themselves
                inputs[name] = _saved(value, value) if copied else value
        produced.update(op.outputs)
    for name in region.unread:
        if name not in inputs and isinstance(value := interpreter.env.get(name), Tensor):
            inputs[name] = _saved(value, value)
    return inputs


def _detached(tensor: Tensor) -> Tensor:
    return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)


def _saved(tensor: Tensor, content: Tensor) -> Tensor:
    """A saved tensor over the storage of `content`, with the `grad_fn` of `tensor`: a recomputation reads it."""
    saved = _detached(content)
    saved.grad_fn, saved.output_nr = tensor.grad_fn, tensor.output_nr
    saved.requires_grad, saved.name = tensor.requires_grad, tensor.name
    if content is tensor:
        saved.base = tensor.base
    return saved


class Selection:
    """What one call of a checkpoint keeps. `skipped`: the ops whose results the recomputation took, by index."""

    def __init__(self, policy: Policy, who: str, op: int) -> None:
        self.policy, self.who, self.op = policy, who, op
        self.kept: deque[list[tuple[Tensor, int]]] = deque()  # of each kept call, in order: tensors with their holds
        self.counts: Counter[str] = Counter()
        self.recomputes = self.is_kept = False
        self.running: deque[tuple[Tensor, int]] = deque()  # of the call that the recomputation takes the results of
        self.taken: list[Tensor] = []  # of these, what it has got
        self.skipped: set[int] = set()

    def recompute(self) -> None:
        """The calls from now on are those of the recomputation."""
        self.recomputes, self.is_kept = True, False
        self.counts.clear()

    def begins(self, e: Eager, kernel: str) -> bool:
        """A kernel is called; False where its results were kept, so that it does not run."""
        self.is_kept = self.policy.keeps(kernel.removeprefix("aten."), self.counts)
        if not self.is_kept:
            return True
        if not self.recomputes:
            self.kept.append([])
            return True
        self.running, self.taken = deque(self.kept.popleft() if self.kept else ()), []
        if self.running:
            self.skipped.add(e.trace.op)
        return not self.running

    @property
    def skips(self) -> bool:
        """The call at hand does not run: its results are there."""
        return self.recomputes and self.is_kept

    def keep(self, e: Eager, tensor: Tensor) -> None:
        """Keeps a result of the running call, if the policy names that."""
        if self.is_kept and not self.recomputes:
            kept = Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)
            self.kept[-1].append((kept, e.take(kept, Reason.CHECKPOINT, self.who, self.op)))

    def result(self, e: Eager) -> Tensor | None:
        """The next result of a call that was kept; None where the call runs."""
        if not self.skips or not self.running:
            return None
        kept, hold = self.running.popleft()
        e.leave_to_scope(kept, hold)
        again = Tensor(kept.storage, kept.shape, kept.strides, kept.dtype)
        again.known_form = kept.form
        self.taken.append(kept)
        return again

    def give_back(self, e: Eager) -> None:
        """The call at hand has not run after all: an early stop came before it, so its results stay kept."""
        self.running.extendleft([(kept, e.take(kept, Reason.CHECKPOINT, self.who, self.op)) for kept in self.taken])
        self.skipped.discard(e.trace.op)

    def release(self, e: Eager) -> None:
        """The checkpoint ends with what nobody has taken."""
        for results in (*self.kept, self.running):
            for tensor, hold in results:
                e.end(tensor, hold)
        self.kept.clear()
        self.running.clear()
