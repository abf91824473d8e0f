"""Views, copies, joining and splitting."""

from __future__ import annotations

from typing import Any

from observe import Case, Spec, call, f, h, i

ROLL = "the fake kernel is one op; `roll_common` rolls one dimension after the other"
UNSHUFFLE = "the fake kernel keeps channels last, as the CPU's does; CUDA runs math_pixel_unshuffle, contiguous"
LAYOUTS: tuple[Spec, ...] = (
    f(2, 3, 4, 6),
    f(2, 3, 4, 6).channels_last,
    f(2, 3, 4, 6).transposed,
    f(2, 1, 4, 1).expand(2, 3, 4, 6),
    f(2, 3, 4, 6).wide(),
    f(2, 4, 3, 6).permute(0, 2, 1, 3),
    f(1, 3, 4, 6),
)


def _reshapes() -> list[Case]:
    cases: list[Case] = []
    for x in LAYOUTS:
        n = x.shape[0]
        cases += [call("aten::reshape", x, shape, root=root) for root in ("like", "expanded")
                  for shape in ((n, 3, 24), (n, 72), (n, 3, 4, 2, 3), (-1, 6), (n * 72,))]  # fmt: skip
        cases += [call("aten::flatten.using_ints", x, 1), call("aten::flatten.using_ints", x, 2, 3)]
        cases += [call("aten::contiguous", x), call("aten::clone", x), call("aten::alias", x)]
        cases += [call("aten::contiguous", x, memory_format="channels_last")]
        cases += [call("aten::clone", x, memory_format="contiguous_format")]
        cases += [call("aten::clone", x, memory_format="channels_last")]
        cases += [call("aten::permute", x, (0, 2, 3, 1)), call("aten::transpose.int", x, 1, -1)]
        cases += [call("aten::permute", x, (0, 2, 3, 1), root="contiguous")]
        cases += [call("aten::unsqueeze", x, k) for k in (0, 2, -1)]
        cases += [call("aten::unflatten.int", x, 3, (2, 3)), call("aten::unflatten.int", x, -1, (-1, 2))]
        cases += [call("aten::slice.Tensor", x, 2, 1, 3), call("aten::slice.Tensor", x, -1, 0, 9, 2)]
        cases += [call("aten::slice.Tensor", x, 2, 1, 3, root="expanded"), call("aten::narrow", x, 1, 1, 2)]
        cases += [call("aten::select.int", x, k, -1) for k in (0, 1, 3)]
        cases += [call("aten::unfold", x, 2, 2, 1), call("aten::diagonal", x, 0, -2, -1)]
        cases += [call("aten::movedim.int", x, 1, -1), call("aten::squeeze.dim", x, 0), call("aten::mT", x)]
    cases += [call("aten::view", f(4, 6), (2, 2, 6)), call("aten::_unsafe_view", f(4, 6), (24,))]
    cases += [call("aten::view", f(4, 6), (24,), root="expanded"), call("aten::_reshape_alias", f(4, 6), (24,), (1,))]
    cases += [call("aten::view_as", f(4, 6), f(24).fixed), call("aten::reshape_as", f(4, 6).transposed, f(24).fixed)]
    cases += [call("aten::flatten.using_ints", f()), call("aten::flatten.using_ints", f(4))]
    cases += [call("aten::squeeze", f(1, 4, 1)), call("aten::squeeze.dims", f(1, 4, 1), (0, 2))]
    cases += [call("aten::t", f(4, 3)), call("aten::t", f(4)), call("aten::numpy_T", f(4, 3, 2))]
    cases += [call("aten::swapaxes", f(2, 3, 4), 0, 2), call("aten::swapdims", f(2, 3, 4), 0, 2)]
    cases += [call("aten::movedim.intlist", f(2, 3, 4), (0, 1), (2, 0)), call("aten::detach", f(4))]
    cases += [
        call("aten::as_strided", f(4, 6), (2, 3), (6, 1), 2),
        call("aten::as_strided", f(4, 6), (4, 5, 2), (6, 1, 1)),
    ]
    cases += [
        call("aten::lift_fresh", f(4).fixed),
        call("aten::alias_copy", f(4, 3)),
        call("aten::lift_fresh_copy", f(4)),
    ]
    return cases


def _expands() -> list[Case]:
    cases = [call("aten::expand", x, size, root=root) for root in ("like", "contiguous", "expanded")
             for x, size in ((f(4, 1), (4, 3)), (f(3), (4, 3)), (f(1, 3), (4, -1)), (f(4, 3), (4, 3)), (f(), (2, 2)),
                             (f(2, 1, 3, 1), (2, 5, 3, 4)), (h(1, 1), (6, 7)), (f(3), (1, 3)))]  # fmt: skip
    cases += [call("aten::expand_as", f(4, 1), f(4, 3).fixed), call("aten::broadcast_to", f(4, 1), (2, 4, 3))]
    cases += [call("aten::repeat", f(4, 3), n) for n in ((2, 1), (1, 1), (3, 1, 2), (2, 2))]
    cases += [call("aten::repeat", f(4, 3).transposed, (1, 2)), call("aten::tile", f(4, 3), (2,))]
    cases += [call("aten::repeat", f(4, 1), (1, 5)), call("aten::repeat", f(3), (4, 1), root="expanded")]
    for x in (f(4, 3), f(4, 3).transposed):
        cases += [call("aten::repeat_interleave.self_int", x, 2, 1), call("aten::repeat_interleave.self_int", x, 3, 0)]
        cases += [call("aten::repeat_interleave.self_int", x, 2)]
    return cases


def _joins() -> list[Case]:
    pairs: tuple[tuple[tuple[Spec, ...], int], ...] = (
        ((f(2, 3), f(4, 3)), 0),
        ((f(2, 3), f(2, 5)), -1),
        ((f(2, 3, 4, 5).channels_last, f(2, 2, 4, 5).channels_last), 1),
        ((f(2, 3, 4, 5).channels_last, f(2, 2, 4, 5)), 1),
        ((h(2, 3), f(2, 3)), 1),
        ((f(2, 3), f(0), f(2, 4)), 1),
        ((f(3, 2).permute(1, 0), f(2, 4)), 1),
    )
    cases: list[Case] = [call("aten::cat", t, dim) for t, dim in pairs]
    cases += [call("aten::pad_sequence", (f(4, 6), f(2, 6), f(3, 6)), first) for first in (True, False)]
    cases += [call("aten::pad_sequence", (f(4, 6), f(2, 6)), True, 0.0, "left")]
    cases += [call("aten::cat", (f(2, 3), f(2, 5)), 1, root="expanded"), call("aten::concat", (f(2), f(3)))]
    cases += [call("aten::concatenate", (i(2), i(3)))]
    cases += [call("aten::stack", (f(4, 3), f(4, 3)), dim) for dim in (0, 1, -1)]
    cases += [call("aten::stack", (h(4, 3), f(4, 3))), call("aten::stack", (f(4, 3).transposed, f(4, 3).transposed), 2)]
    cases += [call("aten::stack", (f(4, 3), f(4, 3)), 0, root="expanded")]
    return cases


def _splits() -> list[Case]:
    ways: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("split.Tensor", (2, 1)),
        ("split.Tensor", (4, 1)),
        ("split.sizes", ((1, 5), 1)),
        ("split_with_sizes", ((1, 5), 1)),
        ("chunk", (3, 1)),
        ("chunk", (4, -1)),
        ("tensor_split.sections", (4, 1)),
        ("tensor_split.indices", ((1, 3), 1)),
        ("unbind.int", (0,)),
        ("unbind.int", (-1,)),
    )
    cases: list[Case] = []
    for name, args in ways:
        for x in (f(4, 6), f(4, 6).transposed, f(2, 6, 4, 5).channels_last, h(3, 6)):
            cases += [call(f"aten::{name}", x, *args, roots=roots) for roots in (None, (0,), (1,))]
        cases.append(call(f"aten::{name}", f(2, 6, 4, 5).channels_last, *args, root="contiguous"))
    return cases


def _moves() -> list[Case]:
    cases = []
    for x in (f(4, 6), f(4, 6).transposed, f(2, 3, 4, 6).channels_last, f(4, 6).wide()):
        cases += [call("aten::roll", x, (1,), (0,)), call("aten::flip", x, (1,)), call("aten::rot90", x, 1, (0, 1))]
        twice = ("outputs", "forward", "grads")
        cases += [call("aten::roll", x, (1, 2), (0, 1), skip=twice, why=ROLL, real=("backward",))]
        cases += [call("aten::roll", x, (1,), skip=twice, why=ROLL, real=("backward",))]
        cases += [call("aten::tril", x), call("aten::triu", x, 1)]
    for x in (f(2, 4, 6, 6), f(2, 4, 6, 6).channels_last):
        cases += [call("aten::pixel_shuffle", x, 2)]
        cases += [call("aten::pixel_unshuffle", x, 2, skip=("outputs",), why=UNSHUFFLE)]
        cases += [call("aten::channel_shuffle", x, 2)]
    return cases


CASES = [*_reshapes(), *_expands(), *_joins(), *_splits(), *_moves()]
