"""Errors that a user can act on: what happened, why, and what to do. The command line turns them into exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEEDED = {"networkx": "networkx", "numpy": "numpy", "onnx": "onnx", "yaml": "pyyaml", "shtab": "shtab"}  # by module


class StaticmemError(Exception):
    """An expected failure. `what`, `why` and `hint` are one sentence each; `code` is stable (SM1xx: input)."""

    def __init__(self, what: str, why: str = "", hint: str = "", code: str = "SM100") -> None:
        super().__init__(what)
        self.what, self.why, self.hint, self.code = what, why, hint, code

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.hint) if line)


class ModelFileError(StaticmemError):
    """The model file is missing, damaged, or not a format that staticmem reads."""


class DimensionError(StaticmemError):
    """A dimension has no size, or a size that was asked for contradicts the graph."""


class UsageError(StaticmemError):
    """A flag or a value that is not understood."""


def unexpected(error: Exception, again: str = "Run it again") -> StaticmemError:
    """What is said of an exception that nobody expected, and of the end of main memory, in place of a traceback."""
    if isinstance(error, MemoryError):
        why, hint = "The graph is larger than this machine can hold.", "Run it on a machine with more main memory."
        return StaticmemError("not enough memory for the analysis", why, hint, "SM191")
    if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
        hint = f"pip install {NEEDED[error.name]}"
        why = "What was asked needs it: staticmem was installed without its dependencies."
        return StaticmemError(f"{error.name} is not installed", why, hint, "SM146")
    detail = (str(error).splitlines() or [""])[0][:200]
    return StaticmemError(
        f"internal error: {type(error).__name__}: {detail}", "This is a bug of staticmem, not of your model.",
        f"{again} with --debug and report what it prints.", "SM190",
    )  # fmt: skip


def described(error: BaseException) -> str:
    """An exception and the cause at the end of its chain, the first line of each: wrappers hide what went wrong."""
    last: BaseException = error
    for _ in range(20):
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None:
            break
        last = cause
    text = _first_line(error)
    return text if last is error or _first_line(last) in text else f"{text.rstrip('.')}; the cause: {_first_line(last)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:180]}" if lines else type(error).__name__


def closest(word: str, choices: Iterable[str]) -> str:
    """A hint that names the choice closest to a word, first one of the same letters; empty where none is close."""
    ordered = sorted(choices)
    swapped = [choice for choice in ordered if sorted(choice) == sorted(word)]
    close = swapped or difflib.get_close_matches(word, ordered, n=1, cutoff=0.6)
    return f"Did you mean '{close[0]}'?" if close else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint that names the closest choice, or lists all of them where none is close."""
    return closest(word, choices) or f"Known: {', '.join(sorted(choices))}."
