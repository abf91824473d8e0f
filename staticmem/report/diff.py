"""What changed between two reports: headline, meters, categories, modules, tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staticmem.report.model import METERS, Report, TensorEntry
from staticmem.report.verdict import place, step_name

SCHEMA = "staticmem.diff/1"
_Key = tuple[str, str, str, str]  # name or op, module, category, dtype
_NAMED = ("parameter", "buffer", "gradient", "optimizer_state", "input")  # by the model; other names are numbers


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both reports, in bytes; `delta` = `after` - `before`. None: that report does not have it."""

    name: str
    before: int | None
    after: int | None
    delta: int | None


@dataclass(frozen=True, slots=True)
class TensorChange:
    """Tensors alive at the peak that belong together: of one module, op (or name in the model), dtype and category.

    Shapes are those of the largest, bytes of all; `name` is that of one of them.
    """

    name: str
    module: str
    category: str
    dtype: str
    before_shape: tuple[int, ...] | None
    after_shape: tuple[int, ...] | None
    before: int
    after: int
    delta: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two reports. `peak_at` says when its peak is; `gpu` and `fit` are None without a card."""

    path: str
    step: str
    phase: str
    peak_at: str
    gpu: str | None
    fit: str | None


@dataclass(frozen=True, slots=True)
class ReportDiff:
    """`settings` are the words of the scenario that differ, as (name, before, after). Largest changes come first.

    `new` are tensors alive at the second peak alone, `gone` those at the first alone, `changed` those in both with
    other bytes. `complete` is False where a saved report lists only its largest tensors: what is new, gone or changed
    is not known then, and these are empty.
    """

    schema: str
    before: Side
    after: Side
    settings: tuple[tuple[str, str, str], ...]
    meters: tuple[Change, ...]
    parameters: Change
    categories: tuple[Change, ...]
    modules: tuple[Change, ...]
    new: tuple[TensorChange, ...]
    gone: tuple[TensorChange, ...]
    changed: tuple[TensorChange, ...]
    complete: bool

    @property
    def live(self) -> Change:
        return self.meters[0]


def diff(before: Report, after: Report) -> ReportDiff:
    """The differences of two reports; of any models."""
    complete = all(len(report.alive) == report.peak.tensors for report in (before, after))
    tensors = _tensors(before.alive, after.alive) if complete else []
    meters = [change(m, getattr(before.peak, f"{m}_bytes"), getattr(after.peak, f"{m}_bytes")) for m in METERS]
    return ReportDiff(
        schema=SCHEMA,
        before=_side(before),
        after=_side(after),
        settings=_settings(before, after),
        meters=tuple(meters),
        parameters=change("parameters", before.parameters.bytes, after.parameters.bytes),
        categories=_changes(before.peak.by_category, after.peak.by_category),
        modules=_changes(_modules(before), _modules(after)),
        new=tuple(t for t in tensors if t.before_shape is None),
        gone=tuple(t for t in tensors if t.after_shape is None),
        changed=tuple(t for t in tensors if t.before_shape is not None and t.after_shape is not None),
        complete=complete,
    )


def change(name: str, before: int | None, after: int | None) -> Change:
    return Change(name, before, after, after - before if before is not None and after is not None else None)


def _side(report: Report) -> Side:
    gpu = report.gpu
    card = (gpu.name, gpu.fit) if gpu else (None, None)
    return Side(report.model.path, step_name(report), report.peak.phase, place(report.peak), *card)


def _settings(before: Report, after: Report) -> tuple[tuple[str, str, str], ...]:
    rows = []
    for name in type(before.scenario).__dataclass_fields__:
        first, second = getattr(before.scenario, name), getattr(after.scenario, name)
        if first != second:
            rows.append((name, _word(first), _word(second)))
    return tuple(rows)


def _word(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _modules(report: Report) -> dict[str, int]:
    return {row.module: row.bytes for row in report.peak.by_module}


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    """What differs, largest change first."""
    rows = [change(name, before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys((*before, *after))]
    return tuple(sorted((row for row in rows if row.delta), key=lambda row: (-abs(row.delta or 0), row.name)))


def _tensors(before: Sequence[TensorEntry], after: Sequence[TensorEntry]) -> list[TensorChange]:
    names: dict[_Key, str] = {}
    sums: tuple[Counter[_Key], Counter[_Key]] = (Counter(), Counter())
    shapes: tuple[dict[_Key, tuple[int, ...]], dict[_Key, tuple[int, ...]]] = ({}, {})
    for side, entries in enumerate((before, after)):
        for e in entries:  # largest first
            # exporters number results (`conv2d_3`): a layer more would rename all behind it, its op and module stay
            key = (e.name if e.category in _NAMED or not e.module else e.op, e.module, e.category, e.dtype)
            names[key] = e.name
            sums[side][key] += e.bytes
            shapes[side].setdefault(key, e.shape)
    rows = []
    for key in dict.fromkeys((*sums[0], *sums[1])):
        old, new = sums[0][key], sums[1][key]
        if old != new:
            _, module, category, dtype = key
            shape = [some.get(key) for some in shapes]
            rows.append(TensorChange(names[key], module, category, dtype, shape[0], shape[1], old, new, new - old))
    return sorted(rows, key=lambda t: (-abs(t.delta), t.module, t.name))
