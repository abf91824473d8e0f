"""The allocations of a process that does several things one after the other, out of the trace of each.

A step of training, an evaluation and a save share one caching allocator: what one leaves in use or in cached blocks is
there for the next. Each is a trace of a steady step (`from_trace`); what lasts between them is the model, its gradients
and its optimizer's state, which go by name, and what the variables of each loop hold, which goes by its place.

Models share what goes by one name: a module that has two others as its parts has their parameters.

The three steps that `process_of_trace` makes are the run with one loop of three steps, and give the same calls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from staticmem.allocators.from_trace import Builder
from staticmem.allocators.process import Mark, Process
from staticmem.allocators.repeated_step import Conditions, Handed, Key, Position, RepeatedStep
from staticmem.eager.trace import ROUND, Buffer
from staticmem.engine.held_outputs import BEFORE
from staticmem.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

STATE, MODEL = ("optimizer_state",), ("parameter", "buffer", "communication")
OF_PARAMETERS = (*STATE, "gradient")
_ELEMENT = 4  # bytes of a scalar, which takes the least block
_LOSS = 4  # bytes of a loss: losses are computed in float32
_INDEX = 8  # bytes of a label and of the result of argmax, int64
Parts: TypeAlias = Mapping[str, str]  # of a model: the path of a module, and whose parameters it has
_Container: TypeAlias = "list[tuple[int, int]]"  # tensors that are gathered: ids, and rows of each
TRIES = 3  # of finding a step that can be repeated: its first steps differ from the later ones


@dataclass
class _Loop:
    """The variables of a loop: what the last step left, by the buffers of `builder`, and the batch."""

    builder: Builder
    left: dict[int, int] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)
    trained: set[Key] = field(default_factory=set)  # parameters in the graph of the loss, which this keeps alive
    ended: list[int] = field(default_factory=list)  # those with their gradients, of models that have ended


@dataclass(frozen=True)
class Gathering:
    """What a loop of inference gathers of each batch on the GPU.

    `joins`: it concatenates, else it appends to lists. `outputs`: all outputs; `predictions`: argmax of the first along
    its last axis, instead; `loss` and `labels`: the loss, once for each sample, and a label for each prediction.
    `nbytes`: one tensor of so many bytes instead of outputs.

    Source: transformers 5.24, `Trainer.evaluation_loop` (trainer.py), `EvalLoopContainer` and `nested_concat`
    (trainer_pt_utils.py): losses, outputs and labels have a container each, and what is concatenated is padded to the
    longest.
    """

    joins: bool
    outputs: bool = True
    predictions: bool = False
    loss: bool = False
    labels: bool = False
    nbytes: int | None = None


class Run:
    """Builds the process of a run, call by call. Models and loops have names."""

    def __init__(self, first: Builder, parts: Mapping[str, Parts] | None = None) -> None:
        """`first` is of any of the traces: the process begins in it. `parts` are those of models that have some."""
        self.process = self.last = first
        first.marks.append(Mark(0, "setup", 0))
        self.parts = {model: sorted(of_it.items(), reverse=True) for model, of_it in (parts or {}).items()}
        self.there: set[str] = set()  # models that were loaded
        self.placed: dict[Key, None] = {}  # what was loaded or made, in that order, wherever it is
        self.lasting: dict[Key, int] = {}
        self.gradients: dict[Key, int] = {}  # which zero_grad() releases
        self.asleep: dict[Key, int] = {}  # the bytes of what is on the CPU
        self.loops: dict[str, _Loop] = {}
        self.gathered: dict[str, list[_Container]] = {}
        self.steps = 0
        # what buffers go by, found once: steps of other sizes have the lists of one builder (`studies.lengths`)
        self._names: dict[tuple[str, int], tuple[Sequence[Buffer], list[tuple[Buffer, Key]]]] = {}
        self._makes: dict[tuple[str, int], tuple[Sequence[str], set[tuple[str, str, str]]]] = {}
        self._repeated: dict[tuple[str, str, int, bool], list[RepeatedStep | None]] = {}

    @property
    def calls(self) -> list[int]:
        return self.process.calls

    # -- what an instant does ------------------------------------------------------------------------------------

    def load(self, builder: Builder, model: str) -> None:
        """Puts a model on the GPU: parameters and buffers that are not there, as `model.to(device)`.

        Raises:
            UsageError: a parameter is there with another size.
        """
        self.bring_back(model)
        self._go_on(builder)
        named = self._named(model, builder.model)
        self._check_parts(model, named)
        self._check_sizes(model, named)
        builder.current.clear()
        builder.load({buffer.id for buffer, key in named if key in self.placed})
        for buffer, key in named:
            if buffer.id in builder.current:
                self.lasting[key] = builder.current[buffer.id]
                self.placed[key] = None
        self.there.add(model)

    def step(self, builder: Builder, model: str, loop: str) -> None:
        """One step of a loop over a model; what is not there of it is loaded."""
        of_loop = self.loops.get(loop)
        if of_loop is None or model not in self.there or self.asleep:
            self._work_out(builder, model, loop)
            return
        stays = self._batch_stays(builder, of_loop)
        handed = Handed(_moved(of_loop, builder), of_loop.batch, dict(self.gradients))
        once = len(self.process.kept), len(self.process.searched)
        conditions = Conditions(
            tuple(handed.left), (stays, len(handed.batch)), tuple(handed.gradients), self.lasting, once
        )
        tried = self._repeated.setdefault((model, loop, id(builder.script), stays), [])
        for step in tried:
            if step is not None and step.is_that_of(builder, conditions):
                self._go_on(builder)
                self.steps += 1
                of_loop.left, of_loop.batch, self.gradients = step.repeat(builder, self.steps, handed)
                of_loop.builder = builder
                return
        conditions = conditions._replace(lasting=dict(self.lasting))
        self._go_on(builder)
        start = Position.of(builder)
        self._work_out(builder, model, loop)
        if len(tried) < TRIES:
            after = Handed(of_loop.left, of_loop.batch, self.gradients)
            is_same = self.lasting == conditions.lasting and once == (len(builder.kept), len(builder.searched))
            tried.append(RepeatedStep.of(builder, conditions, start, handed, after) if is_same else None)

    def _work_out(self, builder: Builder, model: str, loop: str) -> None:
        """One step, call by call."""
        named = self._named(model, builder.model)
        if model not in self.there or any(key not in self.placed for _, key in named):
            self.load(builder, model)
        self.bring_back(model)
        self._check_sizes(model, named)
        self._go_on(builder)
        lasting, current = self.lasting, builder.current
        current.clear()
        current.update({b.id: lasting[key] for b, key in named if key in lasting})
        of_loop = self.loops.get(loop)
        first = of_loop is None
        if of_loop is None:
            of_loop = self.loops[loop] = _Loop(builder)
        of_training = [*self._named(model, builder.state), *self._named(model, builder.gradients)]
        current.update({b.id: lasting[key] for b, key in of_training if key in lasting})
        if first:
            builder.bring_data()
            builder.allocate([b for b in builder.early if b.id not in current])
        self.steps += 1
        builder.starts.append(len(builder.sizes))
        builder.marks.append(Mark(self.steps, "forward", len(builder.calls)))
        if not first:
            self._bring_batch(builder, of_loop)
        left = _moved(of_loop, builder)
        if any(name == "backward" for name, _ in builder.trace.phases):
            self._zero_grad(builder, model)
        if not builder.previous:
            builder.calls += [~id for id in left.values()]
            left = {}
        builder.step(self.steps, [b for b in builder.late if b.id not in current], left)
        builder.allocate([b for b in builder.gradients if b.id not in current])
        builder.calls += [~id for id in left.values()]  # the step has as many variables as the one before, or more
        of_loop.batch = [current[b.id] for b in builder.inputs if b.id in current]
        of_loop.left, gradients = builder.end_step()
        of_loop.builder = builder
        self._keep(builder, model)
        names = builder.trace.buffers.names
        made_now = {(*self._owned(model, names[builder.buffers[id]]), 0): id for id in gradients}
        self.gradients.update(made_now)
        of_loop.trained = {(owner, "parameter", name.removesuffix(".grad"), 0) for owner, _, name, _ in made_now}

    def _zero_grad(self, builder: Builder, model: str) -> None:
        """`optimizer.zero_grad()`: all gradients of the model's own parameters, and those of its parts that the step
        makes anew."""
        buffers = builder.trace.buffers
        place = model, id(buffers.names)
        if place not in self._makes:
            makes = {
                self._owned(model, name)
                for name, category in zip(buffers.names, buffers.categories, strict=True)
                if category == "gradient"
            }
            self._makes[place] = buffers.names, makes
        makes = self._makes[place][1]
        gone = [key for key in self.gradients if key[0] == model or key[:3] in makes]
        builder.calls += [~self.gradients.pop(key) for key in gone]

    def end_loop(self, loop: str) -> None:
        """The function of a loop returns, with its variables."""
        of_loop = self.loops.pop(loop, None)
        if of_loop is not None:
            self.release([*of_loop.left.values(), *of_loop.batch, *of_loop.ended])
        self.release([id for container in self.gathered.pop(loop, ()) for id, _ in container])

    def gather(self, loop: str, what: Gathering, rows: int) -> None:
        """The loop gathers what it has of its last step, a batch of so many `rows`.

        Raises:
            UsageError: the loop has no variable with the outputs.
        """
        of_loop, before = self.loops[loop], self.gathered.get(loop)
        places = [place for place in _outputs(of_loop.builder) if place in of_loop.left]
        if not places and (what.nbytes is None or what.labels):
            why = "What is gathered is made of the variable with the outputs, which `outputs: dropped` leaves out."
            raise UsageError(f"'{loop}' has no outputs to gather", why, "Leave `outputs` out.", "SM448")
        now = self._containers(of_loop, places, what, rows)
        if not before or not what.joins:
            self.gathered[loop] = [*(before or ()), *now]
            return
        joined: list[_Container] = []
        for old, new in zip(before, now, strict=True):  # one after the other: `now` allocates
            joined.append([self._join(*pair) for pair in zip(old, new, strict=True)])
            self.release([id for id, _ in old])
            for id, _ in new:  # the loop's variables have those of the batch
                of_loop.left[min([0, *of_loop.left]) - 1] = id
        self.gathered[loop] = joined

    def _containers(self, loop: _Loop, places: Sequence[int], what: Gathering, rows: int) -> Iterator[_Container]:
        """Losses, outputs, and labels of a batch, each when it is made."""
        buffers, left = loop.builder.trace.buffers, loop.left
        labels = 0
        if places:
            form = buffers.forms[places[0]]
            labels = _INDEX * (buffers.nbytes[places[0]] * 8 // form.dtype.bits // (form.shape or (1,))[-1])
        loss = [self.take(_LOSS, "loss")] if what.loss else []
        if not (what.outputs or what.predictions):  # outputs end with the function that runs the batch
            self.release([left.pop(place) for place in places])
        if what.loss:
            repeated = self.take(_LOSS * rows, "gathered loss")
            self.release(loss)
            yield [(repeated, rows)]
        if what.nbytes is not None:
            yield [(self.take(what.nbytes, "gathered outputs"), rows)]
        elif what.predictions:
            predictions = self.take(labels, "gathered predictions")
            self.release([left.pop(place) for place in places])
            yield [(predictions, rows)]
        elif what.outputs:
            yield [(left.pop(place), rows) for place in places]
        if what.labels:
            yield [(self.take(labels, "gathered labels"), rows)]

    def _join(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        """The concatenation of two tensors with so many rows, the shorter padded."""
        rows = one[1] + other[1]
        sizes = self.process.sizes
        longest = max((sizes[id] / count for id, count in (one, other)), default=0)
        return self.take(round(rows * longest), "gathered"), rows

    def move_gathered(self, loop: str) -> None:
        """What is gathered goes to the CPU, the variables with the last batch's outputs end, and cached memory goes
        back."""
        of_loop = self.loops[loop]
        gone = [id for container in self.gathered.pop(loop, ()) for id, _ in container]
        places = [place for place in of_loop.left if place < 0 or place in _outputs(of_loop.builder)]
        self.release([*gone, *(of_loop.left.pop(place) for place in places)])
        self.empty_cache()

    def take(self, nbytes: int, what: str) -> int:
        """Allocates memory that no trace has; gives its id."""
        id = self.last.new(nbytes, -1, -1, False)
        self.last.whats[id] = what
        return id

    def release(self, ids: Iterable[int]) -> None:
        self.calls.extend([~id for id in ids])

    def copy(self, model: str, categories: Sequence[str] = MODEL, deep: bool = False) -> list[int]:
        """Allocates a copy of what a model has of some categories, one tensor at a time; gives the ids. `deep`: by
        `copy.deepcopy`, which makes a tensor of one element beside each storage (`Tensor.__deepcopy__` of
        torch/_tensor.py)."""
        sizes = self.process.sizes
        copies = []
        for key in self._keys(model, categories):
            copies.append(self.take(sizes[self.lasting[key]], f"copy of {key[2]}"))
            if deep:
                self.release([self.take(_ELEMENT, "deepcopy")])
        return copies

    def gather_shards(self, builder: Builder, model: str, categories: Sequence[str], offloads: bool) -> list[int]:
        """Allocates the whole of what ranks have shards of, one tensor at a time, as an all-gather of shards of one
        size does; gives the ids. With `offloads` each goes before the next.

        Source: torch/distributed/_state_dict_utils.py, `_gather_state_dict`, `_iterate_state_dict`.
        """
        named = [*self._named(model, builder.model), *self._named(model, builder.state)]
        whole = {key: _whole_bytes(buffer) for buffer, key in named}
        ids: list[int] = []
        for key in self._keys(model, categories):
            if whole.get(key, 0) > self.process.sizes[self.lasting[key]]:
                ids.append(self.take(whole[key], f"all of {key[2]}"))
                if offloads:
                    self.release([ids.pop()])
        return ids

    def move_away(self, model: str, categories: Sequence[str] = MODEL) -> None:
        """Releases what a model has of some categories, as `model.to("cpu")` does; with parameters their gradients
        go."""
        sizes, owners = self.process.sizes, self._owners(model)
        gone: dict[Key, int] = {}
        with_gradients = "parameter" in categories
        for key in self._keys(model, categories):
            gone[key] = self.lasting.pop(key)
            of_it = _gradient_of(key)
            if with_gradients and of_it in self.gradients:
                gone[of_it] = self.gradients.pop(of_it)
        for key in [key for key in self.gradients if with_gradients and key[0] in owners]:
            gone[key] = self.gradients.pop(key)
        self.release(gone.values())
        self.asleep.update({key: sizes[id] for key, id in gone.items()})

    def bring_back(self, model: str) -> None:
        """Allocates again what was moved away, in the same order."""
        owners = self._owners(model)
        for key in [key for key in self.asleep if key[0] in owners]:
            id = self.take(self.asleep.pop(key), key[2])
            (self.gradients if key[1] == "gradient" else self.lasting)[key] = id

    def end(self, model: str) -> None:
        """Deletes a model with its optimizer. Parts that are models end by their own names, those that go by a name of
        their own with the last that has them. Variables of a loop over a module that has it keep what they hold."""
        self.there.discard(model)
        others = {owner for other in self.there for owner in self._owners(other)}
        owners = {model} | {one for one in self._owners(model) - others if one not in self.parts}
        gone = {key: id for of_all in (self.lasting, self.gradients) for key, id in of_all.items() if key[0] in owners}
        for loop in self.loops.values():  # its loss has a graph, whose leaves are parameters
            in_graph = loop.trained & gone.keys()
            in_graph |= {_gradient_of(key) for key in in_graph} & gone.keys()
            loop.ended += [gone.pop(key) for key in sorted(in_graph)]
        self.release(gone.values())
        for of_all in (self.placed, self.lasting, self.gradients, self.asleep):
            for key in [key for key in of_all if key[0] in owners]:
                of_all.pop(key)

    def resume(self, builder: Builder, model: str, with_state: bool) -> None:
        """Loads a checkpoint to the GPU beside the model, as torch.load does with map_location. The model copies what
        it is given; the optimizer takes the loaded tensors, and lets go of those that it had."""
        loaded = self.copy(model)
        if with_state:
            self._go_on(builder)
            named = self._named(model, builder.state)
            state = {key: builder.new(b.nbytes, b.id, b.kernel, False) for b, key in named}
            self.release([self.lasting[key] for key in state if key in self.lasting])
            self.lasting.update(state)
            self.placed.update(dict.fromkeys(state))
        self.release(loaded)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""
        id = self.take(0, "empty_cache")
        self.process.empties.append(id)

    # -- the whole -----------------------------------------------------------------------------------------------

    def joined(self) -> Process:
        """The process, all of which counts: no step of it is left out because it repeats the one before."""
        return replace(self.last.process(), whole=True)

    def live(self) -> np.ndarray:
        """The bytes of tensors that are alive behind each call, whole blocks of 512 bytes; workspaces are none."""
        import numpy as np  # late: a single step needs none

        process = self.process
        workspaces = {id for id, buffer in enumerate(process.buffers) if buffer < 0 and process.sources[id] < 0}
        workspaces -= {id for id, what in process.whats.items() if process.kernels[id] < 0 and what != "empty_cache"}
        calls = np.array(process.calls, dtype=np.int64)
        sizes = -(-np.array(process.sizes, dtype=np.int64) // ROUND) * ROUND
        sizes[list(workspaces)] = 0
        return np.cumsum(np.where(calls >= 0, sizes[np.maximum(calls, ~calls)], -sizes[np.maximum(calls, ~calls)]))

    def _go_on(self, builder: Builder) -> None:
        if builder is not self.last:
            builder.go_on_from(self.last)
            self.last = builder

    def _keep(self, builder: Builder, model: str) -> None:
        """Takes down what a model has by now: a tensor that the code has replaced is in the variables of the loop."""
        current = builder.current
        for buffers in (builder.model, builder.state, builder.gradients):
            for buffer, key in self._named(model, buffers):
                if buffer.id in current:
                    self.lasting[key] = current[buffer.id]
                    self.placed[key] = None
                else:
                    self.lasting.pop(key, None)

    def _owners(self, model: str) -> set[str]:
        """Those whose parameters a model has: itself, and its parts."""
        return {model, *(owner for _, owner in self.parts.get(model, ()))}

    def _owned(self, model: str, name: str, category: str = "gradient") -> tuple[str, str, str]:
        """What a buffer of a model goes by: its owner, its category, and its name there."""
        for path, owner in self.parts.get(model, ()):
            if not path:
                return owner, category, name
            if name.startswith(f"{path}."):
                return owner, category, name[len(path) + 1 :]
        return model, category, name

    def _keys(self, model: str, categories: Sequence[str]) -> list[Key]:
        """What is there of a model, in the order in which it was made."""
        owners = self._owners(model)
        return [key for key in self.placed if key[0] in owners and key[1] in categories and key in self.lasting]

    def _named(self, model: str, buffers: Sequence[Buffer]) -> list[tuple[Buffer, Key]]:
        """Buffers with what they go by; of several with one name each has its number."""
        place = model, id(buffers)
        if place not in self._names:
            seen: Counter[tuple[str, str, str]] = Counter()
            named = []
            for buffer in buffers:
                owned = self._owned(model, buffer.name, buffer.category)
                named.append((buffer, (*owned, seen[owned])))
                seen[owned] += 1
            self._names[place] = buffers, named  # who is kept has its place in memory alone
        return self._names[place][1]

    def _check_parts(self, model: str, named: Sequence[tuple[Buffer, Key]]) -> None:
        """Raises UsageError where a part is no module with parameters, or has none in common with who has it."""
        for path, owner in self.parts.get(model, ()):
            own = {
                key for buffer, key in named if key[0] == owner and buffer.name.startswith(f"{path}." if path else "")
            }
            there = {key for key in self.placed if key[0] == owner and key[1] == "parameter"}
            if not own or (there and not own & there):
                what = f"'{model}' has no module '{path}' with parameters"
                if own:
                    what = f"'{path}' of '{model}' and '{owner}' have no parameter in common"
                names = list(dict.fromkeys(b.name.partition(".")[0] for b, key in named if key[1] == "parameter"))
                why = f"It has {', '.join(names[:8])}; a part has the names of parameters that its owner has."
                raise UsageError(what, why, "Correct the path in `parts`.", "SM445")

    def copy_model(self, builder: Builder, model: str, of: str) -> None:
        """`model = copy.deepcopy(of)`: its own tensors of each module before those of modules within, parameters
        first. A parameter is cloned; beside a buffer's storage a tensor of one element is made."""
        before = self._keys(model, MODEL)
        own: dict[str, list[Key]] = {}
        named = sorted(self._named(of, builder.model), key=lambda pair: pair[0].id)
        for category in MODEL:
            for _, key in named:
                if key[1] == category and key in self.lasting:
                    own.setdefault(key[2].rpartition(".")[0], []).append(key)
        copies: dict[Key, int] = {}
        for key in [key for keys in own.values() for key in keys]:
            copies[(model, *key[1:])] = self.take(self.process.sizes[self.lasting[key]], f"copy of {key[2]}")
            if key[1] != "parameter":
                self.release([self.take(_ELEMENT, "deepcopy")])
        self.release([self.lasting[key] for key in before])
        self.lasting.update(copies)
        self.placed.update(dict.fromkeys(copies))
        self.there.add(model)

    def average(self, model: str, temporaries: int) -> None:
        """Updates an average of parameters, one after the other: so many tensors of its size are made meanwhile."""
        for key in self._keys(model, ("parameter",)):
            size = self.process.sizes[self.lasting[key]]
            self.release([self.take(size, f"average of {key[2]}") for _ in range(temporaries)])

    def _check_sizes(self, model: str, named: Iterable[tuple[Buffer, Key]]) -> None:
        """Raises UsageError where a parameter is on the GPU with another size."""
        sizes, lasting = self.process.sizes, self.lasting
        for buffer, key in named:
            if key[1] == "parameter" and key in lasting and sizes[lasting[key]] != buffer.nbytes:
                there = sizes[lasting[key]]
                what = f"'{buffer.name}' of '{model}' has {buffer.nbytes:,} bytes, and is there with {there:,}"
                why = "Instants of one model, and models that share parameters, have these once, in one dtype."
                hint = "Give them the same dtype, quantize and lora, or other models."
                raise UsageError(what, why, hint, "SM445")

    def _batch_stays(self, builder: Builder, loop: _Loop) -> bool:
        """Whether a step has the batch of the one before, with other content."""
        sizes = self.process.sizes
        return [b.nbytes for b in builder.inputs] == [sizes[id] for id in loop.batch]

    def _bring_batch(self, builder: Builder, loop: _Loop) -> None:
        """The batch of a step: the one before where nothing but its content changes, else a new one, behind which the
        old one goes (`batch = next(loader).to(device)`)."""
        if self._batch_stays(builder, loop):
            builder.current.update({b.id: id for b, id in zip(builder.inputs, loop.batch, strict=True)})
            return
        builder.bring_data()
        self.release(loop.batch)


def _whole_bytes(buffer: Buffer) -> int:
    """The bytes of all shards of a tensor of which a rank has one: its shape is that of the whole."""
    shards = -(-math.prod(buffer.shape) * buffer.dtype.bits // (8 * max(buffer.nbytes, 1)))
    return shards * buffer.nbytes


def _gradient_of(key: Key) -> Key:
    """The gradient of a parameter."""
    return key[0], "gradient", f"{key[2]}.grad", 0


def _outputs(builder: Builder) -> list[int]:
    """The buffers that an inference leaves as its outputs."""
    trace = builder.trace
    places = [buffer for buffer in sorted(builder.previous) if trace.buffers.names[buffer] == BEFORE]
    return [new for place in places for new in trace.replaced_by.get(place, ())]


def _moved(loop: _Loop, builder: Builder) -> dict[int, int]:
    """What the loop's last step left, by the buffers of the step that is next: these are the same where both steps have
    one structure, else what has the same place. What has none goes last, under a number that no buffer has."""
    old, left = loop.builder.trace, loop.left
    new = builder.trace
    if old is new or (len(old.buffers) == len(new.buffers) and old.replaced_by == new.replaced_by):
        return dict(left)
    places: dict[str, list[int]] = {}
    for place in sorted(builder.previous):
        places.setdefault(new.buffers.names[place], []).append(place)
    moved: dict[int, int] = {}
    rest = dict(left)
    for place in sorted(loop.builder.previous):
        others = places.get(old.buffers.names[place])
        if not others:
            continue
        pairs = zip(old.replaced_by.get(place, ()), new.replaced_by.get(others.pop(0), ()), strict=False)
        moved.update({there: rest.pop(here) for here, there in pairs if here in rest})
    return moved | {-1 - number: id for number, id in enumerate(rest.values())}
