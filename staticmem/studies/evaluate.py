"""Live peaks of many requests on one model: few steps are run, the others are arithmetic on arrays.

Requests that differ in batch and optimizer alone are a group. A group is run at three batches, each with another of its
optimizers; where the three have one structure, and the bytes of every buffer lie on one line, all batches between are
evaluated as arrays (`structure.Affine`). Where they do not, the range is divided until they do, or until every batch
has been run. Batch 1 is always run: layouts and broadcasting treat a size of 1 in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from staticmem.errors import StaticmemError, unexpected
from staticmem.report.sweep import CardFit
from staticmem.studies import Request, Study, without_cycle_search
from staticmem.studies.structure import Affine, Core, Curves, OptimizerPart, curves, take_apart
from staticmem.studies.study import Key, key_of

# Options that change the optimizer's part of a step and nothing else of it. All other options divide groups.
# That they change nothing else is checked at every step that is run: `_Group._add`.
OPTIMIZER_OPTIONS = tuple(
    "optimizer optimizer_impl momentum dampening weight_decay nesterov amsgrad centered compile_optimizer".split()
)


@dataclass(frozen=True)
class Row:
    """One configuration. Bytes at its live peak; `method` says where it is from: "run", or "arrays" from other runs.
    `cards` are those that it was compared with, `assumed` what its request does not say."""

    request: Request
    mode: str
    live: int
    phase: str
    by_category: Mapping[str, int]
    forward: int
    backward: int | None
    optimizer: int | None
    method: str
    cards: tuple[CardFit, ...] = ()
    assumed: tuple[str, ...] = ()


Outcome = Row | StaticmemError
Done = Callable[[int], None]
Parts = dict[tuple[Key, int, Key], OptimizerPart]  # by group, parameters, optimizer


def of_exception(error: Exception) -> StaticmemError:
    """The error of a configuration, whatever it was: one that cannot be analysed does not end the others."""
    return error if isinstance(error, StaticmemError) else unexpected(error, "Analyse this configuration alone")


def evaluate(study: Study, requests: Sequence[Request], done: Done | None = None) -> list[Outcome]:
    """The live peak of every request, in their order. A request that cannot be analysed has its error.

    Args:
        study: of the model; its own request plays no part.
        done: is called with the number of requests that have been evaluated since the last call.
    """
    outcomes: list[Outcome | None] = [None] * len(requests)
    groups: dict[Key, tuple[Request, list[int]]] = {}
    parts: Parts = {}
    for index, request in enumerate(requests):
        try:
            scenario, _ = request.scenario()
        except Exception as error:
            outcomes[index] = of_exception(error)
            continue
        shared = replace(_without_optimizer(request), batch=None, mode=scenario.mode)
        groups.setdefault(key_of(shared), (shared, []))[1].append(index)
    for shared, members in groups.values():
        group = _Group(study, shared, [requests[i] for i in members], parts)
        for index, outcome in zip(members, group.outcomes(), strict=True):
            outcomes[index] = outcome
        if done is not None:
            done(len(members))
    return [outcome for outcome in outcomes if outcome is not None]


def row_of(study: Study) -> Row:
    """The row of a study's own request."""
    core, _ = take_apart(study.lifetimes, apart=False)
    nothing = OptimizerPart.nothing()
    return _rows([study.request], study.scenario.mode, curves(core, core.sizes()), [nothing], ["run"])[0]


def row_between(request: Request, mode: str, sizes: Affine, batch: int) -> Row:
    """The row of a request whose step lies between two that were run."""
    return _rows([request], mode, sizes.curves([batch]), [OptimizerPart.nothing()], ["arrays"])[0]


def without_options(request: Request, names: Iterable[str]) -> Request:
    """The request with the defaults of some fields."""
    blank = Request()
    return replace(request, **{name: getattr(blank, name) for name in names})


def _without_optimizer(request: Request) -> Request:
    bare = without_options(request, OPTIMIZER_OPTIONS)
    return bare if request.optimizer is not None or request.mode == "train" else request


@dataclass
class _Group:
    """Requests that differ in batch and optimizer alone."""

    study: Study
    key: Request
    requests: Sequence[Request]
    parts: Parts
    cores: dict[int | None, Core] = field(default_factory=dict)
    apart: bool = True
    turn: int = 0

    def outcomes(self) -> list[Outcome]:
        if len({r.batch for r in self.requests}) < len(self.requests) or len(self.requests) > 1:
            try:
                return list(self._together())
            except Exception:  # noqa: S110 - some batch cannot be bound: each request for itself has its own error
                pass
        return [self._alone(request) for request in self.requests]

    def _alone(self, request: Request) -> Outcome:
        try:
            with without_cycle_search():
                return row_of(self.study.ask(request))
        except Exception as error:
            return of_exception(error)

    def _together(self) -> Sequence[Outcome]:
        by_batch: dict[int | None, list[int]] = {}
        for index, request in enumerate(self.requests):
            by_batch.setdefault(request.batch, []).append(index)
        outcomes: dict[int, Outcome] = {}
        for piece, batches in self._pieces(sorted(by_batch, key=lambda b: b or 0)):
            peaks = self._curves(piece, batches)
            for row, batch in enumerate(batches):
                members = by_batch[batch]
                parts = [self._part(self.requests[i], batch) for i in members]
                if any(part is None for part in parts):
                    return self._one_optimizer_at_a_time()
                method = "arrays" if isinstance(piece, Affine) else "run"
                ran = [method if len(members) == 1 or method == "arrays" else "arrays" for _ in members]
                chosen = peaks.take([row] * len(members))
                asked, separate = [self.requests[i] for i in members], [part for part in parts if part is not None]
                rows = _rows(asked, self.key.mode or "infer", chosen, separate, ran)
                outcomes.update(zip(members, rows, strict=True))
        if not self.apart:
            return self._one_optimizer_at_a_time()
        return [outcomes[index] for index in range(len(self.requests))]

    def _one_optimizer_at_a_time(self) -> list[Outcome]:
        """Where an optimizer cannot be taken apart from its step: a group for each."""
        outcomes: dict[int, Outcome] = {}
        groups: dict[Key, list[int]] = {}
        for index, request in enumerate(self.requests):
            groups.setdefault(key_of(replace(request, batch=None)), []).append(index)
        if len(groups) == 1 and not self.apart:
            return [self._alone(request) for request in self.requests]
        for members in groups.values():
            key = replace(self.requests[members[0]], batch=None, mode=self.key.mode)
            group = _Group(self.study, key, [self.requests[i] for i in members], {}, apart=False)
            outcomes.update(zip(members, group._whole(), strict=True))
        return [outcomes[index] for index in range(len(self.requests))]

    def _whole(self) -> list[Outcome]:
        """As `_together`, with the optimizer as part of the core."""
        batches = sorted({r.batch for r in self.requests}, key=lambda b: b or 0)
        nothing = OptimizerPart.nothing()
        rows: dict[int | None, Row] = {}
        for piece, covered in self._pieces(batches):
            method = "arrays" if isinstance(piece, Affine) else "run"
            some = [replace(self.requests[0], batch=batch) for batch in covered]
            mode, peaks, count = self.key.mode or "infer", self._curves(piece, covered), len(covered)
            rows.update(zip(covered, _rows(some, mode, peaks, [nothing] * count, [method] * count), strict=True))
        return [replace(rows[r.batch], request=r) for r in self.requests]

    # -- batches -------------------------------------------------------------------------------------------------

    def _pieces(self, batches: Sequence[int | None]) -> list[tuple[Affine | Core, list[int | None]]]:
        """The batches in runs, each with the structure that serves for it; every batch once."""
        alone = [b for b in batches if b is None or b == 1]
        rest = [b for b in batches if b is not None and b != 1]
        pieces: list[tuple[Affine | Core, list[int | None]]] = [(self._core(b), [b]) for b in alone]
        open_ranges = [rest] if rest else []
        while open_ranges:
            some = open_ranges.pop()
            if len(some) <= 3:
                pieces += [(self._core(b), [b]) for b in some]
                continue
            probes = (some[0], some[len(some) // 2], some[-1])
            affine = Affine.through([(b, self._core(b)) for b in probes])
            if affine is not None:
                pieces.append((affine, list(some)))
                continue
            middle = len(some) // 2
            open_ranges += [some[:middle], some[middle:]]
        return pieces

    def _curves(self, piece: Affine | Core, batches: Sequence[int | None]) -> Curves:
        if isinstance(piece, Affine):
            return piece.curves([b for b in batches if b is not None])
        return curves(piece, piece.sizes())

    def _core(self, batch: int | None) -> Core:
        """The core at a batch, by a run with one of the group's optimizers in turn."""
        if batch not in self.cores:
            wanted = list({key_of(_optimizer(r)): _optimizer(r) for r in self.requests}.values())
            measured = {key[2] for key in self.parts if key[0] == self._family}
            missing = [w for w in wanted if key_of(w) not in measured]
            optimizer = (missing or wanted)[self.turn % len(missing or wanted)]
            self.turn += not missing
            self._add(batch, optimizer)
        return self.cores[batch]

    # -- optimizers ----------------------------------------------------------------------------------------------

    @property
    def _family(self) -> Key:
        """What an optimizer's part may depend on, other than the parameters."""
        return key_of(without_options(self.key, ("resolution", "dims")))

    def _add(self, batch: int | None, optimizer: Request) -> OptimizerPart | None:
        """Runs a step, and compares the optimizer's part with that of earlier runs."""
        options = {name: getattr(optimizer, name) for name in OPTIMIZER_OPTIONS}
        request = replace(self.key, batch=batch, **options)
        with without_cycle_search():
            core, part = take_apart(self.study.ask(request).lifetimes, self.apart)
        before = self.cores.setdefault(batch, core)
        if before is not core and not (
            before.structure == core.structure and np.array_equal(before.nbytes, core.nbytes)
        ):
            self.apart, part = False, None  # an optimizer that changes more than its own part
        if part is None:
            self.apart = False
            return None
        key = (self._family, core.parameters, key_of(optimizer))
        if self.parts.setdefault(key, part) != part:
            self.apart = False
            return None
        return part

    def _part(self, request: Request, batch: int | None) -> OptimizerPart | None:
        optimizer = _optimizer(request)
        at = batch if batch in self.cores else next(iter(self.cores))
        key = (self._family, self.cores[at].parameters, key_of(optimizer))
        return self.parts.get(key) or self._add(at, optimizer)


def _optimizer(request: Request) -> Request:
    """A request of nothing but the options of the optimizer."""
    return Request(**{name: getattr(request, name) for name in OPTIMIZER_OPTIONS})


def _rows(
    requests: Sequence[Request], mode: str, core: Curves, parts: Sequence[OptimizerPart], methods: Sequence[str]
) -> list[Row]:
    """Rows of a core's peaks with the optimizer's part put back."""
    rows = []
    for i, (request, part) in enumerate(zip(requests, parts, strict=True)):
        live, phase = int(core.peak[i]) + part.state, core.peak_phase[i]
        by_category = dict(zip(core.categories, core.by_category[i].tolist(), strict=True))
        step = int(core.end[i]) + part.state + part.peak
        if step > live:
            live, phase = step, "optimizer"
            by_category = dict(zip(core.categories, core.end_by_category[i].tolist(), strict=True))
            for name, size in part.peak_by_category:
                by_category[name] = by_category.get(name, 0) + size
        by_category["optimizer_state"] += part.state
        peaks = dict(zip(core.phases, (core.phase_peak[i] + part.state).tolist(), strict=True))
        at_step = max(step, peaks.get("optimizer", 0)) if request.optimizer and mode == "train" else None
        forward, backward = peaks["forward"], peaks.get("backward")
        rows.append(Row(request, mode, live, phase, by_category, forward, backward, at_step, methods[i]))
    return rows
