"""The sentences that recommend a card, or several, in a sizing report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from staticmem.report.model import ScenarioInfo
from staticmem.report.sizing import ACCUMULATE, FITS, TIGHT, CardRow, Count
from staticmem.scenario.strategies import DATA_PARALLEL, STRATEGIES
from staticmem.studies import Request
from staticmem.units import format_bytes


def recommend(
    rows: Sequence[CardRow], request: Request, scenario: ScenarioInfo, confirms: Callable[[CardRow, Count], bool]
) -> tuple[str, str | None]:
    """The sentences of the recommendation, a line each, and the slug of the card that the first one names.

    Args:
        confirms: whether the verdict of so many devices is "fits"; counts leave out the band of their own step.
    """
    what = f"{'train' if scenario.mode == 'train' else 'run'} it at batch {scenario.batch}"
    what = what if scenario.batch is not None else what.partition(" at ")[0]
    able = [row for row in rows if not row.obstacle]
    if not able:
        return f"No GPU of the list can {what}: {rows[-1].name}: {rows[-1].obstacle}.", None
    rows = able
    one = _examined(_preferred([row for row in rows if row.fit == FITS]))
    tight = _examined(_preferred([row for row in rows if row.fit == TIGHT]))
    ranks = request.context_parallel or 1
    devices = request.devices or ranks
    if request.communicators and devices > 1:
        names = [STRATEGIES[request.parallel].title] if request.parallel is not None else []
        names += [f"each sequence over {ranks} of them"] if ranks > 1 else []
        what = what if ranks > 1 else _each(what, str(request.parallel))
        return _recommend_ranks(one, tight, rows, " and ".join(names), devices, what)
    if one:
        return _recommend_one(one, rows, what, confirms)
    several = _several(rows, confirms)
    if tight:
        return _recommend_tight(tight, several, what)
    if several is None:
        least = min(rows, key=lambda row: row.missing_bytes or 0)
        text = f"No GPU of the list can {what}: the {least.name} is short by {format_bytes(least.missing_bytes)}"
        return _lines(text, "the levers say what makes it smaller"), None
    row, count = several
    text = _write_recommendation(row, count, what)
    nearest = max(rows, key=lambda r: r.usable_bytes)
    nobody = "no single GPU can at once" if count.strategy == ACCUMULATE else "no single GPU can"
    nobody = "no GPU can without them" if _is_alone(count) else nobody
    missing = f"{nobody}: the {nearest.name} is short by {format_bytes(nearest.missing_bytes)}"
    return _lines(text, missing), row.slug


def _lines(*clauses: str) -> str:
    """Clauses as sentences, a line each."""
    return "\n".join(f"{clause[0].upper()}{clause[1:]}." for clause in clauses)


def _write_recommendation(row: CardRow, count: Count, what: str) -> str:
    """`2 x L4 train it at batch 64 each with ZeRO-2 and checkpointed blocks, with 40 % headroom`, and their cost."""
    what = what if count.batch is not None or _is_alone(count) else _each(what, count.strategy)
    joint = "with" if _is_alone(count) else "and"
    with_blocks = f" {joint} checkpointed blocks" if count.checkpointing else ""
    left = f"{with_blocks}{_headroom(row, count)}{_write_condition(row)}"
    return f"{_several_text(row, count, what)}{left}{_cost(row, count.devices or 1)}"


def _headroom(row: CardRow, count: Count) -> str:
    if count.device_bytes is None:
        return ""
    return f", with {_share(row.usable_bytes - count.device_bytes, row.usable_bytes)} headroom"


def _several_text(row: CardRow, count: Count, what: str) -> str:
    """`4 x L4 train it at batch 64 each with ZeRO-2`; of a global batch also how it is shared, or taken one by one."""
    if _is_alone(count):
        return f"One {row.name} {_singular(what)}"
    if count.strategy == ACCUMULATE:
        verb = what.replace("train it", "trains it", 1)
        return f"One {row.name} {verb} in {count.accumulate:,} micro-batches of {count.batch:,}"
    share = f", {count.batch:,} on each" if count.batch is not None else ""
    return f"{count.devices} x {row.name} {what} with {STRATEGIES[count.strategy].title}{share}"


def _recommend_one(
    one: Sequence[CardRow], rows: Sequence[CardRow], what: str, confirms: Callable[[CardRow, Count], bool]
) -> tuple[str, str]:
    """The least that fits (the cheapest where there are prices), the next larger, and the largest that does not."""
    best = min(one, key=_cheapness)
    left = _share(best.headroom_bytes, best.usable_bytes)
    clauses = [f"One {best.name} {_singular(what)} with {left} headroom{_write_condition(best)}{_cost(best, 1)}"]
    larger = [row for row in one if row.usable_bytes > best.usable_bytes and row.vendor == best.vendor]
    clauses += [f"the {row.name} also fits" for row in larger[:1]]
    short = [row for row in rows if row.fit not in (FITS, TIGHT)]
    tight = [row for row in rows if row.fit == TIGHT]
    clauses += [f"the {row.name} is tight: {row.why}" for row in tight[-1:]]
    if short:
        nearest = short[-1]
        less = ", but not with checkpointed blocks" if nearest.fit_with_checkpointing == FITS else ""
        clauses.append(f"the {nearest.name} is short by {format_bytes(nearest.missing_bytes)}{less}")
        others = _several(short, confirms, shared=True)
        if others is not None:
            row, count = others
            clauses.append(f"{_several_text(row, count, what)}{_cost(row, count.devices or 1)} too")
    return _lines(*clauses), best.slug


def _recommend_tight(
    tight: Sequence[CardRow], several: tuple[CardRow, Count] | None, what: str
) -> tuple[str, str | None]:
    """The least that holds the step tightly, and why that is tight; several that have room beside it."""
    best = min(tight, key=_cheapness)
    condition = f"{_write_condition(best)}{_cost(best, 1)}"
    clauses = [f"One {best.name} {_singular(what)}, but it is tight: {best.why}{condition}"]
    if several is not None:
        row, count = several
        same = f"with checkpointed blocks it fits{_headroom(row, count)}"
        clauses.append(same if _is_alone(count) and row is best else _write_recommendation(row, count, what))
    return _lines(*clauses), best.slug


def _recommend_ranks(
    one: Sequence[CardRow], tight: Sequence[CardRow], rows: Sequence[CardRow], title: str, devices: int, what: str
) -> tuple[str, str | None]:
    how = f"{devices} devices with {title}"
    if not one and tight:
        best = min(tight, key=_cheapness)
        return (
            f"{devices} x {best.name} {what} with {title}, but it is tight: {best.why}{_write_condition(best)}.",
            best.slug,
        )
    if not one:
        best = min(rows, key=lambda row: row.missing_bytes or 0)
        return (
            f"No GPU of the list can {what} on {how}: the {best.name} is short by {format_bytes(best.missing_bytes)}.",
            None,
        )
    best = min(one, key=_cheapness)
    left = _share(best.headroom_bytes, best.usable_bytes)
    return f"{devices} x {best.name} {what} with {title}, with {left} headroom{_write_condition(best)}.", best.slug


def _singular(what: str) -> str:
    return what.replace("train it", "trains it", 1).replace("run it", "runs it", 1)


def _write_condition(row: CardRow) -> str:
    """The condition on which a card runs the step."""
    return f", only with {row.condition}" if row.condition else ""


def _preferred(rows: Sequence[CardRow]) -> Sequence[CardRow]:
    """Those that run the step without a condition, if there are any."""
    return [row for row in rows if not row.condition] or rows


def _examined(rows: Sequence[CardRow]) -> Sequence[CardRow]:
    """Those whose context and workspaces were examined, if there are any: their figures are surer."""
    return [row for row in rows if row.vendor == "NVIDIA"] or rows


def _each(what: str, strategy: str) -> str:
    """Data parallelism gives every device a batch of its own."""
    return f"{what} each" if strategy in DATA_PARALLEL and " at batch " in what else what


def _cheapness(row: CardRow) -> tuple[float, float, int]:
    price = row.price
    buy = price.buy if price is not None and price.buy is not None else float("inf")
    hour = price.hour if price is not None and price.hour is not None else float("inf")
    return (buy, hour, row.usable_bytes)


def _cost(row: CardRow, devices: int) -> str:
    """` (8.40 EUR an hour)` or ` (32,000 EUR)`: what so many cards cost; empty without a price."""
    price = row.price
    if price is None:
        return ""
    parts = [f"{devices * price.buy:,.0f} {price.currency}"] if price.buy is not None else []
    parts += [f"{devices * price.hour:,.2f} {price.currency} an hour"] if price.hour is not None else []
    return f" ({', '.join(parts)})" if parts else ""


def _is_alone(count: Count) -> bool:
    """Whether it is one card with checkpointed blocks."""
    return count.devices == 1 and count.accumulate == 1


def _several(
    rows: Sequence[CardRow], confirms: Callable[[CardRow, Count], bool], shared: bool = False
) -> tuple[CardRow, Count] | None:
    """The card and strategy with the fewest devices; of equal ones without checkpointing, then the least memory. The
    first whose verdict is "fits". `shared`: only several devices of a global batch, not one with micro-batches."""
    counts = [(row, count) for row in rows for count in row.counts if count.devices is not None]
    counts += [(row, Count("", 1, None, True, "")) for row in rows if row.fit_with_checkpointing == FITS]
    able = _examined([row for row, _ in counts])
    counts = [pair for pair in counts if pair[0] in able]
    feasible = [pair for pair in counts if not shared or (pair[1].devices != 1 and pair[1].batch is not None)]
    feasible.sort(key=lambda pair: (pair[1].devices or 0, pair[1].checkpointing, _cheapness(pair[0])))
    return next((pair for pair in feasible if confirms(*pair)), None)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
