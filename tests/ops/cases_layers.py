"""Convolutions, pooling, normalizations, resampling and dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from observe import Case, Spec, b, call, f, h, i

from staticmem.eager.strides import numel

LAST = "a CPU build has no cuDNN, which answers in channels last where input or weight prefer it (ConvUtils.h)"
CUDNN = (
    "a CPU build has no cuDNN: without statistics in inference; in training with a contiguous gradient, and with all "
    "three gradients whoever asks for them (test_cuda_only.py)"
)
THREE = "the fake kernel takes contiguous results for fewer than 4 channels; upsample_bilinear2d_out_cuda does not"


# rows, columns, and the diagonal where a triangle ends
TRIANGLES = ((5, 5, -1), (4, 6), (6, 4, -2), (3, 5, 2))


def _convolutions() -> list[Case]:
    cases: list[Case] = []
    image, last = f(2, 4, 6, 7), f(2, 4, 6, 7).channels_last
    for x in (image, last, h(2, 4, 6, 7)):
        kind = x.dtype
        there = len(cases)
        weight, grouped, bias = Spec((6, 4, 3, 3), kind), Spec((4, 1, 3, 3), kind), Spec((6,), kind)
        cases += [call("aten::conv2d", x, weight, bias), call("aten::conv2d", x, weight)]
        cases += [
            call("aten::conv2d", x, weight, bias, (2, 2), (1, 1)),
            call("aten::conv2d", x, weight, bias, (1, 1), (2, 2), (2, 2)),
        ]
        cases += [
            call("aten::conv2d", x, grouped, None, (1,), (1,), (1,), 4),
            call("aten::conv2d", x, weight, bias, root="contiguous"),
        ]
        cases += [
            call("aten::conv2d.padding", x, weight, bias, (1, 1), "same"),
            call("aten::conv2d.padding", x, weight, bias, (1, 1), "valid"),
        ]
        cases += [call("aten::conv_transpose2d.input", x, Spec((4, 6, 3, 3), kind), bias, (2, 2), (1, 1), (1, 1))]
        cases += [call("aten::convolution", x, weight, bias, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)]
        if x is last:
            cases[there:] = [replace(case, skip=("outputs", "grads"), why=LAST) for case in cases[there:]]
    cases += [
        call("aten::conv1d", f(2, 4, 9), f(6, 4, 3), f(6), (2,)),
        call("aten::conv1d", f(2, 4, 9), f(6, 2, 3), f(6), (1,), (1,), (1,), 2),
    ]
    cases += [call("aten::conv1d.padding", f(2, 4, 9), f(6, 4, 3), f(6), (1,), "same")]
    cases += [
        call("aten::conv3d", f(2, 4, 5, 6, 7), f(6, 4, 3, 3, 3), f(6)),
        call("aten::conv3d.padding", f(2, 4, 5, 6, 7), f(6, 4, 3, 3, 3), f(6)),
    ]
    cases += [
        call("aten::conv_transpose1d", f(2, 4, 9), f(4, 6, 3), f(6)),
        call("aten::conv2d", f(4, 6, 7), f(6, 4, 3, 3), f(6)),
    ]
    cases += [call("aten::conv_transpose3d.input", f(2, 4, 5, 6, 7), f(4, 6, 3, 3, 3), f(6))]
    cases += [
        call(
            "aten::_convolution",
            f(2, 4, 6, 7),
            f(6, 4, 3, 3),
            f(6),
            (1, 1),
            (0, 0),
            (1, 1),
            False,
            (0, 0),
            1,
            False,
            False,
            True,
            True,
        )
    ]
    cases += [
        call("aten::conv2d", f(2, 4, 6, 7).fixed, f(6, 4, 1, 1), f(6)),
        call("aten::conv2d", f(2, 1, 6, 7), f(6, 1, 3, 3)),
    ]
    return cases


def _pools() -> list[Case]:
    cases: list[Case] = []
    for x in (f(2, 4, 7, 9), f(2, 4, 7, 9).channels_last, h(2, 4, 7, 9)):
        ways: tuple[tuple[Any, ...], ...] = (
            ((2, 2),),
            ((3, 3), (2, 2), (1, 1)),
            ((2, 2), (2, 2), (0, 0), (1, 1), True),
            ((3, 3), (2, 2), (1, 1), (2, 2)),
        )
        cases += [call(f"aten::max_pool2d{suffix}", x, *way) for suffix in ("", "_with_indices") for way in ways]
        cases += [
            call("aten::avg_pool2d", x, *way)
            for way in (((2, 2),), ((3, 3), (2, 2), (1, 1), True), ((2, 2), (2, 2), (0, 0), True, False))
        ]
        cases += [call("aten::adaptive_avg_pool2d", x, size) for size in ((1, 1), (3, 4), (7, 9))]
        cases += [call("aten::adaptive_max_pool2d", x, (3, 4))]
    cases += [
        call("aten::max_pool1d", f(2, 4, 9), (2,)),
        call("aten::avg_pool1d", f(2, 4, 9), (2,)),
        call("aten::adaptive_avg_pool1d", f(2, 4, 9), (3,)),
    ]
    cases += [call("aten::adaptive_avg_pool1d", f(2, 4, 9), (1,)), call("aten::adaptive_max_pool1d", f(2, 4, 9), (3,))]
    cases += [call("aten::max_pool1d_with_indices", f(2, 4, 9), (2,))]
    cube = f(2, 4, 6, 7, 8)
    cases += [
        call("aten::max_pool3d", cube, (2, 2, 2)),
        call("aten::max_pool3d_with_indices", cube, (2, 2, 2)),
        call("aten::avg_pool3d", cube, (2, 2, 2)),
    ]
    cases += [
        call("aten::adaptive_avg_pool3d", cube, (3, 3, 3)),
        call("aten::adaptive_avg_pool3d", cube, (1, 1, 1)),
        call("aten::adaptive_max_pool3d", cube, (3, 3, 3)),
    ]
    cases += [call("aten::max_pool2d", f(4, 7, 9), (2, 2)), call("aten::avg_pool2d", f(4, 7, 9), (2, 2))]
    return cases


def _norms() -> list[Case]:
    cases: list[Case] = []
    weight, bias = f(4), f(4)
    for x in (f(2, 4, 5, 6), f(2, 4, 5, 6).channels_last, f(3, 4), f(2, 4, 5)):
        stats = (f(4).fixed, f(4).fixed)
        for training in (True, False):
            given: tuple[Any, ...] = (*stats, training, 0.1, 1e-5)
            cudnn: tuple[str, ...] = ("backward", "grads") if training else ("forward", "saved", "backward")
            cudnn = cudnn if len(x.shape) > 2 else ()
            cases += [call("aten::batch_norm", x, weight, bias, *given, True, skip=cudnn, why=CUDNN)]
            cases += [call("aten::batch_norm", x, None, None, *given, False)]
            cases += [call("aten::native_batch_norm", x, weight, bias, *given, roots=(0,))]
        none = (None, None, True, 0.1, 1e-5, True)
        cases += [call("aten::batch_norm", x, weight, bias, *none, skip=cudnn and ("backward", "grads"), why=CUDNN)]
    for x in (f(3, 4, 5), f(4, 3, 5).permute(1, 0, 2), f(6, 5)):
        cases += [
            call("aten::layer_norm", x, (5,), f(5), f(5), device="cpu"),
            call("aten::layer_norm", x, (5,), device="cpu"),
        ]
        cases += [call("aten::layer_norm", x, (5,), f(5), None, device="cpu")]
        cases += [call("aten::native_layer_norm", x, (5,), f(5), f(5), 1e-5, device="cpu", roots=(0,))]
    cases += [call("aten::layer_norm", f(3, 4, 5), (4, 5), f(4, 5), f(4, 5), device="cpu")]
    for x in (f(2, 6, 5), f(2, 6, 5, 4), f(2, 6, 5, 4).channels_last):
        cases += [
            call("aten::group_norm", x, 3, f(6), f(6), device="cpu"),
            call("aten::group_norm", x, 3, device="cpu"),
        ]
    for x in (f(2, 4, 5, 6), f(2, 4, 5)):
        for params in ((weight, bias), (None, None)):
            skip = ("backward", "grads") if params[0] is not None else ()  # it is a batch norm
            tracked = (f(4).fixed, f(4).fixed, True, 0.1, 1e-5, False)
            cases += [call("aten::instance_norm", x, *params, *none, skip=skip, why=CUDNN)]
            cases += [call("aten::instance_norm", x, *params, *tracked, skip=skip, why=CUDNN)]
    for x in (f(2, 6, 5), f(2, 6, 5, 4)):
        cases += [call("aten::native_group_norm", x, f(6), f(6), 2, 6, numel(x.shape[2:]), 3, 1e-5,
                       device="cpu", roots=(0,))]  # fmt: skip
    return cases


def _resamples() -> list[Case]:
    cases: list[Case] = []
    for x in (f(2, 16, 4, 5), f(2, 16, 4, 5).channels_last):
        cases += [
            call("aten::upsample_nearest2d.vec", x, None, (2.0, 2.0)),
            call("aten::upsample_nearest2d.vec", x, (7, 9), None),
        ]
        cases += [
            call("aten::upsample_bilinear2d.vec", x, (7, 9), False, None),
            call("aten::upsample_bilinear2d.vec", x, None, True, (2.0, 2.0)),
        ]
        cases += [
            call("aten::upsample_bicubic2d.vec", x, (7, 9), False, None),
            call("aten::_upsample_nearest_exact2d.vec", x, None, (2.0, 2.0)),
        ]
        cases += [
            call("aten::_upsample_bilinear2d_aa.vec", x, (7, 9), False, None),
            call("aten::_upsample_bicubic2d_aa.vec", x, (2, 3), False, None),
        ]
        cases += [call("aten::upsample_nearest2d", x, (7, 9)), call("aten::upsample_bilinear2d", x, (7, 9), True)]
        cases += [
            call("aten::grid_sampler", x, f(2, 6, 7, 2), 0, 0, False),
            call("aten::grid_sampler_2d", x, f(2, 6, 7, 2), 0, 0, False),
        ]
    cases += [
        call("aten::upsample_nearest1d.vec", f(2, 3, 4), None, (2.0,)),
        call("aten::upsample_linear1d.vec", f(2, 3, 4), (9,), False, None),
    ]
    cases += [call("aten::upsample_nearest3d.vec", f(2, 3, 4, 5, 6), None, (2.0, 2.0, 2.0))]
    cases += [call("aten::upsample_trilinear3d.vec", f(2, 3, 4, 5, 6), (5, 6, 7), False, None)]
    cases += [call("aten::grid_sampler_3d", f(2, 3, 4, 5, 6), f(2, 3, 4, 5, 3), 0, 0, False)]
    return cases


def _dropouts() -> list[Case]:
    cases: list[Case] = []
    for x in (f(2, 4, 5, 6), f(2, 4, 5, 6).channels_last, h(2, 4, 5, 6), f(4, 5).transposed):
        cases += [
            call("aten::dropout", x, 0.5, True),
            call("aten::dropout", x, 0.5, False),
            call("aten::dropout", x, 0.0, True),
        ]
        cases += [call("aten::dropout_", x, 0.5, True), call("aten::native_dropout", x, 0.5, True)]
        cases += [call("aten::feature_dropout", x, 0.5, True), call("aten::feature_dropout_", x, 0.5, True)]
        cases += [call("aten::dropout", x, 1.0, True), call("aten::alpha_dropout", x, 0.5, True)]
        cases += [call("aten::feature_alpha_dropout", x, 0.5, training) for training in (True, False)]
    return cases


def _factories() -> list[Case]:
    cases: list[Case] = []
    for name in ("empty.memory_format", "zeros", "ones", "rand", "randn"):
        cases += [call(f"aten::{name}", (4, 3))]
    cases += [call("aten::full", (4, 3), 1.0), call("aten::full", (4,), 1), call("aten::full", (4,), True)]
    for x in (f(4, 3), f(4, 3).transposed, i(4), f(4, 1).expand(4, 3)):
        cases += [call(f"aten::{name}_like", x) for name in ("empty", "zeros", "ones")]
        cases += [
            call("aten::full_like", x, 2.0),
            call("aten::new_zeros", x, (2, 3)),
            call("aten::new_full", x, (2,), 1.0),
        ]
        cases += [call("aten::new_ones", x, (2, 3)), call("aten::new_empty", x, (2, 3))]
    cases += [
        call("aten::rand_like", f(4, 3)),
        call("aten::randn_like", f(4, 3)),
        call("aten::arange", 5),
        call("aten::arange", 2.0),
    ]
    cases += [
        call("aten::arange.start", 1, 7),
        call("aten::arange.start_step", 0, 7, 2),
        call("aten::linspace", 0, 1, 5),
        *(call(f"aten::{name}_indices", *sizes) for name in ("tril", "triu") for sizes in TRIANGLES),
    ]
    cases += [
        call("aten::eye", 4),
        call("aten::eye.m", 4, 3),
        call("aten::randperm", 5),
        call("aten::randint", 5, (4,)),
    ]
    cases += [call("aten::scalar_tensor", 1.0), call("aten::randint.low", 1, 5, (4, 2))]
    for name, args in (("fill_.Scalar", (1.0,)), ("zero_", ()), ("bernoulli_.float", (0.5,)), ("uniform_", ()),
                       ("normal_", ()),
                       ("exponential_", ()), ("random_", ())):  # fmt: skip
        cases += [call(f"aten::{name}", f(4, 3), *args), call(f"aten::{name}", h(4, 3).transposed, *args)]
    cases += [
        call("aten::bernoulli", f(4, 3)),
        call("aten::bernoulli.p", f(4, 3).fixed, 0.5),
        call("aten::fill.Scalar", f(4, 3), 1.0),
    ]
    cases += [call("aten::multinomial", f(4, 3).fixed, 2), call("aten::logical_not", b(3))]
    return cases


CASES = [*_convolutions(), *_pools(), *_norms(), *_resamples(), *_dropouts(), *_factories()]
