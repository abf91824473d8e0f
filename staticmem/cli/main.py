"""The `staticmem` command: finds the verb, turns errors into three lines and an exit code.

Exit codes: 0 done; 1 --strict found unknown ops; 2 it could not be done; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from staticmem.cli import streams
from staticmem.errors import StaticmemError, UsageError, did_you_mean
from staticmem.version import __version__

EPILOG = """\
examples:
  staticmem analyze model.onnx                                   inference
  staticmem analyze model.pt2 --batch 32 --optimizer adam        a training step
  staticmem analyze model.pt2 --batch 32 --optimizer adamw --amp bf16
  staticmem analyze model.onnx --optimizer sgd --momentum 0.9 --explain-peak

'staticmem analyze --help' has all flags. Exit codes: 0 done, 1 --strict failed, 2 not possible, 130 interrupted.
"""


_HELP = "See 'staticmem analyze --help'."


class Parser(argparse.ArgumentParser):
    """argparse with errors as `UsageError`, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        hint = f"See '{self.prog} --help'."
        if message.startswith("argument VERB: invalid choice: "):
            word = message.split("'")[1]
            message, hint = f"unknown verb '{word}'", did_you_mean(word, VERBS)
        elif message.startswith("unrecognized arguments:"):
            word = message.split(":", 1)[1].split()[0]
            known = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
            if word.startswith("--"):
                close = did_you_mean(word.split("=", 1)[0], known)
                hint = close if close.startswith("Did") else hint  # a verb has too many flags to list
        raise UsageError(message, "The command line was not understood.", hint, code="SM140")


VERBS = (
    "analyze", "sweep", "size", "gpus", "levers", "check", "init", "diff", "layers",
    "trace", "validate", "reconcile", "calibrate", "compare-snapshot", "report", "export", "explain", "doctor",
    "completion",
)  # fmt: skip
HIDDEN = ("schema",)


def make_parser(word: str | None = None) -> Parser:
    """The parser of all verbs, or of one alone: an ordinary start does not build what it will not use."""
    import importlib

    parser = Parser(
        prog="staticmem",
        description="How much GPU memory a model needs, from its exported graph: no GPU, no training, no weights.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"staticmem {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for verb in (word,) if word in (*VERBS, *HIDDEN) else (*VERBS, *HIDDEN):
        importlib.import_module(f"staticmem.cli.{verb.replace('-', '_')}").add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    streams.open_closed_streams()
    try:
        with streams.terminable():
            return _main(list(sys.argv[1:] if argv is None else argv))
    except streams.Terminated:
        return streams.TERMINATED


def _main(words: list[str]) -> int:
    debug = "--debug" in words
    try:
        parser = make_parser(next((word for word in words if not word.startswith("-")), None))
        args, rest = parser.parse_known_args(words)
        if args.verb is None:
            parser.print_help()
            return 2 if rest else 0
        if rest:
            args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.words = words
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except StaticmemError as error:
        if debug:
            raise
        print_error(error)
        return 2
    except BrokenPipeError:
        # the reader (head, less) has what it wanted; Python would complain at its own flush on exit
        streams.drop_stdout()
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except MemoryError:
        print_error(
            StaticmemError(
                "not enough memory for the analysis",
                "The graph is larger than this machine can hold.",
                "Run it on a machine with more main memory.",
                code="SM191",
            )
        )
        return 2
    except Exception as error:
        if isinstance(error, OSError) and streams.is_full(error):
            streams.drop_stdout()
            print_error(UsageError("stdout cannot be written", f"{error.strerror}.", "Give a file: -o FILE.", "SM142"))
            return 2
        if debug:
            raise
        detail = (str(error).splitlines() or [""])[0][:200]
        sys.stderr.write(f"error: internal error: {type(error).__name__}: {detail} [SM190]\n")
        sys.stderr.write("  This is a bug of staticmem, not of your model.\n")
        sys.stderr.write("  Run it again with --debug and report what it prints.\n")
        return 2


def print_error(error: StaticmemError) -> None:
    """Three lines to stderr: what, why, what to do."""
    lines = [f"error: {_line(error.what)} [{error.code}]"]
    lines.append(f"  {_line(error.why) or 'It cannot be analysed so.'}")
    lines.append(f"  {_line(error.hint) or _HELP}")
    text = "\n".join(lines) + "\n"
    sys.stderr.write(streams.printable(text, sys.stderr.encoding))


def _line(text: str) -> str:
    """One line of printable characters: names from a file may have anything in them."""
    from staticmem.report.text import printable  # late: for errors only

    return printable(text)


if __name__ == "__main__":
    sys.exit(main())
