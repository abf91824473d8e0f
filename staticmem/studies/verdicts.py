"""Verdicts of one step on many cards, which share replays of the allocator where their verdicts cannot differ by it.

What the allocator takes depends on a card's architecture until the card is full; only the partial sums of reductions
depend on its multiprocessors too (`hardware.reductions`). So the step is replayed for the largest card of each
architecture, and again for a card of its own where all of those sums together could change the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from staticmem.devices import gpus
from staticmem.devices.gpus import Gpu
from staticmem.devices.kernels import KernelWorkspaces
from staticmem.devices.meters import Device, on_device, usable_on
from staticmem.devices.reductions import Multiprocessors
from staticmem.devices.sizing import TIGHT, Fit, Verdict, verdict
from staticmem.engine.step import StepResult
from staticmem.units import Band

ROOMY = 1 << 60  # bytes: a card on which nothing has to be given back


def on(device: Device, card: Gpu) -> Device:
    """The same software on another card."""
    multiprocessors = Multiprocessors(card.processors, gpus.THREADS[card.architecture])
    return replace(
        device, gpu=card, setup=replace(device.setup, architecture=card.architecture, multiprocessors=multiprocessors)
    )


def largest_of(architecture: str, cards: Iterable[Gpu]) -> Gpu | None:
    """The card with the most memory of an architecture."""
    return max((card for card in cards if card.architecture == architecture), key=_size, default=None)


def _size(card: Gpu) -> tuple[int, str]:
    return card.usable, card.slug


@dataclass
class Verdicts:
    """Verdicts of a step with the software of `device`.

    `spread` gives what the file leaves open (`meters.on_device`); it is asked for only where it is needed. `cards` are
    those whose largest stand for their architectures. `stand_in`: one card that stands for all, whatever their
    architecture: for graphs of which few replays can be made.
    """

    result: StepResult
    device: Device
    spread: Callable[[], tuple[int, int]]
    cards: Iterable[Gpu]
    stand_in: Gpu | None = None
    shared: dict[str, tuple[Band, Band]] = field(default_factory=dict)  # allocated and reserved by architecture
    _own: dict[str, Verdict] = field(default_factory=dict)
    _sums: dict[Multiprocessors, dict[int, int]] = field(default_factory=dict)

    def of(self, card: Gpu, own: bool = False) -> Verdict:
        """The verdict with its band; `own`: from a replay for this card alone, to the byte that of `on_device`."""
        less, more = self.spread()
        return self._without_spread(card, more, own).widened(less, more)

    def fits(self, card: Gpu) -> bool:
        """Whether the whole band is within 95 % of the card, by the replay that its architecture shares: for searches.

        Where the band is not without it, the spread is not asked for.
        """
        needed, usable = self._shared(card), usable_on(on(self.device, card))
        bare = verdict(needed, usable)
        return bare.fit is Fit.FITS and bare.widened(*self.spread()).fit is Fit.FITS

    def representative(self, card: Gpu) -> Gpu:
        """The card whose replay stands for this one's."""
        return self.stand_in or largest_of(card.architecture, self.cards) or card

    def _without_spread(self, card: Gpu, more: int, own: bool = False) -> Verdict:
        """`more` is what the band's upper end will be raised by."""
        if card.slug in self._own:
            return self._own[card.slug]
        device, needed = on(self.device, card), self._shared(card)
        overhead, usable = device.setup.profile.overhead(card), usable_on(device)
        allocated, _ = self.shared[self.representative(card).architecture]
        doubt = self._doubt(card)
        alive = allocated.expected + overhead.expected
        if alive - doubt > usable and not own:  # does not fit, whatever the cache gives back
            return verdict(needed, usable)
        near = abs(needed.high + more - usable * TIGHT) <= doubt if doubt else False
        if own or near or needed.expected + doubt > usable or self._counts_the_card(needed, card):
            if self.stand_in is not None:
                device = replace(device, setup=on(self.device, self.stand_in).setup)
            self._own[card.slug] = on_device(self.result, device).verdict
            return self._own[card.slug]
        return verdict(needed, usable)

    def _shared(self, card: Gpu) -> Band:
        """The need on a card, with what the allocator takes on the one that stands for it."""
        roomy = self.representative(card)
        if roomy.architecture not in self.shared:
            found = on_device(self.result, on(self.device, replace(roomy, usable=ROOMY)))
            self.shared[roomy.architecture] = found.allocated, found.reserved
        return self.shared[roomy.architecture][1].plus(self.device.setup.profile.overhead(card))

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

    def _doubt(self, card: Gpu) -> int:
        """Bytes by which all partial sums of the step together differ from those of the card that stands in."""
        roomy = self.representative(card)
        if self.stand_in is not None or card.slug == roomy.slug:
            return 0
        mine, theirs = self._partial_sums(card), self._partial_sums(roomy)
        return sum(abs(mine.get(kernel, 0) - theirs.get(kernel, 0)) for kernel in mine.keys() | theirs.keys())

    def _partial_sums(self, card: Gpu) -> dict[int, int]:
        setup = on(self.device, card).setup
        if setup.multiprocessors not in self._sums:
            found = KernelWorkspaces(self.result.trace, self.result.graph, setup).partial_sums()
            self._sums[setup.multiprocessors] = found
        return self._sums[setup.multiprocessors]
