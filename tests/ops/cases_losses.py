"""Losses of libraries, which end a graph as one op (`library_losses` has them in PyTorch)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from observe import Case, Spec, call, f, h, i

V, H = 40, 6  # classes and hidden size: Liger divides the tokens by their ratio


def _of(name: str, *inputs: Any, **more: Any) -> Case:
    return call(f"staticmem::{name}", *inputs, **more)


# index_select's backward, and gradients of a weight that is used again, are added in place without a dispatch mode
_REAL: dict[str, Any] = {"real": ("backward",), "why": "a dispatch mode makes the engine add out of place"}
_NO_REAL: dict[str, Any] = {"skip": ("backward", "grads"), "why": "as in float32, which the CPU runs as CUDA does"}
_INSIDE = "ctx.saved_tensors are not in the reach of the observer"


def _all(x: Any, w: Any, bias: Any, plain: bool = False) -> list[Case]:
    tokens = i(x.shape[0], x.shape[1]) if len(x.shape) == 3 else i(x.shape[0])
    fused = _of("fused_linear_cross_entropy", x, w, bias, tokens, skip=("saved",), why=_INSIDE)
    if len(x.shape) == 2:
        return [fused]
    return [_of("linear_cross_entropy", x, w, bias, tokens, **(_REAL if plain else _NO_REAL)), fused]


def _chunks(make: Any, rows: int) -> tuple[Spec, ...]:
    return (make(rows, 2, V).trained,) * 8


_LENGTHS = (9, 8, 9), (4, 2, 3)  # of frames and of targets
_FAKE = "the fake backward of log_softmax keeps the gradient's layout; kernels make a contiguous one"
_LAYOUT: dict[str, Any] = {"skip": ("grads",), "why": _FAKE}
_CTC = [
    *(call("aten::ctc_loss", f(9, 3, V), i(3, 4), *_LENGTHS, 0, reduction, infinity)
      for reduction in (0, 2) for infinity in (False, True)),
    call("aten::ctc_loss", f(3, 9, V).permute(1, 0, 2), i(3, 4), *_LENGTHS, 0, 0),
    *(_of("ctc_loss", f(9, 3, V), i(3, 4), False, given) for given in (False, True)),
    _of("ctc_loss", f(3, 9, V), i(3, 4), True, True),
    *(_of("ctc_loss", x, i(3, 4), True, False, **_LAYOUT) for x in (f(3, 9, V), h(3, 9, V))),
]  # fmt: skip

_PLAIN = [
    _of("causal_lm_loss", f(2, 16, V), i(2, 16)),
    _of("causal_lm_loss", f(1, 16, V), i(1, 16)),
    _of("causal_lm_loss", h(2, 16, V), i(2, 16)),
    _of("chunked_cross_entropy", _chunks(f, 2), i(2, 16)),
    _of("chunked_cross_entropy", _chunks(h, 2), i(2, 16)),
    *_all(f(2, 16, H), f(V, H), None, plain=True),
    *_all(f(2, 16, H), f(V, H), f(V), plain=True),
    *_all(h(2, 16, H), h(V, H), None),
    *_all(h(2, 16, H), h(V, H), h(V)),
    *_all(f(30, H), f(V, H), f(V)),
    *_CTC,
]
_MIXED = [
    _of("causal_lm_loss", h(2, 16, V), i(2, 16)),
    _of("chunked_cross_entropy", _chunks(h, 2), i(2, 16)),
    *_all(f(2, 16, H), f(V, H), None),
    *_all(f(2, 16, H), f(V, H), f(V)),
    *_all(h(2, 16, H), f(V, H), None),
    _of("ctc_loss", h(3, 9, V), i(3, 4), True, False, **_LAYOUT),
    _of("ctc_loss", f(9, 3, V), i(3, 4), False, True),
]
CASES = [*_PLAIN, *(replace(case, name=f"{case.name} autocast", autocast=True) for case in _MIXED)]
