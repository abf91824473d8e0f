"""The model of a recording: the ops that the code ran in each mode, read as hostile input, without torch.

`staticmem.frontends.recording_format` describes the document. A file that carries a recording is opened as its model;
the file's own graph is not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from staticmem.errors import DimensionError
from staticmem.frontends import fields, recent, traced_sizes
from staticmem.frontends import recording_format as written
from staticmem.frontends.output_names import usable
from staticmem.frontends.traced_sizes import LEAST_FOUND
from staticmem.ir import dtypes, expressions
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import (
    NO_KWARGS,
    Arg,
    CustomFunction,
    Frame,
    Graph,
    Holder,
    Note,
    Op,
    Parameter,
    Recorded,
    Ref,
    Region,
    SourceLine,
    Value,
    with_other_call,
)
from staticmem.ir.model_file import (
    MAX_DIM,
    Binding,
    InputSpec,
    ModelFile,
    SymbolRange,
    check_conditions,
    export_command,
)

_HALVES = {dtype.name: dtype for dtype in dtypes.HALVES}
_MODES = [(training, amp) for training in (True, False) for amp in (None, *_HALVES)]
_HOW = ("del", "None", "item", "attribute", "before")  # by the numbers of `recording_format`
_NUMBER = re.compile("-?[0-9]{1,12}")
_MOST = 1 << 21  # values of a program, and items of the functions that it calls: more than those of 100,000 ops
_DEEPEST = 1000  # module calls within each other: Python's limit of calls is reached before
_LONGEST = 4096  # characters of a path of modules
CALLS_DIFFER = Note(
    "warning",
    "SM388",
    "the code does not run the same in each call (it counts its calls, or keeps more after each): the figure is of the "
    "second call, and the band reaches to what another of the first six takes; later calls may take more",
)
_MOST_TOLD = 5  # branches
_LONGEST_WORD = 100  # characters of the op in the names of its results


class RecordedModel(ModelFile):
    """A `ModelFile` over the document of a recording."""

    def __init__(self, path: str, document: Any, format: str) -> None:
        """`format` is that of the file which carries the recording."""
        self.path, self.format = path, format
        self.graphs: recent.Graphs | None = None
        self.notes: list[Note] = []  # of how the recording was come by
        try:
            self.document = fields.mapping(document)
            version = fields.integer(self.document["version"])
            if not 1 <= version <= written.VERSION:
                raise ValueError(f"it has version {version}, and this staticmem reads {written.VERSION}")
            self.producer = f"PyTorch {fields.text(self.document['torch'])}"
            for key in ("model", "staticmem"):
                fields.text(self.document[key])
            self.bounds = {
                fields.text(name): (fields.items(shape), fields.text(op))
                for name, (shape, op) in fields.mapping(self.document["bounds"]).items()
            }
            self.in_data = {
                fields.text(name): None if counted is None else tuple(map(fields.size, fields.items(counted)))
                for name, counted in fields.mapping(self.document.get("in_data", dict.fromkeys(self.bounds))).items()
            }
            self.symbols = {
                fields.text(name): SymbolRange(fields.size(low), None if high is None else fields.size(high))
                for name, (low, high) in fields.mapping(self.document["symbols"]).items()
            } | dict.fromkeys((*self.in_data, *self.document.get("limits", {})), SymbolRange(1, None))
            self.replaced = {
                fields.text(name): fields.text(size)
                for name, size in fields.mapping(self.document.get("replaced", {})).items()
            }
            embeddings = fields.mapping(self.document.get("input_embeddings", {"paths": [], "require_grad": False}))
            paths = tuple(fields.text(path) for path in fields.items(embeddings["paths"]))
            self.input_embeddings = paths, fields.boolean(embeddings["require_grad"])
            self.trained = fields.text(self.document.get("trained", ""))
            self.asked_of_gpu = [fields.text(name) for name in fields.items(self.document.get("asked_of_gpu", []))]
            fixed = fields.mapping(self.document.get("fixed_axes", {}))
            self.fixed_axes = {fields.text(place): fields.text(name) for place, name in fixed.items()}
            read = [fields.text(place) for place in fields.items(self.document.get("read_values", []))]
            self.notes += [_note_of_read(read)] if read else []
            drawn = [fields.text(place) for place in fields.items(self.document.get("drawn_values", []))]
            self.notes += [_note_of_drawn(drawn)] if drawn else []
            self.limits = {
                fields.text(name): (fields.size(value), fields.size(least))
                for name, (value, least) in fields.mapping(self.document.get("limits", {})).items()
            }
            self.loss_function = fields.text(self.document.get("loss_function", ""))
            self.inputs_of_mode = {
                fields.text(name): fields.boolean(training)
                for name, training in fields.mapping(self.document.get("inputs_of_mode", {})).items()
            }
            packed = fields.mapping(self.document.get("packed", {}))
            self.packed = {fields.text(name): fields.size(numbers) for name, numbers in packed.items()}
            self.own_loss, self.unlabelled = self._own_loss(), self._unlabelled()
            self.branches = _branches(fields.items(self.document.get("decided", [])))
            self.sizes = traced_sizes.of_content(self.document["sizes"])
            of_training = {**self.document["sizes"], "conditions": self.document.get("training_conditions", [])}
            self.training_sizes = traced_sizes.of_content(of_training)
            self.inputs = tuple(
                InputSpec(fields.text(name), _dtype(dtype), tuple(self._dim(n) for n in fields.items(shape)))
                for name, dtype, shape in fields.items(self.document["inputs"])
            )
        except fields.MALFORMED as error:
            raise written.damaged(path, str(error)) from error

    def _dim(self, size: Any) -> int | str:
        if isinstance(size, int):
            return fields.size(size)
        if size not in self.symbols:
            raise ValueError(f"an input has the size {size!r}, which is no symbol")
        return fields.text(size)

    def with_packed(self, parameter: Parameter) -> Parameter:
        """A tensor that the model owns; a packed one keeps its type, is not trained, and holds so many numbers."""
        numbers = self.packed.get(parameter.fqn)
        if numbers is None:
            return parameter
        return replace(parameter, trainable=False, cast=False, packed=numbers)

    def _own_loss(self) -> str:
        """What reports say of a loss that the recording has, of labels that go in; "" where it has none."""
        if not fields.boolean(self.document.get("own_loss", False)):
            return ""
        text = f"loss: that of {self.document['model']} itself, from labels that go in (--loss changes it)"
        if fields.boolean(self.document.get("use_cache", False)):
            text += "; its outputs have keys and values, as use_cache of its config says (,use_cache=no changes it)"
        return text

    def _unlabelled(self) -> str:
        """What reports say where the model has a loss of its own and the recording lacks it; "" of any other."""
        reason = fields.text(self.document.get("unlabelled", ""))
        if not reason:
            return ""
        return f"loss: not that of {self.document['model']} itself, which cannot be recorded ({reason[:300]})"


def _branches(rows: Sequence[Any]) -> list[Note]:
    """What reports say of code that branches on what tensors hold."""
    told = []
    for file, line, *texts in rows:
        function, answer = (_name(fields.text(text)) for text in texts)
        told.append(f"{_name(fields.text(file))}:{fields.size(line)} ({function}) had {answer}")
    if not told:
        return []
    more = f", and {len(told) - _MOST_TOLD} more lines" if len(told) > _MOST_TOLD else ""
    text = (
        f"the code asks what tensors hold, and was followed as it ran on example inputs: {', '.join(told[:_MOST_TOLD])}"
        f"{more}. Other inputs may take another way, with other memory"
    )
    return [Note("warning", "SM387", text)]


def _note_of_drawn(places: Sequence[str]) -> Note:
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    text = (
        f"what the network finds is in the data ({', '.join(places[:3])}{more}), and was drawn at random: so much is "
        "found that the model's own limits decide how many boxes remain. Images of a batch are padded to the longest "
        "sides among them, which --resolution HxW sets"
    )
    return Note("assumption", "SM392", text)


def _note_of_read(places: Sequence[str]) -> Note:
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    text = (
        f"the code reads values of its inputs ({', '.join(places[:3])}{more}): the recording follows those of its "
        "example, with images of one size and the tokens that stand for them"
    )
    return Note("assumption", "SM392", text)


def _fixed(model: RecordedModel, axis: str) -> str:
    """An axis, such as `x[0]`, with the size that it was recorded with."""
    name, _, index = axis.removesuffix("]").rpartition("[")
    shape = next((spec.shape for spec in model.inputs if spec.name == name), None)
    return f"{axis} = {shape[int(index)]}" if shape else axis


def decode(model: RecordedModel, binding: Binding) -> Graph:
    """The graph of training at these sizes, or of what was recorded alone; its `programs` have those of other modes.

    Raises:
        ModelFileError: the recording is damaged.
        DimensionError: a size is not a number here, or is one that the code fixed.
    """
    if binding.rebound:
        fixed = ", ".join(_fixed(model, axis) for axis in binding.rebound)
        raise DimensionError(
            f"the code fixed {fixed}, and another size is asked for",
            "Its weights may need this size, or its ops depend on the size (a loop over it, or a number made of it).",
            f"Record it at this size: {export_command(model, binding.shapes)}",
            code="SM115",
        )
    programs = _Programs(model, binding)
    return replace(programs.first, programs=programs)


_Modes = dict[tuple[bool, bool], tuple[Mapping[str, Any], str | None]]


class _Programs:
    """The programs of a recording at one binding."""

    def __init__(self, model: RecordedModel, binding: Binding) -> None:
        self.model, self.binding, self.document = model, binding, model.document
        try:
            recorded = self.modes("programs")
        except fields.MALFORMED as error:
            raise written.damaged(model.path, str(error)) from error
        self.trains = any(training for training, _ in recorded)
        self.has_plain = (self.trains, False) in recorded
        self.first = self.decoded(self.trains, None)

    def of(self, training: bool, amp: DType | None, dtype: DType | None = None) -> Graph:
        if training:
            check_conditions(self.model, self.model.training_sizes, self.binding.symbols, self.binding.shapes)
        is_first = self.has_plain and training is self.trains and amp is None and dtype not in dtypes.HALVES
        return self.first if is_first else self.decoded(training, amp, dtype)

    def modes(self, key: str) -> _Modes:
        """The programs under a key of the document, by mode: training, and whether under autocast."""
        recorded: _Modes = {}
        for program in map(fields.mapping, fields.items(self.document.get(key, []))):
            for mode in map(tuple, fields.items(program["modes"]) or [()]):
                if mode not in _MODES or type(mode[0]) is int or (mode[0], mode[1] is not None) in recorded:
                    raise ValueError(f"it has the mode {mode!r}")
                recorded[mode[0], mode[1] is not None] = program, mode[1]
        return recorded

    def decoded(self, training: bool, amp: DType | None, dtype: DType | None = None) -> Graph:
        """The same at any sizes, also those at which the code takes another way in training."""
        asked = (training, amp is not None)
        try:
            if dtype in dtypes.HALVES and asked in (halved := self.modes("halved")) and amp in (None, dtype):
                program, recorded_amp = halved[asked]
                make = partial(_Program, self.model, self.binding, training, recorded_amp, amp, dtype)
                return self.graph(program, make)
            recorded = self.modes("programs")
            others = ((training, False), (not training, amp is not None), (not training, False))
            for key in (asked, *others, (training, True)):
                if key in recorded:
                    program, recorded_amp = recorded[key]
                    notes = [_other_mode(asked)] if key != asked else []
                    make = partial(_Program, self.model, self.binding, key[0], recorded_amp, amp)
                    return self.graph(program, make, notes)
        except fields.MALFORMED as error:
            raise written.damaged(self.model.path, str(error)) from error
        raise written.damaged(self.model.path, "it has no program of this mode")

    def graph(self, program: Mapping[str, Any], decoder: Callable[[], _Program], notes: Sequence[Note] = ()) -> Graph:
        """The graph of a program, which has that of another call with it where calls differ."""
        graph = decoder().graph(program)
        graph = replace(graph, notes=(*graph.notes, *notes, *self.model.branches))
        if "other_call" not in program:
            return graph
        graph = replace(graph, notes=(*graph.notes, CALLS_DIFFER))
        return with_other_call(graph, decoder().graph(fields.mapping(program["other_call"])))


def _open_limits(model: RecordedModel, training: bool, given: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The sizes of an inference that the model's own limits decide where nobody gives them, with the least of each."""
    return {} if training else {name: both for name, both in model.limits.items() if name not in given}


def _notes_of_limits(model: RecordedModel, training: bool, given: Mapping[str, int]) -> list[Note]:
    return [
        Note(
            "assumption",
            "SM326",
            f"{name} of an image are in the data and were taken as {value:,}, the most that the model's own limit lets "
            f"through (--dim {name}=N sets it)",
        )
        for name, (value, _) in _open_limits(model, training, given).items()
    ]


def _least_of_limits(model: RecordedModel, training: bool, given: Mapping[str, int]) -> dict[str, int]:
    """The least of them, at which a model that is built on demand is recorded too."""
    if not model.is_recorded_again:
        return {}
    return {name: least for name, (value, least) in _open_limits(model, training, given).items() if least < value}


class _Program:
    """Translates one program, of the mode `training` and `recorded_amp`, at one binding. `amp` is the dtype of the
    autocast that is asked for, `cast` that of the cast module that the program is of."""

    def __init__(
        self, model: RecordedModel, binding: Binding, training: bool, recorded_amp: str | None, amp: DType | None,
        cast: DType | None = None,
    ) -> None:  # fmt: skip
        self.model, self.binding, self.training = model, binding, training
        self.document = document = model.document
        self.recorded_amp = recorded_amp
        # bfloat16 and float16 have one size: code that reads the dtype of autocast is recorded with one of them
        self.half = amp if amp is not None and recorded_amp is not None else cast
        self.cast = cast
        self.flags = written.usual_flags(training, None if recorded_amp is None else _HALVES[recorded_amp].name)
        self.symbols = dict(binding.symbols)
        self.notes: list[Note] = [*model.notes, *_notes_of_limits(model, training, binding.symbols)]
        self.sizes: dict[str, int] = {}
        self.least_in_data = _least_of_limits(model, training, binding.symbols)
        self.targets = [fields.text(t) for t in fields.items(document["targets"])]
        self.stacks = _stacks(fields.items(document["stacks"]))
        self.called = [fields.mapping(f) for f in fields.items(document["functions"])]
        self.expanded: dict[int, int] = {}  # size of each function
        self.calls = 0
        self.functions: dict[str, CustomFunction] = {}
        self.names: list[str] = []  # of the values that there are
        self.taken: set[str] = set()  # all names that there are or were
        self.numbers: dict[str, int] = {}  # the last number of each name that has been given, as torch.fx counts them
        self.own = 0  # how many of them the model owns
        self.last = {written.PARAMETER: 0, written.BUFFER: 0}  # values named last
        self.ended: Mapping[str, int] = {}  # values that Python has let go of
        self.read_again: set[str] = set()  # those of them that autograd reads, in ops that it runs for the code
        self.values: dict[str, Value] = {}

    def graph(self, program: Mapping[str, Any]) -> Graph:
        model, document = self.model, self.document
        inputs = tuple(Value(s.name, s.dtype, self.binding.shapes[s.name]) for s in model.inputs)
        self.names += [value.name for value in inputs]
        parameters = self.owned(fields.items(document["parameters"]), "p:", True)
        buffers = self.owned(fields.items(document["buffers"]), "b:", False)
        self.own = len(self.names)
        self.taken.update(self.names)
        kept = self.kept(fields.items(program.get("kept", [])))
        last_held: dict[str, int] = {}
        self.ended = last_held
        self.release(program.get("released_before", []), -1, last_held)
        ops = self.ops(fields.items(program["ops"]), -1, last_held)
        outputs = tuple(self.names[fields.size(v)] for v in fields.items(program.get("outputs", [])))
        called = tuple(usable(fields.text(name)) for name in fields.items(program.get("output_names", [])))
        rows = fields.items(program.get("regions", []))
        given = self.unread(program.get("unread_of_regions", []), len(rows))
        regions = tuple(
            Region(
                fields.size(start), fields.size(end), fields.size(depth), fields.text(name), fields.boolean(reentrant),
                unread=given.get(number, ()),
            )
            for number, (start, end, depth, reentrant, name) in enumerate(rows)
        )  # fmt: skip
        of_calls = self.unread(program.get("unread_of_calls", []), len(self.stacks))
        unread = {self.stacks[call][-1]: values for call, values in of_calls.items()}
        lasting = tuple(self.names[fields.size(v)] for v in fields.items(program.get("lasting", [])))
        loss = fields.boolean(document["loss"]) and self.training
        of_mode = tuple(value for value in inputs if model.inputs_of_mode.get(value.name) in (None, self.training))
        shapes = [self.shape(shape) for shape in fields.items(program.get("output_shapes", []))]
        if shapes and len(shapes) != len(outputs):
            raise ValueError(f"{len(outputs)} outputs have {len(shapes)} shapes")
        enables_grad = not self.training and any(op.grad for op in ops)
        recorded = Recorded(
            last_held, lasting, kept, regions, self.functions, loss, enables_grad, frozenset(self.read_again), unread,
            dict(zip(outputs, shapes, strict=bool(shapes))),
            self.cast is not None, None,
            *self.model.input_embeddings,
            self.unused(program.get("unused", []), ops),
            self.model.trained,
        )  # fmt: skip
        return Graph(
            name=model.path, format=model.format, producer=model.producer, inputs=of_mode, parameters=parameters,
            buffers=buffers, ops=ops, outputs=outputs, values=self.values, notes=tuple(self.notes), recorded=recorded,
            output_names=called if len(called) == len(outputs) else (), least_in_data=self.least_in_data,
        )  # fmt: skip

    def unused(self, rows: Any, ops: Sequence[Op]) -> Mapping[str, tuple[str, tuple[Holder, ...]]]:
        """The values that outlive their use."""
        files, names = (
            [_name(fields.text(t)) for t in fields.items(self.document.get(k, []))] for k in ("files", "names")
        )
        lines = [
            SourceLine(files[fields.size(file)], fields.size(number), _name(fields.text(function)), "")
            for file, number, function in fields.items(self.document.get("lines", []))
        ]
        unused: dict[str, tuple[str, tuple[Holder, ...]]] = {}
        for value, after, holders in fields.items(rows):
            held = [
                (names[fields.size(name)], _HOW[fields.size(how)], lines[fields.size(line)])
                for name, how, line in fields.items(holders)
            ]
            if not -1 <= fields.integer(after) < len(ops):
                raise ValueError(f"a value is let go of after op {after} of {len(ops)}")
            unused[self.names[fields.size(value)]] = ops[after].name if after >= 0 else "", tuple(held)
        return unused

    # -- values --------------------------------------------------------------------------------------------------

    def owned(self, rows: Sequence[Any], prefix: str, trainable: bool) -> tuple[Parameter, ...]:
        owned: list[Parameter] = []
        last: list[str] = []
        for shared, text, shape, *rest in rows:
            dtype, requires_grad, same = _filled(rest, ("float32", trainable, -1))
            last = [*last[: fields.size(shared)], *fields.text(text).split(".")]
            fqn = _name(".".join(last))
            value = Value(prefix + fqn, _dtype(dtype), self.shape(shape))
            self.names.append(value.name)
            alias = owned[fields.size(same)].value.name if fields.integer(same) >= 0 else None
            owned.append(self.model.with_packed(Parameter(value, fqn, fields.boolean(requires_grad), alias)))
        return tuple(owned)

    def kept(self, rows: Sequence[Any]) -> tuple[tuple[Value, str], ...]:
        kept: list[tuple[Value, str]] = []
        for dtype, shape, *rest in rows:
            (base,) = _filled(rest, (-1,))
            (name,) = self.new("kept", 1)
            of = self.names[fields.size(base)] if fields.integer(base) >= 0 else ""
            kept.append((Value(name, _dtype(dtype), self.shape(shape)), of))
        return tuple(kept)

    def fresh(self, word: str) -> str:
        """A name that nothing has: `conv2d`, `conv2d_1`, as the graphs of torch.export have them."""
        name = word
        while name in self.taken:
            number = self.numbers[word] = self.numbers.get(word, 0) + 1
            name = f"{word}_{number}"
        self.taken.add(name)
        return name

    def new(self, word: str, results: Any) -> tuple[str, ...]:
        """Names of the results of an op: of as many values, or "" where a result is none."""
        are_values = fields.items(results) if isinstance(results, list) else [True] * min(fields.size(results), _MOST)
        if len(self.names) + len(are_values) > _MOST:
            raise ValueError(f"it has more than {_MOST:,} values")
        names = []
        for is_value in are_values:
            names.append(self.fresh(word) if fields.boolean(is_value) else "")
            if is_value:
                self.names.append(names[-1])
        return tuple(names)

    def ref(self, arg: str) -> str:
        """The name of the value that an argument is."""
        kind, text = arg[:1], arg[1:]
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"an argument is {arg[:40]!r}")
        steps = int(text)
        number = len(self.names) - steps
        if kind != written.REF:
            number = self.last[kind] = self.last[kind] + steps
        if not 0 <= number < (len(self.names) if kind == written.REF else self.own):
            raise ValueError(f"an argument is {arg[:40]!r}")
        name = self.names[number]
        if name in self.ended:
            self.read_again.add(name)
        return name

    def refs(self, values: Any) -> tuple[str, ...]:
        return tuple("" if v is None else self.ref(fields.text(v)) for v in fields.items(values))

    def shape(self, sizes: Any) -> tuple[int, ...]:
        shape = tuple(self.size(size) for size in fields.items(sizes))
        if any(size < 0 for size in shape):
            raise ValueError(f"a shape is {shape}")
        return shape

    def size(self, size: Any) -> int:
        if type(size) is int:
            return fields.integer(size)
        text = fields.text(size)
        number = self.sizes.get(text)
        if number is None:
            number = self.sizes[text] = self._evaluated(text)
        return number

    def _evaluated(self, text: str) -> int:
        expression = expressions.parse(text)
        for symbol in expressions.symbols_of(expression) - set(self.symbols):
            replaced = self.model.replaced.get(symbol)
            if replaced is None:
                self.symbols[symbol] = self._bounded(symbol)
            else:  # what the code fixed, or found equal, after ops that have it
                self.symbols[symbol] = expressions.evaluate(expressions.parse(replaced), self.binding.symbols)
        number = expressions.evaluate(expression, self.symbols)
        if abs(number) > MAX_DIM:
            raise DimensionError(
                f"a size becomes {number} here", f"The code computes it as {text[:120]}.", "Choose smaller sizes.",
                code="SM118",
            )  # fmt: skip
        return number

    def _bounded(self, symbol: str) -> int:
        """A size that is in the data, as large as it can get."""
        if symbol not in self.model.bounds:
            raise DimensionError(
                f"a size depends on {symbol}, which only the data tells",
                "The code computes a size from tensor values.",
                f"Give an upper bound with --dim {symbol}=N.",
                code="SM117",
            )
        shape, op = self.model.bounds[symbol]
        most = math.prod(self.shape(shape))
        text = (
            f"{symbol} is in the data and was taken as {most:,}, the most that {op} can give (--dim {symbol}=N sets it)"
        )
        self.least_in_data[symbol] = LEAST_FOUND
        if counted := self.model.in_data.get(symbol):
            self.least_in_data[symbol] = max(LEAST_FOUND, most * counted[0] // max(counted[1], 1))
            text += f"; the example has {counted[0]:,} of {counted[1]:,}"
        self.notes.append(Note("assumption", "SM326", text))
        return most

    # -- ops -----------------------------------------------------------------------------------------------------

    def ops(self, rows: Sequence[Any], stack: int, last_held: dict[str, int]) -> tuple[Op, ...]:
        """The ops; `stack` is the module call of the one before, `last_held` takes what Python lets go of."""
        ops: list[Op] = []
        for number, row in enumerate(rows):
            index, step, args, *rest = fields.items(row)
            released, results, flags, kwargs = _filled(rest[:4], written.USUAL_OP)
            target = self.targets[fields.size(index)]
            stack += fields.integer(step)
            word = target.rpartition("::")[2].partition(".")[0][:_LONGEST_WORD] or "op"
            name = f"{word}_{number}"
            read: tuple[Arg, ...]
            if target in (written.FUNCTION, written.HOOK):
                function = self.function(fields.items(args), stack)
                cls = function.name.rpartition(".")[2]
                word = cls[:_LONGEST_WORD] or "function"
                name, target = f"{cls}_{number}", f"{target}.{cls}"
                self.functions[name] = function
                read = tuple(Ref(v) for v in (*function.inputs, *function.results) if v)
            else:
                read = tuple([self.arg(a) for a in fields.items(args)])
            named = {fields.text(k): self.arg(v) for k, v in kwargs.items()} if kwargs else NO_KWARGS
            names = self.new(word, results)
            for shapes in rest[4:]:
                for output, (dtype, shape) in zip(names, fields.items(shapes), strict=False):
                    self.values[output] = Value(output, _dtype(dtype), self.shape(shape))
            self.release(released, number, last_held)
            flags = fields.integer(flags) ^ self.flags
            ops.append(
                Op(
                    name=name,
                    target=target,
                    args=read,
                    kwargs=named,
                    outputs=names,
                    modules=self.stacks[stack] if stack >= 0 else (),
                    grad=not flags & written.NO_GRAD,
                    amp=self.amp(flags),
                    clears=bool(flags & written.CLEARS_AUTOCAST),
                )
            )
        return tuple(ops)

    def release(self, values: Any, number: int, last_held: dict[str, int]) -> None:
        """Python lets go of these values after an op."""
        for back in fields.items(values):
            value = len(self.names) - fields.integer(back)
            if not 0 <= value < len(self.names):
                raise ValueError(f"the value {back} before the end is let go of")
            last_held[self.names[value]] = number

    def unread(self, rows: Any, count: int) -> dict[int, tuple[str, ...]]:
        """What calls are given and do not read, by the number of the call. `count`: how many calls there are."""
        unread: dict[int, tuple[str, ...]] = {}
        call = last = -1
        values = 0
        for step, *numbers in fields.items(rows):
            call = max(call, 0) + fields.size(step)
            if not last < call < count:
                raise ValueError(f"call {call} of {count} is given what it does not read")
            values += len(numbers)
            if values > _MOST:
                raise ValueError(f"calls are given more than {_MOST:,} values that they do not read")
            unread[call] = tuple(self.names[fields.size(v)] for v in numbers)
            last = call
        return unread

    def amp(self, flags: int) -> bool | DType:
        """What autocast does in an op: the step's (True), nothing (False), or that of a region with a dtype."""
        own = next((dtype for bit, dtype in written.AUTOCAST.items() if flags & bit), None)
        if own is None:
            return self.recorded_amp is None
        return True if own == self.recorded_amp else _HALVES[own]

    def arg(self, arg: Any) -> Arg:
        if isinstance(arg, str):
            kind, text = arg[:1], arg[1:]
            if kind in (written.REF, written.PARAMETER, written.BUFFER):
                return Ref(self.ref(arg))
            if kind == written.SIZE:
                return self.size(text)
            if kind == written.DTYPE:
                dtype = dtypes.ALL.get(text)
                return self.half if self.half is not None and text in _HALVES else dtype
            if kind == written.TEXT:
                return text
            if kind == written.FLOAT and text in ("inf", "-inf", "nan"):
                return float(text)
            raise ValueError(f"an argument is {arg[:40]!r}")
        if isinstance(arg, list):
            return tuple([self.arg(a) for a in arg])
        if arg is None or type(arg) in (bool, float):
            return arg  # type: ignore[no-any-return]
        return fields.integer(arg)

    def function(self, args: Sequence[Any], stack: int) -> CustomFunction:
        """The function that an op calls."""
        (index,) = args
        row = self.called[fields.size(index)]
        if index not in self.expanded:
            self.expanded[index] = _count_items(row)
        self.calls += self.expanded[index]
        if self.calls > _MOST:
            raise ValueError("its functions are too large")
        name = fields.text(row["name"])
        inputs, results, saved, attributes = (
            self.refs(row[key]) for key in ("inputs", "results", "saved", "attributes")
        )
        if "backward" not in row:
            return CustomFunction(name, inputs, results, saved, attributes, None, (), ())
        incoming = self.new("gradient", [bool(r) for r in results])
        last_held: dict[str, int] = {}
        self.release(row["released_before"], -1, last_held)
        outer, self.functions, ended, self.ended = self.functions, {}, self.ended, {}
        ops = self.ops(fields.items(row["backward"]), stack, last_held)
        called, self.functions, self.ended = self.functions, outer, ended
        gradients = self.refs(row["gradients"])
        kept = tuple(filter(None, self.refs(row.get("kept", []))))
        reads = [(number, v) for number, op in enumerate(ops) for v in op.refs()]
        reads += [(len(ops), v) for v in gradients]
        if any(last_held.get(v, number) < number for number, v in reads):
            raise ValueError(f"the backward of {name[:60]} reads what has been let go of")
        backward = Graph(
            "", "", "", (), (), (), ops, (*filter(None, gradients), *kept), self.values,
            recorded=Recorded(last_held, (), (), (), called),
        )  # fmt: skip
        materializes = fields.boolean(row.get("materializes", True))
        return CustomFunction(
            name, inputs, results, saved, attributes, backward, incoming, gradients, kept, materializes
        )


def _stacks(rows: Sequence[Any]) -> list[tuple[Frame, ...]]:
    """The module calls around each row. Rows name the row around them, so that their sum is bounded, too."""
    stacks: list[tuple[Frame, ...]] = []
    frames = 0
    characters = 0
    for up, path, cls, *rest in rows:
        (call,) = _filled(rest, (0,))
        around = stacks[len(stacks) - fields.size(up)] if fields.integer(up) else ()
        if len(around) > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST:,} module calls within each other")
        path = fields.text(path)
        path = _name(around[-1].path + path) if path.startswith(".") and around else path
        frames += len(around) + 1
        characters += len(path)
        if frames > _MOST or characters > written.MAX_BYTES:
            raise ValueError(f"its module calls are within each other more than {_MOST:,} times in sum")
        stacks.append((*around, Frame(path, fields.text(cls), fields.integer(call))))
    return stacks


def _filled(values: Sequence[Any], usual: Sequence[Any]) -> list[Any]:
    """Items at the end of a row, with those that were left out."""
    return [*values, *usual[len(values) :]]


def _name(text: str) -> str:
    if len(text) > _LONGEST:
        raise ValueError(f"a name has {len(text):,} characters")
    return text


def _count_items(value: Any) -> int:
    """How many items a part of a document has."""
    items = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(_count_items, items)) if isinstance(value, dict | list) else 1


def _other_mode(asked: tuple[bool, bool]) -> Note:
    training, amp = asked
    mode = f"{'training' if training else 'inference'}{' under autocast' if amp else ''}"
    return Note("warning", "SM328", f"{mode} was not recorded: the ops of another mode are taken")


def _dtype(name: Any) -> DType:
    return dtypes.ALL[fields.text(name)]
