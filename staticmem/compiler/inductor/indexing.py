"""Views of a buffer, as chains of steps, and the strides that such a chain reads with.

Inductor's loads are index expressions (`torch/_inductor/ir.py`, the subclasses of `BaseView`). Memory depends on two
facts of them: are two accesses equal, and are they linear in the loop variables. A chain answers both: strides where it
is linear, else None, and then two accesses are equal where their chains are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from staticmem.eager.strides import Shape, Strides, contiguous_strides, expand_strides, view_strides

# ("reshape", new), or ("reshape", what it goes through, new), or ("reshape", None, new): see `passed`, `in_strides` |
# ("select", dim, index, new) | ("slice", dim, start, step, new), of a computation "cut" |
# ("shift", dim, by, new): behind others, so that indices beyond a dimension are asked for |
# ("part", dim, by, new): the same in a concatenation, whose index is not simplified (`Identity`) |
# ("pick", what, dims, new): values pick elements; `dims` has the new dimension of each old one, -1 where one is picked
Step = tuple[Any, ...]
Views = tuple[Step, ...]
NO_VIEWS: Views = ()
KNOWN = 1 << 14


def new_shape(step: Step) -> Shape:
    shape: Shape = step[-1]
    return shape


def chain(views: Views, step: Step, shape: Shape) -> Views:
    """`views`, which give `shape`, and one step more; steps that change nothing are left out."""
    new = new_shape(step)
    if new == shape and step[0] in ("reshape", "expand"):
        return views
    if step[0] == "slice" and new == shape and step[2:4] == (0, 1):
        return views
    if step[0] == "permute" and step[1] == tuple(range(len(shape))):
        return views
    if views and step[0] == "reshape" and views[-1][0] == "reshape":
        return (*views[:-1], _one_reshape(views[-1], step))
    return (*views, step)


def _one_reshape(before: Step, step: Step) -> Step:
    """Two reshapes as one that remembers what is between."""
    if in_strides(step):
        return step
    between = new_shape(before)
    first = (("strides", between),) if in_strides(before) else (*passed(before), between)
    return "reshape", (*first, *passed(step)), new_shape(step)


def in_strides(step: Step) -> bool:
    """A reshape of a value that had a buffer then: other strides (`ReinterpretView`), no arithmetic of indices."""
    return len(step) == 3 and step[0] == "reshape" and step[1] is None


def passed(step: Step) -> tuple[Any, ...]:
    """Shapes that a reshape of several goes through; ("strides", shape) where strides tell the first."""
    return step[1] if len(step) == 3 and step[0] == "reshape" and step[1] is not None else ()


def in_short(views: Views) -> Views:
    """The chain without what its reshapes go through, which changes no element."""
    return tuple([("reshape", new_shape(step)) if step[0] == "reshape" else step for step in views])


def then(first: Views, shape: Shape, second: Views) -> Views:
    """The chain of `first`, which gives `shape`, and then `second`."""
    if not second:
        return first
    for step in second:
        first = chain(first, step, shape)
        shape = new_shape(step)
    return first


@lru_cache(KNOWN)
def strides_through(shape: Shape, strides: Strides, views: Views) -> tuple[Strides, int] | None:
    """Strides and offset of the last view of a buffer, in elements; None where the index is not linear.

    Sources: `create` of `View`, `PermuteView`, `ExpandView`, `SliceView`, `SqueezeView` in torch/_inductor/ir.py.
    """
    offset = 0
    for step in views:
        kind, new = step[0], new_shape(step)
        if kind == "reshape":
            viewed = view_strides(shape, strides, new)
            if viewed is None:
                return None
            strides = viewed
        elif kind == "permute":
            strides = tuple(strides[dim] for dim in step[1])
        elif kind == "expand":
            strides = expand_strides(shape, strides, new)
        elif kind in ("slice", "cut"):
            dim, start, every = step[1], step[2], step[3]
            offset += start * strides[dim]
            strides = tuple(s * every if d == dim else s for d, s in enumerate(strides))
        elif kind == "select":
            dim, index = step[1], step[2]
            offset += index * strides[dim]
            strides = tuple(s for d, s in enumerate(strides) if d != dim)
        elif kind in ("shift", "part"):
            strides = past_the_end(views, shape, strides, step[1])
            if kind == "part" and strides[step[1]]:
                return None
            offset -= step[2] * strides[step[1]]
        elif kind == "split":
            strides = (*strides[:-1], strides[-1] * step[1], strides[-1])
        elif kind == "strided":
            strides, offset = step[1], step[2]
        elif kind == "pick" and not any(strides[at] for at, dim in enumerate(step[2]) if dim < 0):
            of_dim = {dim: stride for dim, stride in zip(step[2], strides, strict=True) if stride}
            strides = tuple([of_dim.get(dim, 0) for dim in range(len(new))])
        else:
            return None
        shape = new
    return strides, offset


@lru_cache(KNOWN)
def simplest(shape: Shape, views: Views) -> Views:
    """The chain as one step where its index is linear, or none where it changes no element's place: chains to the same
    elements are equal then."""
    placed = strides_through(shape, contiguous_strides(shape), views)
    if not views or placed is None:
        return in_short(views)
    new = new_shape(views[-1])
    strides = without_ones(new, placed[0])
    if new == shape and not placed[1] and strides == without_ones(shape, contiguous_strides(shape)):
        return NO_VIEWS
    return (("strided", strides, placed[1], new),)


def without_added_ones(shape: Shape, views: Views, order: Shape) -> tuple[Views, Shape]:
    """A chain without reshapes at its end that add or take dimensions of size 1, and the same dimensions, which have
    other sizes, in it: two indices are equal whether such dimensions are between or not."""
    views = in_short(views)
    while views and views[-1][0] == "reshape":
        before = new_shape(views[-2]) if len(views) > 1 else shape
        old = [dim for dim, size in enumerate(before) if size != 1]
        new = [dim for dim, size in enumerate(new_shape(views[-1])) if size != 1]
        if [before[dim] for dim in old] != [new_shape(views[-1])[dim] for dim in new]:
            break
        views, order = views[:-1], tuple(old[new.index(dim)] for dim in order)
    return views, order


def past_the_end(views: Views, shape: Shape, strides: Strides, dim: int) -> Strides:
    """Strides where indices beyond a dimension are asked for. Tensors of one element there are read at this element
    whatever the index is (`_fixed_indexer`); a slice of a computation passes the index on (`SliceView`)."""
    if shape[dim] != 1 or any(step[0] == "cut" for step in views):
        return strides
    return tuple([0 if at == dim else stride for at, stride in enumerate(strides)])


def without_ones(shape: Shape, strides: Strides) -> Strides:
    """Strides of dimensions of size 1, which move nothing, as 0."""
    return tuple([0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)])


@lru_cache(KNOWN)
def stride_hints(shape: Shape, strides: Strides, views: Views) -> Strides:
    """How far the index moves from the first element to the second of each dimension (`SizeVarAllocator.stride_hints`).

    Where values pick elements, the dimensions behind keep their strides and the others count 0.
    """
    linear = strides_through(shape, strides, views)
    if linear is not None:
        return linear[0]
    shapes = [shape, *(new_shape(step) for step in views)]
    last = shapes[-1]
    origin = _offset(shapes, strides, views, (0,) * len(last))
    hints = []
    for dim, size in enumerate(last):
        at = tuple(1 if d == dim else 0 for d in range(len(last)))
        hints.append(_offset(shapes, strides, views, at) - origin if size > 1 else 0)
    return tuple(hints)


@lru_cache(KNOWN)
def dependence(shape: Shape, strides: Strides, views: Views) -> tuple[bool, ...]:
    """For each dimension: the index has its variable in it. A hint may be 0 all the same: of `i // 4`."""
    hints = stride_hints(shape, strides, views)
    if strides_through(shape, strides, views) is not None:
        return tuple([bool(hint) for hint in hints])
    shapes = [shape, *(new_shape(step) for step in views)]
    last = shapes[-1]
    origin = _offset(shapes, strides, views, (0,) * len(last))
    edges = {size for passed in shapes for size in suffixes(passed)}

    def moves(dim: int) -> bool:
        at = [0] * len(last)
        for place in sorted({last[dim] // 2, last[dim] - 1, *(edge for edge in edges if edge < last[dim])}):
            at[dim] = place
            if _offset(shapes, strides, views, tuple(at)) != origin:
                return True
        return False

    return tuple([bool(hint) or moves(dim) for dim, hint in enumerate(hints)])


def suffixes(shape: Shape) -> list[int]:
    """Elements of the last dimension, of the last two, and so on."""
    products, count = [], 1
    for size in reversed(shape):
        count *= size
        products.append(count)
    return products


def _offset(shapes: list[Shape], strides: Strides, views: Views, at: Shape) -> int:
    """The element of the buffer that an index of the last view means."""
    for number in range(len(views) - 1, -1, -1):
        step, old, new = views[number], shapes[number], shapes[number + 1]
        kind = step[0]
        if kind == "reshape":
            flat = 0
            for index, size in zip(at, new, strict=True):
                flat = flat * size + index
            back = []
            for size in reversed(old):
                back.append(flat % size if size else 0)
                flat = flat // size if size else 0
            at = tuple(reversed(back))
        elif kind == "permute":
            back = [0] * len(old)
            for index, dim in zip(at, step[1], strict=True):
                back[dim] = index
            at = tuple(back)
        elif kind == "expand":
            kept = at[len(at) - len(old) :]
            at = tuple(0 if size == 1 else index for index, size in zip(kept, old, strict=True))
        elif kind in ("slice", "cut"):
            at = tuple(step[2] + i * step[3] if d == step[1] else i for d, i in enumerate(at))
        elif kind == "select":
            at = (*at[: step[1]], step[2], *at[step[1] :])
        elif kind in ("shift", "part"):
            within = old[step[1]] == 1 and not any(other[0] == "cut" for other in views)
            inner = 0 if within else at[step[1]] - step[2]
            at = (*at[: step[1]], inner, *at[step[1] + 1 :])
        elif kind == "split":
            at = (*at[:-2], at[-2] * step[1] + at[-1])
        elif kind == "strided":
            first: int = step[2]
            return first + dot(at, step[1])
        elif kind == "pick":
            at = tuple([at[dim] if dim >= 0 else 0 for dim in step[2]])
        else:
            same = 0
            while same < min(len(old), len(new)) and old[-1 - same] == new[-1 - same]:
                same += 1
            at = (0,) * (len(old) - same) + (at[len(at) - same :] if same else ())
    return dot(at, strides)


def dot(index: Shape, strides: Strides) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))
