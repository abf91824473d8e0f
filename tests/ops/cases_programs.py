"""Programs of several ops: in-place ops on views, shared gradients, autocast."""

from __future__ import annotations

from typing import Any

from observe import Case, Program, Spec, call, f, h, i

from staticmem.ir import dtypes


def program(name: str, run: Program, *inputs: Spec) -> Case:
    """A case in which the first input needs a gradient: without any, Python's variables would decide what is alive."""
    return Case(name, run, (inputs[0].trained, *inputs[1:]), ("aten::add.Tensor",))


def into_view(name: str, run: Program, *inputs: Spec) -> Case:
    return Case(name, run, inputs, ("aten::add_.Tensor",), skip=("saved",), why="what CopySlices saves is out of reach")


def _left(op: Any, x: Any) -> Any:
    return op("aten::slice.Tensor", x, 1, 0, 2)


def _write_slice(target: str) -> Program:
    def run(op: Any, x: Any, y: Any) -> Any:
        base = op("aten::mul.Tensor", x, 2.0)
        op(target, _left(op, base), y)
        return op("aten::mul.Tensor", base, 2.0)

    return run


def _write_slice_returned(op: Any, x: Any, y: Any) -> Any:
    base = op("aten::mul.Tensor", x, 2.0)
    return op("aten::add_.Tensor", _left(op, base), y)


def _write_deep(op: Any, x: Any, y: Any) -> Any:
    base = op("aten::mul.Tensor", x, 2.0)
    view = op("aten::select.int", op("aten::transpose.int", base, 0, 1), 0, 1)
    op("aten::mul_.Tensor", view, y)
    return base


def _relu_slice(op: Any, x: Any) -> Any:
    base = op("aten::mul.Tensor", x, 2.0)
    op("aten::relu_", _left(op, base))
    return base


def _fill_slice(op: Any, x: Any) -> Any:
    base = op("aten::mul.Tensor", x, 2.0)
    op("aten::fill_.Scalar", _left(op, base), 1.0)
    return base


def _residual(op: Any, x: Any, w: Any) -> Any:
    return op("aten::add.Tensor", x, op("aten::mul.Tensor", op("aten::tanh", x), w))


def _twice(op: Any, x: Any) -> Any:
    return op("aten::mul.Tensor", x, x)


def _branches(op: Any, x: Any) -> Any:
    a, b = op("aten::sin", x), op("aten::exp", x)
    return op("aten::cat", (a, b, op("aten::relu", a)), 1)


def _halves(op: Any, x: Any) -> Any:
    a, b = op("aten::chunk", x, 2, 1)
    return op("aten::mul.Tensor", op("aten::sigmoid", a), b)


def _chain(op: Any, x: Any, w: Any) -> Any:
    return op("aten::log_softmax.int", op("aten::relu_", op("aten::mm", x, w)), -1)


def _casts() -> list[Case]:
    """Autocast: what each list of autocast_mode.h does with its inputs."""
    cases = [call(f"aten::{name}", f(4, 6), f(6, 5), autocast=True) for name in ("mm", "matmul")]
    cases += [
        call("aten::linear", f(4, 6), f(5, 6), f(5), autocast=True),
        call("aten::bmm", f(2, 4, 6), f(2, 6, 5), autocast=True),
    ]
    cases += [call("aten::conv2d", f(2, 3, 5, 5), f(4, 3, 3, 3), f(4), autocast=True)]
    for name in ("exp", "log", "rsqrt", "reciprocal", "softplus", "tan", "cosh", "relu", "sigmoid", "tanh", "sqrt",
                 "gelu", "abs", "erf", "expm1", "log2", "sin", "square", "atan", "leaky_relu", "neg"):  # fmt: skip
        cases.append(call(f"aten::{name}", h(4, 6), autocast=True))
    cases += [
        call("aten::pow.Tensor_Scalar", h(4, 6), 2, autocast=True),
        call("aten::sum.dim_IntList", h(4, 6), (1,), autocast=True),
    ]
    cases += [
        call("aten::softmax.int", h(4, 6), -1, autocast=True),
        call("aten::log_softmax.int", h(4, 6), -1, autocast=True),
    ]
    cases += [
        call("aten::cumsum", h(4, 6), 1, autocast=True),
        call("aten::prod.dim_int", h(4, 6).fixed, 1, autocast=True),
    ]
    cases += [
        call("aten::mean.dim", h(4, 6), (1,), autocast=True),
        call("aten::var.correction", h(4, 6), (1,), correction=1, autocast=True),
    ]
    cases += [
        call("aten::cat", (h(4, 6), f(4, 6)), 1, autocast=True),
        call("aten::stack", (h(4, 6), f(4, 6)), 1, autocast=True),
    ]
    cases += [
        call("aten::add.Tensor", h(4, 6), f(4, 6), autocast=True),
        call("aten::mul.Tensor", h(4, 6), f(4, 6), autocast=True),
    ]
    cases += [
        call("aten::addcmul", h(4, 6), f(4, 6), h(4, 6), autocast=True),
        call("aten::prelu", h(2, 3, 4), h(3), autocast=True),
    ]
    cases += [
        call("aten::dot", f(5), f(5), autocast=True),
        call("aten::baddbmm", f(2, 4, 3), f(2, 4, 5), f(2, 5, 3), autocast=True),
    ]
    cases += [call("aten::upsample_bilinear2d.vec", h(2, 16, 4, 5), (7, 9), False, None, autocast=True)]
    cases += [call("aten::upsample_nearest2d.vec", h(2, 16, 4, 5), (7, 9), None, autocast=True)]
    cases += [
        call("aten::linalg_vector_norm", h(4, 6), 2, (1,), autocast=True),
        call("aten::logsumexp", h(4, 6), (1,), autocast=True),
    ]
    cases += [call("aten::grid_sampler", h(2, 3, 4, 5), f(2, 6, 7, 2), 0, 0, False, autocast=True)]
    cases += [
        call("aten::mv", f(4, 5), f(5), autocast=True),
        call("aten::einsum", "ij,jk->ik", (f(4, 5), f(5, 3)), autocast=True),
    ]
    cases += [
        call("aten::addmm", f(5), f(4, 6), f(6, 5), autocast=True),
        call("aten::conv1d", f(2, 3, 5), f(4, 3, 3), f(4), autocast=True),
    ]
    cases += [call("aten::bilinear", h(4, 5), f(4, 6), f(3, 5, 6), f(3), autocast=True)]
    return cases


CASES = [
    into_view("in-place add to a slice", _write_slice("aten::add_.Tensor"), f(4, 6), f(4, 2)),
    into_view("in-place product with a slice", _write_slice("aten::mul_.Tensor"), f(4, 6), f(4, 2)),
    into_view("copy into a slice", _write_slice("aten::copy_"), f(4, 6), f(4, 2)),
    into_view("copy of another dtype into a slice", _write_slice("aten::copy_"), f(4, 6), h(4, 2)),
    into_view("in-place add to a broadcast slice", _write_slice("aten::add_.Tensor"), f(4, 6), f(2)),
    into_view("the slice that was written to", _write_slice_returned, f(4, 6), f(4, 2)),
    into_view("in-place product with a view of a view", _write_deep, f(4, 6), f(4)),
    into_view("relu_ on a slice", _relu_slice, f(4, 6)),
    into_view("fill_ on a slice", _fill_slice, f(4, 6)),
    program("residual", _residual, f(4, 6), f(6)),
    program("square by product", _twice, f(4, 6)),
    program("branches into a cat", _branches, f(4, 6)),
    program("halves of a chunk", _halves, f(4, 6)),
    program("mm, relu_, log_softmax", _chain, f(4, 6), f(6, 5)),
    *_casts(),
    call("aten::to.dtype", f(4, 6), dtypes.bfloat16, root="expanded"),
    call("aten::embedding", f(10, 3), i(4), autocast=True),
]
