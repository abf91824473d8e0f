"""Index expressions of loads, simplified as far as Inductor simplifies them.

Two loads are one where their expressions have the same text, and some that mean the same element keep different texts:
a view of a value that had no buffer yet is a division inside of a division, and which of them meet depends on the order
of simplifications. Sources: `View._dynamic_reshape_indexer` of torch/_inductor/ir.py, `_simplify_with_ranges` and
`join_dimensions` of torch/_inductor/sizevars.py, `FloorDiv.eval` and `ModularIndexing.eval` of
torch/utils/_sympy/functions.py (PyTorch 2.14; the rules of 2.13 give the same results for views).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd
from typing import Any

from staticmem.compiler.inductor.indexing import Step, Views, in_strides, new_shape, passed, strides_through
from staticmem.eager.strides import Shape, Strides, numel

# ("loop", number) | ("div", expression, divisor) | ("mod", expression, divisor, modulus)
Atom = tuple[Any, ...]
# sums: factors of atoms in the order of `_key`, and a constant
Expression = tuple[tuple[tuple[Atom, int], ...], int]
NOTHING: Expression = ((), 0)
ROUNDS = 32  # more than any chain of views has


def loop(number: int) -> Expression:
    return ((("loop", number), 1),), 0


def constant(value: int) -> Expression:
    return (), value


def total(parts: Iterable[tuple[int, Expression]]) -> Expression:
    """The sum of expressions with factors."""
    factors: dict[Atom, int] = {}
    rest = 0
    for factor, (terms, value) in parts:
        rest += factor * value
        for atom, count in terms:
            factors[atom] = factors.get(atom, 0) + factor * count
    return tuple(sorted(((atom, count) for atom, count in factors.items() if count), key=_key)), rest


def _key(term: tuple[Atom, int]) -> str:
    return repr(term)


def _alone(expression: Expression) -> Atom | None:
    """The atom that an expression is."""
    terms, value = expression
    return terms[0][0] if not value and len(terms) == 1 and terms[0][1] == 1 else None


def _parted(expression: Expression, divisor: int) -> Expression:
    terms, value = expression
    return tuple([(atom, count // divisor) for atom, count in terms]), value // divisor


def _common(expression: Expression, divisor: int) -> int:
    terms, value = expression
    return gcd(divisor, value, *(count for _, count in terms))


def divided(expression: Expression, divisor: int) -> Expression:
    """`FloorDiv.eval`."""
    terms, value = expression
    if divisor == 1:
        return expression
    if not terms:
        return constant(value // divisor)
    atom = _alone(expression)
    if atom is not None and atom[0] == "div":
        return divided(atom[1], atom[2] * divisor)
    whole = tuple([(other, count) for other, count in terms if count % divisor == 0])
    whole_value = value if value % divisor == 0 else 0
    if whole or whole_value:
        left: Expression = tuple([term for term in terms if term not in whole]), value - whole_value
        return total([(1, divided(left, divisor)), (1, _parted((whole, whole_value), divisor))])
    common = _common(expression, divisor)
    if common != 1:
        return divided(_parted(expression, common), divisor // common)
    return ((("div", expression, divisor), 1),), 0


def remainder(expression: Expression, divisor: int, modulus: int) -> Expression:
    """`ModularIndexing.eval`: what is left of an expression, divided, after it is divided by the modulus."""
    terms, value = expression
    if modulus == 1 or expression == NOTHING:
        return NOTHING
    if not terms:
        return constant(value // divisor % modulus)
    common = _common(expression, divisor)
    if common != 1:
        return remainder(_parted(expression, common), divisor // common, modulus)
    if len(terms) + bool(value) > 1 and value >= 0 and all(count > 0 for _, count in terms):
        period = divisor * modulus
        left: Expression = tuple([term for term in terms if term[1] % period]), value if value % period else 0
        if left != expression:
            return remainder(left, divisor, modulus)
    atom = _alone(expression)
    if atom is not None and atom[0] == "div":
        return remainder(atom[1], atom[2] * divisor, modulus)
    return ((("mod", expression, divisor, modulus), 1),), 0


@lru_cache(1 << 12)
def simplify(expression: Expression, sizes: Shape) -> Expression:
    """`_simplify_with_ranges`, with the sizes of loops."""
    for _ in range(ROUNDS):
        joined = _joined(expression)
        expression = _visited(_visited(joined, "mod", sizes), "div", sizes)
        if expression == joined:
            break
    return expression


def _joined(expression: Expression) -> Expression:
    """`join_dimensions`: two parts of one expression become one."""
    terms, value = expression
    for join in (_joined_remainder, _joined_quotient):
        for atom, count in terms:
            if atom[0] != "mod" or len(terms) + bool(value) < 2:
                continue
            joined = join(terms, atom, count)
            if joined is not None:
                other, new = joined
                left = tuple([term for term in terms if term not in ((atom, count), other)])
                return _joined(total([(1, (left, value)), (count, new)]))
    return expression


def _joined_remainder(
    terms: Sequence[tuple[Atom, int]], atom: Atom, count: int
) -> tuple[tuple[Atom, int], Expression] | None:
    _, base, divisor, modulus = atom
    for other in terms:
        above = other[0]
        if above[0] == "mod" and other[1] == count * modulus and above[1:3] == (base, divisor * modulus):
            return other, remainder(base, divisor, modulus * above[3])
    return None


def _joined_quotient(
    terms: Sequence[tuple[Atom, int]], atom: Atom, count: int
) -> tuple[tuple[Atom, int], Expression] | None:
    _, base, divisor, modulus = atom
    wanted = total([(count * modulus, divided(base, divisor * modulus))])
    for other in terms:
        if wanted == ((other,), 0):
            return other, divided(base, divisor)
    return None


def _visited(expression: Expression, kind: str, sizes: Shape) -> Expression:
    """Every division of this kind, the innermost first, with what ranges of loops tell of it."""
    terms, value = expression
    return total([(1, constant(value)), *((count, _visited_atom(atom, kind, sizes)) for atom, count in terms)])


def _visited_atom(atom: Atom, kind: str, sizes: Shape) -> Expression:
    if atom[0] == "loop":
        return ((atom, 1),), 0
    base = _visited(atom[1], kind, sizes)
    again = divided(base, *atom[2:]) if atom[0] == "div" else remainder(base, *atom[2:])
    same = _alone(again)
    if same is None or same[0] != kind:
        return again
    return _visited_quotient(same, sizes) if kind == "div" else _visited_remainder(same, sizes)


def _visited_quotient(atom: Atom, sizes: Shape) -> Expression:
    """`visit_indexing_div`."""
    _, base, divisor = atom
    base = _without_small(base, divisor, sizes)
    if not _may_be_negative(base) and largest(base, sizes) < divisor:
        return NOTHING
    inner = _alone(base)
    if inner is not None and inner[0] == "mod" and inner[3] % divisor == 0:
        return remainder(inner[1], inner[2] * divisor, inner[3] // divisor)
    return divided(base, divisor)


def _visited_remainder(atom: Atom, sizes: Shape) -> Expression:
    """`visit_modular_indexing`."""
    _, base, divisor, modulus = atom
    base = _without_small(base, divisor, sizes)
    inner = _alone(base)
    if inner is not None and inner[0] == "mod" and inner[3] % (divisor * modulus) == 0:
        return remainder(inner[1], inner[2] * divisor, modulus)
    if not _may_be_negative(base) and largest(base, sizes) < divisor * modulus:
        return divided(base, divisor)
    return remainder(base, divisor, modulus)


def _without_small(base: Expression, divisor: int, sizes: Shape) -> Expression:
    """`remove_zero_terms`: a loop that never reaches what the others and the divisor are multiples of."""
    if _may_be_negative(base):
        return base
    for number in sorted(loops_of(base)):
        terms, value = base
        rest: Expression = tuple([term for term in terms if term != (("loop", number), 1)]), value
        if rest != base and number not in loops_of(rest) and sizes[number] - 1 < _common(rest, divisor):
            base = rest
    return base


def loops_of(expression: Expression) -> set[int]:
    numbers: set[int] = set()
    for atom, _ in expression[0]:
        if atom[0] == "loop":
            numbers.add(atom[1])
        else:
            numbers |= loops_of(atom[1])
    return numbers


def _may_be_negative(expression: Expression) -> bool:
    terms, value = expression
    return value < 0 or any(count < 0 for _, count in terms)


def largest(expression: Expression, sizes: Shape) -> int:
    """An upper bound, of sums without negative factors."""
    terms, value = expression
    return value + sum(count * _largest_atom(atom, sizes) for atom, count in terms)


def _largest_atom(atom: Atom, sizes: Shape) -> int:
    if atom[0] == "loop":
        number: int = atom[1]
        return sizes[number] - 1
    quotient: int = largest(atom[1], sizes) // atom[2]
    return quotient if atom[0] == "div" else min(quotient, atom[3] - 1)


def reshaped(at: Sequence[Expression], new: Shape, old: Shape) -> list[Expression] | None:
    """Indices of `old` that indices of `new` mean (`View.dynamic_reshape_indexer`)."""
    direct = _reshaped(at, new, old)
    if direct is not None:
        return direct
    flat = _reshaped(at, new, (numel(new),))
    return None if flat is None else _reshaped(flat, (numel(new),), old)


def _reshaped(at: Sequence[Expression], new: Shape, old: Shape) -> list[Expression] | None:
    rows = list(zip(at, new, strict=True))
    left = list(old)
    indices: list[Expression] = []
    while rows and left:
        size_old = left.pop()
        index, size_new = rows.pop()
        if size_old == 1:
            indices.append(NOTHING)
            rows.append((index, size_new))
        elif size_new == 1:
            left.append(size_old)
        elif size_new <= size_old:
            while size_new < size_old:
                if not rows:
                    return None
                above, size = rows.pop()
                index = total([(size_new, above), (1, index)])
                size_new *= size
            if size_new != size_old:
                return None
            indices.append(index)
        else:
            indices.append(remainder(index, 1, size_old))
            divisor = size_old
            while size_new > divisor:
                if not left:
                    return None
                modulus = left.pop()
                indices.append(remainder(index, divisor, modulus))
                divisor *= modulus
            if size_new != divisor:
                return None
    if any(size != 1 for size in left) or any(size != 1 for _, size in rows):
        return None
    indices += [NOTHING] * len(left)
    return indices[::-1]


def permuted(at: Sequence[Expression], order: Sequence[int]) -> list[Expression]:
    back = [NOTHING] * len(order)
    for index, dim in zip(at, order, strict=True):
        back[dim] = index
    return back


def index_of(shape: Shape, place: tuple[Strides, int], views: Views, order: Sequence[int]) -> Expression | None:
    """The index of the last view of a buffer over loops in this order; None where it is not made of such steps, or of
    one reshape at most, whose strides tell it.

    Args:
        shape: of the buffer.
        place: its strides and offset.
        order: dimensions of the last view from the outermost loop; others have one element.
    """
    first = next((at for at, step in enumerate(views) if step[0] == "reshape" and not in_strides(step)), len(views))
    arithmetic = [step for step in views[first:] if step[0] == "reshape"]
    if len(arithmetic) + sum(len(passed(step)) for step in arithmetic) < 2:
        return None
    shapes = [shape, *(new_shape(step) for step in views)]
    last = shapes[-1]
    at: list[Expression] = [NOTHING] * len(last)
    for number, dim in enumerate(order):
        at[dim] = loop(number)
    base = views[:first]
    for number in range(len(views) - 1, first - 1, -1):
        step = views[number]
        through = passed(step)
        if number == first and through and through[0][0] == "strides":
            base, through = (*base, ("reshape", through[0][1])), through[1:]
            shapes[first] = new_shape(base[-1])
        earlier = _before(step, at, through, shapes[number], shapes[number + 1])
        if earlier is None:
            return None
        at = earlier
    placed = strides_through(shape, place[0], base)
    if placed is None:
        return None
    whole = total([(1, constant(place[1] + placed[1])), *zip(placed[0], at, strict=True)])
    return simplify(whole, tuple([last[dim] for dim in order]))


def _before(
    step: Step, at: Sequence[Expression], through: Sequence[Shape], old: Shape, new: Shape
) -> list[Expression] | None:
    """The indices that those behind a step mean before it."""
    kind = step[0]
    back: list[Expression] | None = list(at)
    if kind == "reshape":
        for shape in (*reversed(through), old):
            back = None if back is None else reshaped(back, new, shape)
            new = shape
        return back
    if kind == "permute":
        return permuted(at, step[1])
    if kind == "expand":
        kept = at[len(at) - len(old) :]
        return [NOTHING if size == 1 else index for index, size in zip(kept, old, strict=True)]
    if kind in ("slice", "cut"):
        moved = total([(1, constant(step[2])), (step[3], at[step[1]])])
        return [moved if dim == step[1] else index for dim, index in enumerate(at)]
    if kind == "select":
        return [*at[: step[1]], constant(step[2]), *at[step[1] :]]
    return None
