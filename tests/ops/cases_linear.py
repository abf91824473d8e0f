"""Matrix products."""

from __future__ import annotations

from typing import Any

from observe import Case, Spec, call, f, h

from staticmem.eager.strides import is_contiguous
from staticmem.ir import dtypes

RANKS: dict[tuple[int, int], tuple[tuple[Spec, Spec], ...]] = {
    (1, 1): ((f(5), f(5)),),
    (1, 2): ((f(5), f(5, 3)),),
    (1, 3): ((f(5), f(2, 5, 3)), (f(5), f(2, 5, 3).transposed)),
    (1, 4): ((f(5), f(2, 4, 5, 3)),),
    (2, 1): ((f(4, 5), f(5)), (f(4, 5).transposed, f(5))),
    (2, 2): ((f(4, 5), f(5, 3)), (f(4, 5).transposed, f(5, 3).transposed), (h(4, 5), h(5, 3))),
    (2, 3): ((f(4, 5), f(2, 5, 3)), (f(4, 5), f(2, 5, 3).transposed)),
    (2, 4): ((f(4, 5), f(2, 6, 5, 3)),),
    (3, 1): ((f(2, 4, 5), f(5)), (f(4, 2, 5).permute(1, 0, 2), f(5))),
    (3, 2): ((f(2, 4, 5), f(5, 3)), (f(4, 2, 5).permute(1, 0, 2), f(5, 3)), (f(2, 4, 5), f(3, 5).permute(1, 0))),
    (3, 3): ((f(2, 4, 5), f(2, 5, 3)), (f(1, 4, 5), f(2, 5, 3)), (f(2, 4, 5).transposed, f(2, 5, 3)),
             (f(2, 4, 5), f(1, 5, 3)),
             (f(2, 4, 5).wide(), f(2, 5, 3).wide())),
    (3, 4): ((f(6, 4, 5), f(2, 6, 5, 3)),),
    (4, 1): ((f(2, 6, 4, 5), f(5)),),
    (4, 2): ((f(2, 6, 4, 5), f(5, 3)), (f(2, 4, 6, 5).permute(0, 2, 1, 3), f(5, 3))),
    (4, 3): ((f(2, 6, 4, 5), f(6, 5, 3)),),
    (4, 4): ((f(2, 6, 4, 5), f(2, 6, 5, 3)), (f(2, 4, 6, 5).permute(0, 2, 1, 3), f(2, 6, 5, 3)),
             (f(2, 1, 4, 5), f(2, 6, 5, 3)), (f(2, 6, 4, 5), f(1, 6, 5, 3)), (f(1, 6, 4, 5), f(1, 6, 5, 3)),
             (f(2, 6, 4, 5).transposed, f(2, 6, 5, 3).transposed)),
}  # fmt: skip


def _matmuls() -> list[Case]:
    cases = [call("aten::matmul", x, y) for pairs in RANKS.values() for x, y in pairs]
    cases += [call("aten::matmul", x, y, root="expanded") for pairs in RANKS.values() for x, y in pairs[:1]]
    return cases


def _grouped() -> list[Case]:
    """Rows of experts; sizes that fill 16 bytes, because a CPU build of PyTorch pads none."""
    ends = Spec((3,), dtypes.int32, grad=False)
    rows, weights = h(24, 8), h(3, 8, 16)
    pairs = (
        (rows, weights),
        (rows, weights.transposed),
        (rows.transposed, weights),
        (rows.transposed, weights.transposed),
        (h(8, 24), h(24, 16)),
        (h(8, 24).transposed, h(24, 16).transposed),
        (h(3, 8, 16), h(16, 24)),
    )
    return [call("aten::_grouped_mm", a, b, ends) for a, b in pairs]


def _products() -> list[Case]:
    mm = ((f(4, 5), f(5, 3)), (f(5, 4).permute(1, 0), f(5, 3)), (f(4, 5), f(3, 5).permute(1, 0)), (h(4, 5), h(5, 3)),
          (f(5, 4).permute(1, 0), f(3, 5).permute(1, 0)), (f(1, 5), f(5, 1)), (f(4, 1), f(1, 3)))  # fmt: skip
    narrow = Spec((32, 48), dtypes.float8_e4m3fn, grad=False), Spec((16, 48), dtypes.float8_e5m2, grad=False)
    scales = f(1).fixed, f(1).fixed
    cases = [
        call("aten::_scaled_mm", narrow[0], narrow[1].permute(1, 0), *scales, out_dtype=out_dtype)
        for out_dtype in (dtypes.bfloat16, dtypes.float32)
    ]
    for x, y in mm:
        out: tuple[Any, ...] = (x.shape[0], y.shape[1])
        bias = Spec((y.shape[1],), x.dtype)
        cases += [call("aten::mm", x, y), call("aten::addmm", bias, x, y), call("aten::mm", x, y, root="contiguous")]
        cases += [call("aten::addmm", Spec(out, x.dtype), x, y), call("aten::addmm", bias, x, y, beta=2, alpha=3)]
    for x, y in ((f(2, 4, 5), f(2, 5, 3)), (f(2, 5, 4).permute(0, 2, 1), f(2, 5, 3)), (h(2, 4, 5), h(2, 5, 3))):
        cases += [call("aten::bmm", x, y), call("aten::baddbmm", Spec((2, 4, 3), x.dtype), x, y)]
        cases += [call("aten::baddbmm", Spec((1, 1, 3), x.dtype), x, y, beta=1, alpha=0.5)]
        cases += [call("aten::baddbmm", Spec((2, 4, 3), x.dtype), x, y, beta=0, alpha=0.5)]
    cases += [call("aten::mv", f(4, 5), f(5)), call("aten::dot", f(5), f(5)), call("aten::addmv", f(4), f(4, 5), f(5))]
    cases += [
        call("aten::outer", f(4), f(5)),
        call("aten::ger", f(4), f(5)),
        call("aten::vdot", f(5), f(5), skip=("grads",), why="the other order of two equal sizes"),
    ]
    return cases


def _linears() -> list[Case]:
    weight, bias = f(3, 5), f(3)
    inputs = (f(4, 5), f(2, 4, 5), f(2, 6, 4, 5), f(5), f(4, 2, 5).permute(1, 0, 2), f(5, 4).permute(1, 0),
              f(2, 4, 5).wide(), f(1, 4, 5), f(2, 1, 5))  # fmt: skip
    cases = [
        call("aten::linear", x, weight, bias)
        if _folded(x)
        else call("aten::linear", x, weight, bias, skip=("outputs",), real=("forward", "backward"), why=INPLACE_BIAS)
        for x in inputs
    ]
    cases += [call("aten::linear", x, weight) for x in inputs]
    cases += [
        call("aten::linear", h(2, 4, 5), h(3, 5), h(3)),
        call("aten::linear", f(2, 4, 5), weight, bias, root="expanded"),
    ]
    cases += [call("aten::linear", f(2, 4, 5), weight, bias, root="contiguous")]
    cases += [call("aten::bilinear", f(4, 5), f(4, 6), f(3, 5, 6), f(3))]
    return cases


INPLACE_BIAS = "`linear` adds the bias in place, but out of place while a dispatch mode watches (Linear.cpp)"


def _folded(x: Spec) -> bool:
    return len(x.shape) == 2 or is_contiguous(x.shape, x.layout)


EQUATIONS = (
    ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
    ("bhqk,bhkd->bhqd", ((2, 3, 4, 6), (2, 3, 6, 5))),
    ("bqhd,bkhd->bhqk", ((2, 4, 3, 5), (2, 6, 3, 5))),
    ("bhqk,bkhd->bqhd", ((2, 3, 4, 6), (2, 6, 3, 5))),
    ("ij,jk->ik", ((4, 5), (5, 3))),
    ("bij,jk->bik", ((2, 4, 5), (5, 3))),
    ("i,j->ij", ((4,), (5,))),
    ("bi,bi->b", ((4, 5), (4, 5))),
    ("bcij,bcij->bc", ((2, 3, 4, 5), (2, 3, 4, 5))),
    ("ij->ji", ((4, 5),)),
    ("ij->i", ((4, 5),)),
    ("...ij,...jk->...ik", ((2, 4, 5), (2, 5, 3))),
    ("bnd,hdk->bhnk", ((2, 4, 5), (3, 5, 6))),
    ("ijk,kl,lm->ijm", ((2, 3, 4), (4, 5), (5, 6))),
    ("bhwc,hkc->bhwk", ((2, 3, 4, 5), (3, 6, 5))),
    ("i,i->", ((4,), (4,))),
    ("bij,bjk", ((2, 4, 5), (2, 5, 3))),
)


def _einsums() -> list[Case]:
    return [call("aten::einsum", eq, tuple(f(*s) for s in shapes)) for eq, shapes in EQUATIONS]


CASES = [*_matmuls(), *_grouped(), *_products(), *_linears(), *_einsums()]
