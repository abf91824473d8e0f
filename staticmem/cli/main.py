"""The `staticmem` command: finds the verb, turns errors into three lines and an exit code.

Exit codes: 0 done; 1 a gate is not met; 2 it could not be done; 130 interrupted; 143 terminated; 129 its
terminal was closed.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from staticmem.errors import StaticmemError, UsageError, did_you_mean, unexpected
from staticmem.version import __version__

EPILOG = """\
examples:
  staticmem analyze models:resnet50 --optimizer adam             an example that comes with staticmem
  staticmem analyze model.onnx                                   inference
  staticmem analyze model.pt2 --batch 32 --optimizer adam        a training step
  staticmem analyze model.pt2 --batch 32 --optimizer adamw --amp bf16
  staticmem analyze model.onnx --optimizer sgd --momentum 0.9 --explain-peak

'staticmem analyze -h' has the flags of every day, '--help' has all.
Exit codes: 0 done, 1 a gate is not met, 2 not possible, 130 interrupted.
"""

# the module of each verb, in which `add_VERB` makes its parser
MODULES = {
    "analyze": "analyze",
    "sweep": "sweep",
    "plan": "plan",
    "size": "size",
    "fit": "fit",
    "gpus": "size",
    "levers": "fit",
    "why": "listings",
    "graph": "listings",
    "check": "sweep",
    "init": "setup",
    "diff": "saved",
    "layers": "listings",
    "trace": "listings",
    "validate": "validate",
    "reconcile": "records",
    "calibrate": "records",
    "compare-snapshot": "records",
    "explain-oom": "records",
    "report": "saved",
    "export": "export",
    "annotate": "annotate",
    "explain": "explain",
    "mcp": "agents",
    "doctor": "doctor",
    "completion": "setup",
}
VERBS = tuple(MODULES)
HIDDEN = {"schema": "setup"}


SEVERAL = "Several cards are 'staticmem size --gpu A --gpu B', several sizes 'staticmem sweep --what-if batch=8,16'."


class Parser(argparse.ArgumentParser):
    """argparse with errors as `UsageError`, so that all errors look alike. `verbs` are the parsers of the verbs."""

    verbs: Any

    def error(self, message: str) -> NoReturn:
        hint = f"See '{self.prog} --help'."
        if message.startswith("argument VERB: invalid choice: "):
            word = message.split("'")[1]
            message, hint = f"unknown verb '{word}'", did_you_mean(word, VERBS)
        elif message.startswith("unrecognized arguments:"):
            word = message.split(":", 1)[1].split()[0]
            if word.startswith("--"):
                hint = self._suggestion(word) or hint  # a verb has too many flags to list
            elif "unrecognized" in message and not word.startswith("-"):
                hint = f"A flag takes one value. {SEVERAL}"
        raise UsageError(message, "The command line was not understood.", hint, code="SM140")

    def _suggestion(self, word: str) -> str:
        """The flag that an unknown one may mean, as the help writes it; empty where none is close."""
        from staticmem.scenario.options import hint_for  # late: for errors only

        flags = {}
        for action in self._actions:
            for flag in action.option_strings:
                metavar = f" {action.metavar}" if isinstance(action.metavar, str) and action.metavar else ""
                # options have the names of their fields, which are not those of the flags everywhere: --dim sets dims
                flags[action.dest if flag == action.option_strings[-1] else flag.lstrip("-")] = f"{flag}{metavar}"
        hint = hint_for(word.split("=", 1)[0].lstrip("-"), flags)
        for name, written in flags.items():
            hint = hint.replace(f"'{name}'", f"'{written}'")
        return hint


def make_parser(verb: str | None = None) -> Parser:
    """The parser of all verbs, or of one alone: a start builds only the parser that it uses."""
    parser = Parser(
        prog="staticmem",
        description="How much GPU memory a model needs, from its exported graph: no GPU, no training, no weights.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"staticmem {__version__}")
    verbs = parser.verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    modules = {**MODULES, **HIDDEN}
    for name in (verb,) if verb in modules else modules:
        getattr(import_module(f"staticmem.cli.{modules[name]}"), f"add_{name.replace('-', '_')}")(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    prepare_streams()
    try:
        with terminable():
            return _main(list(sys.argv[1:] if argv is None else argv))
    except Terminated as ending:
        return ending.code


def _main(argv: list[str]) -> int:
    debug = "--debug" in argv
    verb = next((word for word in argv if not word.startswith("-")), "")
    try:
        parser = make_parser(verb)
        if "-h" in argv and verb in MODULES:
            from staticmem.cli.flags import print_short_help

            print_short_help(parser.verbs.choices[verb])
            return 0
        args, rest = parser.parse_known_args(argv)
        if args.verb is None and not rest:
            parser.print_help()
            return 0
        if rest:
            asked = parser if args.verb is None else args.parser
            asked.error(f"unrecognized arguments: {' '.join(rest)}")
        refuse_second_values(args.parser, argv)
        args.argv = argv
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except StaticmemError as error:
        if debug:
            raise
        return print_error(error, verb, argv)
    except BrokenPipeError:
        # the reader (head, less) has closed the pipe
        drop_stdout()
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except MemoryError as error:
        return print_error(unexpected(error), argv=argv)
    except Exception as error:
        # errors of named files carry the name: this one is of a stream that has no room for more
        if isinstance(error, OSError) and error.filename is None and error.errno in FULL:
            drop_stdout()
            why = f"{error.strerror}."
            return print_error(UsageError("stdout cannot be written", why, "Give a file: -o FILE.", "SM142"))
        if isinstance(error, FileNotFoundError) and folder_is_gone():
            why, hint = "It was removed, so that no path can begin there.", "Go to a folder that exists."
            return print_error(UsageError("the current folder does not exist", why, hint, "SM101"), argv=argv)
        if debug:
            raise
        return print_error(unexpected(error), argv=argv)


def refuse_second_values(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """argparse takes the last value of a flag that has one, so that another before it would be ignored.

    Raises:
        UsageError: such a flag has two that differ.
    """
    flags, taken = parser._option_string_actions, dict[str, str]()
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--":
            return  # the rest are no flags
        flag, joined, value = word.partition("=")
        if flag not in flags and not flag.startswith("--"):  # -b8
            flag, joined, value = word[:2], "yes", word[2:]
        action = flags.get(flag)
        if type(action) is not argparse._StoreAction:  # a switch, a list, or no flag
            continue
        value = value if joined else following
        before = taken.setdefault(action.dest, value)
        if before != value:
            what = f"{action.option_strings[-1]} is given twice: '{before}' and '{value}'"
            raise UsageError(what, "It takes one value.", f"Leave one of them out. {SEVERAL}", "SM140")


def print_error(error: StaticmemError, verb: str = "", argv: Sequence[str] = ()) -> int:
    """Three lines to stderr: what, why, what to do; without advice of its own, the help of the verb. Where the command
    line asks for JSON, stdout has the same as `schemas/error-1.schema.json`. The exit code."""
    from staticmem.cli.output import encodable  # late: for errors only
    from staticmem.report.text import printable

    what, why, hint = (printable(line) for line in (error.what, error.why, error.hint))
    why = why or "The request cannot be analysed as given."
    hint = hint or f"See 'staticmem {verb if verb in VERBS else 'analyze'} --help'."
    text = f"error: {what} [{error.code}]\n  {why}\n  {hint}\n"
    sys.stderr.write(encodable(text, sys.stderr.encoding))
    if _prints_json(argv):
        row = {"schema": "staticmem.error/1", "code": error.code, "what": what, "why": why, "hint": hint}
        sys.stdout.write(json.dumps(row, indent=2) + "\n")
    return 2


# as words, of which a flag has its value in the same or the next; `-qf json` and `-ofile` are flags too
_JSON = re.compile(r"(-[qv]*f[ =]?|--format[ =])json", re.IGNORECASE)
_TO_FILE = re.compile(r"-[qv]*o(?!-).*|--output(=.*)?")


def _prints_json(argv: Sequence[str]) -> bool:
    """Whether a command line, which may not be one that is understood, asks for JSON on stdout."""
    pairs = zip(argv, [*argv, ""][1:], strict=True)
    asked = any(_JSON.fullmatch(word) or _JSON.fullmatch(f"{word} {following}") for word, following in pairs)
    return asked and not any(_TO_FILE.fullmatch(word) for word in argv)


# -- the process: streams that may be closed or full, and the signal that asks it to end

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
# signals that ask a program to end: its own, and that of a terminal that is closed
ENDING = (signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))


class Terminated(BaseException):
    """One of `ENDING`. Not an Exception: nothing handles it but clean-up. `code` is what a shell gives for a program
    that the signal ended."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


@contextmanager
def terminable() -> Iterator[None]:
    """These signals unwind the stack here, so that temporary files go, instead of ending the process at once."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # a program that calls this, or nohup, handles a signal itself
    mine = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in mine:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def prepare_streams() -> None:
    """Opens os.devnull for streams that the caller closed (`>&-`); else the next opened file would take their place.

    Puts a buffer under stdout where there is none (`python -u`, PYTHONUNBUFFERED): without one, Python takes a write
    for complete of which a full disk took a part.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    out = sys.__stdout__
    if out is not None and sys.stdout is out and isinstance(out.buffer, io.RawIOBase):  # else it is a caller's
        sys.stdout = open(out.fileno(), "w", encoding=out.encoding, errors=out.errors, closefd=False)  # noqa: SIM115


def folder_is_gone() -> bool:
    """Whether the current folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def drop_stdout() -> None:
    """Discards what is still in stdout's buffer: Python's flush on exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
