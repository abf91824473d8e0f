"""The graph that every frontend gives and every later stage reads: ops in execution order, values, parameters.

A `Graph` is *bound*: all sizes are integers (a frontend binds symbolic dimensions before it builds one). Ops carry
ATen targets, because the memory of a step is decided by what PyTorch runs: `passes` translate ONNX nodes into that
vocabulary and keep their operators in `Op.source`. An op without ATen meaning keeps its own name (`onnx::NonZero`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from staticmem.ir.dtypes import DType
from staticmem.ir.record import record

if TYPE_CHECKING:
    import numpy as np


@record(frozen=True, slots=True)
class Ref:
    """A use of a value by name: a tensor, or an integer that an op computed (`aten::sym_size`)."""

    name: str


# An argument of an op: what ATen schemas know. Lists are tuples; a tensor is a Ref.
Arg: TypeAlias = "Ref | int | float | bool | str | DType | tuple[Arg, ...] | None"


@record(frozen=True, slots=True)
class Frame:
    """A module call on Python's stack: its path (`layer1.0.conv1`) and class (`torch.nn.modules.conv.Conv2d`).

    `call` tells repeated calls of one module apart.
    """

    path: str
    cls: str = ""
    call: int = 0

    def __hash__(self) -> int:
        return hash(self.path)


@record(frozen=True, slots=True)
class SourceLine:
    """A Python frame of an exporter's stack trace: where the model's code was when it called the op."""

    file: str
    line: int
    function: str
    text: str


# What holds a value: the name of a variable, of a container, or `self.x` of a module; what lets go of it; and the line.
# That is "del" behind the line, "None" in its place there (in a loop), None "before" the line, "item" of a container in
# the line, or "attribute", which the line assigns.
Holder: TypeAlias = "tuple[str, str, SourceLine]"


@record(frozen=True, slots=True)
class AutocastRegion:
    """Ops [start, end) in all of which autocast is the same."""

    start: int
    end: int
    amp: bool | DType  # as `Op.amp`
    clears: bool  # copies of weights are dropped behind it


NO_KWARGS: Mapping[str, Any] = MappingProxyType({})  # one for all ops that have none
_BASES: dict[str, str] = {}  # target -> base: every pass over a graph asks each op several times


@record(frozen=True, slots=True)
class Op:
    """One ATen call. `target` is `aten::add.Tensor`; args are positional and kwargs by name, as in the ATen schema."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outputs: tuple[str, ...]  # names of results; a list result (split, chunk) has one name for each element
    modules: tuple[Frame, ...] = ()  # outermost first
    source: str = ""  # the operator of the file's node that this op has its name from ("Conv"), where it has another
    stack: tuple[SourceLine, ...] = ()  # the model's Python frames, outermost first, where the export kept them
    grad: bool = True  # False inside torch.no_grad / set_grad_enabled(False)
    amp: bool | DType = True  # the step's autocast applies; False inside of torch.autocast(enabled=False), or its dtype
    clears: bool = False  # behind it the outermost region of torch.autocast ends: copies of weights are dropped
    _refs: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def base(self) -> str:
        """The target without its overload: `aten::add`."""
        base = _BASES.get(self.target)
        return base if base is not None else _base(self.target)

    def refs(self) -> tuple[str, ...]:
        """Names of the values that this op reads, in order, with repetitions. Kept: every pass asks."""
        refs = self._refs
        if refs is None:
            names: list[str] = []
            collect_refs(self.args, names)
            if self.kwargs:
                collect_refs(self.kwargs.values(), names)
            refs = tuple(names)
            object.__setattr__(self, "_refs", refs)  # what it says of the op does not change
        return refs

    def changed(
        self,
        *,
        target: str | None = None,
        args: tuple[Arg, ...] | None = None,
        kwargs: Mapping[str, Arg] | None = None,
        outputs: tuple[str, ...] | None = None,
        modules: tuple[Frame, ...] | None = None,
    ) -> Op:
        """As `dataclasses.replace`, in a sixth of the time."""
        return Op(
            self.name,
            self.target if target is None else target,
            self.args if args is None else args,
            self.kwargs if kwargs is None else kwargs,
            self.outputs if outputs is None else outputs,
            self.modules if modules is None else modules,
            self.source,
            self.stack,
            self.grad,
            self.amp,
            self.clears,
        )


def collect_refs(args: Iterable[Arg], names: list[str]) -> None:
    """Adds the names that arguments refer to, lists included."""
    for arg in args:
        kind = type(arg)
        if kind is Ref:
            names.append(arg.name)  # type: ignore[union-attr]
        elif kind is tuple:
            collect_refs(arg, names)  # type: ignore[arg-type]


def _base(target: str) -> str:
    base = target.split(".", 1)[0]
    if len(_BASES) < 4096:  # more than there are operators: a hostile file makes them up
        _BASES[target] = base
    return base


def bases_of(ops: Iterable[Op]) -> set[str]:
    """The bases of all ops: a pass that finds none of its own has nothing to do."""
    return {_base(target) for target in {op.target for op in ops}}


def count_bases(ops: Iterable[Op]) -> Counter[str]:
    """How many ops there are of each base."""
    counts: Counter[str] = Counter()
    for target, number in Counter([op.target for op in ops]).items():
        counts[_base(target)] += number
    return counts


@record(frozen=True, slots=True)
class Value:
    """A tensor of the graph: sizes in elements (None where the file does not say)."""

    name: str
    dtype: DType
    shape: tuple[int, ...] | None

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape or ():
            n *= size
        return n


@record(frozen=True, slots=True)
class Parameter:
    """A tensor that the model owns. `fqn` is its name in the model; `alias_of` is set when its storage is another's.

    `cast` is False for one that keeps its element type where the whole model is cast; `packed` says how many numbers a
    weight has whose elements hold several; `loading` are bytes that are on the device while it is loaded: the weight
    that is packed there."""

    value: Value
    fqn: str
    trainable: bool = True
    alias_of: str | None = None
    cast: bool = True
    packed: int | None = None
    loading: int = 0

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return self.value.numel if self.packed is None else self.packed


@record(frozen=True, slots=True)
class Note:
    """Something a reader of the report must know. `kind` is "assumption", "warning", "dropped" or "regrouped"."""

    kind: str
    code: str
    text: str
    count: int = 1


@record(frozen=True, slots=True)
class Edit:
    """What a pass changed (`passes.pipeline`): how many ops there were before and after, how many are new or differ."""

    name: str
    before: int
    after: int
    changed: int
    notes: tuple[Note, ...] = ()


@record(frozen=True, slots=True)
class Region:
    """The ops [start, end) of a graph, one call of `checkpoint`. `depth` is the number of module frames around it;
    in a recording, of checkpoints too. `saves`: names of calls whose results a selective checkpoint keeps
    (`scenario.checkpointing.Policy`). `unread`: values that the call is given and that none of its ops reads."""

    start: int
    end: int
    depth: int
    name: str
    reentrant: bool = False
    saves: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def is_within(self, other: Region) -> bool:
        return other.start <= self.start and self.end <= other.end and self.depth > other.depth

    def crosses(self, other: Region) -> bool:
        """Whether two regions are the same calls, or overlap without one being inside of the other."""
        overlap = self.start < other.end and other.start < self.end
        return overlap and not self.is_within(other) and not other.is_within(self)


# ops of a recording: the call of a custom autograd function; a tensor that the code has made require a gradient
FUNCTION = "staticmem::function"  # a call of a custom autograd function
HOOK = "staticmem::hook"  # of gradients, a CustomFunction
REQUIRES_GRAD = "staticmem::requires_grad"
REQUIRES_NO_GRAD = "staticmem::requires_no_grad"  # of a parameter
BACKWARD = "staticmem::backward"  # torch.autograd.backward
GRAD = "staticmem::grad"  # torch.autograd.grad
SET_DATA = "staticmem::set_data"  # `tensor.data = other`
NOT_RECORDED = "staticmem::not_recorded"  # what a recording does not have, so that training cannot be predicted
RUN_AUTOGRAD = frozenset((REQUIRES_GRAD, REQUIRES_NO_GRAD, BACKWARD, GRAD))
OF_RECORDINGS = RUN_AUTOGRAD.union((FUNCTION, HOOK, SET_DATA, NOT_RECORDED))  # they have no rule


@record(frozen=True)
class CustomFunction:
    """One call of a `torch.autograd.Function` that has a history.

    Attributes:
        inputs: its tensor arguments, "" for others, in the order of `gradients`.
        results: what its forward returned.
        saved: what `ctx.save_for_backward` was given.
        attributes: tensors that `ctx` has as attributes: they live as long as the graph of autograd.
        backward: the ops of its backward, with what they release; None where it could not run without data.
        incoming: names of the incoming gradients in `backward`, "" for results without one.
        gradients: names of the returned gradients in `backward`, "" for None.
        kept: of a hook, names of what outlives its run.
        materializes: results without a gradient have one of zeros; else None (`ctx.set_materialize_grads(False)`).
    """

    name: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    saved: tuple[str, ...]
    attributes: tuple[str, ...]
    backward: Graph | None
    incoming: tuple[str, ...]
    gradients: tuple[str, ...]
    kept: tuple[str, ...] = ()
    materializes: bool = True


@record(frozen=True)
class Recorded:
    """What a recording of the code knows beside the ops.

    Attributes:
        last_held: values, each with the index of the op after which Python lets go of its storage.
        lasting: values that the module keeps when its forward has returned.
        kept: tensors that the module has from the call before: the value, and one of them whose storage it shares. They
            are what was lasting then, in the same order.
        regions: calls of `torch.utils.checkpoint`.
        functions: calls of custom autograd functions by the name of their op.
        loss: the first output is the loss.
        enables_grad: of inference, some of whose ops have a history all the same (`torch.enable_grad`).
        read_again: values that autograd has saved and the code reads again: the ops of a backward that it runs with
            create_graph=True.
        unread: values that module calls are given and that none of their ops reads, by the frame of the call.
        output_shapes: shapes of the outputs by name, where the recording has them. A step checks them when it has run.
        cast: the code ran in the module cast to 16 bits, so that the dtypes of ops are those of the cast module.
        other_call: the graph of a call that is unlike this one, of code that counts its calls or keeps more after each.
        input_embeddings: modules whose results `enable_input_require_grads()` of transformers makes require a gradient.
        requires_input_grads: that was called.
        unused: values that the code holds and does not read again: the op after which each could end ("": before the
            first), once all of its holders let go of it.
        trained: the path of the one part of the module that is trained, as the denoiser of a pipeline; "": all of it.
    """

    last_held: Mapping[str, int]
    lasting: tuple[str, ...]
    kept: tuple[tuple[Value, str], ...]
    regions: tuple[Region, ...]
    functions: Mapping[str, CustomFunction]
    loss: bool = False
    enables_grad: bool = False
    read_again: Set[str] = frozenset()
    unread: Mapping[Frame, tuple[str, ...]] = field(default_factory=dict)
    output_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cast: bool = False
    other_call: Graph | None = None
    input_embeddings: tuple[str, ...] = ()
    requires_input_grads: bool = False
    unused: Mapping[str, tuple[str, tuple[Holder, ...]]] = field(default_factory=dict)
    trained: str = ""


def with_other_call(graph: Graph, other: Graph) -> Graph:
    """The graph of a call of recorded code that knows another call, which knows it."""
    assert graph.recorded is not None
    assert other.recorded is not None
    knowing = replace(other, recorded=replace(other.recorded, other_call=graph))
    return replace(graph, recorded=replace(graph.recorded, other_call=knowing))


@record(frozen=True, slots=True)
class KeptTokens:
    """The cache of an attention at the end: values that are its keys and values, or views of them, and how many tokens
    their tensors have."""

    key: str
    value: str
    tokens: int


@record(frozen=True, slots=True)
class Generated:
    """What a graph of `generate` is made of. `decode` is the index of the first op of the last decode step, the number
    of ops where there is none. `last_held` has, where the file is no recording, for each policy of `passes.variables`
    the values with the index of the op after which the code lets go of them."""

    decode: int
    caches: tuple[KeptTokens, ...]
    last_held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class Programs(Protocol):
    """The graphs that a recording has of a model, one for each mode."""

    def of(self, training: bool, amp: DType | None, dtype: DType | None = None) -> Graph:
        """The graph that the code runs in this mode; `dtype`: where the model is cast to it."""
        ...


@record(frozen=True)
class Graph:
    """A bound model graph. All sizes are integers; ops are in execution order."""

    name: str
    format: str  # "onnx", "pt2" or "fx"
    producer: str
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, Value] = field(default_factory=dict)  # what the file says of op results (shapes may be None)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)  # small tensors with known contents
    constant_values: Mapping[str, Value] = field(default_factory=dict)  # every constant tensor: dtype and shape
    notes: tuple[Note, ...] = ()
    inplace_known: bool = True  # False where the export lost which ops run in place (ONNX)
    module_tree_known: bool = True
    edits: tuple[Edit, ...] = ()  # what passes changed, in order
    recorded: Recorded | None = None  # None: the file has no recording of the code
    programs: Programs | None = None  # the other modes of a recording
    # values that code which a pass inserted has variables for, each with the name of the op that they last until
    variables: Mapping[str, str] = field(default_factory=dict)
    # of a model that is cast as a whole: casts and new tensors, by the names of their ops, whose code says float32
    # itself, and those of which nothing tells whether it does
    named_float32: Set[str] = frozenset()
    open_float32: Set[str] = frozenset()
    generated: Generated | None = None  # the graph is that of `generate` (passes.requested.generation)
    # what the outputs are called in what the model returns (`out`, `heads.0`), "" for one that has a number alone;
    # empty where the file does not say
    output_names: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()  # passes that are left out of what is made of it (`Binding.without`)
    least_in_data: Mapping[str, int] = field(default_factory=dict)  # of sizes that were taken as large as data can have

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What stages made of this graph, by what they were asked: graphs are kept for the next analysis of a file, and
        what follows from them alone need not be worked out again."""
        return {}

    def version(self, how: str, make: Callable[[Graph], Graph]) -> Graph:
        """The graph as `make` changes it, worked out once for each `how`."""
        if how not in self.derived:
            changed = make(self)
            # not the graph in itself: the circle would keep it alive until Python looks for circles
            self.derived[how] = changed if changed is not self else None
        derived: Graph | None = self.derived[how]
        return self if derived is None else derived

    def reads(self, op: Op) -> Iterator[str]:
        """The names that an op reads: a custom function, also what its backward reads of the forward."""
        yield from op.refs()
        if op.base == FUNCTION and self.recorded is not None:
            function = self.recorded.functions[op.name]
            yield from filter(None, (*function.saved, *function.attributes))
            if function.backward is not None:
                own = {name for inner in function.backward.ops for name in inner.outputs}.union(function.incoming)
                for inner in function.backward.ops:
                    yield from (name for name in inner.refs() if name not in own)

    @property
    def last_read(self) -> Mapping[str, int]:
        """The names that ops read, each with the index of the last op that does."""
        return self._reads[0]

    @property
    def read_again(self) -> Set[str]:
        """The names that are read more than once, by one op or by several."""
        return self._reads[1]

    @cached_property
    def _reads(self) -> tuple[Mapping[str, int], Set[str]]:
        last: dict[str, int] = {}
        again: set[str] = set()
        for index, op in enumerate(self.ops):
            for name in op.refs():
                if name in last:
                    again.add(name)
                last[name] = index
        return last, again

    @cached_property
    def bases(self) -> Set[str]:
        """The bases of all ops."""
        return bases_of(self.ops)

    @cached_property
    def autocast_regions(self) -> tuple[AutocastRegion, ...]:
        """The stretches of ops that the step's autocast does not apply to, or that end with the outermost region of
        `torch.autocast`. Without a mark of that end each of them is taken to be such a region."""
        regions: list[AutocastRegion] = []
        for index, op in enumerate(self.ops):
            if op.amp is True and not op.clears:
                continue
            last = regions[-1] if regions else None
            start = index
            if last is not None and last.end == index and last.amp is op.amp and not last.clears:
                start = regions.pop().start
            regions.append(AutocastRegion(start, index + 1, op.amp, op.clears))
        if not self.marks_autocast:
            regions = [replace(region, clears=True) for region in regions]
        return tuple(regions)

    @cached_property
    def marks_autocast(self) -> bool:
        """Whether the graph says where the outermost regions of `torch.autocast` end."""
        return any(op.clears for op in self.ops)

    @cached_property
    def classes(self) -> Set[str]:
        """The classes of all modules that ops run in; ops of one call have the same tuple of frames."""
        stacks = {id(op.modules): op.modules for op in self.ops}.values()
        return {frame.cls for stack in stacks for frame in stack}

    def with_targets(self, ops: tuple[Op, ...]) -> Graph:
        """The graph with ops that differ from its own in their targets alone."""
        changed = replace(self, ops=ops)
        changed.__dict__["_reads"] = self._reads  # who reads what stays
        return changed

    def with_edit(self, edit: Edit) -> Graph:
        """The graph, which a pass has just made, with the record of it."""
        recorded = replace(self, notes=(*self.notes, *edit.notes), edits=(*self.edits, edit))
        recorded.__dict__.update({key: self.__dict__[key] for key in ("_reads", "bases") if key in self.__dict__})
        return recorded
