"""Programs of a recording as `frontends.recording_format` writes them.

What the code repeats becomes the same text, which LZMA packs to almost nothing: values are counted back from the op
that uses them, parameters and module calls on from the last one named, and what is usual is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from staticmem.frontends import recording_format as written

if TYPE_CHECKING:
    from staticmem.recording.holders import Holder, Line
    from staticmem.recording.watch import Program


def owned(tensors: Iterable[tuple[Any, ...]], trainable: bool) -> list[list[Any]]:
    """Rows of parameters or buffers: name, shape, dtype, whether it requires a gradient, and whose storage it shares.

    `trainable` is what is usual.
    """
    rows = []
    last: list[str] = []
    for name, shape, *rest in tensors:
        path = name.split(".")
        shared = 0
        while shared < min(len(path) - 1, len(last)) and path[shared] == last[shared]:
            shared += 1
        rows.append([shared, ".".join(path[shared:]), shape, *_unusual(rest, ("float32", trainable, -1))])
        last = path
    return rows


def stacks(calls: Sequence[tuple[int, str, str, int]]) -> list[list[Any]]:
    """Rows of module calls: the index of the calling one, path, class, and which call of the module it is."""
    rows = []
    for index, (parent, path, cls, call) in enumerate(calls):
        above = f"{calls[parent][1]}." if parent >= 0 else "."
        path = path[len(above) - 1 :] if path.startswith(above) else path
        rows.append([index - parent if parent >= 0 else 0, path, cls, *_unusual([call], (0,))])
    return rows


Modes = dict[str, list[tuple[bool, "str | None"]]]  # the JSON of programs -> their modes


def _with_modes(programs: Modes) -> list[dict[str, Any]]:
    return [{"modes": [list(m) for m in modes], **json.loads(text)} for text, modes in programs.items()]


class Rows:
    """The programs of one recording, each written once, and the custom functions that they call.

    `buffers` are the values that the buffers are: the last ones that the model owns. `targets` are numbers of targets.
    """

    def __init__(self, buffers: range, targets: Mapping[str, int]) -> None:
        self.buffers, self.targets = buffers, targets
        self.lines: dict[Line, int] = {}  # of holders -> index
        self.names: dict[str, int] = {}  # of variables -> index
        self._functions: dict[str, int] = {}  # their JSON -> index
        self._programs: Modes = {}
        self._halved: Modes = {}  # those of the module cast to 16 bits

    def add(self, row: dict[str, Any], training: bool, amp: str | None, cast: bool = False) -> None:
        """Adds a program that `row` has written."""
        programs = self._halved if cast else self._programs
        programs.setdefault(json.dumps(row), []).append((training, amp))

    def row(self, program: Program, training: bool, amp: str | None) -> dict[str, Any]:
        row = _Numbering(self, written.usual_flags(training, amp)).program(program)
        if program.other_call is not None:
            row["other_call"] = self.row(program.other_call, training, amp)
        return row

    def function(self, row: dict[str, Any]) -> int:
        return self._functions.setdefault(json.dumps(row), len(self._functions))

    def holder(self, holder: Holder) -> list[int]:
        name, how, line = holder
        return [self.names.setdefault(name, len(self.names)), how, self.lines.setdefault(line, len(self.lines))]

    def of_code(self) -> dict[str, Any]:
        """The tables of files, lines and names."""
        files: dict[str, int] = {}
        lines = [[files.setdefault(file, len(files)), *rest] for file, *rest in self.lines]
        return {"files": list(files), "lines": lines, "names": list(self.names)} if lines else {}

    @property
    def programs(self) -> list[dict[str, Any]]:
        return _with_modes(self._programs)

    @property
    def halved(self) -> list[dict[str, Any]]:
        return _with_modes(self._halved)

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._functions]


class _Numbering:
    """Numbers the values of one program in the order in which they are made."""

    def __init__(self, rows: Rows, usual_flags: int) -> None:
        self.rows, self.usual_flags = rows, usual_flags
        self.number_of = {value: value for value in range(rows.buffers.stop)}
        self.next = rows.buffers.stop
        self.last = {written.PARAMETER: 0, written.BUFFER: 0}

    def program(self, program: Program) -> dict[str, Any]:
        kept = [(dtype, shape, self.number_of.get(base, -1), self.new(v)) for v, dtype, shape, base in program.kept]
        before = self.released(program.released_before)
        ops = self.ops(program, -1)
        row = {
            "kept": [[dtype, shape, *_unusual([base], (-1,))] for dtype, shape, base, _ in kept],
            "released_before": before,
            "ops": ops,
            "regions": program.regions,
            "unread_of_calls": self.unread(program.unread_of_calls),
            "unread_of_regions": self.unread(program.unread_of_regions),
            "outputs": [self.number_of[v] for v in program.outputs],
            "output_shapes": program.output_shapes,
            "output_names": program.output_names if any(program.output_names) else [],
            "lasting": [self.number_of[v] for v in program.lasting if v in self.number_of],
            "unused": self.unused(program),
        }
        return {key: value for key, value in row.items() if value}

    def ops(self, program: Program, stack: int) -> list[list[Any]]:
        """The rows of a program's ops; `stack` is the module call of the one before."""
        rows = []
        for (target, own_stack, flags, args, kwargs, outputs, *shapes), ended in zip(
            program.ops, program.released, strict=True
        ):
            if target in (self.rows.targets.get(written.FUNCTION), self.rows.targets.get(written.HOOK)):
                args = [self.rows.function(self.function(program.functions[args[0]], own_stack))]
            else:
                args, kwargs = self.arg(args), {key: self.arg(value) for key, value in kwargs.items()}
            for value in outputs:
                if value >= 0:
                    self.new(value)
            are_values = [value >= 0 for value in outputs]
            results = len(outputs) if all(are_values) else are_values
            rest = [self.released(ended), results, flags ^ self.usual_flags, kwargs, *shapes]
            rows.append([target, own_stack - stack, args, *_unusual(rest, written.USUAL_OP)])
            stack = own_stack
        return rows

    def function(self, function: dict[str, Any], stack: int) -> dict[str, Any]:
        row = {
            "name": function["name"],
            **{key: self.refs(function[key]) for key in ("inputs", "results", "saved", "attributes")},
        }
        body: Program | None = function["backward"]
        if body is not None:
            for value in function["grads"]:
                if value >= 0:
                    self.new(value)
            row["released_before"] = self.released(body.released_before)
            row["backward"] = self.ops(body, stack)
            row["gradients"] = self.refs(function["gradients"])
        if not function.get("materializes", True):
            row["materializes"] = False
        if "kept" in function:
            row["kept"] = self.refs(function["kept"])
        return row

    def unread(self, given: Iterable[tuple[int, list[int]]]) -> list[list[int]]:
        """Rows of what calls are given and do not read: steps from the call of the row before, and numbers."""
        rows = []
        last = 0
        for call, values in sorted(given):
            numbers = [self.number_of[v] for v in values if v in self.number_of]
            if numbers:
                rows.append([call - last, *numbers])
                last = call
        return rows

    def unused(self, program: Program) -> list[list[Any]]:
        """Values that outlive their use, but for those that the caller gets."""
        number_of, reads = self.number_of, program.last_reads
        return [
            [number_of[value], op - 1, [*map(self.rows.holder, holders)]]
            for value, (op, holders) in program.unused.items()
            if value in number_of and value not in program.outputs and reads.get(value, -1) < op
        ]

    def new(self, value: int) -> int:
        number = self.number_of[value] = self.next
        self.next += 1
        return number

    def released(self, values: Iterable[int]) -> list[int]:
        return [self.next - self.number_of[v] for v in values if v in self.number_of]

    def refs(self, values: Iterable[int]) -> list[str | None]:
        return [self.ref(v) if v >= 0 else None for v in values]

    def ref(self, value: int) -> str:
        number = self.number_of[value]
        if number >= self.rows.buffers.stop:
            return f"{written.REF}{self.next - number}"
        kind = written.BUFFER if number in self.rows.buffers else written.PARAMETER
        last, self.last[kind] = self.last[kind], number
        return f"{kind}{number - last}"

    def arg(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self.arg(a) for a in arg]
        if isinstance(arg, float) and not math.isfinite(arg):
            return f"{written.FLOAT}{arg}"  # JSON has no infinity
        return self.ref(int(arg[1:])) if isinstance(arg, str) and arg.startswith(written.REF) else arg


def _unusual(values: list[Any], usual: Sequence[Any]) -> list[Any]:
    """Without the last ones that are as usual."""
    while values and len(values) <= len(usual) and values[-1] == usual[len(values) - 1]:
        values.pop()
    return values
