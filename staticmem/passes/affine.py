"""What is known of small integer and bool tensors without running anything: index arithmetic and masks.

An `Affine` is a tensor whose element at index (i0, i1, ...) is `const + sum(coef[k] * ik)`: arange, positions,
constants. A `Mask` is a conjunction of `Affine >= 0`: all-true and causal masks, as exporters build
them from arange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from staticmem.ir.graph import Op, Ref
from staticmem.ir.record import record
from staticmem.ops.registry import in_place, kinds_of
from staticmem.ops.tags import tagged

Shape = tuple[int, ...]


@record(frozen=True)
class Affine:
    """`const + sum(coef[k] * index[k])` over `shape`."""

    shape: Shape
    const: int
    coef: tuple[int, ...]

    @property
    def constant(self) -> int | None:
        """The value where it is the same everywhere."""
        return self.const if all(c == 0 or s <= 1 for c, s in zip(self.coef, self.shape, strict=True)) else None

    def bounds(self) -> tuple[int, int]:
        low = high = self.const
        for c, s in zip(self.coef, self.shape, strict=True):
            span = c * max(s - 1, 0)
            low, high = low + min(span, 0), high + max(span, 0)
        return low, high


@record(frozen=True)
class Mask:
    """True where all `terms` are >= 0; no terms: true everywhere. `never`: false everywhere."""

    shape: Shape
    terms: tuple[Affine, ...] = ()
    never: bool = False

    @property
    def always(self) -> bool:
        return not self.terms and not self.never

    @property
    def causal(self) -> bool:
        """Element (..., i, j) is true exactly where j <= i."""
        if self.never or len(self.terms) != 1 or len(self.shape) < 2 or self.shape[-1] != self.shape[-2]:
            return False
        term = self.terms[0]
        rest = all(c == 0 for c in term.coef[:-2])
        return rest and term.const == 0 and term.coef[-2:] == (1, -1)

    def independent_of(self, axis: int) -> bool:
        return all(t.coef[axis] == 0 for t in self.terms)


Content = Affine | Mask


def scalar(value: int) -> Affine:
    return Affine((), value, ())


def _broadcast(a: Affine, b: Affine) -> tuple[Affine, Affine] | None:
    rank = max(len(a.shape), len(b.shape))
    wide = [_padded(x, rank) for x in (a, b)]
    shape = []
    for s, t in zip(wide[0].shape, wide[1].shape, strict=True):
        if s != t and 1 not in (s, t):
            return None
        shape.append(t if s == 1 else s)
    return _expanded(wide[0], tuple(shape)), _expanded(wide[1], tuple(shape))


def _padded(x: Affine, rank: int) -> Affine:
    extra = rank - len(x.shape)
    return Affine((1,) * extra + x.shape, x.const, (0,) * extra + x.coef)


def _expanded(x: Affine, shape: Shape) -> Affine:
    x = _padded(x, len(shape))
    coef = tuple(0 if s == 1 and t != 1 else c for s, t, c in zip(x.shape, shape, x.coef, strict=True))
    return Affine(shape, x.const, coef)


def _combine(a: Affine, b: Affine, sign: int) -> Affine | None:
    pair = _broadcast(a, b)
    if pair is None:
        return None
    x, y = pair
    coef = tuple(c + sign * d for c, d in zip(x.coef, y.coef, strict=True))
    return Affine(x.shape, x.const + sign * y.const, coef)


def at_least_zero(*terms: Affine | None) -> Mask | None:
    """The conjunction of `term >= 0`, simplified by the bounds of each term."""
    kept: list[Affine] = []
    for term in terms:
        if term is None:
            return None
        low, high = term.bounds()
        if high < 0:
            return Mask(term.shape, never=True)
        if low < 0:
            kept.append(term)
    first = terms[0]
    assert first is not None
    return Mask(first.shape, tuple(kept))


def _compare(name: str, a: Affine, b: Affine) -> Mask | None:
    less = _combine(b, a, -1)  # b - a
    more = _combine(a, b, -1)  # a - b
    if less is None or more is None:
        return None
    if name == "le":
        return at_least_zero(less)
    if name == "ge":
        return at_least_zero(more)
    if name == "lt":
        return at_least_zero(Affine(less.shape, less.const - 1, less.coef))
    if name == "gt":
        return at_least_zero(Affine(more.shape, more.const - 1, more.coef))
    constant = more.constant
    if constant is None:
        return None
    equal = constant == 0
    return Mask(more.shape, never=equal != (name == "eq"))


def _each(value: Content, change: Callable[[Affine], Affine], shape: Shape) -> Content:
    """Applies a change of dimensions to the tensor, or to every term of a mask."""
    if isinstance(value, Affine):
        return change(value)
    return Mask(shape, tuple(change(t) for t in value.terms), value.never)


def _insert(values: Sequence[int], axis: int, item: int) -> tuple[int, ...]:
    return (*values[:axis], item, *values[axis:])


def _axis(value: Content, dim: int, extra: int = 0) -> int:
    return dim + len(value.shape) + extra if dim < 0 else dim


class Knowledge:
    """Runs over ops in order and remembers what is known of their results."""

    def __init__(self) -> None:
        self.contents: dict[str, Content] = {}
        self.roots: dict[str, str] = {}  # value -> the value whose storage it may share

    def of(self, arg: Any) -> Content | None:
        if isinstance(arg, Ref):
            return self.contents.get(arg.name)
        if isinstance(arg, bool):
            return Mask((), never=not arg)
        return scalar(arg) if isinstance(arg, int) else None

    def visit(self, op: Op) -> None:
        """Notes what is known of the op's result, if anything."""
        name = op.base.removeprefix("aten::")
        if in_place(op.base) and name not in _WRITE_NOTHING:
            self._written(op)
        if not op.outputs:
            return
        first = op.args[0] if op.args else None
        if isinstance(first, Ref) and not _is_fresh(op.base):
            self.roots.update(dict.fromkeys(op.outputs, self._root(first.name)))
        handler = _HANDLERS.get(name)
        if handler is None:
            return
        try:
            result = handler(self, op, list(op.args), op.kwargs)
        except (TypeError, ValueError, LookupError, ArithmeticError):
            return
        if result is not None:
            self.contents[op.outputs[0]] = result

    def _root(self, name: str) -> str:
        return self.roots.get(name, name)

    def _written(self, op: Op) -> None:
        """An op in place: nothing is known any more of what may share the storage that it writes to."""
        written = {self._root(a.name) for a in op.args[:1] if isinstance(a, Ref)}
        for name in [n for n in self.contents if self._root(n) in written]:
            del self.contents[name]


Args = list[Any]
Kwargs = Mapping[str, Any]
Handler = Callable[[Knowledge, Op, Args, Kwargs], "Content | None"]
_HANDLERS: dict[str, Handler] = {}


def _of(names: str) -> Callable[[Handler], Handler]:
    """Registers what is known of the results of ATen ops."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register


def _of_known(names: str) -> Callable[[Callable[[Content, Op, Args, Kwargs], Content | None]], None]:
    """The same for ops of whose results nothing is known unless the first argument is."""

    def register(handler: Callable[[Content, Op, Args, Kwargs], Content | None]) -> None:
        @_of(names)
        def handle(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
            value = k.of(args[0])
            return None if value is None else handler(value, op, args, kwargs)

    return register


def _is_fresh(base: str) -> bool:
    """Whether a result shares no storage with the first argument."""
    if base in tagged("pointwise"):
        return not in_place(base) and base not in tagged("view")
    return base in _FRESH or not kinds_of(base).isdisjoint(("comparison", "factory", "lookup", "running"))


def _integers(values: Any) -> tuple[int, ...] | None:
    """Sizes, or None where one of them is only known when the model runs."""
    plain = isinstance(values, (tuple, list)) and all(type(v) is int for v in values)
    return tuple(values) if plain else None


@_of("arange")
def _arange(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    numbers = _integers([a for a in args if type(a).__name__ != "DType" and a is not None])
    if numbers is None or not {"start", "end", "step"}.isdisjoint(kwargs):
        return None
    start, end, step = 0, 0, 1
    if len(numbers) == 1:
        end = numbers[0]
    elif len(numbers) in (2, 3):
        start, end, step = (*numbers, 1)[:3]
    else:
        return None
    if not step:
        return None
    return _fits(Affine((max(0, -(-(end - start) // step)),), start, (step,)), str(kwargs.get("dtype", "")))


def _fits(value: Affine, dtype: str) -> Affine | None:
    """The value unless the element type cannot hold all of it: integers wrap, floats round."""
    low, high = _RANGES.get(dtype, (-(2**63), 2**63 - 1))
    bounds = value.bounds()
    return value if low <= bounds[0] and bounds[1] <= high else None


@_of("add sub")
def _add(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    a, b = k.of(args[0]), k.of(args[1])
    if not isinstance(a, Affine) or not isinstance(b, Affine) or kwargs.get("alpha", 1) != 1:
        return None
    return _combine(a, b, -1 if op.base == "aten::sub" else 1)


@_of("mul")
def _mul(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    a, b = k.of(args[0]), k.of(args[1])
    if not isinstance(a, Affine) or not isinstance(b, Affine):
        return None
    if b.constant is None:
        a, b = b, a
    factor = b.constant
    pair = _broadcast(a, b)
    if factor is None or pair is None:
        return None
    return Affine(pair[0].shape, pair[0].const * factor, tuple(c * factor for c in pair[0].coef))


@_of_known("unsqueeze")
def _unsqueeze(value: Content, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    axis = _axis(value, args[1], 1)
    shape = _insert(value.shape, axis, 1)
    return _each(value, lambda t: Affine(shape, t.const, _insert(t.coef, axis, 0)), shape)


@_of_known("squeeze")
def _squeeze(value: Content, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    if len(args) < 2 or not isinstance(args[1], int):
        return None
    axis = _axis(value, args[1])
    if value.shape[axis] != 1:
        return value
    shape = value.shape[:axis] + value.shape[axis + 1 :]
    return _each(value, lambda t: Affine(shape, t.const, t.coef[:axis] + t.coef[axis + 1 :]), shape)


@_of_known("expand")
def _expand(value: Content, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    size = _integers(args[1])
    if size is None:
        return None
    offset = len(size) - len(value.shape)
    if offset < 0 or -1 in size[:offset]:
        return None
    shape = tuple(value.shape[i - offset] if s == -1 else s for i, s in enumerate(size))
    if any(old not in (1, new) for old, new in zip(value.shape, shape[offset:], strict=True)):
        return None
    return _each(value, lambda t: _expanded(t, shape), shape)


@_of_known("slice")
def _slice(value: Content, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = (*args[1:], *defaults[len(args) - 1 :])
    axis = _axis(value, dim)
    size = value.shape[axis]
    if step < 1 or kwargs:
        return None
    begin = min(max(start + size if (start or 0) < 0 else start or 0, 0), size)
    stop = size if end is None else min(max(end + size if end < 0 else end, begin), size)
    length = -(-(stop - begin) // step)
    shape = (*value.shape[:axis], length, *value.shape[axis + 1 :])

    def change(t: Affine) -> Affine:
        coef = (*t.coef[:axis], t.coef[axis] * step, *t.coef[axis + 1 :])
        return Affine(shape, t.const + t.coef[axis] * begin, coef)

    return _each(value, change, shape)


@_of_known("permute transpose")
def _permute(value: Content, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    order = list(range(len(value.shape)))
    if op.base == "aten::permute":
        order = [_axis(value, d) for d in args[1]]
    else:
        a, b = _axis(value, args[1]), _axis(value, args[2])
        order[a], order[b] = order[b], order[a]
    shape = tuple(value.shape[i] for i in order)
    return _each(value, lambda t: Affine(shape, t.const, tuple(t.coef[i] for i in order)), shape)


@_of_known("view reshape")
def _view(value: Content, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    """Only size-1 dimensions may come and go."""
    plain = _integers(args[1])
    if plain is None:
        return None
    sizes = list(plain)
    big = [s for s in value.shape if s != 1]
    if -1 in sizes:
        rest = 1
        for s in sizes:
            rest *= s if s != -1 else 1
        total = 1
        for s in value.shape:
            total *= s
        sizes[sizes.index(-1)] = total // max(rest, 1)
    if [s for s in sizes if s != 1] != big:
        return None
    shape = tuple(sizes)

    def change(t: Affine) -> Affine:
        coefs = iter([c for c, s in zip(t.coef, t.shape, strict=True) if s != 1])
        return Affine(shape, t.const, tuple(next(coefs) if s != 1 else 0 for s in shape))

    return _each(value, change, shape)


@_of("to _to_copy clone contiguous alias detach")
def _same(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    value = k.of(args[0])
    target = next((str(a) for a in (*args[1:], *kwargs.values()) if type(a).__name__ == "DType"), "")
    if isinstance(value, Mask) and target and target != "bool":
        return Affine(value.shape, int(value.always), (0,) * len(value.shape)) if value.always or value.never else None
    if isinstance(value, Affine) and target == "bool":
        constant = value.constant
        return None if constant is None else Mask(value.shape, never=constant == 0)
    return _fits(value, target) if isinstance(value, Affine) else value


@_of("ones zeros new_ones new_zeros ones_like zeros_like")
def _filled(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    name = op.base.removeprefix("aten::")
    if name.endswith("_like"):
        like = k.of(args[0])
        shape = like.shape if like is not None else None
    else:
        shape = _integers(args[1] if name.startswith("new_") else args[0])
    if shape is None:
        return None
    fill = int("ones" in name)
    if str(kwargs.get("dtype")) == "bool":
        return Mask(shape, never=not fill)
    return Affine(shape, fill, (0,) * len(shape))


@_of("eq ne lt le gt ge")
def _comparison(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    a, b = k.of(args[0]), k.of(args[1])
    if not isinstance(a, Affine) or not isinstance(b, Affine):
        return None
    return _compare(op.base.removeprefix("aten::"), a, b)


@_of("bitwise_and logical_and")
def _and(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    a, b = k.of(args[0]), k.of(args[1])
    if not isinstance(a, Mask) or not isinstance(b, Mask):
        return None
    shape = _broadcast(Affine(a.shape, 0, (0,) * len(a.shape)), Affine(b.shape, 0, (0,) * len(b.shape)))
    if shape is None:
        return None
    full = shape[0].shape
    terms = tuple(dict.fromkeys(_expanded(t, full) for t in (*a.terms, *b.terms)))
    return Mask(full, terms, a.never or b.never)


@_of("index")
def _index(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    value = k.of(args[0])
    picks = [k.of(a) for a in args[1]]
    if not isinstance(value, Affine) or len(picks) != len(value.shape):
        return None
    total: Affine | None = scalar(value.const)
    for pick, coef, size in zip(picks, value.coef, value.shape, strict=True):
        if not isinstance(pick, Affine) or total is None:
            return None
        low, high = pick.bounds()
        if low < 0 or high >= size:  # Python's negative indices, or an error
            return None
        total = _combine(total, Affine(pick.shape, pick.const * coef, tuple(c * coef for c in pick.coef)), 1)
    return total


@_of("diff")
def _diff(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    """Along the last axis with a prepended column that continues the sequence: the step, everywhere."""
    value = k.of(args[0])
    prepend = k.of(args[3]) if len(args) > 3 else k.of(kwargs.get("prepend"))
    order = args[1] if len(args) > 1 else kwargs.get("n", 1)
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if not isinstance(value, Affine) or not isinstance(prepend, Affine):
        return None
    if order != 1 or _axis(value, dim) != len(value.shape) - 1 or len(args) > 4 or kwargs.get("append") is not None:
        return None
    step = value.coef[-1]
    zero = (0,) * len(value.coef)
    same = all(c == 0 for c in value.coef[:-1]) and prepend.constant == value.const - step
    return Affine(value.shape, step, zero) if same and prepend.shape[-1] == 1 else None


@_of("cumsum")
def _cumsum(k: Knowledge, op: Op, args: Args, kwargs: Kwargs) -> Content | None:
    value = k.of(args[0])
    if isinstance(value, Mask):
        return Affine(value.shape, 0, (0,) * len(value.shape)) if value.never else None
    return value if value is not None and value.constant == 0 else None


# whole numbers that an element type holds exactly (IEEE 754 significands; two's complement)
_RANGES: Mapping[str, tuple[int, int]] = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "float16": (-(2**11), 2**11),
    "bfloat16": (-(2**8), 2**8),
    "float32": (-(2**24), 2**24),
    "float64": (-(2**53), 2**53),
}
_FRESH = ("aten::cat", "aten::diff")
_WRITE_NOTHING = frozenset(("detach_", "requires_grad_"))
