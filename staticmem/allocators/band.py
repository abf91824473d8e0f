"""Bands for allocated and reserved memory: the replay again, with what nobody knows changed a little.

The replay without change is what is expected (docs/adr/0021). One buffer more or less than a free block's size opens a
segment or not, so reserved swings by whole activations between runs that differ in nothing that a graph can tell.
Each jitter changes, deterministically:

- the order of segments in address space, which is the driver's choice and decides between free blocks of equal size;
- all sizes that grow with the batch, by up to 5 %, because a real process has workspaces, metrics and batches that are
  a little different from the ones predicted. The half of the readings of docs/internals/measurements.md that was
  looked at chose that number;
- workspaces that are known as a band: one in four is at its least and one in four at its most, of each kernel the same
  in all steps. Of those that the band is known to miss now and then (`Process.strays`) one in eight is beyond it.

Allocated memory has blocks that were not split: PyTorch gives a free block whole where less than 1 MiB would be left of
it, so the same tensors take up to 1 MiB more each, as the blocks happen to be that are free. How much that is at the
peak differs from jitter to jitter; the band of allocated memory goes as far from what is expected, to either side, as
the jitter that differs the most.

Two more replays have all workspaces at their least, and at their most. Where nothing but PyTorch's default settings is
asked for, all of these are of the large pool in the first two steps (`LargePool`, docs/adr/0014): what is left out
moves reserved memory by a few MiB, and takes four fifths of the time. None of them has a limit: what the memory of a
card does is for `devices.meters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from staticmem.allocators.peaks import LargePool, Outline, joined, large_ids, outline, reserve
from staticmem.allocators.process import Process
from staticmem.allocators.settings import (
    DEFAULTS,
    MIN_BLOCK,
    SMALL_SIZE,
    UNLIMITED,
    Layout,
    Settings,
    ascending,
    descending,
    shuffled,
)
from staticmem.frontends.recent import Recent
from staticmem.units import Band

if TYPE_CHECKING:
    from staticmem.allocators.result import Replay

# The replays of a band are independent of one another and cost the same; a long process gets fewer of them.
JITTERS = 10
LONG, JITTERS_OF_LONG = 200_000, 2  # calls of the process
WIDTH = 0.05  # the largest change of sizes: the range of batches that one prediction stands for
_FACTOR = 2654435761  # Knuth's multiplicative hash: lots that look random and are always the same

# A replay with sizes for some allocations, and a layout: the peaks of allocated and reserved memory and the rounding at
# the first, None where it runs out of memory, as it may with settings that are a limit.
_Outcome: TypeAlias = "tuple[tuple[int, int], int] | None"
_Replayed: TypeAlias = Callable[[Sequence[int], Layout], _Outcome]


class Replays:
    """The replays of a band, each of which is run once, when it is asked for: a search is often content with a few."""

    def __init__(
        self, process: Process, nominal: Outline | Replay | None, settings: Settings = DEFAULTS,
        total: int | None = None, pools: Pools | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            nominal: the replay of the process as it is, without a limit: an outline stands for the default settings, as
                does None, with which the outline is made when it is asked for.
            total: bytes of the device, where the settings ask for a fraction of it.
            pools: of processes with the same calls.
        """
        self.process, self._nominal, self._settings, self._total = process, nominal, settings, total
        self._given_pools = pools
        self._jitters = list(jitters(JITTERS if len(process.calls) <= LONG else JITTERS_OF_LONG))
        # replays in all: the jitters, and behind them all workspaces at their least, and at their most
        self._count = len(self._jitters) + (2 if process.bounds else 0)
        self._outcomes: dict[int, _Outcome] = {}
        self._large: dict[int, int] = {}  # bytes of large segments of a replay

    @property
    def nominal(self) -> Outline | Replay:
        if self._nominal is None:
            self._nominal = outline(self.process.calls, self.process.sizes, self.process.streams)
        return self._nominal

    def bands(self, progress: Callable[[int, int], None] | None = None) -> tuple[Band, Band]:
        """Allocated and reserved bytes at their peaks: those of the nominal replay are expected.

        Args:
            progress: is called with the number of replays that are done, and of all.
        """
        for index in range(self._count):
            self._outcome(index)
            if progress is not None:
                progress(index + 1, self._count)
        nominal, count = self.nominal, len(self._jitters)
        reserved, expected, unsure = [nominal.peak_reserved], _rounding(nominal), 0
        for index in range(count):
            outcome = self._outcome(index)
            if outcome is not None:
                (_, segments), rounding = outcome
                reserved.append(segments)
                unsure = max(unsure, abs(rounding - expected))
        allocated = [nominal.peak_allocated - min(unsure, expected), nominal.peak_allocated + unsure]
        # As blocks are not split below 1 MiB, a smaller workspace can leave a larger block: either bound may be either
        # end
        for index in range(count, self._count):
            outcome = self._outcome(index)
            if outcome is not None:
                allocated.append(outcome[0][0])
                reserved.append(outcome[0][1])
        least = min(allocated)
        return (
            Band(least, nominal.peak_allocated, max(allocated)),
            Band(max(min(reserved), least), nominal.peak_reserved, max(reserved)),
        )

    def some_reserves(self, too_much: Callable[[int], bool], room: int) -> bool:
        """Whether a replay reserves too much, the nominal one included: the one that did so the last time comes first,
        then those with the most bytes, and none follows one that does. What is too much is so for any number that is
        larger, and for all beyond `room`: the large pool alone may be, which is known before the nominal replay."""
        largest_first = sorted(range(len(self._jitters)), key=lambda index: -self._jitters[index][0])
        order = [largest_first[0], *range(self._count - 1, len(self._jitters) - 1, -1), *largest_first[1:]]
        order.sort(key=self._pools.last_beyond.__ne__)
        if self._is_quick:
            beyond = next((index for index in order if self._reserve_large(index, room) > room), None)
            if beyond is not None:
                self._pools.last_beyond = beyond
                return True
        return too_much(self.nominal_reserved[0]) or any(too_much(self._reserve(index)) for index in order)

    @cached_property
    def reserved(self) -> tuple[int, int]:
        """The least and the most bytes that any replay reserves."""
        all_of_them = self.nominal_reserved[0], *(self._reserve(index) for index in range(self._count))
        return min(all_of_them), max(all_of_them)

    @cached_property
    def nominal_reserved(self) -> tuple[int, int]:
        """What the nominal replay reserves, and what of it is small segments."""
        if not self._is_quick:
            return self.nominal.peak_reserved, 0
        if isinstance(self._nominal, Outline):
            return self._nominal.peak_reserved, self._nominal.small
        return self._pools.reserved(self.process)

    @property
    def _is_quick(self) -> bool:
        return self._nominal is None or isinstance(self._nominal, Outline)

    def _reserve(self, index: int) -> int:
        """What a replay reserves; nothing where it runs out of memory."""
        if self._is_quick:
            return self._reserve_large(index) + self.nominal_reserved[1]
        outcome = self._outcome(index)
        return 0 if outcome is None else outcome[0][1]

    def _reserve_large(self, index: int, most: int = UNLIMITED) -> int:
        """What a replay reserves in the large pool; more than `most` is no exact figure."""
        segments = self._large.get(index)
        if segments is None:
            pool, sizes = self._of_large_pool
            segments = pool.reserve(*self._changed(index, sizes, pool.ids, MIN_BLOCK), most)
            if segments <= most:
                self._large[index] = segments
        return segments

    @cached_property
    def _pools(self) -> Pools:
        return self._given_pools or Pools()

    @cached_property
    def _of_large_pool(self) -> tuple[LargePool, JitteredSizes]:
        pool = self._pools.large(self.process)
        return pool, JitteredSizes(self.process, pool.ids)

    def _outcome(self, index: int) -> _Outcome:
        if index not in self._outcomes:
            replayed, ids, jittered = self._way
            self._outcomes[index] = replayed(*self._changed(index, jittered, ids))
        return self._outcomes[index]

    def _changed(
        self, index: int, jittered: JitteredSizes, ids: Sequence[int], multiple: int = 1
    ) -> tuple[list[int], Layout]:
        """The sizes of some ids in a replay, as whole multiples, and its layout."""
        if index < len(self._jitters):
            scale, layout = self._jitters[index]
            return jittered.scaled(scale, index + 1, multiple), layout
        bound = self.process.bound(index > len(self._jitters))
        return [-(-bound[id] // multiple) * multiple for id in ids], ascending

    @cached_property
    def _way(self) -> tuple[_Replayed, Sequence[int], JitteredSizes]:
        """Replays, the allocations whose sizes they ask for, and these sizes."""
        if isinstance(self.nominal, Outline):
            pool = LargePool(self.process, self.nominal, large_ids(self.process, 1 + WIDTH))
            return pool.peaks_and_rounding, pool.ids, JitteredSizes(self.process, pool.ids)
        ids = range(len(self.process.sizes))
        return _whole(self.process, self._settings, self._total), ids, JitteredSizes(self.process, ids)


class Pools:
    """Large pools of processes, and their joined calls: the same for those that differ in sizes alone."""

    MOST = 8  # that are kept, some 50 KiB each for a step of a thousand ops

    def __init__(self) -> None:
        self.last_beyond = -1  # the replay that reserved too much
        self._large: Recent[tuple[Process, LargePool]] = Recent(self.MOST)
        self._joined: Recent[tuple[Process, list[int]]] = Recent(self.MOST)
        self._small: Recent[tuple[Process, int]] = Recent(self.MOST)

    def large(self, process: Process) -> LargePool:
        """The large pool without a nominal replay."""
        ids = large_ids(process, 1 + WIDTH)
        key = id(process.calls), ids  # the process that is kept holds its calls
        kept = self._large.get(key)
        if kept is None:
            kept = process, LargePool(process, None, ids)
            self._large.put(key, kept)
        return kept[1]

    def reserved(self, process: Process) -> tuple[int, int]:
        """Bytes of segments, and of the small ones among them. The two pools share nothing, so that each is served
        alone: from one batch to the next hardly any small tensor has another size."""
        sizes = [(nbytes + MIN_BLOCK - 1) & -MIN_BLOCK for nbytes in process.sizes]
        calls, streams = self._joined_calls(process), process.streams
        of_small = tuple([size if size <= SMALL_SIZE else 0 for size in sizes])
        key = id(process.calls), of_small
        kept = self._small.get(key)
        if kept is None:
            kept = process, reserve(calls, of_small, streams=streams)[1]
            self._small.put(key, kept)
        of_large = [size if size > SMALL_SIZE else 0 for size in sizes]
        return reserve(calls, of_large, streams=streams)[0] + kept[1], kept[1]

    def _joined_calls(self, process: Process) -> list[int]:
        kept = self._joined.get(id(process.calls))
        if kept is None:
            kept = process, joined(process.calls, len(process.sizes))
            self._joined.put(id(process.calls), kept)
        return kept[1]


def _whole(process: Process, settings: Settings, total: int | None) -> _Replayed:
    from staticmem.allocators.cuda_caching import simulate  # the default settings need none of it

    def replayed(sizes: Sequence[int], layout: Layout) -> _Outcome:
        replay = simulate(process.served(sizes), settings, total=total, fallbacks=process.fallbacks, layout=layout)
        return None if replay.oom is not None else ((replay.peak_allocated, replay.peak_reserved), _rounding(replay))

    return replayed


def _rounding(nominal: Outline | Replay) -> int:
    """What blocks are larger than requests where allocated memory peaks, beyond whole blocks of 512 bytes."""
    if isinstance(nominal, Outline):
        return nominal.rounding
    alive = [p for p in nominal.placements() if p.alive(nominal.peak_allocated_at)]
    return sum(p.size - -(-p.requested // MIN_BLOCK) * MIN_BLOCK for p in alive)


def jitters(count: int) -> Iterator[tuple[float, Layout]]:
    """`count` jitters: the factor of sizes that grow with the batch, and where the driver puts segments.

    They are pairs of a larger and a smaller batch.
    """
    layouts = [descending, *map(shuffled, range(1, count + 1))]
    pairs = max(count // 2, 1)
    for index in range(count):
        change = WIDTH * (index // 2 + 1) / pairs
        yield 1 - change if index % 2 else 1 + change, layouts[index]


class JitteredSizes:
    """The sizes of some allocations of a process, as each jitter has them."""

    def __init__(self, process: Process, ids: Sequence[int] | None = None) -> None:
        """`ids`: these alone, in this order; all by default."""
        sizes, scales, kernels = process.sizes, process.scales, process.origins.kernels
        bounds, strays = process.bounds, process.strays
        # Many allocations are alike, as those of a kernel in each step are: each place has the number of its kind
        kinds: dict[Any, int] = {}
        self._places: list[int] = []
        for id in range(len(sizes)) if ids is None else ids:
            kind: Any = (sizes[id], scales[id])
            if id in bounds or id in strays:
                kind = (*kind, kernels[id], bounds.get(id), strays.get(id))
            self._places.append(kinds.setdefault(kind, len(kinds)))
        self._kinds = [(kind[0], kind[1]) for kind in kinds]
        uncertain = [(number, *kind[2:]) for kind, number in kinds.items() if len(kind) > 2]
        self._bounds = [(number, kernel, *band) for number, kernel, band, _ in uncertain if band is not None]
        self._strays = [(number, kernel, *band) for number, kernel, _, band in uncertain if band is not None]

    def scaled(self, scale: float, draw: int = 0, multiple: int = 1) -> list[int]:
        """The sizes of a batch that is `scale` times as large, as whole multiples. What is smaller than a block stays
        as it is.

        `draw` above 0 chooses which kernels' workspaces are at a bound.
        """
        kinds = self._kinds
        if draw and (self._bounds or self._strays):
            kinds = list(kinds)
            for number, kernel, low, high in self._bounds:
                lot = (kernel * _FACTOR + draw) * _FACTOR >> 16 & 3
                if lot < 2:
                    kinds[number] = (high if lot else low, kinds[number][1])
            # as often as docs/internals/workspace.md says
            for number, kernel, low, high in self._strays:
                lot = ((kernel + high) * _FACTOR + draw) * _FACTOR >> 20 & 15
                if lot < 2:
                    kinds[number] = (high if lot else low, kinds[number][1])
        grown = [round(nbytes * scale) if grows and nbytes > MIN_BLOCK else nbytes for nbytes, grows in kinds]
        if multiple > 1:
            grown = [-(-nbytes // multiple) * multiple for nbytes in grown]
        return [grown[number] for number in self._places]


def is_quick(process: Process, settings: Settings) -> bool:
    """Whether an outline and the large pool stand for whole replays without a limit: with default settings.

    A memory fraction alone is a limit, which neither has.
    """
    plain = replace(settings, per_process_memory_fraction=1.0) == DEFAULTS
    return plain and not process.empties and not process.private
