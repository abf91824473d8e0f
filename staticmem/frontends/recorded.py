"""The model of a recording: the ops that the code ran in each mode, read as hostile input, without torch.

`staticmem.frontends.recording_format` describes the document. A file that carries a recording is opened as its model;
the file's own graph is not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from staticmem.errors import DimensionError
from staticmem.frontends import fields, recent, traced_sizes
from staticmem.frontends import recording_format as written
from staticmem.ir import dtypes, expressions
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import (
    NO_KWARGS,
    Arg,
    CustomFunction,
    Frame,
    Graph,
    Note,
    Op,
    Parameter,
    Recorded,
    Ref,
    Region,
    Value,
)  # fmt: skip
from staticmem.ir.model_file import MAX_DIM, Binding, InputSpec, SymbolRange

_HALVES = {"bfloat16": dtypes.bfloat16, "float16": dtypes.float16}


class RecordedModel:
    """A `ModelFile` over the document of a recording."""

    def __init__(self, path: str, document: Any, format: str) -> None:
        """`format` is that of the file which carries the recording."""
        self.path, self.format = path, format
        self.graphs: recent.Graphs | None = None
        try:
            self.document = fields.mapping(document)
            version = fields.integer(self.document["version"])
            if version > written.VERSION:
                raise ValueError(f"it has version {version}, and this staticmem reads {written.VERSION}")
            self.producer = f"PyTorch {fields.text(self.document['torch'])}"
            self.symbols = {
                fields.text(name): SymbolRange(fields.size(low), None if high is None else fields.size(high))
                for name, (low, high) in fields.mapping(self.document["symbols"]).items()
            }
            self.sizes = traced_sizes.of_content(self.document["sizes"])
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


def decode(model: RecordedModel, binding: Binding) -> Graph:
    """The graph of training at these sizes; its `programs` have those of the other modes.

    Raises:
        ModelFileError: the recording is damaged.
        DimensionError: a size is not a number here.
    """
    programs = _Programs(model, binding)
    training = programs.of(True, None)
    return replace(training, programs=programs)


class _Programs:
    """The programs of a recording at one binding."""

    def __init__(self, model: RecordedModel, binding: Binding) -> None:
        self.model, self.binding, self.document = model, binding, model.document

    def of(self, training: bool, amp: DType | None) -> Graph:
        try:
            programs = [fields.mapping(p) for p in fields.items(self.document["programs"])]
            recorded = {(fields.boolean(p["training"]), p["amp"] is not None): p for p in programs}
            asked = (training, amp is not None)
            for key in (asked, (training, False), (not training, amp is not None), (not training, False)):
                if key in recorded:
                    program = _Program(self.model, self.binding, recorded[key], amp)
                    program.notes += [_other_mode(asked)] if key != asked else []
                    return program.graph()
        except fields.MALFORMED as error:
            raise written.damaged(self.model.path, str(error)) from error
        raise written.damaged(self.model.path, "it has no program of this mode")


class _Program:
    """Translates one program at one binding. `amp` is the dtype of the autocast that is asked for."""

    def __init__(self, model: RecordedModel, binding: Binding, program: Mapping[str, Any], amp: DType | None) -> None:
        self.model, self.binding, self.program = model, binding, program
        self.document = document = model.document
        self.recorded_amp = None if program["amp"] is None else _HALVES[program["amp"]]
        # bfloat16 and float16 have one size: code that reads the dtype of autocast is recorded with one of them
        self.half = amp if amp is not None and self.recorded_amp is not None else None
        self.symbols = dict(binding.symbols)
        self.notes: list[Note] = []
        self.sizes: dict[str, int] = {}
        self.targets = [fields.text(t) for t in fields.items(document["targets"])]
        stacks: list[tuple[Frame, ...]] = []
        for parent, path, cls, call in fields.items(document["stacks"]):
            around = stacks[fields.size(parent)] if fields.integer(parent) >= 0 else ()
            stacks.append((*around, Frame(fields.text(path), fields.text(cls), fields.integer(call))))
        self.stacks = [*stacks, ()]  # the last one is of ops outside of all modules: index -1
        self.names: dict[int, str] = {}  # of what the model owns
        self.values: dict[str, Value] = {}

    def graph(self) -> Graph:
        model, document, program = self.model, self.document, self.program
        for index, spec in enumerate(model.inputs):
            self.names[index] = spec.name
        inputs = tuple(Value(s.name, s.dtype, self.binding.shapes[s.name]) for s in model.inputs)
        parameters = self.owned(fields.items(document["parameters"]), True)
        buffers = self.owned(fields.items(document["buffers"]), False)
        kept = self.kept(fields.items(program["kept"]))
        results = fields.items(program["outputs"])
        for index, value in enumerate(results):
            self.names.setdefault(fields.size(value), f"output_{index}" if index else "output")
        ops = self.ops(program)
        outputs = tuple(self.name(v) for v in results)
        last_held = self.releases(program, len(ops))
        regions = tuple(
            Region(
                fields.size(start), fields.size(end), fields.size(depth), fields.text(name), fields.boolean(reentrant)
            )
            for start, end, depth, reentrant, name in fields.items(program["regions"])
        )
        functions = {
            op.name: self.function(fields.mapping(program["functions"][fields.size(op.args[0])]))
            for op in ops
            if op.target == written.FUNCTION
        }
        lasting = tuple(self.name(v) for v in fields.items(program["lasting"]))
        loss = fields.boolean(document["loss"]) and fields.boolean(program["training"])
        recorded = Recorded(last_held, lasting, kept, regions, functions, loss)
        return Graph(
            name=model.path, format=model.format, producer=model.producer, inputs=inputs, parameters=parameters,
            buffers=buffers, ops=ops, outputs=outputs, values=self.values, notes=tuple(self.notes), recorded=recorded,
        )  # fmt: skip

    # -- values --------------------------------------------------------------------------------------------------

    def owned(self, rows: Sequence[Any], parameters: bool) -> tuple[Parameter, ...]:
        owned: list[Parameter] = []
        for fqn, dtype, shape, requires_grad, same in rows:
            name = ("p:" if parameters else "b:") + fields.text(fqn)
            self.names[len(self.names)] = name
            value = Value(name, _dtype(dtype), self.shape(shape))
            alias = owned[fields.size(same)].value.name if fields.integer(same) >= 0 else None
            owned.append(Parameter(value, fqn, fields.boolean(requires_grad), alias))
        return tuple(owned)

    def kept(self, rows: Sequence[Any]) -> tuple[tuple[Value, str], ...]:
        return tuple(
            (Value(self.name(value), _dtype(dtype), self.shape(shape)), self.name(base) if base >= 0 else "")
            for value, dtype, shape, base in rows
        )

    def name(self, value: Any) -> str:
        """What a value is called in the graph."""
        if value in self.names:
            return self.names[value]
        return f"v{fields.size(value)}" if fields.integer(value) >= 0 else ""

    def shape(self, sizes: Any) -> tuple[int, ...]:
        return tuple(self.size(size) for size in fields.items(sizes))

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
            self.symbols[symbol] = self._bounded(symbol)
        number = expressions.evaluate(expression, self.symbols)
        if abs(number) > MAX_DIM:
            raise DimensionError(
                f"a size becomes {number} here", f"The code computes it as {text[:120]}.", "Choose smaller sizes.",
                code="SM118",
            )  # fmt: skip
        return number

    def _bounded(self, symbol: str) -> int:
        """A size that is in the data, as large as it can get."""
        bounds = fields.mapping(self.document.get("bounds") or {})
        if symbol not in bounds:
            raise DimensionError(
                f"a size depends on {symbol}, which only the data tells",
                "The code computes a size from tensor values.",
                f"Give an upper bound with --dim {symbol}=N.",
                code="SM117",
            )
        shape, op = bounds[symbol]
        most = math.prod(self.shape(shape))
        text = (
            f"{symbol} is in the data and was taken as {most:,}, the most that {op} can give (--dim {symbol}=N sets it)"
        )
        self.notes.append(Note("assumption", "SM326", text))
        return most

    # -- ops -----------------------------------------------------------------------------------------------------

    def ops(self, program: Mapping[str, Any]) -> tuple[Op, ...]:
        ops = []
        for number, row in enumerate(fields.items(program["ops"])):
            target, stack, flags, args, kwargs, outputs, *shapes = fields.items(row)
            target = self.targets[fields.size(target)]
            names = tuple(self.name(v) for v in fields.items(outputs))
            if shapes:
                for name, (dtype, shape) in zip(names, fields.items(shapes[0]), strict=False):
                    self.values[name] = Value(name, _dtype(dtype), self.shape(shape))
            ops.append(
                Op(
                    name=f"{target.rpartition('::')[2].partition('.')[0]}_{number}",
                    target=target,
                    args=tuple([self.arg(a) for a in fields.items(args)]),
                    kwargs={fields.text(k): self.arg(v) for k, v in kwargs.items()} if kwargs else NO_KWARGS,
                    outputs=names,
                    modules=self.stacks[fields.integer(stack)],
                    grad=not fields.integer(flags) & written.NO_GRAD,
                    amp=self.amp(flags),
                )
            )
        return tuple(ops)

    def amp(self, flags: int) -> bool | DType:
        """What autocast does in an op: the step's (True), nothing (False), or that of a region with a dtype."""
        own = next((dtype for bit, dtype in written.AUTOCAST.items() if flags & bit), None)
        if own is None:
            return self.recorded_amp is None
        return True if own == self.program["amp"] else _HALVES[own]

    def arg(self, arg: Any) -> Arg:
        if isinstance(arg, str):
            kind, text = arg[:1], arg[1:]
            if kind == written.REF:
                return Ref(self.name(int(text)))
            if kind == written.SIZE:
                return self.size(text)
            if kind == written.DTYPE:
                dtype = dtypes.ALL.get(text)
                return self.half if self.half is not None and text in _HALVES else dtype
            if kind == written.TEXT:
                return text
            raise ValueError(f"an argument is {arg[:40]!r}")
        if isinstance(arg, list):
            return tuple([self.arg(a) for a in arg])
        if arg is None or type(arg) in (bool, float):
            return arg  # type: ignore[no-any-return]
        return fields.integer(arg)

    def releases(self, program: Mapping[str, Any], ops: int) -> dict[str, int]:
        released = fields.items(program["released"])
        if len(released) != ops:
            raise ValueError(f"{len(released):,} releases of {ops:,} ops")
        last = {self.name(v): -1 for v in fields.items(program["released_before"])}
        for index, values in enumerate(released):
            for value in fields.items(values):
                last[self.name(value)] = index
        return last

    def function(self, row: Mapping[str, Any]) -> CustomFunction:
        names = {
            key: tuple(self.name(v) for v in fields.items(row[key]))
            for key in ("inputs", "results", "saved", "attributes", "grads")
        }
        backward: Graph | None = None
        gradients: tuple[str, ...] = ()
        if row["backward"] is not None:
            body = fields.mapping(row["backward"])
            ops = self.ops(body)
            gradients = tuple(self.name(v) for v in fields.items(row["gradients"]))
            recorded = Recorded(self.releases(body, len(ops)), (), (), (), {})
            backward = Graph(
                "", "", "", (), (), (), ops, tuple(filter(None, gradients)), self.values, recorded=recorded
            )
        return CustomFunction(
            fields.text(row["name"]), names["inputs"], names["results"], names["saved"], names["attributes"], backward,
            names["grads"], gradients,
        )  # fmt: skip


def _other_mode(asked: tuple[bool, bool]) -> Note:
    training, amp = asked
    mode = f"{'training' if training else 'inference'}{' under autocast' if amp else ''}"
    return Note("warning", "SM328", f"{mode} was not recorded: the ops of another mode are taken")


def _dtype(name: Any) -> DType:
    return dtypes.ALL[fields.text(name)]
