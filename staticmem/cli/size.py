"""`staticmem size` and `staticmem gpus`: which cards train or run a model and how many, and the catalog of cards."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from staticmem.cli import settings
from staticmem.cli.flags import add_flag, add_jobs, add_max_dim, add_scenario, add_verb, positive
from staticmem.cli.output import Progress, add_output, chosen_format, emit
from staticmem.errors import UsageError
from staticmem.report.formats import Formats
from staticmem.scenario.options import checked_choice
from staticmem.scenario.request import OPTIONS, SERVE

if TYPE_CHECKING:
    from staticmem.devices.gpus import Gpu
    from staticmem.report.sizing import CardRow

FORMATS, GPUS_FORMATS = Formats("sizing"), Formats("gpus")
TABLES = ("table", "csv")  # formats without curves, whose points are not computed then
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

SIZE = """\
Which GPUs have the memory, with what batch, and how many are needed: the report before a purchase.
MODEL is an ONNX file or an archive of torch.export (.pt2); CONFIG is a YAML file that names one.
"""

SIZE_EXAMPLES = """\
examples:
  staticmem size model.pt2 --batch 64 --optimizer adamw --amp bf16
  staticmem size model.pt2 --batch 64 --optimizer adamw -o sizing.html
  staticmem size model.pt2 --optimizer adam --gpu l40s --gpu h100-sxm-80gb --gpu 24GB
  staticmem size model.pt2 --optimizer adam --vendor nvidia --min-memory 24GB --year 2022 --prices prices.yaml
  staticmem size llm.pt2 --optimizer adamw --amp bf16 --parallel zero3
  staticmem size model.pt2 --optimizer adamw --global-batch 2048 --gpu h100 --gpu l40s
  staticmem size llm.pt2 --batch 1 --optimizer adamw --amp bf16 --max-dim seq
  staticmem size config.json --mode serve --concurrency 64 --max-len 32768 --prices prices.yaml
  staticmem size llm.pt2 --mode generate --prompt 2048 --new-tokens 512 --max-dim prompt
"""

GPUS = """\
The GPUs that --gpu and 'staticmem size' know: what is sold, what nvidia-smi shows, what a process can use.
A star marks a GPU with figures that have no source of their own.
"""

GPUS_EXAMPLES = """\
examples:
  staticmem gpus
  staticmem gpus --vendor nvidia --min-memory 40GB --year 2022
  staticmem gpus --class consumer -f csv
  staticmem gpus --gpus-file mine.yaml -f json     # every figure with its source
"""


def add_size(verbs: Any) -> None:
    about = "which GPUs have the memory, and how many are needed"
    parser = add_verb(verbs, "size", size, about, SIZE, SIZE_EXAMPLES)
    parser.add_argument("model", metavar="MODEL|CONFIG", nargs="?", help="an .onnx or .pt2 file, or a .yaml config")
    add_scenario(parser, many_gpus=True)
    _add_filters(parser)
    question = parser.add_argument_group("the question")
    about = "samples of a step of the optimizer, which GPUs share (DDP, ZeRO, FSDP) or one takes in micro-batches"
    question.add_argument("--global-batch", type=positive("--global-batch"), metavar="N", help=about)
    about = "the largest size of an open dimension on each GPU, instead of batches; in generation 'prompt'"
    add_max_dim(question, about)
    about = "requests of --max-len at once, with --mode serve: how many cards of each kind serve them"
    question.add_argument("--concurrency", type=positive("--concurrency"), metavar="N", help=about)
    add_jobs(question)
    output = add_output(parser, FORMATS)
    output.add_argument(
        "--prices",
        metavar="FILE|gpuhunt",
        help="YAML or CSV with your prices of GPUs; or gpuhunt, a package that fetches those of clouds",
    )
    output.add_argument("--no-batches", action="store_true", help="do not search the largest batch of each GPU")
    about = "the date in the report (default: that of SOURCE_DATE_EPOCH, else none)"
    output.add_argument("--date", metavar="YYYY-MM-DD", help=about)


def add_gpus(verbs: Any) -> None:
    parser = add_verb(verbs, "gpus", gpus, "the catalog of GPUs", GPUS, GPUS_EXAMPLES)
    add_flag(_add_filters(parser), OPTIONS["gpus_file"])
    add_output(parser, GPUS_FORMATS)


def _add_filters(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    cards = parser.add_argument_group("GPUs")
    cards.add_argument("--vendor", action="append", metavar="NAME", help="only NVIDIA, AMD or Intel; repeatable")
    cards.add_argument("--min-memory", metavar="SIZE", help="only GPUs sold with at least so much: 24GB")
    cards.add_argument("--max-memory", metavar="SIZE", help="only GPUs sold with at most so much")
    cards.add_argument("--year", type=positive("--year"), metavar="YEAR", help="only GPUs of this year or later")
    about = "only consumer, workstation or 'data centre' GPUs; repeatable"
    cards.add_argument("--class", dest="card_class", action="append", metavar="CLASS", help=about)
    return cards


def gpus(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, GPUS_FORMATS)
    emit(_cards(args), chosen, args)
    return 0


def size(args: argparse.Namespace) -> int:
    """The exit code: 0 where the report could be made."""
    chosen = chosen_format(args, FORMATS)
    from staticmem.devices import gpus  # late: --help needs no engine
    from staticmem.report.formats.sizing import outcome
    from staticmem.studies import Study
    from staticmem.studies.sizing import Options
    from staticmem.studies.sizing import size as sizing

    names, args.gpu = args.gpu, None
    settings.take_config(args)
    request, config = settings.request(args), settings.settings(args)
    if args.global_batch is not None:
        request = settings.without(args, request, ("batch", "accumulate"), settings.GLOBAL_BATCH)
    names = names or (config.gpus if config is not None else ())
    cards = _cards(args, names)
    if request.mode == SERVE or args.concurrency is not None:
        from staticmem.cli import serving

        return serving.size(args, request, cards, chosen.name, named=bool(names))
    prices = {}
    if args.prices is not None:
        from staticmem.studies.prices import prices_of

        prices = prices_of(args.prices, {**gpus.catalog(args.gpus_file), **{card.slug: card for card in cards}})
    command = shlex.join(["staticmem", *args.argv])
    with settings.model_path(settings.model_of(args)) as path, Progress("GPUs", args.quiet, model=path) as bar:

        def tell(done: int, total: int, row: CardRow | None = None) -> None:
            bar.update(done, total, "" if row is None else f"{row.name}: {outcome(row)}")

        options = Options(
            cards,
            prices,
            _date(args.date),
            command,
            batches=not args.no_batches,
            curves=chosen.name not in TABLES,
            progress=tell,
            dim=args.max_dim,
            global_batch=args.global_batch,
            jobs=args.jobs,
        )
        result = sizing(Study.open(path, request), options)
    emit(result, chosen, args)
    return 0


def _cards(args: argparse.Namespace, names: Sequence[str] = ()) -> list[Gpu]:
    """The cards that the filters leave, or those of `names`, by memory and name.

    Raises:
        UsageError: a filter's value is unknown, or no card is left.
    """
    from staticmem.devices import gpus

    file = args.gpus_file
    cards = [gpus.find(name, file=file) for name in names] if names else list(gpus.catalog(file).values())
    if args.vendor:
        vendors = {checked_choice("vendor", word, tuple(v.lower() for v in gpus.VENDORS)) for word in args.vendor}
        cards = [card for card in cards if card.vendor.lower() in vendors]
    if args.card_class:
        classes = {checked_choice("class", word, gpus.CLASSES) for word in args.card_class}
        cards = [card for card in cards if card.price_class in classes]
    least, most = _memory("--min-memory", args.min_memory), _memory("--max-memory", args.max_memory)
    cards = [card for card in cards if card.nominal >= (least or 0) and (most is None or card.nominal <= most)]
    if args.year:
        cards = [card for card in cards if card.year is not None and card.year >= args.year]
    if not cards:
        raise UsageError("no GPU is left", "The filters exclude all of the catalog.", "See 'staticmem gpus'.", "SM183")
    return sorted(cards, key=lambda card: (card.nominal, card.usable, card.slug))


def _memory(flag: str, text: str | None) -> int | None:
    from staticmem.devices.gpus import parse_size

    memory = parse_size(text) if text is not None else None
    if text is not None and memory is None:
        why = "It is a number with GB, GiB, MB or MiB."
        raise UsageError(f"{flag} '{text}' is not a size", why, f"Example: {flag} 24GB", "SM110")
    return memory


def _date(given: str | None) -> str | None:
    """The date of the report; none unless it is given, so that the same input gives the same report."""
    if given is not None:
        try:
            if not DATE.fullmatch(given):
                raise ValueError
            return datetime.date.fromisoformat(given).isoformat()
        except ValueError:
            why, hint = "It is a year, a month and a day.", "Example: --date 2026-11-21"
            raise UsageError(f"--date '{given}' is not a date", why, hint, "SM110") from None
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isascii() and epoch.isdigit() and len(epoch) <= 11:
        return datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc).date().isoformat()
    return None
