"""Who holds each value while the model's code runs: variables that it does not mention again, items and attributes.

At each op the frames of the model's code are looked at. A value can be let go of once all references to it are those of
variables that are not mentioned again before they are assigned, of items of lists and dictionaries, and of attributes:
Python's own count of references tells whether there are others (an argument of a call that has not returned, a tuple, a
closure). Nothing here holds a tensor or a frame, which would change what is recorded.
"""

from __future__ import annotations

import ast
import dis
import linecache
import os
import sys
import sysconfig
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from staticmem.frontends.recording_format import ATTRIBUTE, BEFORE, DELETED, EMPTIED, ITEM

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NEVER = (_OWN, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_OPTIMIZED = 0x3  # CO_OPTIMIZED | CO_NEWLOCALS: the frame of a function
_COPIES = sys.version_info < (3, 13)  # before, `f_locals` was a copy that the frame kept (PEP 667)
_MOST_ITEMS = 256  # of a container
_LONGEST = 80  # characters of the name of a variable

Line = tuple[str, int, str]  # file, number, function
Holder = tuple[str, int, Line]  # what has to go by its name in the code, how (`recording_format`), and where
# what refers to each tensor, by its id; None for a variable that the code mentions again, and for a tuple
References = Mapping[int, list[Holder | None]]


class Holders:
    """What the frames of one model hold. `attributes` are those of modules to which code has given a tensor."""

    def __init__(self, root: torch.nn.Module) -> None:
        own = getattr(sys.modules.get(type(root).__module__), "__file__", None)
        self.folder = os.path.dirname(os.path.abspath(own)) + os.sep if own else ""
        self.attributes: dict[tuple[int, str], tuple[Any, Line]] = {}
        self._paths: dict[str, str] = {}
        self._before: dict[int, int] = {}  # frame -> the line that it ran when the op before was looked at

    def place(self, frame: FrameType, line: int) -> Line:
        name = str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name)).rpartition("<locals>.")[2]
        return self.path(frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))), line, name[:_LONGEST]

    def now(self) -> Line | None:
        """The line of the model's code that runs."""
        frame = next(_frames(), None)
        return None if frame is None else self.place(frame, frame.f_lineno)

    def path(self, file: str, module: str) -> str:
        """A file without the folders that are of the machine."""
        if file not in self._paths:
            full = os.path.abspath(file)
            first = -1 - module.count(".") - os.path.basename(file).startswith("__init__.")  # a package's own folders
            if self.folder and full.startswith(self.folder):
                first = self.folder.count(os.sep)
            self._paths[file] = "/".join(full.split(os.sep)[first:])
        return self._paths[file]

    def assigned(self, module: torch.nn.Module, name: str) -> None:
        """Code has assigned an attribute."""
        frame = next(_frames(), None)
        if frame is not None and isinstance(module.__dict__.get(name), torch.Tensor):
            self.attributes[id(module), name] = weakref.ref(module), self.place(frame, frame.f_lineno)

    def look(self, tensors: Mapping[int, torch.Tensor | None]) -> dict[int, list[Holder]]:
        """The values that could go, with all that holds them: nothing of Python's holds the base of views. `tensors`
        are values to look for, each with its tensor: this is asked for right where nothing else has them."""
        references: References = {id(tensor): [] for tensor in tensors.values() if tensor is not None}
        seen: set[int] = set()
        frames = list(_frames())
        for frame in frames:
            self._look_at(frame, references, seen)
        for (_, name), (module_ref, line) in self.attributes.items():
            module = module_ref()
            if module is not None and (number := id(module.__dict__.get(name))) in references:
                references[number].append((f"self.{name}", ATTRIBUTE, line))
        free: dict[int, list[Holder]] = {}
        own = Counter(map(id, tensors.values()))  # an op in place gives its tensor another value
        for value in tensors:
            tensor = tensors[value]
            held = [holder for holder in references.get(id(tensor), ()) if holder is not None]
            # one more is the variable here
            if tensor is not None and _references(tensor) - own[id(tensor)] - 1 - _of_views(tensor) == len(held):
                free[value] = held
        self._before = {id(frame): frame.f_lineno for frame in frames}
        return free

    def _look_at(self, frame: FrameType, references: References, seen: set[int]) -> None:
        shared = _shared(frame.f_code)
        if shared is None:  # the code may have the copy
            return
        variables: Any = frame.f_locals
        containers: list[tuple[str, Any]] = []
        value: Any = None
        for name, value in variables.items():
            if name in shared:
                continue
            if id(value) in references:
                references[id(value)].append(self.end_of(frame, name))
            elif type(value) in (list, tuple, dict) and id(value) not in seen and len(value) <= _MOST_ITEMS:
                seen.add(id(value))
                if not references.keys().isdisjoint(map(id, value.values() if type(value) is dict else value)):
                    containers.append((name, value))
        if _COPIES:
            variables.clear()
        del value, variables
        for name, container in containers:
            alone = _references(container) == 3  # of the frame, of the list here and of the variable here
            self._look_into(frame, name, container, references, alone)

    def _look_into(self, frame: FrameType, name: str, container: Any, references: References, alone: bool) -> None:
        """Into what a variable has. `alone`: nothing else has it."""
        numbers = [id(item) for item in (container.values() if isinstance(container, dict) else container)]
        holder = self.end_of(frame, name) if alone else None
        if holder is None and not isinstance(container, tuple):
            line = self._before.get(id(frame), frame.f_lineno)  # the op before may have been the last to read it
            holder = name[:_LONGEST], ITEM, self.place(frame, line)
        for number in references.keys() & numbers:
            references[number] += [holder] * numbers.count(number)

    def end_of(self, frame: FrameType, name: str) -> Holder | None:
        """Where a variable can be deleted before the statement that runs; None: the code mentions it again. Where that
        begins another turn of a loop, or is behind one, it is behind the last statement of a turn."""
        code = frame.f_code
        number, start = _statement_at(code, frame.f_lasti)
        if is_mentioned(code, start, name):
            return None
        statements, lines = _statements(code.co_filename), _code(code).lines
        turn = 0  # the end of a loop that begins another turn
        while (around := statements.around.get(number)) in lines and not turn:
            if is_mentioned(code, lines.index(around), name):
                break
            if around < self._before.get(id(frame), 0) <= statements.loop_ends.get(around, 0):
                turn = statements.loop_ends[around]
            else:
                number = around
        loop = statements.behind.get(number)
        if not turn and loop in lines and not is_mentioned(code, lines.index(loop), name):
            turn = statements.loop_ends[loop]
        how, line = (EMPTIED, turn) if turn else statements.places.get(number, (DELETED, number - 1))
        return name[:_LONGEST], how, self.place(frame, line)


def _frames() -> Iterator[FrameType]:
    """The frames of the model's code, innermost first: functions that are neither PyTorch's nor Python's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_called" and code.co_filename.startswith(_OWN):
            return
        if code.co_flags & _OPTIMIZED == _OPTIMIZED and _is_of_model(code.co_filename):
            yield frame
        frame = frame.f_back


@cache
def _shared(code: CodeType) -> frozenset[str] | None:
    """The variables that closures have too, and those that comprehensions make; None: the code asks for all."""
    if "locals" in code.co_names or "vars" in code.co_names:
        return None
    own = [name for name in code.co_varnames if name.startswith(".")]
    return frozenset((*code.co_cellvars, *code.co_freevars, *own))


@cache
def _is_of_model(file: str) -> bool:
    if file.startswith("<") and not file.startswith("<ipython"):
        return False
    full = os.path.abspath(file)
    return not full.startswith(_NEVER) and (not full.startswith(_STANDARD) or any(map(full.count, _LIBRARIES)))


def _references(of: Any) -> int:
    """References to an object, without that of the argument here (from Python 3.14 on it is borrowed)."""
    return sys.getrefcount(of) - _COUNTED


def _of_views(tensor: torch.Tensor) -> int:
    """The references that PyTorch itself has, as views have to their base: since it counts them they are one."""
    return int(_COUNTS_ITSELF and tensor._use_count() > 1)


def _calibrate() -> tuple[int, bool]:
    base = torch.empty(1, device="meta")
    alone = _references(base)
    views = [base.view(1)]
    return alone - 1, _references(base) == alone + len(views)


_COUNTED = 0
_COUNTED, _COUNTS_ITSELF = _calibrate()


# -- what the code of a function says ------------------------------------------------------------------------------


class _Statements:
    """The statements of a file by their first line."""

    def __init__(self, file: str) -> None:
        self.start: dict[int, tuple[int, int]] = {}  # line -> the statement, or the head of one, that it is of
        self.places: dict[int, tuple[int, int]] = {}  # how to let go of a variable before it, and the line of that
        self.around: dict[int, int] = {}  # the first statement of a block -> the one that has the block
        self.behind: dict[int, int] = {}  # the statement behind a loop -> the loop
        self.loop_ends: dict[int, int] = {}  # the first line of a loop -> the last of what it repeats
        with suppress(SyntaxError, ValueError, RecursionError):
            self._walk(ast.parse("".join(linecache.getlines(file))), False)

    def _walk(self, node: ast.AST, in_loop: bool) -> None:
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        in_loop = not is_scope and (in_loop or isinstance(node, ast.For | ast.While))
        if isinstance(node, ast.For | ast.While):
            self.loop_ends[node.lineno] = node.body[-1].end_lineno or 0
        for _, block in ast.iter_fields(node):
            before: ast.stmt | None = None
            for item in block if isinstance(block, list) else ():
                if isinstance(item, ast.stmt):
                    self._add(item, before, in_loop)
                    if before is None and isinstance(node, ast.stmt) and not is_scope and node.lineno != item.lineno:
                        self.around[item.lineno] = node.lineno
                    before = item
                if isinstance(item, ast.stmt | ast.ExceptHandler | ast.match_case):
                    self._walk(item, in_loop)

    def _add(self, item: ast.stmt, before: ast.stmt | None, in_loop: bool) -> None:
        body = getattr(item, "body", None)
        end = max(body[0].lineno - 1 if body else item.end_lineno or 0, item.lineno)
        self.start.update(dict.fromkeys(range(item.lineno, end + 1), (item.lineno, end)))
        line = item.lineno - 1 if before is None else before.end_lineno or 0
        how = EMPTIED if in_loop else DELETED  # what is deleted twice has to be assigned in between
        if isinstance(before, ast.For | ast.While):
            self.behind[item.lineno] = before.lineno
        self.places[item.lineno] = (BEFORE, item.lineno) if hasattr(before, "body") else (how, line)


_statements = cache(_Statements)


class _Code(NamedTuple):
    instructions: list[dis.Instruction]
    at: dict[int, int]  # offset -> index
    lines: list[int]  # of each instruction


@cache
def _code(code: CodeType) -> _Code:
    instructions = list(dis.get_instructions(code))
    starts = {start: line or 0 for start, _, line in code.co_lines()}
    lines, line = [], 0
    for instruction in instructions:
        line = starts.get(instruction.offset, line)
        lines.append(line)
    return _Code(instructions, {i.offset: index for index, i in enumerate(instructions)}, lines)


@cache
def _statement_at(of: CodeType, offset: int) -> tuple[int, int]:
    """The first line of the statement that runs, and the index of its first instruction."""
    code = _code(of)
    index = bisect_right(code.instructions, offset, key=lambda i: i.offset) - 1  # it may be that of an inline cache
    line = code.lines[index]
    start, end = _statements(of.co_filename).start.get(line, (line, line))
    while index and start <= code.lines[index - 1] <= end:
        index -= 1
    return start, index


@cache
def is_mentioned(of: CodeType, start: int, name: str) -> bool:
    """Whether a function, from an instruction on, may read or delete a variable before it assigns it."""
    code = _code(of)
    ahead, been = [start], set()
    while ahead:
        index = ahead.pop()
        while index < len(code.instructions) and index not in been:
            been.add(index)
            instruction = code.instructions[index]
            operation = instruction.opname
            names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            if "_FAST" in operation and name in names:
                assigns_first = names[0] == name or operation == "STORE_FAST_STORE_FAST"
                if not (operation.startswith("STORE_FAST") and assigns_first):
                    return True
                break
            if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
                ahead.append(code.at[instruction.argval])
                if operation in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"):
                    break
            if operation.startswith(("RETURN", "RAISE", "RERAISE")):
                break
            index += 1
    return False
