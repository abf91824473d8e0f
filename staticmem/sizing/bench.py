"""Steps and their needs, each worked out once: what the rows, counts and curves of a sizing report ask for again and
again. What the allocator takes depends on a card's architecture only, the context on the card."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from staticmem.allocators import process
from staticmem.allocators.peaks import joined, peaks
from staticmem.analysis import Request, Study, without_cycle_search
from staticmem.analysis.device import device_of
from staticmem.analysis.ranks import on_one_device, strategy_of
from staticmem.errors import StaticmemError
from staticmem.hardware import communicators
from staticmem.hardware.band import Band
from staticmem.hardware.gpus import DEFAULT_ARCHITECTURE, Gpu
from staticmem.hardware.kernels import KernelWorkspaces
from staticmem.hardware.sizing import TIGHT, Verdict, verdict
from staticmem.lifetimes import liveness
from staticmem.meters import Device, on_device
from staticmem.parallel.rank import on_rank
from staticmem.training.step import StepResult

LIMIT = 20_000  # ticks of a trace; beyond it one architecture stands for all, and bands come from it
ROOMY = 1 << 60  # bytes: a card on which nothing has to be given back


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
    _bands: dict[tuple[tuple[str, str | None, int], str], tuple[Band, Band]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = device_of(replace(self.study.request, gpu=None, parallel=None))

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
            self._live[key] = liveness(self.step(ask).trace).peak_bytes
        return self._live[key]

    # -- needs ---------------------------------------------------------------------------------------------------

    def architecture(self, ask: Ask, card: Gpu) -> str:
        """The architecture whose workspaces are replayed for a card."""
        return card.architecture if self.step(ask).trace.ticks <= LIMIT else DEFAULT_ARCHITECTURE

    def overhead(self, ask: Ask, card: Gpu) -> Band:
        """Context and libraries, and a communicator's buffers where devices talk."""
        found = self.device.setup.profile.overhead(card)
        several = ask.devices > 1 or ask.request.parallel is not None
        return found.plus(communicators.NCCL) if several else found

    def expected(self, ask: Ask, card: Gpu) -> int:
        """Bytes on the card by one replay: what searches compare."""
        key = (_key(ask), self.architecture(ask, card))
        if key not in self._nominal:
            result, setup = self.step(ask), replace(self.device.setup, architecture=key[1])
            with without_cycle_search():
                found = process(result.trace, KernelWorkspaces(result.trace, result.graph, setup))
                made = peaks(joined(found.calls, len(found.sizes)), list(found.sizes))
            self._nominal[key] = made.allocated, made.reserved
        return self._nominal[key][1] + self.overhead(ask, card).expected

    def allows(self, ask: Ask, card: Gpu) -> bool:
        """Whether the expected need is within 95 % of the card. What live tensors rule out is not replayed."""
        limit = int(card.usable * TIGHT)
        if self.live(ask) + self.overhead(ask, card).expected > limit:
            return False
        return self.expected(ask, card) <= limit

    def verdict(self, ask: Ask, card: Gpu) -> Verdict:
        """The verdict with its band; where only the allocator's cache is too large, with a replay on a card that
        full."""
        architecture = self.architecture(ask, card)
        key = (_key(ask), architecture)
        if (
            key not in self._bands
            and ask == Ask(replace(self.study.request, gpu=None))
            and self.study.request.gpu is None
        ):
            self._take_report(key)
        if key not in self._bands:
            meters = on_device(self.step(ask), self._device(replace(card, usable=ROOMY), architecture))
            self._bands[key] = meters.allocated, meters.reserved
        allocated, reserved = self._bands[key]
        overhead = self.overhead(ask, card)
        needed = reserved.plus(overhead)
        if needed.expected > card.usable >= allocated.expected + overhead.expected:
            profile = replace(self.device.setup.profile, libraries=overhead.minus(self._context(card)))
            device = self._device(card, architecture)
            return on_device(self.step(ask), replace(device, setup=replace(device.setup, profile=profile))).verdict
        return verdict(needed, card.usable)

    def _take_report(self, key: tuple[tuple[str, str | None, int], str]) -> None:
        """The study's report has replayed its step already, for one architecture."""
        peak = self.study.report.peak
        if key[1] == DEFAULT_ARCHITECTURE and peak.allocated_bytes is not None and peak.reserved_bytes is not None:
            allocated, reserved = peak.bands["allocated"], peak.bands["reserved"]
            self._bands[key] = (
                Band(allocated.low, peak.allocated_bytes, allocated.high),
                Band(reserved.low, peak.reserved_bytes, reserved.high),
            )

    def _context(self, card: Gpu) -> Band:
        return self.device.setup.profile.context(card)

    def _device(self, card: Gpu, architecture: str) -> Device:
        return replace(self.device, gpu=card, setup=replace(self.device.setup, architecture=architecture))


def _key(ask: Ask) -> tuple[str, str | None, int]:
    return repr(ask.request), ask.strategy, ask.devices
