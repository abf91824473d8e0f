"""The sizing report of a study: rows of cards, counts by strategy, curves, levers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from staticmem.devices import gpus
from staticmem.devices.gpus import Gpu
from staticmem.devices.sizing import Fit
from staticmem.errors import StaticmemError, UsageError
from staticmem.frontends.recent import Recent
from staticmem.report.model import NoteInfo
from staticmem.report.sizing import ACCUMULATE, SCHEMA, CardRow, Count, Lever, Point, Price, Sizing
from staticmem.report.sweep import TRAINING, LeverRow
from staticmem.report.verdict import step_name
from staticmem.scenario.combinations import SIZE, check
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.strategies import STRATEGIES
from staticmem.studies import Request, Study, without_cycle_search, workers
from staticmem.studies.bench import LIMIT, Bench, card_fit
from staticmem.studies.checkpoints import repeated_blocks
from staticmem.studies.largest import LargestBatches
from staticmem.studies.levers import candidates, in_order, try_out
from staticmem.studies.recommend import recommend
from staticmem.studies.sizing_search import GrownSize, batch_range, fewest, resolutions
from staticmem.studies.study import key_of, unused
from staticmem.studies.trials import Lever as Trial
from staticmem.studies.trials import Trials
from staticmem.units import format_bytes
from staticmem.version import __version__

POINTS = 9  # of a curve
REPLAYS_OF_CARD, REPLAYS_OF_MANY = 12, 2.4  # what the row of a card takes, in times of the replays of a step
FEW = 8  # cards: up to so many get replays of their own and exact batches; of more, those of an architecture share them
_TRIED = tuple([name for name, facts in STRATEGIES.items() if facts.worth_trying])
_DIVIDING = tuple([name for name in _TRIED if not STRATEGIES[name].keeps_whole])  # DDP needs what one device needs
_SHARING = tuple([name for name in _DIVIDING if STRATEGIES[name].shares_samples])
_WHOLE = tuple([name for name in _TRIED if STRATEGIES[name].keeps_whole])
GLOBAL_STRATEGIES = (*_WHOLE, ACCUMULATE, *_SHARING)  # those that share out samples

NOT_INCLUDED = (
    "other processes on the GPU, a desktop, and what a data loader or metrics keep there",
    "the moments of start-up (loading a checkpoint, moving a model to the GPU)",
    "CUDA graphs, unless --compile-mode asks for them",
)


def _nothing(done: int, total: int, row: CardRow | None = None) -> None:
    """No progress."""


@dataclass(frozen=True)
class Options:
    """The request of a sizing report, apart from the step. `cards` are those that may be bought; `command` is shown."""

    cards: Sequence[Gpu]
    prices: Mapping[str, Price] = field(default_factory=dict)
    date: str | None = None
    command: str = ""
    batches: bool = True  # search the largest batches
    progress: Callable[[int, int, CardRow | None], None] = _nothing  # cards done, of how many, and the one that is new
    global_batch: int | None = None  # of a step: what devices share, or one takes in micro-batches
    dim: str | None = None  # search the largest sizes of this dimension, in place of batches
    curves: bool = True  # the needs at other batches and resolutions, which tables of cards do not show
    jobs: int = 1  # processes, where the work is longer than their start


def size(study: Study, options: Options) -> Sizing:
    """The report.

    Raises:
        StaticmemError: the file or the step cannot be analysed.
        UsageError: no card is left to choose from, or options do not go together.
    """
    if not options.cards:
        raise UsageError(
            "no GPU is left", "The filters exclude all of the catalog.", "See 'staticmem gpus'.", code="SM183"
        )
    asked = {"global_batch": options.global_batch, "max_dim": options.dim, "no_batches": not options.batches or None}
    check(SIZE, study.request.given(**asked))
    if options.global_batch is not None:  # one device takes it at once
        study = study.ask(replace(study.request, batch=options.global_batch))
    with without_cycle_search():
        return _size(study, options)


def _size(study: Study, options: Options) -> Sizing:
    one = _sizing_of(study, options)  # runs the step, with all that is read and imported once
    begun = time.process_time()
    one.study.report  # noqa: B018 - how long its replays take says how long all of them do
    return one.run(time.process_time() - begun)


def _sizing_of(study: Study, options: Options) -> _Sizing:
    request = study.request
    if request.parallel is not None and request.devices is None:  # the fewest devices of this strategy
        return _Sizing(study.ask(replace(request, parallel=None)), options, (request.parallel,))
    of_total = options.global_batch is not None
    return _Sizing(study, options, GLOBAL_STRATEGIES if of_total else _strategies(study))


class _Sizing:
    def __init__(self, study: Study, options: Options, strategies: tuple[str, ...]) -> None:
        self.study, self.options, self.strategies = study, options, strategies
        self.few = len(options.cards) <= FEW
        self.bench = Bench(study, many_cards=not self.few)
        self.request = replace(study.request, gpu=None)
        self.blocks = _block_class(study)
        self.checkpointed = _checkpointed(self.request, self.blocks)
        self.grown = GrownSize(options.dim)
        self.plain, self.with_blocks = self._searched(self.request), self._searched(self.checkpointed)

    def run(self, seconds: float) -> Sizing:
        """The report; `seconds`: what the replays of a step took."""
        options, report = self.options, self.study.report
        cards = sorted(options.cards, key=lambda card: (card.usable, card.slug))
        rows = self._rows(cards, seconds)
        sentence, card = recommend(rows, self.request, report.scenario, self._confirms)
        able = [card for card, row in zip(cards, rows, strict=True) if not row.obstacle] or cards
        shown = next((one for one in cards if one.slug == card), able[-1])
        batches, sizes = self._curves(cards, shown)
        large = self.study.result.trace.ticks > LIMIT
        pulled = () if self.request.communicators else _levers(self.bench, None if large else shown.slug)
        notes = list(report.assumptions)
        if self._hopeless(cards):
            notes.append(_note("no curves: the step needs more than twice the memory of the largest GPU"))
        if large and not self.few:
            notes.append(
                _note("the graph is large: workspaces of one architecture (sm_90) stand for those of all GPUs")
            )
        if self.plain is not None and self.plain.shortened is not None:
            tried, name = self.plain.shortened, self.grown.name
            text = f"a {name} beyond {tried:,} was not tried: a larger one adds ops to the step"
            notes.append(_note(f"{text}, as a loop over the {name} does"))
        notes += [_note(text) for card in cards for text in card.unsaid]
        others = sorted({c.vendor for c in cards if c.vendor != "NVIDIA"})
        if others:
            text = f"GPUs of {' and '.join(others)} are sized as an H100 of their memory: context, workspaces"
            notes.append(_note(f"{text} and PyTorch's allocator on them were not examined"))
        idle = [NoteInfo("SM302", text, 1) for text in unused(self.request, ())]
        ops, warnings = report.coverage, (*report.warnings, *idle)
        return Sizing(
            SCHEMA, __version__, options.date, gpus.checked(), report.model, report.scenario, step_name(report),
            report.parameters.count, report.peak.live_bytes, sentence, card, tuple(rows), self.strategies, batches,
            sizes, self.blocks, pulled, ops.ops, tuple(row.op for row in ops.unknown),
            tuple(n for n in notes if n.code not in ("SM404", "SM405")), warnings, NOT_INCLUDED,
            options.command, self.few, shown.name if batches or sizes else "", None if large else shown.name,
            options.global_batch, options.dim,
        )  # fmt: skip

    def _searched(self, request: Request | None) -> LargestBatches | None:
        if request is None or not self.options.batches:
            return None
        return LargestBatches(self.bench, request, self.grown)

    # -- cards ---------------------------------------------------------------------------------------------------

    def _rows(self, cards: Sequence[Gpu], seconds: float) -> list[CardRow]:
        """The rows of cards, in their order. The structure of the largest batch holds for the smaller ones, so that the
        largest card comes first, and of each kind; kinds share nothing that a figure depends on, and go to processes.
        Cards of a kind share replays, which are not kept for long."""
        kinds: dict[tuple[str, tuple[str, ...]], list[Gpu]] = {}
        for card in reversed(cards):
            kinds.setdefault((card.architecture, card.alternatives), []).append(card)
        tasks = sorted(kinds.values(), key=len, reverse=True)
        work = seconds * len(cards) * (REPLAYS_OF_CARD if self.few else REPLAYS_OF_MANY)
        path, rows = workers.name_to_reopen(self.study.model), {}
        several = self.options.jobs > 1 and len(tasks) > 1 and work > workers.WORTH_PROCESSES
        if several and path is not None:
            options = replace(self.options, progress=_nothing, cards=tuple(cards), command="", jobs=1)
            results = self._in_processes(path, options, tasks)
        else:
            results = ((card, self.row(card)) for of_kind in kinds.values() for card in of_kind)
        self.options.progress(0, len(cards), None)
        for done, (card, row) in enumerate(results):
            rows[card.slug] = replace(row, device_compiled_bytes=None if row.obstacle else self._compiled(card))
            self.options.progress(done + 1, len(cards), row)
        return [rows[card.slug] for card in cards]

    def _in_processes(self, path: str, options: Options, tasks: Sequence[list[Gpu]]) -> Iterator[tuple[Gpu, CardRow]]:
        request, strategies = self.study.request, self.strategies

        def run(task: list[Gpu]) -> tuple[Any, ...]:
            return rows_of, path, request, options, strategies, [card.slug for card in task]

        jobs = min(self.options.jobs, len(tasks))
        for task, result in workers.in_processes(
            tasks, run, jobs, lambda task: [[card] for card in task], self._run_levers
        ):
            if isinstance(result, StaticmemError):
                raise result
            yield from zip(task, result, strict=True)

    def _run_levers(self) -> None:
        """Runs the steps of levers, which do not depend on a card, and that of compiled code."""
        asked = self.study.request
        if asked.communicators:
            return
        study = self.bench.ask(replace(asked, gpu=None))
        for lever in _wanted_levers(study, "any card"):
            with suppress(StaticmemError):  # it does not go with the request
                self.bench.step(replace(study.request, **lever.options))

    def row(self, card: Gpu) -> CardRow:
        """The row of a card, without its need under torch.compile."""
        outcome = self.bench.verdict(self.request, card, own=self.few)
        obstacle = outcome.standing.obstacle
        plain, with_blocks = (None, None) if obstacle else (self.plain, self.with_blocks)
        (largest, safe), (_, safe_with_blocks) = self._largest(plain, card), self._largest(with_blocks, card, False)
        low, expected, high = outcome.needed
        nothing, grown = (None, None, None), (largest, safe, safe_with_blocks)
        batches, sizes = (grown, nothing) if self.grown.dim is None else (nothing, grown)
        return CardRow(
            slug=card.slug, name=card.name, vendor=card.vendor, form=card.form,
            architecture=card.chip or card.architecture, nominal_bytes=card.nominal, nvml_bytes=card.nvml,
            usable_bytes=card.usable, device_low_bytes=low, device_bytes=expected, device_high_bytes=high,
            fit_with_checkpointing=None if obstacle else self._try_checkpointing(card, outcome.fit),
            max_batch=batches[0], safe_batch=batches[1], safe_batch_with_checkpointing=batches[2],
            device_compiled_bytes=None,
            counts=tuple(self._count(name, card, outcome.fit, obstacle) for name in self.strategies),
            bandwidth_gb_s=card.bandwidth, tflops=dict(card.tflops), tdp_w=card.tdp, link=card.link, year=card.year,
            price_class=card.price_class, price=self.options.prices.get(card.slug),
            assumed=(*card.assumed, *card.unread), **outcome.said,
            max_size=sizes[0], safe_size=sizes[1], safe_size_with_checkpointing=sizes[2],
        )  # fmt: skip

    def _largest(self, batches: LargestBatches | None, card: Gpu, both: bool = True) -> tuple[int | None, int | None]:
        """The largest batch, or size of the dimension, and the largest safe one, as `CardRow` has them."""
        if batches is None:
            return None, None
        try:
            if not self.few:
                return None, batches.tried_size(card)
            if both:
                return batches.both_sizes(card)
            return None, batches.safe(card) * batches.grown.stride
        except StaticmemError:  # the batch is fixed, or each sample adds ops
            if self.grown.dim is not None and both:  # it was asked for
                raise
            return None, None

    def _compiled(self, card: Gpu) -> int | None:
        """The need with the model under torch.compile; None where it is so already, where compiled code does not run on
        the card, or the graph is large."""
        request = self.request
        if request.compile or request.communicators or self.study.result.trace.ticks > LIMIT:
            return None
        compiled = replace(request, compile=(WHOLE,))
        try:
            return None if self.bench.standing(compiled, card).obstacle else self.bench.needed(compiled, card)
        except StaticmemError:
            return None

    def _try_checkpointing(self, card: Gpu, fit: Fit) -> str | None:
        if self.checkpointed is None:
            return None
        if fit is not Fit.FITS and self.bench.live(self.checkpointed) > card.usable:
            return Fit.DOES_NOT_FIT.value  # no replay is needed to see it
        return self.bench.verdict(self.checkpointed, card).fit.value

    def _count(self, strategy: str, card: Gpu, fit: Fit, obstacle: str) -> Count:
        if obstacle:
            return Count(strategy, None, None, False, obstacle)
        total = self.options.global_batch
        if fit is Fit.FITS:
            return Count(strategy, 1, None, False, "", total)
        pair = self.checkpointed
        if pair is None or self._try_checkpointing(card, fit) != Fit.FITS.value:
            return fewest(self.bench, strategy, card, self.request, pair, total)
        without_blocks = fewest(self.bench, strategy, card, self.request, None, total)
        if without_blocks.devices is not None:
            return without_blocks
        return Count(strategy, 1, self.bench.expected(pair, card), True, "", total)  # it takes no second one

    def _confirms(self, row: CardRow, count: Count) -> bool:
        """Whether `analyze` calls what a count says "fits", with the band of that step."""
        asked = self.checkpointed if count.checkpointing else self.request
        assert asked is not None
        if count.batch is not None:
            asked = replace(asked, batch=count.batch, accumulate=count.accumulate)
        if count.devices != 1:
            asked = replace(asked, parallel=count.strategy, devices=count.devices)
        try:
            return card_fit(self.bench.ask(asked), row.slug).fit == Fit.FITS.value
        except StaticmemError:
            return False

    # -- curves --------------------------------------------------------------------------------------------------

    def _curves(self, cards: Sequence[Gpu], card: Gpu) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
        scenario = self.study.report.scenario
        batches: list[Point] = []
        if not self.options.curves or self._hopeless(cards):
            return (), ()
        limits = batch_range(self.study.model)
        if limits is not None and scenario.batch is not None:
            for batch in _around(scenario.batch, *limits):
                self._point(batches, card, batch=batch)
        sizes: list[Point] = []
        for size in resolutions(self.study, scenario.resolution):
            self._point(sizes, card, resolution=size)
        return tuple(batches), tuple(sizes)

    def _hopeless(self, cards: Sequence[Gpu]) -> bool:
        """Whether the graph is large and its step far beyond every card: curves would cost much and show nothing."""
        largest = max(card.usable for card in cards)
        return self.study.result.trace.ticks > LIMIT and self.study.lifetimes.peak_bytes > 2 * largest

    def _point(
        self, points: list[Point], card: Gpu, *, batch: int | None = None, resolution: tuple[int, int] | None = None
    ) -> None:
        """Adds a point, unless the model does not take it. No step of a batch between those of a search is run, and
        none again of the size that was asked for."""
        asked = self.study.report.scenario.resolution
        sizes: dict[str, Any] = {"batch": batch} if batch is not None else {"resolution": resolution}
        sizes = {} if resolution is not None and asked == resolution else sizes
        searches = (self.plain, self.with_blocks) if batch is not None else (None, None)
        bench, with_blocks = (self.bench if search is None else search.between for search in searches)
        pair = self.checkpointed
        try:
            ask = replace(self.request, **sizes)
            need = bench.expected(ask, card)
            less = with_blocks.expected(replace(pair, **sizes), card) if pair is not None else None
        except StaticmemError:
            return
        points.append(Point(batch, resolution, bench.live(ask), need, less))


_of_process: Recent[_Sizing] = Recent(1)  # what a process of `Options.jobs` works on


def rows_of(
    path: str, request: Request, options: Options, strategies: tuple[str, ...], slugs: Sequence[str]
) -> list[CardRow]:
    """The rows of some cards of a model file, the largest first, with counts by these strategies: a function of plain
    values, for other processes."""
    key = path, key_of(request)
    with without_cycle_search():
        one = _of_process.get(key)
        if one is None:
            one = _Sizing(Study.open(path, request), options, strategies)
            _of_process.put(key, one)
        cards = {card.slug: card for card in options.cards}
        return [one.row(cards[slug]) for slug in slugs]


def _checkpointed(request: Request, blocks: str | None) -> Request | None:
    """The request with the blocks checkpointed; None where it trains nothing, or does so already."""
    asked = request.checkpoint or request.checkpoint_segments
    if blocks is None or asked or request.scenario()[0].mode != "train":
        return None
    return replace(request, checkpoint=(blocks,))


def _strategies(study: Study) -> tuple[str, ...]:
    """Those that can make the need of a device smaller; none where the step is that of a rank already."""
    if study.request.communicators or study.request.compile:
        return ()
    if study.scenario.training:
        return _DIVIDING
    return tuple([name for name in _DIVIDING if STRATEGIES[name].for_inference])


def _around(batch: int, low: int, most: int) -> list[int]:
    """Batches from small to well beyond the asked one, for a curve."""
    factors = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4)
    return sorted({min(max(round(batch * factor), low), most) for factor in factors} | {batch})[:POINTS]


def _note(text: str) -> NoteInfo:
    return NoteInfo("SM407", text, 1)


def _block_class(study: Study) -> str | None:
    """What `--checkpoint` takes for the outermost modules that a model repeats; None where it repeats nothing."""
    blocks = repeated_blocks(study.result.graph)
    return blocks[0].selector if blocks else None


def _levers(bench: Bench, gpu: str | None) -> tuple[Lever, ...]:
    """Those of `staticmem levers` that save something, the largest saving first. What trains something else is left
    out, but for the same optimizer with state of 8 bits."""
    trials = Trials(bench.ask(replace(bench.study.request, gpu=None)), gpu, bench)
    rows = in_order(try_out(trials, _wanted_levers(trials.study, gpu)))
    return tuple(
        Lever(_with_moves(row), row.flags, row.live_bytes, row.device_bytes, row.saved_bytes)
        for row in rows
        if row.saved_bytes > 0
    )


def _wanted_levers(study: Study, gpu: str | None) -> list[Trial]:
    """Those of `_levers`, on a card or of live memory."""
    in_8_bits = f"{study.scenario.optimizer}-8bit"

    def wanted(lever: Trial) -> bool:
        if gpu is None and lever.options.keys() == {"alloc_conf"}:  # live tensors are the same
            return False
        return lever.changes != TRAINING or lever.options.get("optimizer") == in_8_bits

    return [lever for lever in candidates(study) if wanted(lever)]


def _with_moves(row: LeverRow) -> str:
    """What a lever does, with what it sends over the bus in each step."""
    return f"{row.does}, {format_bytes(row.moved_bytes)} over the bus a step" if row.moved_bytes else row.does
