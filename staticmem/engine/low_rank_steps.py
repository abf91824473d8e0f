"""GaLore's and APOLLO's AdamW: the state of each parameter, and the tensors of a step that computes projections anew.

One `step()` goes through two groups, first the parameters that are not projected. Both packages have AdamW as a loop of
their own, whose variables keep their tensors until the next parameter assigns them.

Sources: galore_torch 1.0, adamw.py and galore_projector.py; apollo_torch 1.0.3, apollo.py, random_projector.py and
svd_projector.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from staticmem.eager.strides import numel
from staticmem.eager.tensor import Tensor
from staticmem.engine.optimizer_steps import Drop, Make, MakeAll, OptimizerFacts, SecondName, Shape, State, Steps
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Note
from staticmem.ops.linear import SVD
from staticmem.scenario.optimizers import LowRank
from staticmem.units import format_bytes

FULL = dtypes.float32  # in which the decomposition runs
# `denom = exp_avg_sq.sqrt().add_(eps)` and `norm_grad = exp_avg / denom`
_ROOTS = ("aten.sqrt.default", "denom"), ("aten.div.Tensor", "norm_grad")
_PLAIN: Steps = (Drop(("grad",)), *(Make(*root) for root in _ROOTS))


def note_on(asked: LowRank, projected: Sequence[Tensor], others: int) -> Note:
    """What a reader must know: which step is shown, and of how many parameters."""
    count, gap = len(projected), asked.gap
    text = (
        f"gradients of {count:,} weight{'s' if count != 1 else ''} of linear layers are projected to rank "
        f"{asked.rank:,}, and have their states there; the other {others:,} parameters have AdamW's. The step shown "
        f"computes projections anew, as the first and every {gap:,}{_ending(gap)} does"
    )
    most = max((_refreshed(asked, p) for p in projected), default=0)
    if most:
        text += f": {format_bytes(most)} besides for the largest weight, which the others do not make"
    return Note("assumption", "SM217", text, count)


def _ending(number: int) -> str:
    last = "" if number % 100 in (11, 12, 13) else str(number)[-1]
    return {"1": "st", "2": "nd", "3": "rd"}.get(last, "th")


def _refreshed(asked: LowRank, p: Tensor) -> int:
    """Bytes of what computing a projection makes of a parameter."""
    total = 0
    for step in _refresh(asked, p.shape, p.dtype):
        if isinstance(step, MakeAll):
            total += sum(numel(shape(p.shape)) * step.dtype.itemsize for shape in step.shapes)
        elif isinstance(step, Make):
            shape = p.shape if step.shape is None else step.shape(p.shape)
            total += numel(shape) * (step.dtype or p.dtype).itemsize
    return total


# -- shapes --------------------------------------------------------------------------------------------------------


def _side(asked: LowRank, shape: Shape) -> str:
    """The side on which a matrix is multiplied by its projection: `right`, `left` or both (`full`)."""
    tall = shape[0] >= shape[1]
    if asked.side in ("std", "reverse_std"):
        return "right" if tall == (asked.side == "std") else "left"
    return asked.side


def _rank(asked: LowRank, shape: Shape) -> int:
    """Singular vectors are as many as the smaller size; random ones as many as are asked for."""
    return min(asked.rank, *shape) if asked.svd else asked.rank


def _low(asked: LowRank) -> Callable[[Shape], Shape]:
    def low(shape: Shape) -> Shape:
        side, rank = _side(asked, shape), _rank(asked, shape)
        return (rank if side != "right" else shape[0], rank if side != "left" else shape[1])

    return low


def _left(asked: LowRank) -> Callable[[Shape], Shape]:
    return lambda shape: (shape[0], _rank(asked, shape))


def _right(asked: LowRank) -> Callable[[Shape], Shape]:
    return lambda shape: (_rank(asked, shape), shape[1])


def _all_left(shape: Shape) -> Shape:
    return (shape[0], min(shape))


def _all_right(shape: Shape) -> Shape:
    return (min(shape), shape[1])


def _values(shape: Shape) -> Shape:
    return (min(shape),)


def _scalar(shape: Shape) -> Shape:
    return ()


# -- state ---------------------------------------------------------------------------------------------------------


def _projections(asked: LowRank, shape: Shape, dtype: DType) -> tuple[State, ...]:
    """In float32 a projection of singular vectors is a view of all of them, which stay; in another type it is a copy
    (`get_orthogonal_matrix`: `Vh[:rank, :]`, and `.type(original_type)`)."""
    whole, side = asked.svd and dtype is FULL, _side(asked, shape)
    left, right = (_all_left, _all_right) if whole else (_left(asked), _right(asked))
    one = {"left": (left,), "right": (right,), "full": (left, right)}[side]
    return tuple(State("ortho_matrix", shape) for shape in one)


def projecting(asked: LowRank, apollo: bool) -> OptimizerFacts:
    """A weight whose gradient is projected."""

    def states(shape: Shape, dtype: DType) -> tuple[State, ...]:
        moments = State("exp_avg", _low(asked)), State("exp_avg_sq", _low(asked))
        norm = (State("scaled_grad", _scalar),) if apollo else ()
        return (*_projections(asked, shape, dtype), *moments, *norm)

    def loop(shape: Shape, dtype: DType) -> Steps:
        update = _scaled(asked, shape) if apollo else _back(asked, shape)
        roots = (Make(*root, shape=_low(asked)) for root in _ROOTS)
        return (Drop(("grad",)), *_refresh(asked, shape, dtype), *_project(asked, shape), *roots, *update)

    return OptimizerFacts(states, loop)


PLAIN = OptimizerFacts(lambda shape, dtype: (State("exp_avg"), State("exp_avg_sq")), lambda shape, dtype: _PLAIN)


# -- step ----------------------------------------------------------------------------------------------------------


def _refresh(asked: LowRank, shape: Shape, dtype: DType) -> Steps:
    """`get_orthogonal_matrix`: the variables of the function end with it, and the old projection with the new one."""
    half = dtype is not FULL
    cast = (Make("aten._to_copy.default", "matrix", dtype=FULL),) * half
    side = _side(asked, shape)
    names = {"left": ("A",), "right": ("B",), "full": ("A", "B")}[side]
    of = {"A": _left(asked), "B": _right(asked)}
    if not asked.svd:
        new = of[names[0]]
        steps: Steps = (
            *cast,
            Make("aten.randn.generator", "noise", shape=new, dtype=FULL if half else None),
            Make("aten.div.Tensor", names[0], ("noise",), shape=new, dtype=FULL if half else None),
        )
    else:
        steps = (*cast, MakeAll(SVD, ("U", "s", "Vh"), (_all_left, _values, _all_right), FULL))
        if side != "full":  # the product with the singular values, which nothing reads
            other = "B" if side == "left" else "A"
            steps = (
                *steps,
                Make("aten.diag_embed.default", "diagonal", shape=_square(asked), dtype=FULL),
                Make("aten.mm.default", other, ("diagonal",), shape=of[other], dtype=FULL),
            )
    if half:
        steps = (*steps, *(Make("aten._to_copy.default", name, shape=of[name]) for name in names))
    return (*steps, Drop(("matrix", "U", "s", "Vh", "A", "B")))


def _square(asked: LowRank) -> Callable[[Shape], Shape]:
    return lambda shape: (_rank(asked, shape), _rank(asked, shape))


def _project(asked: LowRank, shape: Shape) -> Steps:
    if _side(asked, shape) != "full":
        return (Make("aten.mm.default", "grad", shape=_low(asked)),)
    return (
        Make("aten.mm.default", "product", shape=_right(asked)),
        Make("aten.mm.default", "grad", ("product",), shape=_low(asked)),
    )


def _back(asked: LowRank, shape: Shape) -> Steps:
    """GaLore's `project_back`: the update in the space of the weight, and its product with the scale."""
    steps: Steps = (Make("aten.mm.default", "full_rank_grad"),)
    if _side(asked, shape) == "full":
        product = Make("aten.mm.default", "product", shape=_left(asked))
        steps = product, Make("aten.mm.default", "full_rank_grad", ("product",))
    return (*steps, Make("aten.mul.Tensor", "norm_grad", ("full_rank_grad",)))


def _scaled(asked: LowRank, shape: Shape) -> Steps:
    """APOLLO scales the gradient itself, by ratios of norms, and limits how fast its norm grows. A limiter of 1, which
    it has while the norm grows by less than a hundredth, is a number of Python."""
    axis = 0 if shape[0] < shape[1] else 1

    def norms(shape: Shape) -> Shape:
        return (_low(asked)(shape)[1 - axis],) if asked.by_channel else ()

    norm = "aten.linalg_vector_norm.default"
    return (
        Make(norm, "numerator", shape=norms),
        Make(norm, "norm", shape=norms),
        Make("aten.add.Tensor", "denominator", ("norm",), shape=norms),
        Make("aten.div.Tensor", "grad_scaling_factor", ("numerator", "denominator"), shape=norms),
        Make("aten.mul.Tensor", "scaled_grad"),
        Make(norm, "scaled_grad_norm", shape=_scalar),
        Make("aten.add.Tensor", "sum", shape=_scalar),
        Make("aten.div.Tensor", "ratio", ("sum",), shape=_scalar),
        Make("aten.gt.Scalar", frees=("ratio",), shape=_scalar, dtype=dtypes.bool_),
        Make("aten.div.Tensor", "scaled_grad"),
        Make("aten.div.Tensor", shape=_scalar),
        SecondName("norm_grad", "scaled_grad"),
    )
