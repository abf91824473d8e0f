"""Indexing, gathering, scattering, masks and padding."""

from __future__ import annotations

from observe import Case, b, call, f, h, i

from staticmem.ir import dtypes

INPLACE = "PyTorch scatters out of place into the zeros while a dispatch mode watches"
CIRCULAR = "composed of slice copies; our backward is their sum without temporaries"
LAYOUTS = (f(4, 6), f(4, 6).transposed, h(4, 6))


def _gathers() -> list[Case]:
    cases: list[Case] = []
    for x in LAYOUTS:
        for target, args in (("take", (i(3, 2),)), ("index.Tensor", ((i(3),),)), ("index.Tensor", ((i(2, 3),),)),
                             ("index.Tensor", ((i(3), i(3)),)), ("index.Tensor", ((i(3, 1), i(5)),)),
                             ("index_select", (0, i(3))), ("index_select", (1, i(5))),
                             ("gather", (1, i(4, 2))), ("gather", (0, i(2, 6))), ("take_along_dim", (i(4, 2), 1)),
                             ("take_along_dim", (i(1, 2), 1))):  # fmt: skip
            if x.dtype is dtypes.float32:
                cases.append(call(f"aten::{target}", x, *args, real=("backward",), why=INPLACE))
            else:  # the CPU's index_put_ and scatter_add_ widen half precision
                cases.append(call(f"aten::{target}", x, *args, skip=("backward", "grads"), why=INPLACE))
        cases += [call("aten::masked_fill.Scalar", x, b(4, 6), 0.0), call("aten::masked_fill.Scalar", x, b(6), 0.0)]
        cases += [
            call("aten::masked_fill.Scalar", x, b(2, 4, 6), -1.0),
            call("aten::masked_fill_.Scalar", x, b(4, 6), 0.0),
        ]
        cases += [call("aten::masked_fill.Tensor", x, b(4, 6), type(x)((), x.dtype, grad=False))]
        cases += [call("aten::where.self", b(4, 6), x, x), call("aten::where.self", b(4, 1), x, type(x)((), x.dtype))]
        cases += [call("aten::where.self", b(2, 4, 6), x, x)]
        cases += [call("aten::diff", x), call("aten::diff", x, 1, 0)]
    cases += [
        call("aten::where.ScalarOther", b(4, 6), f(4, 6), 0.0),
        call("aten::where.ScalarSelf", b(4, 6), 1.0, f(4, 6)),
    ]
    cases += [call("aten::where.Scalar", b(4, 6), 1.0, 0.0), call("aten::where.self", b(4, 6), h(4, 6), f(4, 6))]
    for indices in (i(7), i(2, 7), i(2, 7).transposed):
        cases += [call("aten::embedding", f(10, 3), indices), call("aten::embedding", h(10, 3), indices, 1)]
    cases += [call("aten::embedding", f(10, 3), i(2, 7), root="expanded"), call("aten::diff", f(6), prepend=f(1))]
    cases += [call("aten::meshgrid.indexing", (f(3), f(4)), indexing="ij"), call("aten::meshgrid", (f(3), f(4)))]
    cases += [call("aten::one_hot", i(4), 7, skip=("forward", "outputs"), why="composed of zeros and scatter_")]
    cases += [
        call("aten::bucketize.Tensor", f(4).fixed, f(3).fixed),
        call("aten::searchsorted.Tensor", f(5).fixed, f(3).fixed),
    ]
    cases += [call("aten::meshgrid.indexing", (i(3), i(4)), indexing="xy")]
    return cases


def _scatters() -> list[Case]:
    cases: list[Case] = []
    for x in (f(4, 6), h(4, 6)):
        src = type(x)((4, 2), x.dtype)
        for suffix in ("", "_"):
            cases += [
                call(f"aten::scatter{suffix}.src", x, 1, i(4, 2), src),
                call(f"aten::scatter{suffix}.value", x, 1, i(4, 2), 1.0),
            ]
            cases += [call(f"aten::scatter_add{suffix}", x, 1, i(4, 2), src)]
            cases += [
                call(f"aten::index_add{suffix}", x, 1, i(2), src),
                call(f"aten::index_copy{suffix}", x, 1, i(2), src),
            ]
            cases += [call(f"aten::index_fill{suffix}.int_Scalar", x, 1, i(2), 0.0)]
            cases += [call(f"aten::index_put{suffix}", x, (i(3),), type(x)((3, 6), x.dtype))]
            cases += [call(f"aten::index_put{suffix}", x, (i(3),), type(x)((3, 6), x.dtype), True)]
            cases += [call(f"aten::masked_scatter{suffix}", x, b(4, 6), type(x)((4, 6), x.dtype))]
        cases += [call("aten::slice_scatter", x, type(x)((2, 6), x.dtype), 0, 1, 3)]
        cases += [call("aten::select_scatter", x, type(x)((6,), x.dtype), 0, 1)]
        cases += [call("aten::scatter_reduce.two", x, 1, i(4, 2), src, "sum")]
        for how in ("mean", "amax", "amin", "prod"):
            cases += [call("aten::scatter_reduce.two", x, 1, i(4, 2), src, how)]
            cases += [call("aten::scatter_reduce.two", x, 1, i(4, 2), src, how, include_self=False)]
            cases += [call("aten::index_reduce", x, 1, i(2), src, how)]
            cases += [call("aten::index_reduce", x, 1, i(2), src, how, include_self=False)]
        cases += [
            call("aten::put", x, i(3), type(x)((3,), x.dtype)),
            call("aten::put_", x, i(3), type(x)((3,), x.dtype)),
        ]
        cases += [call("aten::put", x, i(3), type(x)((3,), x.dtype), True)]
        cases += [call("aten::diagonal_scatter", x, type(x)((4,), x.dtype))]
        cases += [call("aten::scatter_reduce_.two", x, 1, i(4, 2), src, "amax")]
        cases += [call("aten::scatter_reduce_.two", x, 1, i(4, 2), src, "prod")]
    return cases


def _pads() -> list[Case]:
    cases: list[Case] = []
    for x in (f(2, 3, 4, 5), f(2, 3, 4, 5).channels_last, h(2, 3, 4, 5)):
        cases += [call("aten::constant_pad_nd", x, (1, 2), 0.0), call("aten::pad", x, (1, 1, 2, 2))]
        cases += [call("aten::constant_pad_nd", x, (0, 0, 0, 0)), call("aten::pad", x, (-1, 2, 1, -1), "constant", 0.0)]
        for mode in ("reflect", "replicate"):
            cases += [call("aten::pad", x, (1, 1, 2, 2), mode)]
        cases += [call("aten::pad", x, (1, 1, 2, 2), "circular", skip=("backward", "grads"), why=CIRCULAR)]
        cases += [call("aten::reflection_pad2d", x, (1, 1, 1, 1)), call("aten::replication_pad2d", x, (1, 1, 1, 1))]
    cases += [
        call("aten::pad", f(2, 3, 4), (1, 1), "reflect"),
        call("aten::constant_pad_nd", f(4, 6).transposed, (1, 0), 0.0),
    ]
    cases += [call("aten::reflection_pad1d", f(2, 3, 4), (1, 1)), call("aten::replication_pad1d", f(2, 3, 4), (1, 1))]
    return cases


CASES = [*_gathers(), *_scatters(), *_pads()]
