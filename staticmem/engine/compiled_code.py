"""Runs the regions of a graph that `torch.compile` compiles: the plan of the forward graph in the place of the region's
ops, and one node of autograd, whose backward runs the plan of the backward graph.

The node gives up what it has saved, and the engine the gradients that come in, before the backward's code runs: it lets
go of each after its last use. All gradients are returned together. The forward's inputs are the caller's.

Source: torch/_functorch/_aot_autograd/runtime_wrappers.py (`CompiledFunction`: `ctx.maybe_clear_saved_tensors()`,
`steal_args`, `boxed_grads_call`; `coerce_to_expected_memory_format`), torch/_inductor/codegen/wrapper.py
(`args.clear()`, `del` after the last use), torch/autograd/function.py (`materialize_grads`).

Runs of compiled code as CUDA graphs (`mode="reduce-overhead"`): what they read is copied to places of their own, and
all that they allocate is in a pool of their own.

Parameters and buffers stay where they are, and so does what another CUDA graph has made. Every other input is copied
before the graph runs, into memory of the pool that the code frees as it frees its inputs. The caller's tensor goes when
it is copied, where nobody else holds it.

Source: torch/_inductor/cudagraph_trees.py of PyTorch 2.15 (`CUDAGraphNode.__init__`: `static_input_idxs`,
`cudagraph_managed_idxs`; `_allocate_and_copy_recording_inputs`; `_copy_inputs_and_remove_from_src`),
torch/_inductor/compile_fx.py (`static_input`, `get_static_input_idxs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from staticmem.compiler.plan import CompiledCall, Plan
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Grads, Owner, TakingNode, Tensor
from staticmem.eager.trace import CudaGraph
from staticmem.engine.interpreter import Interpreter
from staticmem.ir.graph import FUNCTION, NO_KWARGS, Graph, Op, Ref
from staticmem.ir.stacks import common_depth
from staticmem.ops.dispatch import BAD_ARGUMENTS
from staticmem.ops.size_arithmetic import SIZE_OPS
from staticmem.passes.variables.releases import lasting_values

End = Callable[[], object]  # ends a hold
COPY = "aten.empty_strided.default"  # `static_input`; `_foreach_copy_` follows
STATIC = ("parameter", "buffer")  # categories of what has one place in all steps


class Capture:
    """One run of compiled code as a CUDA graph.

    Attributes:
        inputs: what the code reads.
        ends: what lets go of each of them; None where the caller keeps it.
    """

    def __init__(
        self, e: Eager, inputs: Sequence[Tensor], ends: Sequence[End | None], names: Sequence[str], kind: Reason
    ) -> None:
        """`names` are of the inputs, for reports, and `kind` is that of the holds on copies."""
        self.e, self.start = e, len(e.trace.kernels)
        self.inputs, self.ends = list(inputs), list(ends) or [None] * len(inputs)
        self.copied: dict[int, int] = {}  # copy -> what it is of, as buffers
        places = [at for at, tensor in enumerate(inputs) if not is_static(e, tensor)]
        for at in places:
            tensor = inputs[at]
            copy = e.empty(tensor.shape, tensor.dtype, tensor.strides, COPY)
            e.trace.buffers.names[copy.storage.id] = f"{names[at] or 'input'}, copied for the CUDA graph"
            self.copied[copy.storage.id] = tensor.storage.id
            self.inputs[at] = copy
        given_up = [self.ends[at] for at in places]
        for at in places:
            copy = self.inputs[at]
            hold = e.take(copy, kind, "input of the CUDA graph")
            self.ends[at] = partial(self._end, at, copy, hold)
        for end in given_up:
            if end is not None:
                end()
        self.body = len(e.trace.kernels)

    def _end(self, at: int, copy: Tensor, hold: int) -> None:
        self.ends[at] = None
        self.e.end(copy, hold)

    def leave(self) -> None:
        """The code has returned. Copies that it returns live on as long as somebody holds them."""
        trace = self.e.trace
        for at, tensor in enumerate(self.inputs):
            end = self.ends[at]
            if end is not None and tensor.storage.id in self.copied:
                end()
        trace.cuda_graphs.append(CudaGraph(self.start, self.body, len(trace.kernels), self.copied))


def is_static(e: Eager, tensor: Tensor) -> bool:
    """Whether a CUDA graph reads a tensor where it is."""
    buffers, id = e.trace.buffers, tensor.storage.id
    return buffers.categories[id] in STATIC or e.trace.in_cuda_graph(buffers.kernels[id])


NODE = "CompiledFunctionBackward"
TRITON = "triton: "  # how kernels of Inductor's own begin, before the ops in them
COPIED = ", copied"  # how names of copies in another layout end


class CompiledStretch:
    """A stretch of ops with its plans. `op` stands for them: it reads what they read."""

    def __init__(
        self, graph: Graph, call: CompiledCall, name: str = "", captured: bool = False, begin: int | None = None
    ) -> None:
        """`captured`: its code runs as CUDA graphs. `begin`: the first op of the graph that it was cut from."""
        self.call, self.name, self.captured = call, name, captured
        self.start, self.end = call.start, call.end
        ops = graph.ops[self.start : self.end]
        stacks = list({id(op.modules): op.modules for op in ops if op.modules}.values())
        stack = stacks[0] if stacks else ()
        for other in stacks[1:]:
            stack = stack[: common_depth(stack, other)]
        # copies of inputs: what they are called, and the first op that reads them
        owned = {p.value.name: p.fqn for p in (*graph.parameters, *graph.buffers)}
        self.copies = {name: (owned.get(name, name) + COPIED, -1) for name in call.inputs}
        for index in range(self.end - 1, self.start - 1, -1):
            for name in graph.ops[index].refs():
                if name in self.copies:
                    self.copies[name] = (self.copies[name][0], index)
        # values of the graph that it was cut from, which Dynamo's code drops with their last call
        self.dropped: frozenset[str] = frozenset()
        if begin is not None and begin < self.start:
            kept = {*graph.outputs, *lasting_values(graph)}
            computed = {name for op in graph.ops[begin : self.start] for name in op.outputs}
            self.dropped = frozenset(n for n in computed - kept if self.start <= graph.last_read.get(n, -1) < self.end)
        reads = tuple([Ref(name) for name in call.inputs])
        self.op = Op(f"compiled {name or 'model'}", "staticmem::compiled", reads, NO_KWARGS, call.outputs, stack)
        targets = Counter([op.target for op in ops])
        uncounted = {*SIZE_OPS, FUNCTION}
        for target in [t for t in targets if t in uncounted or t.split(".", 1)[0] in uncounted]:
            del targets[target]
        self.covered: Mapping[str, int] = targets  # how often each target is run, without arithmetic of sizes

    def run(self, interpreter: Interpreter) -> None:
        """Runs the forward in the place of the ops."""
        e, op = interpreter.e, self.op
        interpreter.index = self.end - 1  # all of it has run when a checkpoint stops it
        e.trace.op = self.start
        if op.modules and interpreter.recorded is None:
            interpreter.enter(op)
        e.open_scope()
        try:
            results = self.forward(e, [interpreter.value(name, op) for name in op.refs()])
            for name, tensor in zip(op.outputs, results, strict=True):
                if tensor is not None:
                    interpreter.bind(name, tensor, op)
        except (ValueError, *BAD_ARGUMENTS) as error:
            raise interpreter.explained(interpreter.graph.ops[self.start], error) from error
        e.close_scope()
        interpreter.coverage.covered.update(self.covered)
        e.choices.update(self.call.choices)
        self._release(interpreter)

    def _release(self, interpreter: Interpreter) -> None:
        """Ends the values from before that the region's ops read last."""
        e, owners, frames = interpreter.e, interpreter.owners, interpreter.frames
        for name in self.dropped:
            held = owners.pop(name, None)
            if held is not None:
                e.end(*held)
        for index in sorted(interpreter.assigned_after):
            if self.start <= index < self.end:
                interpreter.assign(interpreter.assigned_after[index])
        for names in interpreter.released_after[self.start : self.end]:
            for name in (names,) if type(names) is str else names or ():
                held = owners.pop(name, None)
                if held is not None:
                    depth = interpreter.held_by_frames.get(name)
                    if depth is not None and depth < len(frames):
                        e.hold(held[0], frames[depth][1])
                    e.end(*held)

    def forward(self, e: Eager, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Runs the forward over tensors that the caller holds. What it returns has its history, and belongs to the
        present scope."""
        call = self.call
        capture = Capture(e, inputs, (), self._names(), Reason.COMPILED) if self.captured else None
        if capture is None:
            code = _Code(e, call.forward, inputs, (), self.copies)
        else:
            code = _Code(e, call.forward, capture.inputs, capture.ends, self.copies)
        selection, e.selection = e.selection, None  # the policy of a checkpoint around it sees one call of its own name
        code.run()
        e.selection = selection
        tensors = code.outputs()
        results, saved = tensors[: len(call.outputs)], tensors[len(call.outputs) :]
        if call.backward is not None and e.needs_grad(*inputs):
            self._record(e, inputs, results, [tensor for tensor in saved if tensor is not None])
        code.leave()
        if capture is not None:
            capture.leave()
        return results

    def _names(self) -> list[str]:
        """Names of the forward's inputs."""
        return [name.removesuffix(COPIED) for name, _ in self.copies.values()]

    def _record(
        self, e: Eager, inputs: Sequence[Tensor], results: Sequence[Tensor | None], saved: Sequence[Tensor]
    ) -> None:
        outputs = [results[k] for k in self.call.differentiable]
        differentiable = [tensor for tensor in outputs if tensor is not None]
        node = CompiledNode(self, e.sequence, differentiable)
        e.sequence += 1
        e.record(node.name, differentiable, inputs, (), saved if e.saved_hooks else (), node)
        if not e.saved_hooks:
            node.save(e, saved)


class CompiledNode(TakingNode):
    """`CompiledFunctionBackward` of one call of a region. `forms` are those of the outputs that have a gradient."""

    __slots__ = ("forms", "region", "tensors")

    def __init__(self, region: CompiledStretch, sequence: int, outputs: Sequence[Tensor]) -> None:
        super().__init__(f"{NODE} of {region.name or 'the model'}", sequence, -1)
        self.region, self.forms = region, [tensor.form for tensor in outputs]
        self.tensors: list[Tensor] = []  # what it has saved

    def save(self, e: Eager, tensors: Sequence[Tensor]) -> None:
        """Saves tensors, each for the op that it was computed for."""
        holds, ticks, call = e.trace.holds, e.trace.ticks, self.region.call
        plan = call.forward
        numbers = [output.storage - plan.inputs for output in plan.outputs[len(call.outputs) :] if output is not None]
        self.tensors, self.saved, self.hold = list(tensors), [tensor.storage for tensor in tensors], len(holds)
        for tensor, number in zip(tensors, numbers, strict=True):
            op = -1
            if number >= 0:
                buffer = plan.buffers[number]
                op = self.region.copies[buffer.what][1] if buffer.what in self.region.copies else buffer.op
            holds.take(tensor.storage.id, Reason.SAVED, self.name, ticks, op)
            tensor.storage.refs += 1
        for tensor in tensors[len(tensors) - call.on_ctx :]:  # `ctx._tensors_no_vc_check`, which nothing clears
            e.keep_on_ctx(tensor)

    def run(self, e: Eager, waiting: Owner, slots: Grads, retain_graph: bool) -> list[Tensor | None]:
        plan = self.region.call.backward
        assert plan is not None
        if self.packed is not None:
            self.packed.unpack(e, slots)
        own = Owner(Reason.GRADIENT, self.name)
        gradients = self._gradients(e, waiting, own, slots)
        saved, ends = self._given_up(e, retain_graph)
        ends += [partial(e.drop, *gradient) for gradient in gradients]
        inputs, capture = [*saved, *(tensor for tensor, _ in gradients)], None
        if self.region.captured:
            names = [e.trace.buffers.names[tensor.storage.id] for tensor in saved] + ["gradient"] * len(gradients)
            capture = Capture(e, inputs, ends, names, Reason.COMPILED)
            inputs, ends = capture.inputs, capture.ends
        code = _Code(e, plan, inputs, ends, self.region.copies)
        code.run()
        results = code.outputs()
        code.leave()
        if capture is not None:
            capture.leave()
        e.trace.op = self.op
        for tensor, hold in own.held:
            e.leave_to_scope(tensor, hold)
        if self.packed is not None:
            self.packed.applied(e)
        return results

    def _gradients(self, e: Eager, waiting: Owner, own: Owner, slots: Grads) -> list[tuple[Tensor, Owner]]:
        """The incoming gradients, each with who holds it: zeros where none came, a copy where its strides are others
        than the backward was compiled for, which are those of the output."""
        gradients: list[tuple[Tensor, Owner]] = []
        for form, slot in zip(self.forms, slots, strict=True):
            if slot is not None and slot.strides == form.strides:
                gradients.append((slot, waiting))
                continue
            kernel = "aten.zeros.default" if slot is None else "aten.copy_.default"
            gradient = e.empty(form.shape, form.dtype if slot is None else slot.dtype, form.strides, kernel)
            e.hold(gradient, own)
            if slot is not None:
                e.drop(slot, waiting)
            gradients.append((gradient, own))
        return gradients

    def _given_up(self, e: Eager, retain_graph: bool) -> tuple[list[Tensor], list[End | None]]:
        """The saved tensors, and for each what ends its hold."""
        if self.packed is not None:  # a checkpoint around the region has computed them again
            held = self.packed.tensors()
            return [tensor for tensor, _ in held], [partial(e.release, owner) for _, owner in held]
        if retain_graph:
            return self.tensors, [None] * len(self.tensors)
        storages, self.saved = self.saved, ()
        return self.tensors, [partial(e.let_go, storage, self.hold + k) for k, storage in enumerate(storages)]


class _Code:
    """One run of a plan. `ends` has for each of its inputs what lets go of it; none where the caller keeps them all.
    `copies` has names and ops of values of the graph, of which the code may make copies in another layout."""

    def __init__(
        self,
        e: Eager,
        plan: Plan,
        inputs: Sequence[Tensor],
        ends: Sequence[End | None],
        copies: Mapping[str, tuple[str, int]],
    ) -> None:
        assert len(inputs) == plan.inputs, f"{len(inputs)} inputs of {plan.inputs}"
        self.e, self.plan, self.ends, self.copies = e, plan, ends, copies
        self.tensors: list[Tensor | None] = [*inputs, *([None] * len(plan.buffers))]
        self.holds: dict[int, int] = {}  # of what it has allocated and not freed, by number

    def run(self) -> None:
        e, plan, tensors, holds, ends = self.e, self.plan, self.tensors, self.holds, self.ends
        inputs, trace = plan.inputs, e.trace
        returned = {output.storage for output in plan.outputs if output is not None}
        if ends:
            for number in plan.unread:
                self._let_go(number)
        for step in plan.steps:
            kernel, trace.op = step.kernel, step.op
            if kernel.startswith(TRITON) and kernel[len(TRITON) :] in self.copies:
                kernel, trace.op = f"{TRITON}copy", self.copies[kernel[len(TRITON) :]][1]
            e.kernel(kernel)
            for read in step.reads:
                e.reads(read)
            for number in step.allocates:
                self._allocate(number, number not in returned)
            for number in step.frees:
                if number < inputs:
                    if ends:
                        self._let_go(number)
                else:
                    freed = tensors[number]
                    assert freed is not None
                    e.end(freed, holds.pop(number))

    def _allocate(self, number: int, is_inner: bool) -> None:
        """Allocates a buffer; `is_inner`: it gets no name from what it is returned as."""
        e, buffer = self.e, self.plan.buffers[number - self.plan.inputs]
        what, op = buffer.what, buffer.op
        form, names = buffer.form, e.trace.buffers.names
        tensor = self.tensors[number] = e.empty(form.shape, form.dtype, form.strides)
        if what in self.copies:
            what, op = self.copies[what]
            names[tensor.storage.id] = what
        elif is_inner:
            names[tensor.storage.id] = f"({what.rpartition('::')[2].partition('.')[0]})"
        self.holds[number] = e.take(tensor, Reason.COMPILED_AGAIN if buffer.recomputed else Reason.COMPILED, what, op)
        if buffer.recomputed:
            e.trace.buffers.categories[tensor.storage.id] = "activation"

    def _let_go(self, number: int) -> None:
        end = self.ends[number]
        if end is not None:
            end()

    def outputs(self) -> list[Tensor | None]:
        """What it returns: tensors that nobody holds, over the storages of the plan."""
        outputs: list[Tensor | None] = []
        for output in self.plan.outputs:
            if output is None:
                outputs.append(None)
                continue
            source, form = self.tensors[output.storage], output.form
            assert source is not None
            tensor = Tensor(source.storage, form.shape, form.strides, form.dtype)
            tensor.known_form = form
            outputs.append(tensor)
        return outputs

    def leave(self) -> None:
        """It returns: the present scope, in which it allocated, frees what nobody has taken by its end."""
        ends, ticks = self.e.trace.holds.ends, self.e.trace.ticks
        for number, hold in self.holds.items():
            tensor = self.tensors[number]
            assert tensor is not None
            ends[hold] = ticks
            tensor.refs -= 1
            tensor.storage.refs -= 1
        self.holds.clear()
