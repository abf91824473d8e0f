"""The allocations of a process that does several things one after the other, out of the trace of each.

A step of training, an evaluation and a save share one caching allocator: what one leaves in use or in cached blocks is
there for the next. Each is a trace of a steady step (`from_trace`); what lasts between them is the model, its gradients
and its optimizer's state, which go by name, and what the variables of each loop hold, which goes by its place.

The three steps that `process_of_trace` makes are the run with one loop of three steps, and give the same calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from staticmem.allocators.from_trace import Builder
from staticmem.allocators.process import Mark, Process
from staticmem.eager.trace import Buffer, round_up
from staticmem.engine.held_outputs import BEFORE

STATE, MODEL = ("optimizer_state",), ("parameter", "buffer", "communication")
OF_PARAMETERS = (*STATE, "gradient")
_ELEMENT = 4  # bytes of a scalar, which takes the least block
_Key: TypeAlias = "tuple[str, str, int]"  # category, name, and the how manieth buffer with that name


@dataclass
class _Loop:
    """The variables of a loop: what the last step left, by the buffers of `builder`, and the batch."""

    builder: Builder
    left: dict[int, int] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Moment:
    """An instant of a run: the indices of its first call and of the one behind its last."""

    name: str
    start: int
    end: int


class Run:
    """Builds the process of a run, call by call. Models and loops have names."""

    def __init__(self, first: Builder) -> None:
        """`first` is of any of the traces: the process begins in it."""
        self.process = self.last = first
        first.marks.append(Mark(0, "setup", 0))
        self.lasting: dict[str, dict[_Key, int]] = {}
        self.gradients: dict[str, dict[str, int]] = {}  # of each model by name, which zero_grad() releases
        self.loops: dict[str, _Loop] = {}
        self.gathered: dict[str, list[int]] = {}
        self.builders: list[Builder | None] = [None]  # of each step, 0: of what comes before
        self.steps = 0

    @property
    def calls(self) -> list[int]:
        return self.process.calls

    # -- what an instant does ------------------------------------------------------------------------------------

    def load(self, builder: Builder, model: str) -> None:
        """Puts a model on the GPU: parameters and buffers, as `model.to(device)`."""
        self._go_on(builder)
        builder.load()
        self._keep(builder, model)

    def step(self, builder: Builder, model: str, loop: str) -> None:
        """One step of a loop over a model, which is loaded if it is not there."""
        if model not in self.lasting:
            self.load(builder, model)
        self._go_on(builder)
        names, current = self.lasting[model], builder.current
        current.clear()
        current.update({b.id: names[key] for b, key in _named(builder.model) if key in names})
        of_loop = self.loops.get(loop)
        first = of_loop is None
        if of_loop is None:
            of_loop = self.loops[loop] = _Loop(builder)
        lasting = _named([*builder.state, *builder.gradients])
        current.update({b.id: names[key] for b, key in lasting if key in names})
        if first:
            builder.bring_data()
            builder.allocate([b for b in builder.early if b.id not in current])
        self.steps += 1
        builder.starts.append(len(builder.sizes))
        self.builders.append(builder)
        builder.marks.append(Mark(self.steps, "forward", len(builder.calls)))
        if not first:
            self._bring_batch(builder, of_loop)
        left = _moved(of_loop, builder)
        if any(name == "backward" for name, _ in builder.trace.phases):  # zero_grad()
            builder.calls += [~id for id in self.gradients.pop(model, {}).values()]
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
        if gradients:
            names_of = builder.trace.buffers.names
            self.gradients[model] = {names_of[builder.buffers[id]]: id for id in gradients}

    def end_loop(self, loop: str) -> None:
        """The function of a loop returns, with its variables."""
        of_loop = self.loops.pop(loop, None)
        if of_loop is not None:
            self.release([*of_loop.left.values(), *of_loop.batch])
        self.release(self.gathered.pop(loop, []))

    def gather(self, loop: str, nbytes: int | None = None, joins: bool = False) -> None:
        """The loop appends the outputs of its last step to a list, or what it makes of them, of `nbytes`; with `joins`
        it concatenates them with those of before each time."""
        of_loop, kept = self.loops[loop], self.gathered.setdefault(loop, [])
        ids = [of_loop.left[buffer] for buffer in _outputs(of_loop.builder) if buffer in of_loop.left]
        sizes = self.process.sizes
        if joins and kept:
            more = sum(sizes[id] for id in ids) if nbytes is None else nbytes
            whole = self.take(sum(sizes[id] for id in kept) + more, "gathered outputs")
            self.release(kept)
            self.gathered[loop] = [whole]
            return
        if nbytes is not None:
            kept.append(self.take(nbytes, "gathered outputs"))
            return
        kept += ids
        of_loop.left = {buffer: id for buffer, id in of_loop.left.items() if id not in ids}

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
        names, sizes = self.lasting.get(model, {}), self.process.sizes
        copies = []
        for key in [key for key in names if key[0] in categories]:
            copies.append(self.take(sizes[names[key]], f"copy of {key[1]}"))
            if deep:
                self.release([self.take(_ELEMENT, "deepcopy")])
        return copies

    def move_away(self, model: str, categories: Sequence[str] = MODEL) -> dict[_Key, int]:
        """Releases what a model has of some categories, as `model.to("cpu")` does; with parameters their gradients go.
        Gives the bytes of each."""
        names, sizes = self.lasting.get(model, {}), self.process.sizes
        gone: dict[_Key, int] = {}
        gradients = self.gradients.pop(model, {}) if "parameter" in categories else {}
        for key in [key for key in names if key[0] in categories]:
            gone[key] = names.pop(key)
            of_it = f"{key[1]}.grad"
            if of_it in gradients:
                gone["gradient", of_it, 0] = gradients.pop(of_it)
        gone |= {("gradient", name, 0): id for name, id in gradients.items()}
        self.release(gone.values())
        if not names:
            self.lasting.pop(model, None)
        return {key: sizes[id] for key, id in gone.items()}

    def bring_back(self, model: str, gone: Mapping[_Key, int]) -> None:
        """Allocates again what was moved away, in the same order."""
        names, gradients = self.lasting.setdefault(model, {}), self.gradients.setdefault(model, {})
        for key, nbytes in gone.items():
            id = self.take(nbytes, key[1])
            if key[0] == "gradient":
                gradients[key[1]] = id
            else:
                names[key] = id

    def resume(self, builder: Builder, model: str, with_state: bool) -> None:
        """Loads a checkpoint to the GPU beside the model, as torch.load does with map_location. The model copies what
        it is given; the optimizer takes the loaded tensors, and lets go of those that it had."""
        loaded = self.copy(model)
        if with_state:
            self._go_on(builder)
            names = self.lasting.setdefault(model, {})
            state = {key: builder.new(b.nbytes, b.id, b.kernel, False) for b, key in _named(builder.state)}
            self.release([names[key] for key in state if key in names])
            names.update(state)
        self.release(loaded)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""
        id = self.take(0, "empty_cache")
        self.process.empties.append(id)

    # -- the whole -----------------------------------------------------------------------------------------------

    def joined(self) -> Process:
        """The process, all of which counts: no step of it is left out because it repeats the one before."""
        return replace(self.last.process(), whole=True)

    def live(self) -> list[int]:
        """The bytes of tensors that are alive behind each call, whole blocks of 512 bytes; workspaces are none."""
        process = self.process
        workspaces = {id for id, buffer in enumerate(process.buffers) if buffer < 0 and process.sources[id] < 0}
        workspaces -= {id for id, what in process.whats.items() if process.kernels[id] < 0 and what != "empty_cache"}
        line, now = [], 0
        for call in process.calls:
            id = call if call >= 0 else ~call
            size = 0 if id in workspaces else round_up(process.sizes[id])
            now += size if call >= 0 else -size
            line.append(now)
        return line

    def _go_on(self, builder: Builder) -> None:
        if builder is not self.last:
            builder.go_on_from(self.last)
            self.last = builder

    def _keep(self, builder: Builder, model: str) -> None:
        """Takes down what a model has by now: a tensor that the code has replaced is in the variables of the loop."""
        names, current = self.lasting.setdefault(model, {}), builder.current
        for buffer, key in _named([*builder.model, *builder.state, *builder.gradients]):
            if buffer.id in current:
                names[key] = current[buffer.id]
            else:
                names.pop(key, None)

    def _bring_batch(self, builder: Builder, loop: _Loop) -> None:
        """The batch of a step: the one before where nothing but its content changes, else a new one, behind which the
        old one goes (`batch = next(loader).to(device)`)."""
        sizes = self.process.sizes
        if [b.nbytes for b in builder.inputs] == [sizes[id] for id in loop.batch]:
            builder.current.update({b.id: id for b, id in zip(builder.inputs, loop.batch, strict=True)})
            return
        builder.bring_data()
        self.release(loop.batch)


def _named(buffers: Iterable[Buffer]) -> list[tuple[Buffer, _Key]]:
    """Buffers with their names, of which several may be equal."""
    seen: Counter[tuple[str, str]] = Counter()
    named = []
    for buffer in buffers:
        name = buffer.category, buffer.name
        named.append((buffer, (*name, seen[name])))
        seen[name] += 1
    return named


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
