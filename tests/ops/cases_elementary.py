"""Functions of two numbers, special functions, distances, composite ops and aliases."""

from __future__ import annotations

from typing import Any

from observe import Case, b, call, f, h, i

_UNARY = ("absolute", "arccos", "arcsin", "arctan", "fix", "negative")
_COMPARE = ("greater", "greater_equal", "less", "less_equal", "not_equal")
_SPECIAL = ("erf", "erfc", "expit", "exp2", "expm1", "gammaln", "log1p", "round")


def _aliases() -> list[Case]:
    cases = [call(f"aten::{name}", f(4, 3)) for name in (*_UNARY, "arcsinh", "arccosh", "arctanh")]
    cases += [call(f"aten::{name}_", f(4, 3)) for name in _UNARY]
    cases += [call(f"aten::{name}.Tensor", f(4, 3), f(3)) for name in ("multiply", "subtract", "divide", *_COMPARE)]
    cases += [call(f"aten::{name}_.Tensor", f(4, 3), f(3)) for name in ("multiply", "subtract", "divide")]
    cases += [call(f"aten::special_{name}", f(4, 3)) for name in _SPECIAL]
    cases += [call("aten::special_logit", f(4, 3), 0.1), call("aten::special_softmax", f(4, 3), 1)]
    cases += [call("aten::special_log_softmax", f(4, 3), 1), call("aten::special_logsumexp", f(4, 3), (1,))]
    cases += [call("aten::moveaxis.int", f(4, 3, 2), 0, 2), call("aten::linalg_matmul", f(4, 3), f(3, 5))]
    cases += [call("aten::unsafe_chunk", f(4, 3), 2), call("aten::unsafe_split.Tensor", f(4, 3), 2)]
    cases += [call("aten::unsafe_split_with_sizes", f(4, 3), (1, 3))]
    cases += [call(f"aten::bitwise_{side}_shift.Tensor", i(4), i(4)) for side in ("left", "right")]
    cases += [call("aten::_unsafe_index.Tensor", f(4, 3), (i(5),))]
    cases += [call("aten::arccos", h(4, 3), autocast=True), call("aten::multiply.Tensor", h(4), f(4), autocast=True)]
    return cases


def _elementary() -> list[Case]:
    cases = [call(f"aten::{name}", f(4, 3), f(*shape)) for name in ("atan2", "hypot") for shape in ((4, 3), (3,))]
    cases += [call("aten::arctan2", f(4, 3), f(4, 3))]
    cases += [call(f"aten::{name}", f(4, 3), f(3)) for name in ("xlogy.Tensor", "special_xlogy", "copysign.Tensor")]
    cases += [call(f"aten::{name}", f(4, 3)) for name in ("sinc", "special_sinc", "digamma", "special_digamma")]
    cases += [call("aten::special_psi", f(4, 3)), call("aten::positive", f(4, 3)), call("aten::resolve_neg", f(4, 3))]
    cases += [call("aten::logcumsumexp", f(4, 3), 1), call("aten::logcumsumexp", f(2, 3, 4), 0)]
    cases += [call("aten::nansum", f(4, 3), (1,)), call("aten::nansum", f(4, 3), (0,), True)]
    cases += [call("aten::count_nonzero", f(4, 3)), call("aten::count_nonzero.dim_IntList", f(4, 3), (1,))]
    cases += [call("aten::histc", f(4, 3), 8)]
    cases += [call("aten::_weight_norm", f(4, 3, 5), g, dim) for g, dim in ((f(4, 1, 1), 0), (f(1, 1, 5), 2))]
    cases += [call("aten::_weight_norm", f(4, 3, 5), g, dim) for g, dim in ((f(), -1), (f(1, 3, 1), 1))]
    cases += [call("aten::_is_all_true", b(4)), call("aten::_is_any_true", b(4))]
    cases += [call("aten::isin.Tensor_Tensor", i(4), i(3))]
    cases += [call("aten::addbmm", f(4, 3), f(2, 4, 5), f(2, 5, 3))]
    for factor, side in ((f(4, 4), f(4, 3)), (f(2, 4, 4), f(2, 4, 3)), (f(2, 6, 4, 4), f(2, 6, 4, 5).transposed)):
        cases += [call("aten::linalg_solve_triangular", factor, side, upper=upper) for upper in (False, True)]
    cases += [
        call("aten::linalg_solve_triangular", f(2, 4, 4), f(2, 3, 4), upper=False, left=False, unitriangular=True)
    ]
    cases += [call("aten::addbmm", f(4, 3), f(2, 4, 5), f(2, 5, 3), beta=0.5, alpha=2)]
    return cases


def _distances() -> list[Case]:
    cases = [call("aten::cdist", f(4, 3), f(5, 3)), call("aten::cdist", f(2, 4, 3), f(2, 5, 3), 1.0)]
    cases += [call("aten::cdist", f(30, 3), f(5, 3)), call("aten::cdist", f(2, 4, 3), f(2, 5, 3), 2.0, 1)]
    cases += [call("aten::cdist", f(2, 30, 3), f(2, 5, 3), 2.0, 2)]
    cases += [call("aten::dist", f(4, 3), f(4, 3)), call("aten::pairwise_distance", f(4, 3), f(4, 3))]
    return cases


def _composed() -> list[Case]:
    cases = [call(f"aten::{name}", (f(4, 3), f(4, 3))) for name in ("hstack", "vstack", "row_stack", "dstack")]
    cases += [call(f"aten::{name}", (f(4), f(4))) for name in ("hstack", "vstack", "dstack", "column_stack")]
    cases += [call("aten::column_stack", (f(4, 3), f(4)))]
    cases += [call(f"aten::atleast_{n}d", f(*shape)) for n in (1, 2, 3) for shape in ((), (4,), (4, 3), (2, 2, 2))]
    cases += [call("aten::broadcast_tensors", (f(4, 1), f(3))), call("aten::ravel", f(4, 3).transposed)]
    cases += [call("aten::adjoint", f(2, 4, 3)), call("aten::mH", f(4, 3)), call("aten::matrix_H", f(4, 3))]
    cases += [call("aten::fliplr", f(4, 3)), call("aten::flipud", f(4))]
    cases += [call("aten::tensordot", f(4, 3, 5), f(3, 5, 6), (1, 2), (0, 1))]
    cases += [call("aten::tensordot", f(3, 4, 5), f(5, 3, 6), (0, 2), (1, 0)), call("aten::inner", f(4, 3), f(5, 3))]
    for reduction in (0, 1, 2):
        cases += [call("aten::l1_loss", f(4, 3), f(4, 3), reduction), call("aten::kl_div", f(4, 3), f(4, 3), reduction)]
    cases += [call("aten::kl_div", f(4, 3), f(4, 3), log_target=True)]
    logits = "aten::binary_cross_entropy_with_logits"
    real: dict[str, Any] = {"real": ("backward",), "why": "in place, but not while a dispatch mode watches"}
    both = (f(4, 3), f(4, 3).fixed)
    cases += [call(logits, *both, None, None, reduction, **real) for reduction in (0, 1, 2)]
    cases += [call(logits, *both, None, f(3).fixed, **real), call(logits, *both, f(3).fixed, **real)]
    return cases


def _margins() -> list[Case]:
    cases: list[Case] = []
    real: dict[str, Any] = {"why": "in place, but not while a dispatch mode watches"}
    x, y, sign = f(4, 3), f(4, 3), f(4, 3).fixed
    for reduction in (0, 1, 2):
        cases += [
            call("aten::soft_margin_loss", x, sign, reduction, real=("forward", "backward"), **real),
            call("aten::margin_ranking_loss", x, y, sign, 0.5, reduction, real=("forward",), **real),
            call("aten::hinge_embedding_loss", x, sign, 1.0, reduction, real=("forward",), **real),
            call("aten::cosine_embedding_loss", x, y, f(4).fixed, 0.5, reduction, real=("forward",), **real),
            call("aten::poisson_nll_loss", x, sign, True, False, 1e-8, reduction),
            call("aten::poisson_nll_loss", x, sign, False, False, 1e-8, reduction),
            call("aten::triplet_margin_loss", x, y, f(4, 3), 1.0, 2.0, 1e-6, False, reduction),
        ]
    cases += [call("aten::triplet_margin_loss", x, y, f(4, 3), 1.0, 2.0, 1e-6, True)]
    return cases


CASES = [*_margins(), *_aliases(), *_elementary(), *_distances(), *_composed()]
