"""Arithmetic, comparisons and element-wise functions."""

from __future__ import annotations

from observe import Case, Spec, b, call, f, h, i

from staticmem.ir import dtypes
from staticmem.ops import activations, unary

SUBCLASS = "PyTorch takes an out-of-place branch while a dispatch mode watches (clamp_backward)"
FAKE = "the fake kernel keeps the layout; glu_backward_cuda of aten/src/ATen/native/cuda/GatedLinearUnit.cpp does not"
BINARY = ("add", "sub", "mul", "div")
OPERANDS: tuple[tuple[Spec, Spec], ...] = (
    (f(4, 3), f(4, 3)),
    (f(4, 3), f(3)),
    (f(3), f(4, 3)),
    (f(2, 1, 5), f(3, 1)),
    (f(4, 3), f()),
    (f(), f(4, 3)),
    (f(4, 3).transposed, f(4, 3)),
    (f(4, 3), f(4, 3).transposed),
    (f(4, 3).transposed, f(4, 3).transposed),
    (f(2, 3, 4, 5).channels_last, f(2, 3, 4, 5)),
    (f(2, 3, 4, 5).channels_last, f(1, 3, 1, 1)),
    (f(4, 1).expand(4, 3), f(4, 3)),
    (f(1, 3).expand(4, 3), f(1, 3).expand(4, 3)),
    (f(4, 3).wide(), f(4, 3)),
    (h(4, 3), f(4, 3)),
    (h(4, 3), f(3)),
    (h(4, 3), f()),
    (h(4, 3), h(4, 1)),
)


def _binary() -> list[Case]:
    cases = []
    for name in BINARY:
        cases += [call(f"aten::{name}.Tensor", x, y) for x, y in OPERANDS]
        cases += [call(f"aten::{name}.Tensor", x, 2.0) for x in (f(4, 3), f(4, 3).transposed, h(4), i(5))]
        cases += [call(f"aten::{name}.Tensor", i(4, 3), y) for y in (i(3), f(3), 3)]
        for x, y in OPERANDS:
            if (x.shape == y.shape or x.shape == (4, 3)) and 0 not in x.layout and x.dtype is y.dtype:
                cases += [call(f"aten::{name}_.Tensor", x, y)]
        cases += [call(f"aten::{name}_.Tensor", h(4, 3), f(4, 3)), call(f"aten::{name}_.Tensor", f(4, 3), 2.0)]
        cases += [call(f"aten::{name}.Scalar", f(4, 3), 3), call(f"aten::{name}.Tensor", b(4), 2.0)]
        cases += [call(f"aten::{name}.Tensor", 2.0, x) for x in (f(4, 3), f(4, 3).transposed, h(4), i(5), b(4))]
        cases += [call(f"aten::{name}.Tensor", f(4, 3), f(3), root="expanded")]
    for name in ("add", "sub"):
        cases += [
            call(f"aten::{name}.Tensor", f(4, 3), f(3), alpha=2),
            call(f"aten::{name}.Tensor", 0.5, f(4, 3), alpha=2),
            call(f"aten::{name}_.Tensor", f(4), f(4), alpha=3),
        ]
    return cases


def _gradients() -> list[Case]:
    """Of activations and of parts, which code differentiates again."""
    cases = []
    for name, numbers in {
        "threshold": (0,),
        "leaky_relu": (0.1, False),
        "hardtanh": (-1.0, 1.0),
        "tanh": (),
        "sigmoid": (),
    }.items():
        layouts = ((f(4, 3), f(4, 3)), (f(4, 3).transposed, f(4, 3)), (f(4, 3), f(4, 3).transposed), (h(4, 3), h(4, 3)))
        cases += [call(f"aten::{name}_backward", x, y, *numbers) for x, y in layouts]
    cases += [call("aten::slice_backward", f(4, 2), [4, 3], 1, 0, 2, 1)]
    cases += [call("aten::select_backward", x, [4, 3], 1, 0) for x in (f(4), h(4))]
    return cases


def _division() -> list[Case]:
    cases = [call("aten::true_divide.Tensor", f(4, 3), f(3)), call("aten::div.Tensor", i(4), i(4))]
    for mode in ("floor", "trunc"):
        cases += [call("aten::div.Tensor_mode", f(4, 3), f(3), rounding_mode=mode)]
        cases += [call("aten::div.Tensor_mode", i(4, 3), 2, rounding_mode=mode)]
        cases += [call("aten::div.Tensor_mode", 7.0, f(4, 3), rounding_mode=mode)]
    cases += [call("aten::floor_divide", 7, i(4, 3)), call("aten::remainder.Scalar_Tensor", 7, i(4, 3))]
    for name in ("remainder", "fmod"):
        cases += [call(f"aten::{name}.Tensor", f(4, 3), f(3)), call(f"aten::{name}.Scalar", f(4, 3), 2.0)]
    cases += [call("aten::floor_divide", i(4), 2), call("aten::floor_divide", i(4, 3), i(3))]
    return cases


def _ternary() -> list[Case]:
    return [
        call("aten::addcmul", f(4, 3), f(4, 3), f(3)),
        call("aten::addcmul", f(3), f(4, 3), f(4, 3), value=2),
        call("aten::addcdiv", f(4, 3), f(4, 3), f(3)),
        call("aten::addcdiv", f(4, 3), f(4, 3), f(4, 3), value=0.5),
        call("aten::lerp.Scalar", f(4, 3), f(4, 3), 0.5),
        call("aten::lerp.Tensor", f(4, 3), f(4, 3), f(3)),
        call("aten::lerp_.Scalar", f(4, 3), f(4, 3), 0.5),
        call("aten::lerp_.Tensor", f(4, 3), f(4, 3), f(3)),
        call("aten::rsub.Scalar", f(4, 3), 1.0),
        call("aten::rsub.Tensor", f(4, 3), f(3)),
        call("aten::rsub.Scalar", i(4), 1),
    ]


def _powers() -> list[Case]:
    cases = [call("aten::pow.Tensor_Scalar", x, 3) for x in (f(4, 3), f(4, 3).transposed, h(4, 3), i(4))]
    cases += [call("aten::pow.Tensor_Scalar", f(4, 3), n) for n in (0, 1, 2, 0.5, 2.0)]
    cases += [call("aten::pow.Tensor_Tensor", x, y) for x, y in ((f(4, 3), f(4, 3)), (f(4, 3), f(3)), (f(3), f(4, 3)))]
    cases += [call("aten::pow.Scalar", 2.0, f(4, 3)), call("aten::square", f(4, 3)), call("aten::square_", f(4, 3))]
    return cases


def _comparisons() -> list[Case]:
    cases = []
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        cases += [call(f"aten::{name}.Tensor", f(4, 3), f(3)), call(f"aten::{name}.Scalar", f(4, 3).transposed, 0)]
        cases += [call(f"aten::{name}.Tensor", i(4, 1), i(3)), call(f"aten::{name}.Scalar", i(4), 2)]
    for name in ("logical_and", "logical_or", "logical_xor"):
        cases += [call(f"aten::{name}", b(4, 3), b(3)), call(f"aten::{name}", f(4).fixed, i(4))]
    cases += [call(f"aten::{n}.Tensor", b(4, 1), b(3)) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")]
    cases += [call(f"aten::{n}.Tensor", b(4, 1), b(3)) for n in ("__and__", "__or__", "__xor__")]
    cases += [call(f"aten::{n}.Scalar", i(4), 2) for n in ("__lshift__", "__rshift__")]
    cases += [call(f"aten::{n}", f(4, 3).fixed) for n in ("isposinf", "isneginf", "logical_not")]
    cases += [call("aten::isnan", f(4, 3).fixed), call("aten::bitwise_not", b(4)), call("aten::bitwise_not", i(4))]
    cases += [call("aten::isinf", f(4, 3).fixed), call("aten::isfinite", f(4, 3).fixed)]
    for name in ("maximum", "minimum", "fmax", "fmin", "max.other", "min.other"):
        cases += [call(f"aten::{name}", f(4, 3), f(3)), call(f"aten::{name}", f(4, 3).transposed, f(4, 3).transposed)]
        cases += [call(f"aten::{name}", i(4), i(4))]
    return cases


_ARGUMENTS = {"threshold": (0.1, 20.0), "hardtanh": (-2.0, 2.0), "leaky_relu": (0.2,), "celu": (2.0,)}
_COMPOSED = {"silu", "mish"}
_NOT_DIFFERENTIABLE_IN_PLACE = {"asinh", "acosh", "atanh"}
_NO_INPLACE = {"hardshrink", "softshrink", "softplus", "log_sigmoid"}


def _unary() -> list[Case]:
    cases = []
    for row in (*activations.TABLE, *unary.TABLE):
        rest = _ARGUMENTS.get(row.name, ())
        device = "cpu" if row.name in _COMPOSED else "cuda"
        xs = (f(4, 3), f(2, 3, 4, 5).channels_last, f(4, 3).wide(), h(4, 3), f(1, 3).expand(4, 3))
        cases += [call(f"aten::{row.name}", x, *rest, device=device) for x in xs]
        if row.name not in _NO_INPLACE:
            for x in (f(4, 3), h(4, 3).transposed):
                x = x.fixed if row.name in _NOT_DIFFERENTIABLE_IN_PLACE else x
                cases.append(call(f"aten::{row.name}_", x, *rest, device=device))
    cases += [call(f"aten::{n}", i(4)) for n in ("abs", "neg", "sign", "relu", "exp", "sqrt", "sigmoid", "cos", "log")]
    cases += [call("aten::gelu", f(4, 3), approximate="tanh"), call("aten::relu", f(4, 3), root="expanded")]
    cases += [
        call("aten::silu", f(4, 3), root="expanded", device="cpu"),
        call("aten::gelu", f(4, 3).transposed, root="contiguous"),
    ]
    return cases


def _bounded() -> list[Case]:
    cases = [call("aten::clamp", f(4, 3), *bounds) for bounds in ((0.0, 6.0), (0.0,), (None, 6.0))]
    cases += [call("aten::clamp", h(4, 3).transposed, 0.0, 1.0), call("aten::clamp", i(4), 0, 5)]
    cases += [
        call("aten::clip", f(4, 3), 0.0, 1.0),
        call("aten::clamp.Tensor", f(4, 3), f(3).fixed, f(3).fixed, real=("backward",), why=SUBCLASS),
    ]
    cases += [
        call("aten::clamp.Tensor", f(4, 3), f(4, 3)),
        call("aten::clamp.Tensor", f(4, 3), f(3), f(4, 3), real=("backward",), why=SUBCLASS),
    ]
    cases += [call("aten::clamp_min", f(4, 3), 0.0), call("aten::clamp_max", f(4, 3), 1.0)]
    cases += [call("aten::clamp_min.Tensor", f(4, 3), f(3)), call("aten::clamp_max.Tensor", f(4, 3), f(3))]
    cases += [call("aten::clamp_", f(4, 3), 0.0, 1.0), call("aten::clamp_", f(4, 3), 0.0)]
    cases += [call("aten::clamp_min_", f(4, 3), 0.0), call("aten::clamp_max_", f(4, 3), 1.0)]
    cases += [call("aten::prelu", f(2, 3, 4), f(3)), call("aten::prelu", f(2, 3, 4, 5).channels_last, f(1))]
    cases += [call("aten::prelu", f(2, 3), f(3)), call("aten::prelu", f(6), f(1))]
    cases += [call("aten::_prelu_kernel", f(2, 3, 4), f(4)), call("aten::_prelu_kernel", f(2, 3, 4), f(1, 3, 1))]
    cases += [
        call("aten::glu", f(4, 6)),
        call("aten::glu", f(2, 4, 5, 3).channels_last, 1, skip=("grads",), why=FAKE),
        call("aten::glu", h(4, 6), 0),
    ]
    return cases


def _casts() -> list[Case]:
    cases = []
    for x in (f(4, 3), f(4, 3).transposed, f(1, 3).expand(4, 3), f(4, 3).wide()):
        cases += [call("aten::to.dtype", x, dtypes.bfloat16), call("aten::to.dtype", x, dtypes.float32)]
        cases += [call("aten::_to_copy", x, dtype=dtypes.float16), call("aten::to.dtype", x, dtypes.int64)]
    for x in (f(2, 3, 4, 5), f(2, 3, 4, 5).transposed, f(2, 3, 4, 5).channels_last, f(1, 3).expand(4, 3)):
        for format in ("contiguous_format", "preserve_format", *(("channels_last",) if len(x.shape) == 4 else ())):
            for dtype in (dtypes.float32, dtypes.bfloat16):
                cases += [call("aten::to.dtype", x, dtype, memory_format=format)]
            cases += [call("aten::to.dtype", x, dtypes.bfloat16, False, False, format)]
            cases += [call("aten::_to_copy", x, dtype=dtypes.float16, memory_format=format)]
            cases += [call(f"aten::{name}_like", x, memory_format=format) for name in ("empty", "zeros")]
        cases += [call("aten::to.dtype", x, dtypes.float32, False, True), call("aten::to.dtype_layout", x, copy=True)]
    cases += [call("aten::type_as", f(4, 3), h(2).fixed), call("aten::to.other", f(4, 3), h(2).fixed)]
    cases += [
        call("aten::to.dtype", h(4, 3), dtypes.float32, False, True),
        call("aten::to.dtype", i(4), dtypes.float32),
    ]
    cases += [
        call("aten::copy_", f(4, 3), f(4, 3)),
        call("aten::copy_", f(4, 3), f(3)),
        call("aten::copy_", f(4, 3), h(4, 3)),
    ]
    return cases


CASES = [
    *_gradients(),
    *_binary(), *_division(), *_ternary(), *_powers(), *_comparisons(), *_unary(), *_bounded(), *_casts(),
]  # fmt: skip
