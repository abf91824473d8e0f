"""Steps and their needs, each worked out once: what the rows, counts and curves of a sizing report ask for again and
again. What the allocator takes depends on a card's architecture only, the context on the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from staticmem.allocators.band import is_quick
from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.allocators.peaks import joined, peaks
from staticmem.allocators.process import Process
from staticmem.devices import communicators, gpus
from staticmem.devices.gpus import DEFAULT_ARCHITECTURE, Gpu
from staticmem.devices.kernels import KernelWorkspaces
from staticmem.devices.meters import Device, usable_on
from staticmem.devices.sizing import TIGHT, Verdict
from staticmem.engine.step import StepResult
from staticmem.errors import StaticmemError
from staticmem.liveness import liveness
from staticmem.parallel.rank import on_rank
from staticmem.studies import Request, Study, without_cycle_search
from staticmem.studies.device import device_of
from staticmem.studies.ranks import on_one_device, strategy_of
from staticmem.studies.verdicts import Verdicts, largest_of, on
from staticmem.units import Band

LIMIT = 20_000  # ticks of a trace; beyond it one architecture stands for all, and bands come from it


@dataclass(frozen=True)
class Ask:
    """A step: a request, on one device or as one rank of a strategy."""

    request: Request
    strategy: str | None = None
    devices: int = 1


@dataclass
class Bench:
    """Needs of a model. All are kept, so nothing is asked of a graph twice."""

    study: Study
    _studies: dict[str, Study] = field(default_factory=dict)
    _steps: dict[tuple[str, str | None, int], StepResult | StaticmemError] = field(default_factory=dict)
    _live: dict[tuple[str, str | None, int], int] = field(default_factory=dict)
    _nominal: dict[tuple[tuple[str, str | None, int], str], tuple[int, int]] = field(default_factory=dict)
    _made: dict[tuple[str, str | None, int], Verdicts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = device_of(replace(self.study.request, gpu=None, parallel=None))
        self.cards = tuple(gpus.catalog(self.study.request.gpus_file).values())

    # -- steps ---------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> Study:
        """The study of a request on this model."""
        key = repr(request)
        if key not in self._studies:
            self._studies[key] = self.study if request == self.study.request else self.study.ask(request)
        return self._studies[key]

    def step(self, ask: Ask) -> StepResult:
        """The step, as the rank with the most memory runs it.

        Raises:
            StaticmemError: it cannot be run so; the same error at every call.
        """
        key = _key(ask)
        if key not in self._steps:
            try:
                with without_cycle_search():
                    self._steps[key] = self._run(ask)
            except StaticmemError as error:
                self._steps[key] = error
        found = self._steps[key]
        if isinstance(found, StaticmemError):
            raise found
        return found

    def _run(self, ask: Ask) -> StepResult:
        if ask.strategy is None:
            return self.ask(ask.request).result
        one = self.step(Ask(on_one_device(ask.request, ask.strategy)))
        return on_rank(one, strategy_of(ask.request, ask.strategy, ask.devices))

    def live(self, ask: Ask) -> int:
        """Bytes of tensors at the peak."""
        key = _key(ask)
        if key not in self._live:
            result = self.step(ask)
            one = ask.strategy is None
            self._live[key] = (self.ask(ask.request).lifetimes if one else liveness(result.trace)).peak_bytes
        return self._live[key]

    # -- needs ---------------------------------------------------------------------------------------------------

    def overhead(self, ask: Ask, card: Gpu) -> Band:
        """Context and libraries, and a communicator's buffers where devices talk."""
        return self._device(ask).setup.profile.overhead(card)

    def expected(self, ask: Ask, card: Gpu) -> int:
        """Bytes on the card by one replay: what counts of devices and curves compare."""
        return self._reserved(ask, card)[0] + self.overhead(ask, card).expected

    def _reserved(self, ask: Ask, card: Gpu) -> tuple[int, int]:
        """Reserved memory by one replay, and with every workspace at its most, which no band is below."""
        stands = self._verdicts(ask).representative(card)
        key = (_key(ask), stands.architecture)
        if key not in self._nominal:
            result, setup = self.step(ask), on(self.device, stands).setup
            with without_cycle_search():
                found = process_of_trace(result.trace, KernelWorkspaces(result.trace, result.graph, setup))
                nominal = self._replayed(found, found.sizes)
                most = self._replayed(found, found.bound(True)) if found.bounds else nominal
            self._nominal[key] = nominal, max(nominal, most)
        return self._nominal[key]

    def _replayed(self, found: Process, sizes: Sequence[int]) -> int:
        settings = replace(self.device.settings, per_process_memory_fraction=1.0)
        if is_quick(found, settings):
            return peaks(joined(found.calls, len(sizes)), list(sizes)).reserved
        return simulate(found.served(sizes), settings, fallbacks=found.fallbacks).peak_reserved

    def allows(self, ask: Ask, card: Gpu) -> bool:
        """Whether the expected need is within 95 % of the card. What live tensors rule out is not replayed."""
        return self._alive(ask, card) and self.expected(ask, card) <= self._limit(ask, card)

    def may_fit(self, ask: Ask, card: Gpu) -> bool:
        """Whether the least that a band can reach up to is within 95 %: nearly always the verdict, at a tenth of it."""
        if not self._alive(ask, card):
            return False
        return self._reserved(ask, card)[1] + self.overhead(ask, card).high <= self._limit(ask, card)

    def _alive(self, ask: Ask, card: Gpu) -> bool:
        return self.live(ask) + self.overhead(ask, card).expected <= self._limit(ask, card)

    def _limit(self, ask: Ask, card: Gpu) -> int:
        return int(usable_on(on(self._device(ask), card)) * TIGHT)

    def verdict(self, ask: Ask, card: Gpu, own: bool = False) -> Verdict:
        """That of `analyze --gpu`; `own`: from a replay for this card alone, so that the bytes are the same too."""
        with without_cycle_search():
            return self._verdicts(ask).of(card, own)

    def fits(self, ask: Ask, card: Gpu) -> bool:
        """Whether the whole band is within 95 %, by the replay that cards of an architecture share."""
        with without_cycle_search():
            return self.may_fit(ask, card) and self._verdicts(ask).fits(card)

    def _verdicts(self, ask: Ask) -> Verdicts:
        key = _key(ask)
        if key not in self._made:
            result = self.step(ask)
            stand_in = None if result.trace.ticks <= LIMIT else largest_of(DEFAULT_ARCHITECTURE, self.cards)
            made = Verdicts(result, self._device(ask), lambda: self._spread(ask), self.cards, stand_in)
            self._made[key] = made
            if ask == Ask(self.study.request) and ask.request.gpu is None:
                self._take_report(made)
        return self._made[key]

    def _spread(self, ask: Ask) -> tuple[int, int]:
        return self.ask(ask.request).spread if ask.strategy is None else (0, 0)

    def _take_report(self, made: Verdicts) -> None:
        """The study's report has replayed its step already, for one architecture."""
        peak, default = self.study.report.peak, self.device
        stands = made.representative(default.gpu)
        same = on(default, stands).setup == default.setup
        if same and peak.allocated_bytes is not None and peak.reserved_bytes is not None:
            less, more = self.study.spread
            allocated, reserved = peak.bands["allocated"], peak.bands["reserved"]
            made.shared[stands.architecture] = (
                Band(allocated.low + less, peak.allocated_bytes, allocated.high - more),
                Band(reserved.low + less, peak.reserved_bytes, reserved.high - more),
            )

    def _device(self, ask: Ask) -> Device:
        """The software, with a communicator where devices talk."""
        if ask.devices == 1 and ask.request.parallel is None:
            return self.device
        setup, profile = self.device.setup, self.device.setup.profile
        talking = replace(profile, libraries=profile.libraries.plus(communicators.NCCL))
        return replace(self.device, setup=replace(setup, profile=talking))


def _key(ask: Ask) -> tuple[str, str | None, int]:
    return repr(ask.request), ask.strategy, ask.devices
