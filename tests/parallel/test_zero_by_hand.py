"""What ZeRO-3 gathers, keeps and copies, on few uses, counted by hand: found missing by scripts/faults/mutants.py."""

from __future__ import annotations

import pytest

from staticmem.eager.trace import Buffer, Trace
from staticmem.ir.dtypes import float32
from staticmem.parallel.division import ZeroConfig
from staticmem.parallel.rewrite import Piece, Rewrite, Weight
from staticmem.parallel.strategies.zero import Use, _fetch, _next_uses, _reduce, sub_groups

SIZES = {"a": 10, "b": 20, "c": 5}
PLENTY = 10**9


def trace(*gradients: str) -> Trace:
    """Parameters, then a forward, then a backward in which gradients come one a tick."""
    made = Trace()

    def buffer(name: str, category: str, numel: int) -> None:
        kernel = made.kernel("made")
        number = len(made.buffers)
        made.buffers.append(Buffer(number, 4 * numel, (numel,), float32, category, name, kernel, made.ticks))
        made.ticks += 1

    made.begin("setup")
    for name, numel in SIZES.items():
        buffer(name, "parameter", numel)
    made.begin("forward")
    buffer("x", "activation", 1)
    made.begin("backward")
    for name in gradients:
        buffer(f"{name}.grad", "gradient", SIZES[name])
    return made


def fetched(
    order: str, *, reuse: int = 0, prefetch: int = 0, live: int = PLENTY, whole: str = ""
) -> list[tuple[str, int, int]]:
    """(name, use at which it is gathered, use after which it goes) of each gathered parameter; use k takes one tick
    and those in `whole` are never split."""
    rewrite = Rewrite(trace())
    before = len(rewrite.pieces)
    split = {name: Weight(name, (numel,), rewrite.pieces[k]) for k, (name, numel) in enumerate(SIZES.items())}
    found: list[Use] = [(100 + k, 101 + k, (name,)) for k, name in enumerate(order)]
    config = ZeroConfig(PLENTY, prefetch, 0, live, reuse, PLENTY)
    _fetch(rewrite, {name: w for name, w in split.items() if name not in whole}, found, config)

    def lived(piece: Piece) -> tuple[str, int, int]:
        assert piece.died is not None
        return piece.name, piece.born[0] - 100, piece.died[0] - 101

    return [lived(piece) for piece in rewrite.pieces[before:]]


def test_without_reuse_and_prefetch_each_use_gathers() -> None:
    assert fetched("aba") == [("a", 0, 0), ("b", 1, 1), ("a", 2, 2)]
    assert fetched("aba", whole="a") == [("b", 1, 1)]
    assert fetched("") == []


@pytest.mark.parametrize(
    ("reuse", "expected"),
    [(20, [("a", 0, 0), ("b", 1, 1), ("a", 2, 2), ("c", 3, 3)]), (21, [("a", 0, 2), ("b", 1, 1), ("c", 3, 3)])],
)
def test_what_is_used_again_within_the_distance_stays(reuse: int, expected: list[tuple[str, int, int]]) -> None:
    """`__params_to_release` goes through the modules ahead until `max_reuse_distance` elements have passed: between the
    two uses of `a` there are the 20 of `b`. What is never used again goes."""
    assert fetched("abac", reuse=reuse) == expected


def test_what_stays_goes_with_the_last_use() -> None:
    """`a` is used again, but gone by then: without a use to end it, it would stay to the end of the step."""
    assert fetched("aca", reuse=PLENTY) == [("a", 0, 2), ("c", 1, 1)]


@pytest.mark.parametrize(
    ("live", "first"),
    [
        (10, [("a", 0)]),  # `a` itself is all that may be there
        (11, [("a", 0), ("b", 0)]),  # one element more: the next is fetched, however large it is
        (30, [("a", 0), ("b", 0)]),  # with `b` there are 30
        (31, [("a", 0), ("b", 0), ("c", 0)]),
    ],
)
def test_prefetch_stops_at_the_parameters_that_may_be_there(live: int, first: list[tuple[str, int]]) -> None:
    """`fetch_sub_module`: min(max_live_parameters - what is there, prefetch_bucket_size) elements ahead."""
    assert [(name, at) for name, at, _ in fetched("abc", prefetch=PLENTY, live=live) if at == 0] == first


def test_what_goes_makes_room_for_a_prefetch() -> None:
    """25 may be there: with `a` (10) comes `b` (20); when `a` is gone and `b` works, there is room for `c` (5)."""
    assert fetched("abc", prefetch=PLENTY, live=25) == [("a", 0, 0), ("b", 0, 1), ("c", 1, 2)]
    assert fetched("abc", prefetch=PLENTY, live=20) == [("a", 0, 0), ("b", 0, 1), ("c", 2, 2)]


def test_what_is_there_already_is_not_fetched_again() -> None:
    assert fetched("aab", prefetch=1) == [("a", 0, 0), ("b", 0, 2), ("a", 1, 1)]
    assert fetched("aab", prefetch=1, reuse=1) == [("a", 0, 1), ("b", 0, 2)]


def test_the_next_use_of_each() -> None:
    found: list[Use] = [(0, 1, ("a", "b")), (1, 2, ("b",)), (2, 3, ("a", "c")), (3, 4, ("b",))]
    assert _next_uses(found) == [{"a": 2, "b": 1}, {"b": 3}, {}, {}]


@pytest.mark.parametrize(
    ("sizes", "limit", "groups"),
    [
        ([3, 4, 5], 7, [7, 5]),
        ([3, 4, 5], 8, [12]),
        ([3, 4, 5], 1, [3, 4, 5]),
        ([4, 4, 4, 4], 8, [8, 8]),
        ([3], 4, [3]),
        ([], 4, []),
    ],
)
def test_groups_of_the_optimizer_are_closed_by_what_fills_them(sizes: list[int], limit: int, groups: list[int]) -> None:
    """`_create_fp16_sub_groups`: a group takes parameters until it has `sub_group_size` elements."""
    assert sub_groups(sizes, limit) == groups


@pytest.mark.parametrize(
    ("bucket", "copies"),
    [
        (100, [35]),  # one bucket of all three
        (35, [35]),
        (34, [25]),  # `c` and `b` are 25; `a` alone is sent as it is
        (24, [15]),  # `c` and `a`
        (9, []),  # each alone
    ],
)
def test_a_bucket_of_several_gradients_is_copied(bucket: int, copies: list[int]) -> None:
    """`reduce_scatter_coalesced` makes one flat tensor of them; of a single gradient it takes the parts themselves."""
    order = "cab" if bucket == 24 else "cba"
    rewrite = Rewrite(trace(*order))
    before = len(rewrite.pieces)
    pieces = {p.name: p for p in rewrite.pieces}
    listed = [Weight(n, (k,), pieces[n], [pieces[f"{n}.grad"]]) for n, k in SIZES.items()]
    _reduce(rewrite, listed, ZeroConfig(reduce_bucket_size=bucket))
    assert [piece.nbytes // 4 for piece in rewrite.pieces[before:]] == copies
    assert all(pieces[f"{n}.grad"].died is not None for n in SIZES)
