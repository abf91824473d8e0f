"""Flags of a session of the ONNX Runtime, and `analyze --runtime onnxruntime`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from staticmem.cli import scenario
from staticmem.cli.values import byte_size, one_of, positive
from staticmem.errors import UsageError
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    from staticmem.allocators.onnxruntime.session import SessionOptions

PROVIDERS = ("cpu", "cuda")
LEVELS = ("disable", "basic", "extended", "layout", "all")
SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
STRATEGIES = ("kNextPowerOfTwo", "kSameAsRequested")
FORMATS = Formats("session")
# flags and where they go in `SessionOptions`
_OPTIONS = {
    "optimization": "graph_optimization_level",
    "mem_pattern": "enable_mem_pattern",
    "mem_reuse": "enable_mem_reuse",
    "cpu_mem_arena": "enable_cpu_mem_arena",
    "threads": "intra_op_num_threads",
    "arena_extend_strategy": "arena_extend_strategy",
    "gpu_mem_limit": "gpu_mem_limit",
    "cudnn_conv_algo_search": "cudnn_conv_algo_search",
}


def add_session(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group "the session of the ONNX Runtime". What is not given is None: the runtime's default."""
    session = parser.add_argument_group("the session of the ONNX Runtime")
    session.add_argument(
        "--optimization", type=one_of("--optimization", LEVELS), metavar="LEVEL",
        help="of the graph: disable, basic, extended, layout, all (default)",
    )  # fmt: skip
    for flag, name in (("--mem-pattern", "enable_mem_pattern"), ("--mem-reuse", "enable_mem_reuse")):
        session.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=f"{name} (default: on)")
    session.add_argument(
        "--cpu-mem-arena", action=argparse.BooleanOptionalAction, default=None,
        help="enable_cpu_mem_arena (default: on)",
    )  # fmt: skip
    session.add_argument("--threads", type=positive("--threads"), metavar="N", help="intra_op_num_threads")
    session.add_argument(
        "--arena-extend-strategy", type=one_of("--arena-extend-strategy", STRATEGIES), metavar="NAME",
        help="CUDA: kNextPowerOfTwo (default) or kSameAsRequested",
    )  # fmt: skip
    session.add_argument(
        "--gpu-mem-limit", type=byte_size("--gpu-mem-limit"), metavar="SIZE", help="CUDA: of the arena, e.g. 4GiB"
    )
    session.add_argument(
        "--cudnn-conv-algo-search", type=one_of("--cudnn-conv-algo-search", SEARCHES), metavar="NAME",
        help="CUDA: EXHAUSTIVE (default), HEURISTIC or DEFAULT",
    )  # fmt: skip
    return session


def add_analyzed(parser: argparse.ArgumentParser) -> None:
    """The flags with which `analyze` is about a session, and the group of its options."""
    session = add_session(parser)
    session.add_argument(
        "--provider", type=one_of("--provider", PROVIDERS), metavar="NAME", help="cpu (default) or cuda"
    )
    session.add_argument(
        "--optimized-model", metavar="FILE",
        help="the graph that the runtime executes, as it saved it (optimized_model_filepath)",
    )  # fmt: skip


def options(args: argparse.Namespace, threads: int, **more: Any) -> SessionOptions:
    """The options that the flags give; `threads` where they give none, `more` what other flags decide."""
    from staticmem.allocators.onnxruntime.session import SessionOptions

    words = {name: getattr(args, flag) for flag, name in _OPTIONS.items()}
    words = {name: value for name, value in words.items() if value is not None}
    return SessionOptions(**{"intra_op_num_threads": threads, **words, **more})


def given(args: argparse.Namespace) -> list[str]:
    """The flags of a session that were given."""
    names = (*_OPTIONS, "provider", "optimized_model")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]


def check_not_given(args: argparse.Namespace) -> None:
    """Raises:
    UsageError: a flag of a session without --runtime onnxruntime (SM513).
    """
    flags = given(args)
    if flags:
        raise UsageError(
            f"{', '.join(flags)} say nothing of PyTorch",
            "They are options of a session of the ONNX Runtime.",
            "Add --runtime onnxruntime, or leave them out.",
            code="SM513",
        )


def refuse_training(words: dict[str, Any]) -> None:
    """Raises:
    UsageError: a training step is asked for (SM512).
    """
    if words.get("optimizer") is not None or words.get("mode") == "train":
        raise UsageError(
            "the ONNX Runtime does not train",
            "--optimizer and --mode train ask for a training step.",
            "Leave them away: it runs inference.",
            code="SM512",
        )


def run(args: argparse.Namespace, name: str) -> int:
    """`analyze --runtime onnxruntime`. The exit code: 0, or 1 where --strict found values that are not counted."""
    from staticmem.cli.output import emit, warn
    from staticmem.cli.source import model_path
    from staticmem.studies.session import APPLIES, MAX_THREADS, session_report

    words = scenario.flags(args)
    refuse_training(words)
    others = sorted(f"--{name.replace('_', '-')}" for name in words if name not in APPLIES)
    others += [f"--{name.replace('_', '-')}" for name in ("max_batch", "explain_peak") if getattr(args, name)]
    if others:
        raise UsageError(
            f"{', '.join(others)} {'does' if len(others) == 1 else 'do'} not apply to the ONNX Runtime",
            "A session runs the graph as the file has it; these are about a step of PyTorch.",
            "Leave them out, or leave out --runtime onnxruntime.",
            code="SM513",
        )
    if name not in FORMATS:
        raise UsageError(
            f"no {name} of a session", f"There are {' and '.join(FORMATS)}.", "Use -f table or -f json.", code="SM513"
        )
    config = scenario.settings(args)
    unused = sorted(name for name in (config.words if config is not None else ()) if name not in APPLIES)
    if unused:
        sys.stderr.write(f"Not used of the config, as a session does not train: {', '.join(unused)}\n")
    wanted = scenario.request(args, top=args.top)
    session = options(args, MAX_THREADS, provider=args.provider or PROVIDERS[0])
    with model_path(scenario.model_of(args)) as path:
        report = session_report(path, wanted, session, args.optimized_model, args.threads is not None)
    if args.quiet and name == "table":
        warn(report.warnings)
    emit(report, FORMATS[name], args)
    uncounted = [note for note in report.warnings if note.code in ("SM522", "SM523")]
    for note in uncounted if args.strict else ():
        sys.stderr.write(f"strict: {note.text}\n")
    return 1 if args.strict and uncounted else 0
