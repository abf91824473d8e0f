"""Steps of one model and what they need on cards: each is computed once and kept.

What the allocator takes depends on a card's architecture until the card is full; only the partial sums of reductions
depend on its multiprocessors too (`devices.reductions`). So a step is replayed for the largest card of each
architecture, and again for a card of its own where all of those sums together could change the verdict (`Verdicts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from staticmem.devices import gpus
from staticmem.devices.architectures import Needs, Standing
from staticmem.devices.gpus import DEFAULT_ARCHITECTURE, Gpu
from staticmem.devices.kernels import KernelWorkspaces
from staticmem.devices.meters import (
    Device,
    DeviceMeters,
    SharedReplays,
    Unlimited,
    alternatives,
    expected_need,
    highest_need,
    least_usable,
    needs_of,
    on_device,
    standing_on,
    usable_on,
)
from staticmem.devices.profile import NCCL
from staticmem.devices.reductions import Multiprocessors
from staticmem.devices.sizing import TIGHT, Fit, Verdict, verdict
from staticmem.engine.step import StepResult
from staticmem.errors import StaticmemError
from staticmem.liveness import Lifetimes
from staticmem.parallel.rank import on_one_device, on_rank, strategy_of
from staticmem.report.html.beside import CardRow
from staticmem.report.sweep import CardFit
from staticmem.studies import Request, Study, without_cycle_search
from staticmem.studies.device import device_of
from staticmem.studies.study import Key, key_of
from staticmem.units import Band

LIMIT = 20_000  # ticks of a trace; beyond it one architecture stands for all, and bands come from it


def on(device: Device, card: Gpu) -> Device:
    """The same software on another card."""
    multiprocessors = Multiprocessors(card.processors, gpus.THREADS[card.architecture])
    return replace(
        device,
        gpu=card,
        setup=replace(device.setup, architecture=card.architecture, multiprocessors=multiprocessors),
        bounded=True,
    )


Kind = tuple[str, tuple[str, ...]]  # cards of which one replay stands for all


def _kind(card: Gpu) -> Kind:
    return card.architecture, card.alternatives


def largest_of(architecture: str, cards: Iterable[Gpu], alternatives: tuple[str, ...] = ()) -> Gpu | None:
    """The card with the most memory of an architecture, or of those that it stands in for (`Gpu.alternatives`)."""
    rivals = [card for card in cards if card.architecture == architecture and card.alternatives == alternatives]
    return max(rivals, key=lambda card: (card.usable, card.slug), default=None)


@dataclass
class Verdicts:
    """Verdicts of a step with the software of `device`.

    `spread` gives what the file leaves open (`meters.on_device`); it is computed only where it is needed. `cards` are
    those whose largest stand for their architectures. `stand_in`: one card that stands for all, whatever their
    architecture: for graphs that are too large for many replays.
    """

    result: StepResult
    device: Device
    spread: Callable[[], tuple[int, int]]
    cards: Iterable[Gpu]
    stand_in: Gpu | None = None
    shared: dict[Kind, DeviceMeters] = field(default_factory=dict)  # without a limit, by `_kind`
    replays: SharedReplays = field(default_factory=SharedReplays)  # of this step and of others
    _own: dict[str, Verdict] = field(default_factory=dict)
    _least: dict[tuple[Kind | str, int], int] = field(default_factory=dict)
    _sums: dict[tuple[Multiprocessors, tuple[str, ...]], dict[int, int]] = field(default_factory=dict)

    def of(self, card: Gpu, own: bool = False) -> Verdict:
        """The verdict with its band; `own`: from a replay for this card alone, to the byte that of `on_device`."""
        less, more = self.spread()
        outcome = self._without_spread(card, more, own).widened(less, more)
        if outcome.memory is Fit.DOES_NOT_FIT and outcome.least is None:
            outcome = replace(outcome, least=self._least_usable(card, own))
        return replace(outcome, standing=self.standing(card))

    def needed(self, card: Gpu, more: int, live: int, own: bool = False) -> int:
        """The expected need, without the replays of its band where that does not decide which replay serves, as it does
        with partial sums of another card and settings that look at the card. `more` as in `_without_spread`, `live` are
        bytes of tensors at the peak."""
        settings = self.device.settings
        looks = settings.garbage_collection_threshold > 0 or settings.expandable_segments
        if card.slug in self._own or self.stand_in is not None or (not own and (looks or self.doubt(card))):
            return self._without_spread(card, more, own).needed.expected
        device = on(self.device, card)
        overhead, usable = device.setup.profile.overhead(card).expected, usable_on(device)
        shared = 0 if own else self.unlimited(card).replays.nominal_reserved[0] + overhead
        if not own and (shared <= usable or live + overhead > usable):
            return shared
        return expected_need(self.replays.unlimited(self.result, device), device)

    def fits(self, card: Gpu) -> bool:
        """Whether the verdict is "fits". Where the band without the spread does not, the spread is not computed."""
        if self.standing(card).obstacle:
            return False
        fits = self._fits_surely(card, 0)
        if fits is False or (fits is None and self._without_spread(card, 0).memory is not Fit.FITS):
            return False
        less, more = self.spread()
        fits = self._fits_surely(card, more) if more and fits else None
        if fits is not None:
            return fits
        return not more or self._without_spread(card, more).widened(less, more).memory is Fit.FITS

    def highest(self, card: Gpu) -> int:
        """The upper end of the need of `of`, where that fits."""
        _, more = self.spread()
        needed = self._highest_shared(card, more)
        return self.of(card).needed.high if needed is None else needed.high + more

    def _fits_surely(self, card: Gpu, more: int) -> bool | None:
        """Whether the verdict is "fits" with so much more at the upper end, by what replays reserve; None where
        replays for this card decide it."""
        needed = self._highest_shared(card, more)
        return None if needed is None else needed.high + more <= usable_on(on(self.device, card)) * TIGHT

    def _highest_shared(self, card: Gpu, more: int) -> Band | None:
        """The need as `highest_need` has it; None where that does not decide the verdict."""
        if card.slug in self._own or _kind(self.representative(card)) in self.shared:
            return None
        device = replace(on(self.device, self.representative(card)), bounded=False)
        reserved = highest_need(self.result, device, self.replays.unlimited)
        if reserved is None:
            return None
        needed = reserved.plus_unrelated(self.device.setup.profile.overhead(card))
        return None if self._is_decided_alone(needed, card, more) else needed

    def runs(self, card: Gpu) -> bool:
        """Whether the verdict is "fits" or "tight", which the spread does not decide."""
        return not self.standing(card).obstacle and self.needed(card, 0, 0) <= usable_on(on(self.device, card))

    def standing(self, card: Gpu) -> Standing:
        """Whether the card runs the step, whatever its memory."""
        return standing_on(self.result, on(self.device, card), self._needs)

    @cached_property
    def _needs(self) -> Needs:
        return needs_of(self.result)

    def _least_usable(self, card: Gpu, own: bool) -> int:
        """The least usable memory that holds the step; cards that share replays share it."""
        device = on(self.device, card)
        if self.stand_in is not None:
            device = replace(device, setup=on(self.device, self.stand_in).setup)
        usable, key = usable_on(device), card.slug if own else _kind(self.representative(card))
        overhead = device.setup.profile.overhead(card).expected
        leasts = [least for (kind, _), least in self._least.items() if kind == key and least + overhead > usable]
        if not leasts:
            roomy = self.replays.unlimited(self.result, device) if own else self.unlimited(card)
            leasts = [least_usable(roomy, device) - overhead]
            self._least[key, usable] = leasts[0]
        return leasts[0] + overhead

    def representative(self, card: Gpu) -> Gpu:
        """The card whose replay stands for this one's."""
        return self.stand_in or largest_of(card.architecture, self.cards, card.alternatives) or card

    def _without_spread(self, card: Gpu, more: int, own: bool = False) -> Verdict:
        """The verdict before the spread; `more` is what the spread will add to the band's upper end."""
        if card.slug in self._own:
            return self._own[card.slug]
        device, needed = on(self.device, card), self._shared(card)
        overhead, usable = device.setup.profile.overhead(card), usable_on(device)
        free = self.shared[_kind(self.representative(card))]
        # convolutions have plans with less workspace, or none
        alive = free.allocated.expected - free.parts.get("workspace", 0) + overhead.expected
        if alive - self.doubt(card) > usable and not own:  # does not fit, whatever the cache gives back
            return verdict(needed, usable)
        if own or self._is_decided_alone(needed, card, more):
            if self.stand_in is not None:
                device = replace(device, setup=on(self.device, self.stand_in).setup)
            self._own[card.slug] = on_device(self.result, device, self.replays.unlimited, least=False).verdict
            return self._own[card.slug]
        return verdict(needed, usable)

    def _is_decided_alone(self, needed: Band, card: Gpu, more: int) -> bool:
        """Whether replays for this card decide its verdict, given the need by those of the one that stands for it."""
        usable, doubt = usable_on(on(self.device, card)), self.doubt(card)
        near = abs(needed.high + more - usable * TIGHT) <= doubt if doubt else False
        return near or needed.expected + doubt > usable or self._counts_the_card(needed, card)

    def _shared(self, card: Gpu) -> Band:
        """The need on a card, with what the allocator takes on the one that stands for it."""
        roomy = self.representative(card)
        if _kind(roomy) not in self.shared:
            device = replace(on(self.device, roomy), bounded=False)
            self.shared[_kind(roomy)] = on_device(self.result, device, self.replays.unlimited)
        return self.shared[_kind(roomy)].reserved.plus_unrelated(self.device.setup.profile.overhead(card))

    def unlimited(self, card: Gpu) -> Unlimited:
        """The step on the card that stands for this one, with enough memory for it."""
        return self.replays.unlimited(self.result, replace(on(self.device, self.representative(card)), bounded=False))

    def _counts_the_card(self, needed: Band, card: Gpu) -> bool:
        """Whether the allocator's settings look at the size of the card: a limit from which it collects, and the
        addresses that expandable segments reserve, 9/8 of the card, whose end a step of half its size does not reach.
        """
        settings = self.device.settings
        if self.stand_in is not None:
            return False
        if settings.garbage_collection_threshold > 0 and settings.per_process_memory_fraction < 1:
            return True
        return settings.expandable_segments and 2 * needed.high > card.usable

    def doubt(self, card: Gpu) -> int:
        """Bytes by which all partial sums of the step together differ from those of the card that stands in."""
        roomy = self.representative(card)
        if self.stand_in is not None or card.slug == roomy.slug:
            return 0
        mine, theirs = self._partial_sums(card), self._partial_sums(roomy)
        return sum(abs(mine.get(kernel, 0) - theirs.get(kernel, 0)) for kernel in mine.keys() | theirs.keys())

    def _partial_sums(self, card: Gpu) -> dict[int, int]:
        setup = on(self.device, card).setup
        key = setup.multiprocessors, card.alternatives
        if key not in self._sums:
            setups = [setup, *(other.setup for other in alternatives(on(self.device, card)))]
            ids = len(self.result.trace.kernels)
            self._sums[key] = {
                kernel + number * ids: size
                for number, one in enumerate(setups)
                for kernel, size in KernelWorkspaces(self.result.trace, one).partial_sums().items()
            }
        return self._sums[key]


class Bench:
    """Needs of a model. A request names a step: on one device, or that of a rank where it has a strategy.

    `many_cards`: one architecture stands for all where the graph is large.
    """

    def __init__(self, study: Study, many_cards: bool = False) -> None:
        self.study, self.many_cards = study, many_cards
        self.device = device_of(replace(study.request, gpu=None, parallel=None))
        self.cards = tuple(gpus.catalog(study.request.gpus_file).values())
        self._studies: dict[Key, Study] = {key_of(study.request): study}
        self._steps: dict[Key, StepResult | StaticmemError] = {}
        self._live: dict[Key, int] = {}
        self._nominal: dict[tuple[Key, Kind], int] = {}
        self._verdicts: dict[Key, Verdicts] = {}
        self.replays = SharedReplays()

    # -- steps ---------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> Study:
        """The study of a request on this model."""
        key = key_of(request)
        if key not in self._studies:
            self._studies[key] = self.study.ask(request)
        return self._studies[key]

    def step(self, request: Request) -> StepResult:
        """The step, as the rank with the most memory runs it.

        Raises:
            StaticmemError: the step cannot be run; every call raises the same error.
        """
        key = key_of(request)
        if key not in self._steps:
            try:
                with without_cycle_search():
                    self._steps[key] = self._run(request)
            except StaticmemError as error:
                self._steps[key] = error
        outcome = self._steps[key]
        if isinstance(outcome, StaticmemError):
            raise outcome
        return outcome

    def _run(self, request: Request) -> StepResult:
        if self._is_own(request):
            return self.ask(request).result
        return on_rank(self.step(on_one_device(request)), strategy_of(request))

    def _is_own(self, request: Request) -> bool:
        """Whether a study of the request itself has its step: other strategies divide one step of one device."""
        return request.parallel is None or request.context_parallel is not None or request == self.study.request

    def live(self, request: Request) -> int:
        """Bytes of tensors at the peak."""
        key = key_of(request)
        if key not in self._live:
            result = self.step(request)
            own = self._is_own(request)
            self._live[key] = (self.ask(request).lifetimes if own else Lifetimes(result.trace)).peak_bytes
        return self._live[key]

    # -- needs ---------------------------------------------------------------------------------------------------

    def overhead(self, request: Request, card: Gpu) -> Band:
        """Context and libraries, and a communicator's buffers where devices talk."""
        return self._device(request).setup.profile.overhead(card)

    def expected(self, request: Request, card: Gpu) -> int:
        """Bytes on the card by one replay: what counts of devices and curves compare."""
        return self._reserved(request, card) + self.overhead(request, card).expected

    def _reserved(self, request: Request, card: Gpu) -> int:
        """Reserved memory by one replay."""
        verdicts = self._of(request)
        key = (key_of(request), _kind(verdicts.representative(card)))
        if key not in self._nominal:
            with without_cycle_search():
                self._nominal[key] = verdicts.unlimited(card).replays.nominal_reserved[0]
        return self._nominal[key]

    def expected_alone(self, request: Request, name: str) -> tuple[int, str | None]:
        """The expected need as `card_fit` has it, without its band, and the verdict where the card cannot run it."""
        study, device = self.ask(request), device_of(replace(request, gpu=name))
        cannot_run = standing_on(study.result, device).obstacle
        is_same = device == on(self.device, device.gpu)  # software
        roomy = (self.replays.unlimited if is_same else Unlimited)(study.result, device)
        return expected_need(roomy, device), Fit.CANNOT_RUN.value if cannot_run else None

    def may_fit(self, request: Request, card: Gpu) -> bool:
        """Whether the band is within 95 %, as replays on the card that stands for this one have it: nearly the verdict.
        Where it is not, a few replays tell."""
        if not self._alive(request, card):
            return False
        verdicts, overhead = self._of(request), self.overhead(request, card)
        room = int(usable_on(on(self._device(request), card)) * TIGHT) + verdicts.doubt(card)
        with without_cycle_search():
            roomy = verdicts.unlimited(card)

            def too_much(reserved: int) -> bool:
                nominal = roomy.replays.nominal_reserved[0]
                return Band(nominal, nominal, max(reserved, nominal)).plus_unrelated(overhead).high > room

            return not roomy.replays.some_reserves(too_much, room - overhead.expected)

    def _alive(self, request: Request, card: Gpu) -> bool:
        return self.live(request) <= self.room(request, card, TIGHT)

    def verdict(self, request: Request, card: Gpu, own: bool = False) -> Verdict:
        """That of `analyze --gpu`; `own`: from a replay for this card alone, so that the bytes are the same too."""
        with without_cycle_search():
            return self._of(request).of(card, own)

    def needed(self, request: Request, card: Gpu, own: bool = False) -> int:
        """The expected need of `verdict`, which needs no band of the live peak."""
        with without_cycle_search():
            verdicts = self._of(request)
            more = self._spread(request)[1] if verdicts.doubt(card) and not own else 0
            return verdicts.needed(card, more, self.live(request), own)

    def standing(self, request: Request, card: Gpu) -> Standing:
        """Whether a card runs the step, whatever its memory."""
        return self._of(request).standing(card)

    def safe(self, request: Request, card: Gpu) -> bool:
        """Whether the verdict is "fits": the whole band within 95 %."""
        with without_cycle_search():
            return self.may_fit(request, card) and self._of(request).fits(card)

    def highest(self, request: Request, card: Gpu) -> tuple[int, int]:
        """The upper end of the need of a step that is safe, and what of the card is usable."""
        with without_cycle_search():
            return self._of(request).highest(card), usable_on(on(self._device(request), card))

    def runs(self, request: Request, card: Gpu) -> bool:
        """Whether the step is expected not to run out of memory: the verdict is "fits" or "tight"."""
        if self.live(request) > self.room(request, card):
            return False
        with without_cycle_search():
            return self._of(request).runs(card)

    def room(self, request: Request, card: Gpu, share: float = 1.0) -> int:
        """Bytes that a share of the card leaves beside the context and libraries."""
        usable = usable_on(on(self._device(request), card))
        return int(usable * share) - self.overhead(request, card).expected

    def card(self, name: str) -> Gpu:
        """A card by name or size.

        Raises:
            UsageError: there is none of that name.
        """
        return gpus.find(name, file=self.study.request.gpus_file)

    def _of(self, request: Request) -> Verdicts:
        key = key_of(request)
        if key not in self._verdicts:
            result = self.step(request)
            large = self.many_cards and result.trace.ticks > LIMIT
            stand_in = largest_of(DEFAULT_ARCHITECTURE, self.cards) if large else None
            device, spread = self._device(request), partial(self._spread, request)
            verdicts = Verdicts(result, device, spread, self.cards, stand_in, replays=self.replays)
            self._verdicts[key] = verdicts
            if request == self.study.request and request.gpu is None:
                self._share_meters(verdicts)
        return self._verdicts[key]

    def _spread(self, request: Request) -> tuple[int, int]:
        return self.ask(request).spread if request.parallel == self.study.request.parallel else (0, 0)

    def _share_meters(self, verdicts: Verdicts) -> None:
        """The study has replayed its step for its report already, for one architecture."""
        device = self.study.device
        stands = verdicts.representative(device.gpu)
        if on(device, stands).setup == device.setup and self.study.replays:
            verdicts.shared[_kind(stands)] = self.study.meters

    def _device(self, request: Request) -> Device:
        """The software, with a communicator where devices talk."""
        if not request.communicators:
            return self.device
        setup, profile = self.device.setup, self.device.setup.profile
        talking = replace(profile, libraries=profile.libraries.plus(NCCL[request.communicators]))
        return replace(self.device, setup=replace(setup, profile=talking))


def card_fit(study: Study, name: str, spread: tuple[int, int] | None = None) -> CardFit:
    """The meters of a study's step on a card; `spread` is the study's, unless another is given."""
    return fit_on(study.result, study.request, name, study.spread if spread is None else spread, Unlimited)


def fit_on(
    result: StepResult,
    request: Request,
    name: str,
    spread: tuple[int, int],
    unlimited: Callable[[StepResult, Device], Unlimited],
) -> CardFit:
    """The meters of a step of a request on a card, as reports have them; `unlimited` as in `on_device`."""
    device = device_of(replace(request, gpu=name))
    gpu, meters = device.gpu, on_device(result, device, unlimited).widened(*spread)
    need: dict[str, Any] = {"device_low_bytes": meters.device.low, "device_high_bytes": meters.device.high}
    return CardFit(
        gpu.slug,
        gpu.usable,
        allocated_bytes=meters.allocated.expected,
        reserved_bytes=meters.reserved.expected,
        device_bytes=meters.device.expected,
        **need,
        **meters.verdict.said,
    )


def card_rows(result: StepResult, asked: Device, spread: tuple[int, int] = (0, 0)) -> tuple[CardRow, ...]:
    """The rows of the requested card, and of those that can run the step, the smallest first; `spread` as in
    `meters.on_device`."""
    cards = {**gpus.cards(), asked.gpu.slug: asked.gpu}
    wide = result.trace.ticks <= LIMIT
    verdicts = Verdicts(result, asked, lambda: spread, tuple(cards.values()))
    rows = []
    for card in sorted(cards.values(), key=lambda card: (card.slug != asked.gpu.slug, card.usable, card.name)):
        named = card.slug == asked.gpu.slug
        runs = not verdicts.standing(card).obstacle
        if named or (runs and (wide or card.architecture == asked.gpu.architecture)):
            rows.append(_row(card, verdicts.of(card, own=named), named))
    return tuple(rows)


def _row(card: Gpu, outcome: Verdict, asked: bool) -> CardRow:
    low, expected, high = outcome.needed
    return CardRow(
        card.slug,
        card.name,
        card.architecture,
        card.nominal,
        card.usable,
        low,
        expected,
        high,
        outcome.fit.value,
        outcome.headroom,
        asked,
        card.assumed,
        card.chip if card.chip != card.architecture else "",
        outcome.why,
        outcome.standing.condition,
    )
