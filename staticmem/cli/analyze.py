"""`staticmem analyze MODEL`: the memory of one step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from staticmem.cli import session, settings
from staticmem.cli.flags import add_flag, add_max_dim, add_model, add_scenario, add_verb, asked_largest, one_of
from staticmem.cli.output import Progress, add_output, chosen_format, put, say, view_of, warn
from staticmem.report.formats import Formats
from staticmem.report.text import style_for
from staticmem.scenario.request import ALL, OPTIONS, SERVE

if TYPE_CHECKING:
    from staticmem.report.formats import Format
    from staticmem.report.model import LargestSize, Report
    from staticmem.studies import Study
    from staticmem.studies.sizing_search import GrownSize

RUNTIMES = ("torch", "onnxruntime")
FORMATS = Formats("report")
LEVERS_LIMIT = 1_000  # ops: the twenty levers are a step each, which takes a few seconds

ANALYZE = """\
The peak memory of one training or inference step: how much, when, and what is alive then.
MODEL is an ONNX file or an archive of torch.export (.pt2); its content decides. '-' reads it from stdin.
"""

ANALYZE_EXAMPLES = """\
examples:
  staticmem analyze model.pt2 --batch 32 --optimizer adam
      one training step; without --optimizer, inference
  staticmem analyze model.onnx --batch 8 --resolution 512 --mode infer
      inference on images of 512 x 512
  staticmem analyze bert.onnx --batch 16 --dim seq=384 --optimizer adamw --amp bf16
      open dimensions by name, mixed precision
  staticmem analyze model.pt2 --optimizer adam --gpu rtx-4090 --max-batch
      the largest batch on a GPU
  staticmem analyze llm.pt2 --batch 1 --optimizer adamw --gpu h100 --max-dim seq
      the longest sequence on a GPU
  staticmem analyze model.onnx --batch 8 --runtime onnxruntime --provider cuda --gpu l4
      a session of the ONNX Runtime: its arena, and the device
  staticmem analyze config.json --mode serve --engine vllm --gpu h100 --max-len 32768
      an engine that serves a model: whether it starts, and the tokens that its cache holds
  staticmem analyze model.pt2 --optimizer adam -o report.json
      the report as JSON, to a file
  staticmem analyze model.pt2 --batch 32 --optimizer adam -o report.html
      a page with charts and sliders: one file, no network
  staticmem analyze model.pt2 --optimizer adam -o step.pickle
      the allocator's timeline and segments, for pytorch.org/memory_viz
"""


def add_analyze(verbs: Any) -> None:
    about = "the peak memory of a training or inference step"
    parser = add_verb(verbs, "analyze", run, about, ANALYZE, ANALYZE_EXAMPLES)
    add_model(parser, optional=True)
    add_scenario(parser)
    question = parser.add_argument_group("the question")
    about = "the largest batch on the GPU of --gpu; without --batch the report is that of it"
    question.add_argument("--max-batch", action="store_true", help=about)
    about = "the same of an open dimension, as the longest sequence; without --dim of it the report has it"
    add_max_dim(question, about)
    about = "what runs the model: torch (default), or onnxruntime: inference in a session of it, of .onnx"
    runtime = one_of("--runtime", RUNTIMES)
    question.add_argument("--runtime", type=runtime, default=RUNTIMES[0], metavar="NAME", help=about)
    session.add_session(parser, analyzed=True)
    output = add_output(parser, FORMATS)
    add_flag(output, OPTIONS["top"])
    output.add_argument(
        "--explain-peak", action="store_true", help="what is alive at the peak: who holds it, by module"
    )
    about = "computes the figures from the graph of the step as well, and fails where they differ"
    output.add_argument("--check-liveness", action="store_true", help=about)
    output.add_argument("--strict", action="store_true", help="exit 1 if an op is unknown")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where --strict found an unknown op."""
    chosen = chosen_format(args, FORMATS)
    if args.runtime == "onnxruntime":
        return session.run(args, chosen.name)
    session.check_not_given(args)
    from staticmem.studies import Study, without_cycle_search  # late: --help and errors of flags need no engine

    top = ALL if args.explain_peak and chosen.name == "json" else args.top
    request = settings.request(args, top=top, host=True if chosen.shows == "host" else None)
    if request.mode == SERVE:
        from staticmem.cli import serving  # late: few ask for an engine

        return serving.run(args, request, chosen.name)
    with (
        settings.model_path(settings.model_of(args)) as path,
        without_cycle_search(),
        Progress("replays", args.quiet, model=path) as bar,
    ):
        study = Study.open(path, request)
        study.progress = bar.update
        if args.max_batch or args.max_dim is not None:
            bar.begin("looking for the largest size")
            study, largest = _find_largest(study, asked_largest(args))
        else:
            largest = None
        data = _rendered(study, largest, chosen, args, bar)
    put(data, args)
    if args.verbose:
        _name_passes(study)
    if args.check_liveness:
        from staticmem.studies.owners import check_liveness

        say(f"liveness: the graph of the step ({check_liveness(study):,} nodes) has the same figures")
    unknown = sorted(study.result.unknown)
    if args.strict and unknown:
        names = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        say(f"strict: unknown ops: {names}")
        return 1
    return 0


def _name_passes(study: Study) -> None:
    """What each pass did, on stderr: names and paths are the file's."""
    from staticmem.passes.pipeline import edit_lines

    plain = style_for(sys.stderr, "never").plain
    sys.stderr.write("".join(f"{plain(line)}\n" for line in edit_lines(study.result.graph)))


def _find_largest(study: Study, grown: GrownSize) -> tuple[Study, LargestSize]:
    """The largest size on the card that was named, and the study of it where the request gives none."""
    from staticmem.studies.bench import Bench
    from staticmem.studies.largest import largest_size, no_card

    if study.request.gpu is None:
        raise no_card(grown.flag)
    largest = largest_size(Bench(study), study.request.gpu, grown)
    if grown.size_of(study.request) is None and largest.size:
        study = study.ask(grown.of_size(study.request, largest.size))
    return study, largest


def _rendered(
    study: Study, largest: LargestSize | None, chosen: Format, args: argparse.Namespace, bar: Progress
) -> str | bytes:
    """The output. With --quiet, warnings of a table go to stderr."""
    if chosen.shows == "replay":
        from staticmem.studies.device import replay_of

        if args.explain_peak:
            say(f"warning: --explain-peak is not used: --format {chosen.name} has every tensor of the step [SM302]")

        return chosen.render(replay_of(study.request, study.result), view_of(args))
    report = study.report
    if args.explain_peak or chosen.name == "html":
        from staticmem.studies.owners import with_owners

        report = with_owners(study, report)
    if largest is not None:
        batch = largest.as_batch() if largest.dim == "batch" else None
        report = replace(report, max_batch=batch, max_dim=None if batch is not None else largest)
    if chosen.name == "html":
        return _page(study, report, args, bar)
    if chosen.name == "table" and args.quiet:
        warn(report.warnings)
    return chosen.render(report, view_of(args))


def _page(study: Study, report: Report, args: argparse.Namespace, bar: Progress) -> str:
    """The HTML page, with the command lines that made it and that its sliders stand for."""
    import shlex

    from staticmem.studies.levers import levers
    from staticmem.studies.page import page

    bar.begin("trying levers for the page", "levers of the page")
    config = settings.settings(args) is not None
    few = len(study.result.graph.ops) <= LEVERS_LIMIT
    rows = levers(study, progress=bar.update, config=config).rows if few else None
    bar.begin("working out the page: other GPUs, batches and precisions")
    command, others = (shlex.join(["staticmem", *argv]) for argv in (args.argv, without(args.argv, SLIDERS)))
    return page(study, report, units=args.units, command=command, what_if_command=others, levers=rows)


# What the sliders of a page set, and where its own output went; True: a value follows.
SLIDERS: Mapping[str, bool] = {
    "--batch": True,
    "-b": True,
    "--resolution": True,
    "--optimizer": True,
    "--momentum": True,
    "--dtype": True,
    "--amp": True,
    "--output": True,
    "-o": True,
    "--format": True,
    "-f": True,
    "--force": False,
    "--max-batch": False,
    "--max-dim": True,
}


def without(argv: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """The command line without some flags and their values, however written: `-b 8`, `-b8`, `--batch=8`."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in flags:
            skip = flags[word]
        elif word.startswith("--"):
            if word.split("=", 1)[0] not in flags:
                kept.append(word)
        elif not (word.startswith("-") and flags.get(word[:2], False)):
            kept.append(word)
    return kept
