"""The allocations of a process, from its start to the end of its third step, out of the trace of one step.

The trace is of a steady step. The steps before it differ in what exists: the first has no optimizer state until its
`optimizer.step()` makes it, in memory that the backward has just freed, and no loss, outputs or gradients of a step
before.
Where a state comes to lie in step 1 decides what fits in steps 2 and 3: reserved memory may peak in any of them.

What runs as CUDA graphs allocates in a pool of its own. Its first step is a warm-up: it runs eagerly in that pool, over
the caller's inputs. The second is recorded, over copies of them. From the third on it is replayed, which allocates
nothing; what was returned by the step before is given up when the first graph of a step runs. Workspaces of cuBLAS that
are kept go before and after each of the two, and cached memory goes back before a recording, not in a warm-up
(torch/_inductor/cudagraph_trees.py: `CUDAWarmupNode.run`, `CUDAGraphNode._record`, `clear_cublas_manager`,
`disable_conv_cache_emptying`, `dealloc_current_path_weakrefs`; torch/cuda/graphs.py, `graph.__enter__`).

Sources: torch/optim/{adam,adamw,sgd,rmsprop,adagrad}.py (`_init_group`, `_multi_tensor_*`: when state is made),
torch/optim/optimizer.py (`zero_grad(set_to_none=True)`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from staticmem.allocators.process import (
    FIRST,
    LAST,
    STEPS,
    Fallbacks,
    Mark,
    Origins,
    Process,
    Workspace,
    WorkspaceModel,
)
from staticmem.eager.strides import prefers_channels_last
from staticmem.eager.trace import OPEN, Buffer, Convolution, Trace, is_depthwise
from staticmem.ir.dtypes import float16

DataSource: TypeAlias = Literal["resident", "each-step", "handed-over"]
_FIXED = ("parameter", "buffer", "gradient", "optimizer_state", "communication")  # they do not grow with the batch
# Kernels whose results are allocated in another order than they are returned in (aten/src/ATen/native/cuda/Dropout.cu,
# `dropout_cuda`: the mask, then the result). The trace has them in the order of the ops that are recorded from outside.
MASK_FIRST = ("aten.native_dropout.default",)
STATE_IN_CONSTRUCTOR = (".sum",)  # Adagrad fills its state in __init__ (torch/optim/adagrad.py)

PACKED_LATER = "weight that is packed"  # a weight on the device, before it is packed there
EMPTY = -(1 << 40)  # the source of an id without bytes
NO_SPACE = -1  # an entry of the script that is no workspace
# what a builder has of its process, whatever the trace
OF_PROCESS = """
    calls sizes buffers kernels scales sources by_size whats starts marks fallbacks bounds strays empties searched kept
    private streams
""".split()
_AtTick: TypeAlias = "dict[int, list[tuple[int, int]]]"  # tick -> (kernel, index of a workspace)


def process_of_trace(
    trace: Trace, workspaces: WorkspaceModel | None = None, *, steps: int = STEPS, data: DataSource = "resident"
) -> Process:
    """The calls of `steps` steps from the start of the process.

    Args:
        trace: a step of training or an inference; its setup phase says what exists before.
        workspaces: what kernels take for themselves; None: nothing.
        data: where inputs and target come from. "resident": they are made once. "each-step": each step brings new
            ones, the old ones have gone before (`for x, y in loader: x = x.to(device)`). "handed-over": the old ones
            go when the new ones are there (`batch = next(loader).to(device)` into the same variable).
    """
    return Builder(trace, workspaces, data).run(steps)


class Builder:
    """Makes the process of a trace.

    `sources` has of each id its buffer, or `~n` for the n-th of `spaces`, or EMPTY for what has no bytes, or, for the
    n-th weight that is packed on the device, n more than there are buffers and one; `by_size`
    where sizes of buffers decided a call: a buffer of the step before, those that are left, and which of them goes.
    """

    def __init__(self, trace: Trace, workspaces: WorkspaceModel | None, data: DataSource = "resident") -> None:
        self.trace, self.spaces, self.data = trace, spaces_of(workspaces), data
        self.calls: list[int] = []
        self.sizes: list[int] = []
        self.buffers: list[int] = []  # of each id: its buffer, its kernel, whether it grows with the batch
        self.kernels: list[int] = []
        self.scales: list[bool] = []
        self.sources: list[int] = []
        self.by_size: list[tuple[int, tuple[int, ...], list[int]]] = []
        self.whats: dict[int, str] = {}
        self.starts: list[int] = [0]  # of each step: its first id
        self.marks: list[Mark] = []
        self.fallbacks: dict[int, Fallbacks] = {}
        self.bounds: dict[int, tuple[int, int]] = {}
        self.strays: dict[int, tuple[int, int]] = {}
        self.empties: list[int] = []
        self.searched: set[str] = set()  # names of workspaces that are taken once
        self.kept: dict[str, int] = {}  # names of workspaces that are there to stay, and their ids
        self.graph = -1  # the CUDA graph that runs, as an index of those of the trace
        self.began = False  # it has been recorded so far that it has its inputs
        self.private: set[int] = set()  # ids in the pool of CUDA graphs
        self.streams: dict[int, int] = {}  # of ids that the default stream does not allocate
        self.copied = {copy: of for graph in trace.cuda_graphs for copy, of in graph.copied.items()}
        self.current: dict[int, int] = {}  # buffer -> id of its present allocation
        self.first = dict(reversed(trace.phases)).get("forward", 0)  # of the first micro-batch
        buffers = trace.buffers
        model, self.inputs, state = [], [], []
        # gradients that are there before the forward: zero_grad(set_to_none=False) keeps those of the first step
        self.gradients: list[Buffer] = []
        # of the step before: the loss, outputs that the loop holds, what modules keep
        self.previous: set[int] = set()
        for buffer in buffers.pick(range(bisect_left(buffers.born, self.first))):
            category = buffer.category
            if category in ("parameter", "buffer", "communication"):
                model.append(buffer)
                if buffer.died is not None and buffer.died >= self.first:  # `p.data = ...` replaces it in each step
                    self.previous.add(buffer.id)
            elif category == "input":
                self.inputs.append(buffer)
                if buffer.died is not None:  # the loop lets go of its batch
                    self.previous.add(buffer.id)
            elif category == "optimizer_state":
                state.append(buffer)
            elif category == "gradient" and buffer.died is None:
                self.gradients.append(buffer)
            elif buffer.died is None or buffer.died >= self.first:
                self.previous.add(buffer.id)
        self.model, self.state = model_to_order(model), _order_as_created(state)
        # what the optimizer's constructor makes, and what its first step does, with gradients that stay
        self.early: list[Buffer] = []
        self.late = list(self.gradients)
        for buffer in self.state:
            (self.early if buffer.name.endswith(STATE_IN_CONSTRUCTOR) else self.late).append(buffer)
        self.persistent = {b.id for b in (*model, *self.inputs, *state, *self.gradients)}
        self.grows = grows(trace, map(attrgetter("id"), model))
        self.script = self._script()

    # -- one step ------------------------------------------------------------------------------------------------

    def _script(self) -> list[tuple[int, int, int]]:
        """The step as (tick, index, workspace): a birth of buffer `index`, a death of buffer ~`index`, or a workspace
        of kernel `index`, as its index in `spaces`."""
        script: list[tuple[int, int, int]] = []
        buffers, first, swapped = self.trace.buffers, self.first, self._swapped()
        changes: list[int | None] = [None] * (self.trace.ticks - first)  # a tick has one
        for id, born in enumerate(buffers.born):
            if born >= first:
                changes[born - first] = swapped.get(id, id)
        for id, died in enumerate(buffers.died):
            if first <= died < OPEN:
                changes[died - first] = ~id
        before: _AtTick = {}
        after: _AtTick = {}
        if self.spaces:
            self._schedule(before, after)
        for tick, index in enumerate(changes, first):
            if index is None:
                continue
            if tick in before:
                script += [(tick, kernel, space) for kernel, space in before[tick]]
            script.append((tick, index, NO_SPACE))
            if tick in after:
                script += [(tick, kernel, space) for kernel, space in after[tick]]
        return script

    def _swapped(self) -> dict[int, int]:
        """Which buffer is allocated where the trace has another: the first two of a kernel that makes its second result
        before its first."""
        kernels = {index for index, name in enumerate(self.trace.kernels.names) if name in MASK_FIRST}
        for index, reads in self.trace.reads.items():
            for read in reads:
                if isinstance(read, Convolution) and _makes_weight_gradient_first(read):
                    kernels.add(index)
        results: dict[int, list[int]] = {}
        for id, kernel in enumerate(self.trace.buffers.kernels) if kernels else ():
            if kernel in kernels:
                results.setdefault(kernel, []).append(id)
        swapped: dict[int, int] = {}
        for ids in results.values():
            if len(ids) > 1:
                swapped |= {ids[0]: ids[1], ids[1]: ids[0]}
        return swapped

    def _schedule(self, before: _AtTick, after: _AtTick) -> None:
        """Adds the workspaces that come before, and those that come after, the event of a tick."""
        taken: dict[int, list[tuple[int, Workspace]]] = {}
        for place, (kernel, space) in enumerate(self.spaces):
            taken.setdefault(kernel, []).append((place, space))
        ticks: dict[int, list[int]] = {}  # of each kernel in the step, when it allocates
        for kernel, tick in zip(self.trace.buffers.kernels, self.trace.buffers.born, strict=True):
            if tick >= self.first:
                ticks.setdefault(kernel, []).append(tick)
        allocating = sorted(ticks)
        for kernel, spaces in taken.items():
            own = ticks.get(kernel)
            if own is None:  # it allocates nothing: before the next that does
                at = bisect_left(allocating, kernel)
                if at < len(allocating):
                    before.setdefault(ticks[allocating[at]][0], []).extend((kernel, place) for place, _ in spaces)
                continue
            for place, space in spaces:
                if space.after == FIRST:
                    before.setdefault(own[0], []).append((kernel, place))
                else:
                    at = -1 if space.after == LAST else min(space.after, len(own) - 1)
                    after.setdefault(own[at], []).append((kernel, place))

    # -- the process ---------------------------------------------------------------------------------------------

    def run(self, steps: int) -> Process:
        calls = self.calls
        self.marks.append(Mark(0, "setup", 0))
        self.load()
        if self.data == "resident":
            self.bring_data()
        self.allocate(self.early)
        late = self.late
        left: dict[int, int] = {}  # what the step before left besides gradients: buffer -> id
        gradients: list[int] = []
        last = start = 0  # where the calls of the step before, and of this one, begin
        for step in range(1, steps + 1):
            self.starts.append(len(self.sizes))
            last, start = start, len(calls)
            if step > 2:
                self._repeat(step, last)
                continue
            self.marks.append(Mark(step, "forward", start))
            if self.data != "resident":
                self.bring_data()
            calls += [~id for id in gradients]  # zero_grad()
            if not self.previous:  # an inference: nothing of the pass before is held into this one
                calls += [~id for id in left.values()]
            self.step(step, late if step == 1 else (), left)
            if step == 1:  # a step without an optimizer
                self.allocate([b for b in self.gradients if b.id not in self.current])
            left, gradients = self.end_step()
        return self.process()

    def end_step(self) -> tuple[dict[int, int], list[int]]:
        """What a step has left, buffer -> id, and the ids of its gradients, which zero_grad() releases."""
        later = {new for old in self.previous for new in self.trace.replaced_by.get(old, ())}  # zero_grad() comes later
        left: dict[int, int] = {}
        gradients: list[int] = []
        for buffer in [b for b in self.current if b not in self.persistent]:
            id = self.current.pop(buffer)
            if self.trace.buffers.categories[buffer] == "gradient" and buffer not in later:
                gradients.append(id)
            else:
                left[buffer] = id
        return left, gradients

    def process(self) -> Process:
        """What has been asked so far."""
        return Process(
            calls=tuple(self.calls),
            sizes=tuple(self.sizes),
            origins=Origins(self.buffers, self.kernels, self.starts, self.whats),
            marks=tuple(self.marks),
            scales=tuple(self.scales),
            fallbacks=self.fallbacks,
            bounds=self.bounds,
            empties=tuple(self.empties),
            strays=self.strays,
            private=frozenset(self.private),
            streams=self.streams,
        )

    def _repeat(self, step: int, start: int) -> None:
        """The step before once more, whose calls begin at `start`. From the second on steps differ in ids alone, and in
        CUDA graphs, which are replayed from the third on.

        What is released is of the step before, or the model's: an id of the step itself stands for the same `count`
        later, one of the step before that for the same allocation of the step before.
        """
        first, end = self.starts[step - 1], self.starts[step]
        count, private = end - first, self.private
        ids = {self._place(id): id for id in range(first, end)}
        calls = []
        for call in self.calls[start:]:
            if call >= 0:
                calls.append(call + count)
            elif ~call >= first:
                calls.append(call - count)
            else:
                calls.append(~ids[self._place(~call)])
        private.update([id + count for id in private if id >= first])
        before: Sequence[int] = range(len(calls) + 1)  # for each of the calls, how many of those before it the step has
        if private:  # a replay allocates nothing, and releases what the recording has left
            gone = [(c if c >= 0 else ~c) in private and (step > STEPS or (c if c >= 0 else ~c) >= end) for c in calls]
            before = [0, *accumulate(not is_gone for is_gone in gone)]
            calls = [call for call, is_gone in zip(calls, gone, strict=True) if not is_gone]
        began = len(self.calls)
        marks = [mark for mark in self.marks if mark.step == step - 1]
        self.marks += [Mark(step, mark.phase, began + before[mark.event - start]) for mark in marks]
        self.calls += calls
        self.sizes += self.sizes[first:end]
        self.buffers += self.buffers[first:end]
        self.kernels += self.kernels[first:end]
        self.scales += self.scales[first:end]
        self.sources += self.sources[first:end]
        by_id: tuple[dict[int, Any], ...] = (self.whats, self.fallbacks, self.bounds, self.strays, self.streams)
        for facts in by_id:
            facts.update({id + count: fact for id, fact in facts.items() if id >= first})

    def _place(self, id: int) -> Hashable:
        """What an id is the allocation of, whatever the step."""
        buffer = self.buffers[id]
        return buffer if buffer >= 0 else (self.kernels[id], self.whats.get(id))

    def bring_data(self) -> None:
        if self.data == "each-step":
            for buffer in self.inputs:
                if buffer.id in self.current:
                    self.calls.append(~self.current.pop(buffer.id))
        for buffer in self.inputs:
            old = self.current.get(buffer.id)
            self.allocate([buffer])
            if old is not None:
                self.calls.append(~old)

    def step(self, step: int, late: Sequence[Buffer], left: dict[int, int]) -> None:
        """Follows the script. `late` is allocated when the optimizer begins; `left` is of the step before."""
        phases = [(name, tick) for name, tick in self.trace.phases if tick >= self.first][1:]
        held: list[int] = []  # workspaces until the end of the kernel
        awaited = sum(self.trace.buffers.died[buffer] != OPEN for buffer in self.previous)
        kernel = -1
        warm_up = _WarmUp(self.trace, self.copied) if step == 1 and self.copied else None
        graphs = bool(self.trace.cuda_graphs)
        current, calls, grows = self.current, self.calls, self.grows
        nbytes, kernels = self.trace.buffers.nbytes, self.trace.buffers.kernels
        for tick, index, place in self.script:
            while phases and tick >= phases[0][1]:
                self._release(held)
                late = self._begin(step, phases.pop(0)[0], late)
            if graphs and index >= 0:
                self._reach(step, index if place >= 0 else kernels[index], left)
            if place >= 0:
                if self.spaces[place][1].held and index != kernel:
                    self._release(held)
                kernel = index
                self._take(place, held)
                continue
            if index >= 0:
                if held and kernels[index] != kernel:
                    self._release(held)
                kernel = kernels[index]
                if warm_up is not None and index in self.copied:
                    continue
                current[index] = self.new(nbytes[index], index, kernel, grows[index])
                continue
            if held:
                self._release(held)
            if warm_up is not None:
                calls += [~current.pop(buffer) for buffer in warm_up.released(~index) if buffer in current]
            elif ~index in current:
                calls.append(~current.pop(~index))
            elif ~index in self.previous:
                awaited -= 1
                gone = self._gone(~index, left) if awaited else tuple(left)
                calls += [~left.pop(buffer) for buffer in gone]
        self._release(held)
        if graphs:
            self._enter(step, -1, left)
        for name, _ in phases:  # phases without an allocation in the trace
            late = self._begin(step, name, late)

    def _gone(self, previous: int, left: dict[int, int]) -> Iterable[int]:
        """The buffers that are released where the trace releases one of the step before."""
        replaced = self.trace.replaced_by.get(previous)
        if replaced is not None:
            return [buffer for buffer in replaced if buffer in left]
        gone = of_its_size(self.trace, previous, left)  # what a module kept
        self.by_size.append((previous, tuple(left), gone))
        return gone

    def _find_cuda_graph(self, kernel: int) -> int:
        """The CUDA graph that a kernel runs in, -1: none."""
        graphs = self.trace.cuda_graphs
        at = bisect_right(graphs, kernel, key=lambda graph: graph.start) - 1
        return at if at >= 0 and kernel < graphs[at].end else -1

    def _reach(self, step: int, kernel: int, left: dict[int, int]) -> None:
        """A kernel is the next that runs."""
        graph = self._find_cuda_graph(kernel)
        if graph != self.graph:
            self._enter(step, graph, left)
        if graph >= 0 and not self.began and step > 1 and kernel >= self.trace.cuda_graphs[graph].body:
            self.began = True
            self._empty_cache(kernel)

    def _enter(self, step: int, graph: int, left: dict[int, int]) -> None:
        """The next kernel runs in another CUDA graph, or in none."""
        if graph >= 0 and not self.private:  # the manager of the graphs is made, and records one without kernels
            self._empty_cache(-1)
        self.graph, self.began = graph, False
        self.calls += [~id for id in self.kept.values()]
        self.kept.clear()
        for buffer in [buffer for buffer, id in left.items() if id in self.private]:
            self.calls.append(~left.pop(buffer))

    def _empty_cache(self, kernel: int) -> None:
        id = self.new(0, -1, kernel, False)
        self.whats[id] = "empty_cache"
        self.empties.append(id)

    def _begin(self, step: int, phase: str, late: Sequence[Buffer]) -> Sequence[Buffer]:
        """A phase begins; what is still to be allocated when the optimizer does."""
        self.marks.append(Mark(step, phase, len(self.calls)))
        if phase != "optimizer":
            return late
        self.allocate(late)
        return ()

    def load(self, there: Container[int] = ()) -> None:
        """Allocates the model, but what is `there` of it by the numbers of its buffers. A weight that is packed on
        the device is there beforehand as it was, for a moment: it leaves a block, of which others are cut."""
        loading = {number: self.trace.buffers[number].name for number in self.trace.loading}
        names = {name: number for number, name in loading.items()}
        first, open_now = len(self.trace.buffers) + 1, {}
        for buffer in self.model:
            if buffer.id in there:
                continue
            name = buffer.name if buffer.id in loading else buffer.name.rpartition(".")[0]
            if name in names:  # the first of the weight and its statistics
                place = list(loading).index(number := names.pop(name))
                open_now[name] = self.new(self.trace.loading[number], -1, buffer.kernel, False, first + place)
                self.whats[open_now[name]] = PACKED_LATER
            self.allocate([buffer])
            if buffer.id in loading:
                self.calls.append(~open_now.pop(name))

    def go_on_from(self, other: Builder) -> None:
        """The process is the one that another trace has built so far."""
        for name in OF_PROCESS:
            setattr(self, name, getattr(other, name))

    # -- calls ---------------------------------------------------------------------------------------------------

    def allocate(self, buffers: Sequence[Buffer]) -> None:
        """Allocates what lasts: the model, its inputs, and the optimizer's state."""
        for buffer in buffers:
            self.current[buffer.id] = self.new(buffer.nbytes, buffer.id, buffer.kernel, self.grows[buffer.id])

    def new(self, nbytes: int, buffer: int, kernel: int, grows: bool, source: int = EMPTY) -> int:
        id = len(self.sizes)
        self.calls.append(id)
        self.sizes.append(nbytes)
        self.buffers.append(buffer)
        self.kernels.append(kernel)
        self.scales.append(grows)
        self.sources.append(buffer if buffer >= 0 else source)
        if buffer in self.trace.streams:
            self.streams[id] = self.trace.streams[buffer]
        if self.graph >= 0:
            self.private.add(id)
        return id

    def _take(self, place: int, held: list[int]) -> None:
        """Allocates a workspace, and releases it unless it is `held` or kept."""
        kernel, space = self.spaces[place]
        if space.keep in self.kept or space.once in self.searched:
            return
        id = self.new(space.nbytes, -1, kernel, space.keep is None, ~place)
        self.whats[id] = space.what
        if space.fallbacks:
            self.fallbacks[id] = Fallbacks(space.fallbacks, space.plan)
        if space.bounds is not None:
            self.bounds[id] = space.bounds
        if space.strays is not None:
            self.strays[id] = space.strays
        if space.keep is not None:
            self.kept[space.keep] = id
        else:
            if space.held:
                held.append(id)
            else:
                self.calls.append(~id)
        if space.once is not None:
            self.searched.add(space.once)
            if self.graph < 0:
                self._empty_cache(kernel)

    def _release(self, held: list[int]) -> None:
        self.calls += [~id for id in held]
        held.clear()


def loaded_packed(process: Process) -> Process:
    """The process if its weights come packed from the checkpoint: nothing is packed on the device."""
    as_they_were = {id for id, what in process.whats_of_setup() if what == PACKED_LATER}
    return replace(process, calls=tuple([c for c in process.calls if (c if c >= 0 else ~c) not in as_they_were]))


def spaces_of(workspaces: WorkspaceModel | None) -> list[tuple[int, Workspace]]:
    """The kernels that take workspaces, once for each that they take."""
    return [(kernel, space) for kernel, taken in workspaces.taken() for space in taken] if workspaces else []


def _makes_weight_gradient_first(call: Convolution) -> bool:
    """Whether the gradient of the weight is allocated before that of the input, which is returned first: in PyTorch's
    own kernel of depthwise convolutions. cuDNN runs those in channels_last instead, and some in float16, which
    `devices.conv_workspace.runs_on_cudnn` has for a card.

    Source: aten/src/ATen/native/cuda/DepthwiseConv2d.cu, `conv_depthwise2d_backward_cuda_out`.
    """
    if call.gradients != (True, True) or call.groups == 1 or call.transposed or len(call.stride) > 2:
        return False
    x, w = call.input, call.weight
    if not is_depthwise(x.shape[1], w.shape[0], call.groups):
        return False
    last = prefers_channels_last(x.shape, x.strides) or prefers_channels_last(w.shape, w.strides)
    return not last and call.result.dtype is not float16


def of_its_size(trace: Trace, buffer: int, others: Iterable[int]) -> list[int]:
    """The first of other buffers that has as many bytes as one, if there is any."""
    nbytes = trace.buffers.nbytes
    return [other for other in others if nbytes[other] == nbytes[buffer]][:1]


def grows(trace: Trace, model: Iterable[int]) -> list[bool]:
    """Of each buffer, whether it grows with the batch; `model`: parameters and buffers."""
    buffers = trace.buffers
    fixed_shapes = {buffers.forms[id].shape for id in model}
    return [
        category not in _FIXED and form.shape not in fixed_shapes
        for category, form in zip(buffers.categories, buffers.forms, strict=True)
    ]


class _WarmUp:
    """The first step of what runs as CUDA graphs: nothing is copied, and what would be lives as long as its copies."""

    def __init__(self, trace: Trace, copied: Mapping[int, int]) -> None:
        self.copied = copied
        died = trace.buffers.died
        alive = Counter(of for copy, of in copied.items() if died[copy] != OPEN)
        self.readers = alive  # of what is copied, how many of its copies are still to go
        self.waiting: set[int] = set()  # what would have gone already

    def released(self, buffer: int) -> tuple[int, ...]:
        """What goes where the trace releases a buffer."""
        of = self.copied.get(buffer)
        if of is None:
            if not self.readers[buffer]:
                return (buffer,)
            self.waiting.add(buffer)
            return ()
        self.readers[of] -= 1
        return (of,) if of in self.waiting and not self.readers[of] else ()


def _order_as_created(state: Iterable[Buffer]) -> list[Buffer]:
    """State in the order in which an optimizer makes it: for each parameter its `step` before the others."""
    groups: dict[str, list[Buffer]] = {}
    for buffer in state:
        groups.setdefault(buffer.name.rpartition(".")[0], []).append(buffer)
    return [b for group in groups.values() for b in sorted(group, key=_is_no_counter)]


def _is_no_counter(buffer: Buffer) -> bool:
    return not buffer.name.endswith(".step")


def model_to_order(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Parameters and buffers in the order of `model.to(device)`, from their order of registration and their names.

    Source: `Module._apply` in torch/nn/modules/module.py: children first, in order of registration, then the module's
    own parameters, then its own buffers. A child module without parameters is taken to be registered behind those that
    have some.
    """
    own: dict[str, list[Buffer]] = {}  # of each module, by its path: parameters, then buffers
    children: dict[str, list[str]] = {}
    seen = {""}
    for buffer in sorted(buffers, key=lambda b: b.category != "parameter"):  # parameters tell the order of modules
        path = buffer.name.rpartition(".")[0]
        own.setdefault(path, []).append(buffer)
        while path not in seen:
            seen.add(path)
            inner, path = path, path.rpartition(".")[0]
            children.setdefault(path, []).append(inner)
    parents_first, stack = [], [""]
    while stack:
        path = stack.pop()
        parents_first.append(path)
        stack += children.get(path, ())  # the last child is visited first, so that the reverse has it last
    return [buffer for path in reversed(parents_first) for buffer in own.get(path, ())]
