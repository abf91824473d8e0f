"""Reductions, softmax, scans and order."""

from __future__ import annotations

from typing import Any

from observe import Case, Spec, call, f, h, i

from staticmem.ir import dtypes

INPUTS = (f(4, 3, 5), f(4, 3, 5).transposed, h(4, 3, 5), f(2, 3, 4, 5).channels_last, f(4, 1, 5).expand(4, 3, 5))


def _sums() -> list[Case]:
    cases: list[Case] = []
    for x in INPUTS:
        for name in ("sum.dim_IntList", "mean.dim"):
            cases += [call(f"aten::{name}", x, (1,)), call(f"aten::{name}", x, (0, -1), True)]
        cases += [call("aten::sum", x), call("aten::mean", x)]
        cases += [call("aten::mean.dim", x, (-1,), True, root="expanded"), call("aten::sum", x, dtype=dtypes.float32)]
        cases += [call("aten::mean.dim", x, (1,), dtype=dtypes.float32)]
        for name in ("var", "std"):
            cases += [call(f"aten::{name}.correction", x, (1,), correction=1, keepdim=True)]
            cases += [call(f"aten::{name}.correction", x, (0, 2), correction=0), call(f"aten::{name}", x)]
            cases += [
                call(f"aten::{name}.dim", x, (-1,), False, True),
                call(f"aten::{name}.dim", x, (-1,), True, False),
            ]
        cases += [call("aten::linalg_vector_norm", x, n, (1,), True) for n in (2, 1, 3)]
        cases += [call("aten::linalg_vector_norm", x, 2, (-1,)), call("aten::linalg_vector_norm", x)]
        cases += [call("aten::norm.ScalarOpt_dim", x, 2, (1,), True)]
        cases += [call("aten::logsumexp", x, (1,)), call("aten::logsumexp", x, (-1,), True)]
        for dim in (1, -1):
            cases += [
                call("aten::cumsum", x, dim),
                call("aten::softmax.int", x, dim),
                call("aten::log_softmax.int", x, dim),
            ]
        cases += [call("aten::_softmax", x, 1, False), call("aten::_log_softmax", x, 1, False)]
    cases += [
        call("aten::softmax.int", h(4, 5), -1, dtypes.float32),
        call("aten::log_softmax.int", h(4, 5), 1, dtypes.float32),
    ]
    cases += [
        call("aten::softmax.int", f(4, 5), -1, root="expanded"),
        call("aten::sum", i(4)),
        call("aten::cumsum", i(4, 3), 0),
    ]
    cases += [call("aten::softmax.int", f(4, 5).transposed, -1, root="contiguous")]
    cases += [call("aten::cumprod", f(4, 3), 0, real=("backward",), why=SAFE)]
    return cases


def _pairs() -> list[Case]:
    cases = []
    for name in ("var_mean", "std_mean"):
        for roots in (None, (0,), (1,)):
            cases += [call(f"aten::{name}.correction", f(4, 3, 5), (1,), correction=0, keepdim=True, roots=roots)]
            cases += [call(f"aten::{name}.correction", f(4, 3, 5), (0, 2), correction=1, roots=roots)]
            cases += [call(f"aten::{name}", f(4, 3, 5), roots=roots)]
            cases += [call(f"aten::{name}.dim", f(4, 3, 5), (2,), False, True, roots=roots)]
    return cases


SCATTER = "PyTorch scatters out of place while a dispatch mode watches (value_selecting_reduction_backward)"
SAFE = "PyTorch takes the path that is safe for zeros while a dispatch mode watches (prod_backward)"
PROD = f"{SAFE}; and the CPU, not CUDA, copies bools to int64 before it sums them"
FULL = "a dispatch mode adds a mask, the CPU counts non-zeros; evenly_distribute_backward of FunctionsManual.cpp"


def _extremes() -> list[Case]:
    cases: list[Case] = []

    def picked(target: str, x: Spec, *args: Any, **kwargs: Any) -> None:
        if x.dtype is dtypes.bfloat16:  # the CPU's scatter_ widens half precision
            x = x.fixed
        args = (x, *args)
        cases.append(call(f"aten::{target}", *args, **kwargs, real=("backward",), why=SCATTER))

    for x in (f(4, 3), f(4, 3).transposed, h(4, 3)):
        cases += [call(f"aten::{name}", x, skip=("backward", "grads"), why=FULL) for name in ("max", "min")]
        cases += [call("aten::amax", x, (1,)), call("aten::amin", x, (0,), True), call("aten::amax", x)]
        for name in ("max.dim", "min.dim", "median.dim"):
            picked(name, x, 1)
            picked(name, x, 0, True)
        for name, args in (("topk", (2,)), ("topk", (2, 0)), ("sort", ()), ("sort", (0, True)), ("kthvalue", (1,))):
            picked(name, x, *args)
        picked("sort.stable", x, stable=True, dim=1)
        picked("mode", x)
        picked("cummax", x, 0)
        picked("cummin", x, 1)
        cases += [call("aten::argsort", x), call("aten::argsort", x, 0), call("aten::argmax", x)]
        cases += [call("aten::argmax", x, 1), call("aten::argmin", x, 0, True)]
    logical: tuple[Any, ...] = ((), (0,), (1, True))
    cases += [call(f"aten::{n}{'.dim' if a else ''}", f(4, 3).fixed, *a) for n in ("any", "all") for a in logical]
    cases += [call("aten::prod", f(4, 3), real=("backward",), why=SAFE)]
    cases += [
        call("aten::prod.dim_int", f(4, 3), *args, skip=("backward", "grads"), why=PROD) for args in ((1,), (0, True))
    ]
    return cases


CASES = [*_sums(), *_pairs(), *_extremes()]
