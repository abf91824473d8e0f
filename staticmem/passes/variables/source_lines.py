"""Local variables as the export's stack traces show them, and for how long at most, where they show code in part.

torch.export (and the ONNX exporter built on it) keep the Python frames of every op, with the source line of each. A
line `x = self.conv(x)` says which name holds the result: until the name is assigned again in that frame, or the frame
returns. Where a file has no traces (they can be stripped), `variables.policy` states a policy instead.

A frame is told from the next call of the same function by its caller's frame and line, and by its module call. A
statement ends when its frame moves to another line, or calls another module on a line that has one call (a loop).
A line with several statements does not tell which of them an op is of: their variables are taken to hold nothing, and
the upper end of the band has them hold all that they may (`unseen_code.values_on_crowded_lines`).

What lines leave open, and what the upper end of the band assumes of it:

- A line calls code that no trace shows (a method, a function of the file): it may hold all that it made until the line
  is done.
- A line is a part of a statement, or assigns what a call returned in a container: all that later ops read of what it
  made, and all that the code which returned had names for, may be held until the line runs again or the frame returns.
- A list that no line assigns is read (`sum(skips)`, `preds[-1]`): all that the frame has names for may be in it.
- A value that is read after its line has run again is in a container, which lives until the frame returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from staticmem.ir.graph import Frame, Graph, Op, Ref, SourceLine
from staticmem.ir.stacks import general_path
from staticmem.ops.registry import JOINS
from staticmem.passes.variables import line_texts
from staticmem.passes.variables.policy import Attribute, attention_weights

_APPEND = re.compile(r"^([A-Za-z_][\w.]*)\.(?:append|insert|extend)\(")
_JOINED = re.compile(r"(?:(?<![\w.])|\btorch\.)(?:cat|concat(?:enate)?|stack)\(\s*([A-Za-z_]\w*)\s*[,)]")
_ADDED = re.compile(r"(?<![\w.])sum\(\s*([A-Za-z_]\w*)\s*\)")  # Python's own: an `add` for each value of the list
_ARGUMENTS = re.compile(r"\(([^()]*)\)\s*(?:#.*)?$")
_SUMS = ("aten::add", "aten::add_")
_SECOND = re.compile(r"[\w\])]\s*\+=?\s*([A-Za-z_]\w*)\s*(?:[),\]]|#|$)")
_FIRST = re.compile(r"(?:[=(,\[]|\breturn)\s*([A-Za-z_]\w*)\s*\+(?!=)")
_WORD = re.compile(r"[A-Za-z_]\w*")
_REPLACED = "?="  # the slot of what a name held that the running line assigns again
_PASSED = re.compile(r"([\w.\]]+)\(\s*([A-Za-z_]\w*)\s*\)\s*(?:#.*)?$")


def names_of_children(graph: Graph) -> frozenset[str]:
    """The attributes that modules of a graph have child modules in."""
    return frozenset(part for op in graph.ops for frame in op.modules for part in frame.path.split("."))


def _child_called(op: Op, modules: int) -> str:
    """The path by which the module call at a level of the stack calls the next one, with `*` for numbers of lists."""
    if not 0 < modules < len(op.modules):
        return ""
    path = op.modules[modules].path.removeprefix(op.modules[modules - 1].path).strip(".")
    return general_path(path)


@dataclass
class PythonFrame:
    """A running Python function: where it is, what its names hold."""

    line: SourceLine
    modules: int  # how many module calls enclose it (itself included)
    began: int  # index of the first op
    since: int  # of the first op of the running statement
    names: dict[str, list[str]] = field(default_factory=dict)  # a list `xs` is kept under `xs[]`
    reads: set[str] = field(default_factory=set)  # by the ops of the running statement
    opened: set[str] = field(default_factory=set)  # lists that a line of this frame assigned
    aliases: set[str] = field(default_factory=set)  # names that were given without an op
    called: dict[str, int] = field(default_factory=dict)  # children that the statement has called, and how often
    child: str = ""  # the last one of them
    done: bool = False  # the statement has ended
    guessed: bool = False  # it may have, or goes on
    listed: tuple[int, str] = (0, "")  # the line and list of the statement before, where that made one


def held_by_lines(graph: Graph) -> Mapping[str, int]:
    """For every op result that a Python name holds: the index of the last op during which it holds it."""
    return execution_of(graph).released


def execution_of(graph: Graph) -> Execution:
    """All of the graph, line by line: `released` and `assigned` say what variables and modules hold."""
    execution = Execution(graph)
    if any(op.stack for op in graph.ops[:64]):
        execution.run()
    return execution


_RUNS_FUNCTION = re.compile(r"\brun_function\(")


def is_checkpoint_function(line: SourceLine) -> bool:
    """Whether a line is of the autograd function of a checkpoint with use_reentrant=True (torch/utils/checkpoint.py,
    `CheckpointFunction.forward`, and copies of it in libraries). Its `forward` is no module's."""
    return line.function == "forward" and _RUNS_FUNCTION.search(line.text) is not None


_TORCH = re.compile(r"[/\\]torch[/\\]")


def is_of_torch(line: SourceLine) -> bool:
    """Whether a line is of PyTorch, whose code was compared with what is held here. All other code may hold more."""
    return _TORCH.search(line.file) is not None


def certainly_held_by_lines(graph: Graph) -> Mapping[str, int]:
    """As `held_by_lines`, without lists and names that no line assigns: a statement without an op, of which there is no
    trace, may take a value out of a list (`x = skips.pop()`)."""
    return Execution(graph, certain=True).run() if any(op.stack for op in graph.ops[:64]) else {}


class Execution:
    """Follows the Python frames from op to op. `now` is always the op that ran last."""

    def __init__(self, graph: Graph, certain: bool = False) -> None:
        self.graph, self.last_read, self.certain = graph, graph.last_read, certain
        self.children = names_of_children(graph)
        self.frames: list[PythonFrame] = []
        self.modules: tuple[Frame, ...] = ()
        self.holders: dict[str, int] = {}  # how many names hold a value
        self.released: dict[str, int] = {}
        self.latest: tuple[str, ...] = ()
        self.made_by: dict[str, int] = {}  # the op that made a value
        self.named: set[str] = set()  # values that a name was given to
        self.attributes: dict[tuple[Frame, ...], dict[str, str]] = {}  # `self.x = ...`, of each call of a module
        self.weights: Set[str] | None = None  # of attention, once a line asks
        self.assigned: dict[str, Attribute] = {}  # values that are attributes when the forward returns

    def run(self) -> dict[str, int]:
        for index, op in enumerate(self.graph.ops):
            if op.stack:
                self._move_frames(op, index - 1)
                if op.outputs:
                    self.latest = op.outputs
                    self.made_by.update(dict.fromkeys(op.outputs, index))
                for frame in self.frames:
                    frame.reads.update(op.refs())
                if len(self.frames) == len(op.stack) and self._ends_statement(self.frames[-1], op):
                    self._finish(self.frames[-1], index)
                    self.frames[-1].done = True
            elif op.modules and op.outputs:
                self._lose_line(op, index)
        self._leave_frames(0, len(self.graph.ops) - 1)
        return self.released

    def _lose_line(self, op: Op, index: int) -> None:
        """An op whose line an export has lost: what it reads last is taken to lose its name (`x = f(x)`)."""
        if self.certain:  # a line that is lost may have assigned any name again
            self._leave_frames(0, index - 1)
            return
        calls = 0
        while calls < min(len(self.modules), len(op.modules)) and self.modules[calls] == op.modules[calls]:
            calls += 1
        depth = sum(frame.modules <= calls for frame in self.frames)
        self._leave_frames(depth, index - 1)
        if not self.frames:
            return
        frame = self.frames[-1]
        if frame.line.text:
            self._finish(frame, index - 1)
            frame.line, frame.since = replace(frame.line, line=-1, text=""), index
        for name, values in [*frame.names.items()]:
            if any(self.last_read.get(value) == index for value in values):
                self._drop(frame.names.pop(name), index)

    def _move_frames(self, op: Op, now: int) -> None:
        """Moves from the frames of the op before to those of `op`; what ends, ends after op `now`."""
        depth = self._still_running(op)
        returned = len(self.frames) > depth
        self._leave_frames(depth, now)
        modules = 0
        for level, line in enumerate(op.stack):
            calls = level + 1 < len(op.stack)
            # the function of a checkpoint ends with the module that it runs, as if it were that module's
            function = is_checkpoint_function(line)
            modules += line.function == "forward" and not function
            if level == len(self.frames):
                self.frames.append(PythonFrame(line, modules + function, now + 1, now + 1))
            frame = self.frames[level]
            # the first call of a line goes on with what the line did for its arguments (`k = f(y + dt * k1)`)
            child = _child_called(op, modules) if calls else ""
            new_call = calls and level >= depth - 1
            ended = frame.done or (new_call and self._turns(frame, child))
            if not calls and returned and level == depth - 1:
                ended = ended or self._ended_with_call(frame)
            if frame.line.line != line.line or ended:
                if not frame.done:
                    self._finish(frame, now)
                if frame.line.line != line.line:
                    self._drop(frame.names.pop(_REPLACED, []), now)
                frame.since, frame.called, frame.done = now + 1, {}, False
            frame.line = line
            if new_call:
                frame.called[child] = frame.called.get(child, 0) + 1
                frame.child = child
        self.modules = op.modules

    def _ends_statement(self, frame: PythonFrame, op: Op) -> bool:
        """Whether the running statement ends with this op of its own, as all its calls have returned."""
        text = frame.line.text
        if op.base.removeprefix("aten::").rstrip("_") != line_texts.op_that_ends(text):
            return False
        return self._all_returned(frame)

    def _ended_with_call(self, frame: PythonFrame) -> bool:
        """Whether what the last call returned was the result of the running statement."""
        text, child = frame.line.text, frame.child
        if not line_texts.ends_with_call(text, child) or frame.called.get(child, 0) < line_texts.calls_of(text, child):
            return False
        return self._all_returned(frame)

    def _all_returned(self, frame: PythonFrame) -> bool:
        """Whether a statement has called all that may run ops: a variable that it calls is a child of a list."""
        of_lists = sum(count for child, count in frame.called.items() if "*" in child)
        return line_texts.hidden_calls(frame.line.text, self.children) <= of_lists

    def _turns(self, frame: PythonFrame, child: str) -> bool:
        """Whether one more call of a child is of the next turn of a loop: the line has no other call for it."""
        text = frame.line.text
        most = line_texts.calls_of(text, child)
        if line_texts.most_calls(text) < 2 and (most or not line_texts.calls_hidden_code(text, self.children)):
            return bool(frame.called)
        if most == 0:  # a function that no trace shows calls it, in a loop or not
            frame.guessed = self.certain and child in frame.called
            return frame.guessed
        return frame.called.get(child, 0) >= most

    def _still_running(self, op: Op) -> int:
        """How many of the frames still run: same functions, and same lines in all callers."""
        calls = 0
        for x, y in zip(self.modules, op.modules, strict=False):
            if x != y:
                break
            calls += 1
        depth = 0
        for frame, line in zip(self.frames, op.stack, strict=False):
            if frame.line.file != line.file or frame.line.function != line.function or frame.modules > calls:
                break
            depth += 1
            if frame.line.line != line.line:
                break
        return depth

    def _leave_frames(self, depth: int, now: int) -> None:
        while len(self.frames) > depth:
            if not self.frames[-1].done:
                self._finish(self.frames[-1], now)
            for values in self.frames.pop().names.values():
                self._drop(values, now)

    # -- statements ----------------------------------------------------------------------------------------------

    def _finish(self, frame: PythonFrame, now: int) -> None:
        """The frame's statement is done: its names take the last op's results."""
        statements = line_texts.statements_of(frame.line.text)
        reads, frame.reads = frame.reads, set()
        guessed, frame.guessed = frame.guessed, False
        if len(statements) > 1 or guessed:  # no op says which of them it is of, or what they have assigned
            for name in line_texts.assigned_names(statements):
                self._forget(frame, name, now)
            return
        text = statements[0] if statements else ""
        if ".pop(" in text:  # what the statement read of a list is gone from it
            for name, values in frame.names.items():
                if name.endswith("[]"):
                    self._drop([v for v in values if v in reads], now)
                    frame.names[name] = [v for v in values if v not in reads]
        guesses = not self.certain or is_of_torch(frame.line)
        joined = (_JOINED.search(text) or _ADDED.search(text)) if guesses else None
        if joined is not None:  # `cat(parts)`: a list; `parts.append(x)` runs no op, so that no trace shows it
            reads = self._joined_parts(frame, now) or reads
            owner, name = self._list_owner(frame, joined[1], reads)
            parts = owner.names.setdefault(name + "[]", [])
            self._extend(parts, [v for v in reads if v not in parts and len(reads) > 1 and v in self.made_by])
        if guesses:
            self._aliases(frame, text, now)
            self._passed_name(frame, text, reads)
        listed, frame.listed = frame.listed, (0, "")
        append = _APPEND.match(text)
        if append is not None:
            if guesses:
                self._extend(frame.names.setdefault(append[1] + "[]", []), self.latest[-1:])
            return
        assign = line_texts.ASSIGN.match(text)
        if assign is not None:
            names = [name.strip(" *") for name in assign[1].split(",")]
            is_list = text[assign.end() :].lstrip().startswith("[")
            if guesses or not is_list:
                self.latest = line_texts.element_of(text, self.latest)
                self._assign(frame, names, is_list, listed, now)

    def _assign(self, frame: PythonFrame, names: list[str], is_list: bool, listed: tuple[int, str], now: int) -> None:
        values = self.latest
        each = self._results(frame.since, now) if len(names) > 1 and len(values) == 1 else ()
        for position, name in enumerate(names):
            if name.startswith("self.") and name.count(".") == 1:
                if len(names) == 1 or not is_of_torch(frame.line):
                    taken = self._taken(position, len(names), each) or self._weights(frame.since, now)
                    self._keep(frame, name, taken, now)
            elif name == "_" or "." in name:
                continue
            elif len(names) == 1 and is_list:
                # `xs = [f(x) for f in fs]`: all that the line makes and later ones read. A comprehension with one call
                # on its line ends a statement with each turn, and the list goes on
                frame.opened.add(name)
                taken = self._results(frame.since, now) or values[:1]
                self._hold(taken)
                if listed != (frame.line.line, name):
                    # a comprehension gives its name the list when all of its turns are done
                    replaced = [*frame.names.pop(name, ()), *frame.names.pop(f"{name}[]", ())]
                    frame.names.setdefault(_REPLACED, []).extend(replaced)
                frame.listed = frame.line.line, name
                frame.names.setdefault(name + "[]", []).extend(taken)
            else:
                taken = self._taken(position, len(names), each)
                self._hold(taken)
                self._forget(frame, name, now)
                frame.names[name] = list(taken)
                frame.aliases.discard(name)
                self.named.update(taken)

    def _taken(self, position: int, count: int, each: tuple[str, ...]) -> tuple[str, ...]:
        """What one of `count` names is given. `each`: what the statement made and later ones read."""
        values = self.latest
        if count == 1:
            return values[:1]
        if len(values) == count:
            return values[position : position + 1]
        if len(each) == count:
            return each[position : position + 1]
        return values if position == 0 else ()

    def _weights(self, since: int, now: int) -> tuple[str, ...]:
        """The weights of attention that a statement computed: what functions return beside a result as a habit."""
        if self.weights is None:
            self.weights = attention_weights(self.graph)
        outputs = [name for op in self.graph.ops[since : now + 1] for name in op.outputs if name in self.weights]
        return tuple(outputs[-1:])

    def _keep(self, frame: PythonFrame, name: str, values: tuple[str, ...], now: int) -> None:
        """`self.x = value`: the module holds it on, and no longer what it had before."""
        modules = self.modules[: frame.modules]
        kept = self.attributes.setdefault(modules, {})
        before = kept.pop(name, None)
        if before is not None:
            self.assigned.pop(before, None)
            self._drop([before], now)
        for value in values[:1]:
            kept[name] = value
            self._hold((value,))
            path = modules[-1].path if modules else ""
            self.assigned[value] = Attribute(f"{path}.{name[5:]}".strip("."), now)

    def _aliases(self, frame: PythonFrame, text: str, now: int) -> None:
        """`x = f(x) + residual`: a name that no line with an op assigned is another name of that operand
        (`residual = x`). It means the operand from its making on, until the same name means another one."""
        op = self.graph.ops[now]
        operands = [a.name for a in op.args[:2] if isinstance(a, Ref)]
        if op.base not in _SUMS or len(operands) != 2 or op.stack[len(self.frames) :] or op.stack[-1:] != (frame.line,):
            return
        for pattern, value in ((_SECOND, operands[1]), (_FIRST, operands[0])):
            match = pattern.search(line_texts.without_indices(text))
            name = match[1] if match is not None else ""
            born = self.made_by.get(value, -1)
            if not name or born < frame.began or (name in frame.names and name not in frame.aliases):
                continue
            if value in frame.names.get(name, ()):
                continue
            self._hold((value,))
            for old in frame.names.pop(name, []):
                self._drop([old], max(born, self.last_read.get(old, born)))
            frame.names[name] = [value]
            frame.aliases.add(name)

    def _passed_name(self, frame: PythonFrame, text: str, reads: Iterable[str]) -> None:
        """`x = self.up(low)`: a name that no line with an op assigned (`low = x`) means the one value of its frame that
        the line reads."""
        match = _PASSED.search(text)
        name = match[2] if match is not None and match[1] not in line_texts.BUILTINS else ""
        if not name or (name in frame.names and name not in frame.aliases) or f"{name}[]" in frame.names:
            return
        own = [value for value in reads if frame.began <= self.made_by.get(value, -1) < frame.since]
        if len(own) != 1 or own[0] in frame.names.get(name, ()) or not self._was_named(frame, own[0], text):
            return
        self._hold((own[0],))
        for old in frame.names.pop(name, []):
            born = self.made_by[own[0]]
            self._drop([old], max(born, self.last_read.get(old, born)))
        frame.names[name] = own
        frame.aliases.add(name)

    def _was_named(self, frame: PythonFrame, value: str, text: str) -> bool:
        """Whether a line gave a name to a value, and the line that reads it now does not read it by that name."""
        assign = line_texts.ASSIGN.match(text)
        augmented = assign is None or assign[0][-2:-1] in tuple("+-*/@|&")
        read_names = set(_WORD.findall(text if augmented or assign is None else text[assign.end() :]))
        return value in self.named and not any(value in values and n in read_names for n, values in frame.names.items())

    def _results(self, since: int, now: int) -> tuple[str, ...]:
        """What a statement made and later ones read: `x1, x2 = self.f1(x), self.f2(x)`."""
        outputs = (name for op in self.graph.ops[since : now + 1] for name in op.outputs)
        return tuple(name for name in outputs if self.last_read.get(name, -1) > now)

    def _joined_parts(self, frame: PythonFrame, now: int) -> set[str]:
        """What the joins of the frame's statement read: `xs.append(f(torch.cat(xs)))` reads more, within `f`."""
        depth = self.frames.index(frame) + 1
        ops = [op for op in self.graph.ops[frame.since : now + 1] if len(op.stack) == depth]
        joins = [op for op in ops if op.base in JOINS] or [op for op in ops if op.base in _SUMS]
        return {name for op in joins for name in op.refs()}.difference(*(op.outputs for op in joins))

    def _list_owner(self, frame: PythonFrame, name: str, reads: set[str]) -> tuple[PythonFrame, str]:
        """The frame that a joined list lives in, and its name there.

        It is the caller's where the caller passes a name besides the first argument that no op was assigned to, and the
        list came with contents: something in it is older than the frame (`self.conv_mid(x, output)`).
        """
        depth = self.frames.index(frame)
        if depth == 0 or name in frame.opened or not any(self.made_by.get(v, -1) < frame.began for v in reads):
            return frame, name
        caller = self.frames[depth - 1]
        passed = _ARGUMENTS.search(caller.line.text)
        names = [a.strip() for a in passed[1].split(",")][1:] if passed is not None else []
        lists = [a for a in names if a.isidentifier() and a not in caller.names and a not in ("None", "True", "False")]
        if not lists:
            return frame, name
        appended = frame.names.pop(name + "[]", [])  # by this frame
        caller.names.setdefault(lists[-1] + "[]", []).extend(appended)
        return caller, lists[-1]

    # -- holders -------------------------------------------------------------------------------------------------

    def _extend(self, values: list[str], more: Iterable[str]) -> None:
        more = tuple(more)
        values.extend(more)
        self._hold(more)

    def _hold(self, values: tuple[str, ...]) -> None:
        for value in values:
            self.holders[value] = self.holders.get(value, 0) + 1

    def _forget(self, frame: PythonFrame, name: str, now: int) -> None:
        """A name is assigned again, whether it meant a value or a list."""
        self._drop(frame.names.pop(name, []), now)
        self._drop(frame.names.pop(name + "[]", []), now)

    def _drop(self, values: list[str], now: int) -> None:
        for value in values:
            self.holders[value] -= 1
            if self.holders[value] == 0:
                self.released[value] = now


_LISTS = re.compile(
    r"\b(?:cat|concat(?:enate)?|stack|sum|tuple|list)\(\s*([A-Za-z_]\w*)\s*[,)]|\b([A-Za-z_]\w*)\[-\d|\b(\w+)\.pop\("
)


def longest_holds_of_lines(graph: Graph) -> tuple[dict[str, int], Set[str]]:
    """For every op result that a Python frame may hold: the index of the last op during which it may; and the results
    that a call returns beside its own (`return f(x), out`), which outlive it."""
    longest = _Longest(graph)
    return longest.run(), longest.passed_on


class _Longest(Execution):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.returned: list[str] = []  # what frames that returned had names for, during the running statement
        self.passed_on: set[str] = set()
        self.listy = _find_unseen_lists(graph)

    def _finish(self, frame: PythonFrame, now: int) -> None:
        if is_of_torch(frame.line):
            super()._finish(frame, now)
            self.returned = []
            return
        text, indices = frame.line.text, range(frame.since, now + 1)
        returned, self.returned = self.returned, []
        before = {name: tuple(values) for name, values in frame.names.items()}
        for values in before.values():
            self._hold(values)
        hidden = line_texts.calls_hidden_code(text, self.children)
        ops, depth = self.graph.ops, self.frames.index(frame) + 1
        results = [name for index in indices for name in ops[index].outputs]
        super()._finish(frame, now)
        read_later = [name for name in results if self.last_read.get(name, -1) > now]
        if hidden:  # what modules of the model's own make inside themselves is in frames of their own
            own = [op for op in (ops[index] for index in indices) if all(map(is_of_torch, op.stack[depth:]))]
            for name in (
                *(n for op in own for n in op.outputs),
                *(n for op in own for n in op.refs() if n in self.made_by),
            ):
                if self.made_by.get(name, -1) >= frame.since:
                    self.until(name, now)
        one = line_texts.assigns_one_result(text) and set(read_later) <= set(self.latest)
        if not one:
            unclear = dict.fromkeys(
                (
                    *read_later,
                    *(
                        self.latest
                        if line_texts.ASSIGN.match(text) or line_texts.parsed_statement(text) is None
                        else ()
                    ),
                )
            )
            if len(set(read_later) - set(self.latest)) or not line_texts.assigns_one_result(text):
                unclear.update(dict.fromkeys(returned))
            slot = f"?{frame.line.line}"
            self._hold(tuple(unclear))
            self._forget(frame, slot, now)
            frame.names[slot] = list(unclear)
        key = (frame.line.file, frame.line.function)
        for name, values in before.items():  # names that were assigned again
            kept = frame.names.get(name, ())
            for value in values:
                if value not in kept and (key in self.listy or self.last_read.get(value, -1) > now):
                    self._hold((value,))
                    frame.names.setdefault("?[]", []).append(value)
            self._drop(list(values), now)

    def _leave_frames(self, depth: int, now: int) -> None:
        while len(self.frames) > depth:
            frame = self.frames[-1]
            values = [value for held in frame.names.values() for value in held]
            for name in line_texts.returned_names(frame.line.text):
                self.passed_on.update(frame.names.get(name, ()))
            super()._leave_frames(len(self.frames) - 1, now)
            self.returned = [*self.returned, *values, *(v for held in frame.names.values() for v in held)]

    def until(self, value: str, index: int) -> None:
        self.least[value] = max(self.least.get(value, index), index)

    def run(self) -> dict[str, int]:
        self.least: dict[str, int] = {}
        released = super().run()
        for name, index in self.least.items():
            released[name] = max(released.get(name, index), index)
        return released


def _find_unseen_lists(graph: Graph) -> set[tuple[str, str]]:
    """Functions that read a list which no line of theirs assigns."""
    texts: dict[tuple[str, str], set[str]] = {}
    for stack in {id(op.stack): op.stack for op in graph.ops}.values():
        for line in stack:
            texts.setdefault((line.file, line.function), set()).add(line.text)
    keys: set[tuple[str, str]] = set()
    for key, lines in texts.items():
        assigned = {
            name.strip(" *") for text in lines if (m := line_texts.ASSIGN.match(text)) for name in m[1].split(",")
        }
        read = {name for text in lines for match in _LISTS.findall(text) for name in match if name}
        if read - assigned - {"self", "x"}:
            keys.add(key)
    return keys
