"""Losses, embedding bags, recurrent layers and the rest."""

from __future__ import annotations

from typing import Any

from observe import Case, call, f, h, i

from staticmem.ir import dtypes


def _losses() -> list[Case]:
    cases: list[Case] = []
    for reduction in (0, 1, 2):
        forward = ("forward",) if reduction else ()
        why = "fake tensors do not show that the reduced loss keeps the storage of what it reduces" if reduction else ""
        for name in ("mse_loss", "smooth_l1_loss"):
            cases += [call(f"aten::{name}", f(4, 3), f(4, 3), reduction, skip=forward, why=why)]
        cases += [call("aten::huber_loss", f(4, 3), f(4, 3), reduction)]
        cases += [call("aten::binary_cross_entropy", f(4, 3), f(4, 3).fixed, None, reduction, real=forward, why=why)]
        for x, y in ((f(4, 7), i(4)), (f(2, 7, 4, 5), i(2, 4, 5))):
            cases += [
                call("aten::cross_entropy_loss", x, y, None, reduction),
                call("aten::nll_loss_nd", x, y, None, reduction),
            ]
    cases += [call("aten::nll_loss", f(4, 7), i(4)), call("aten::nll_loss2d", f(2, 7, 4, 5), i(2, 4, 5))]
    cases += [call("aten::cross_entropy_loss", h(4, 7), i(4), autocast=True)]
    cases += _soft_targets()
    return cases


def _soft_targets() -> list[Case]:
    """Label smoothing and class probabilities, with and without weights of the classes."""
    name = "aten::cross_entropy_loss"
    cases: list[Case] = []
    for reduction in (0, 1, 2):
        for x, y in ((f(4, 7), i(4)), (f(2, 7, 4, 5), i(2, 4, 5))):
            cases += [call(name, x, y, None, reduction, -100, 0.1), call(name, x, x.fixed, None, reduction)]
            cases += [call(name, x, x, f(7).fixed, reduction, -100, 0.1)]
            parts = ("outputs", "forward", "saved") if reduction == 1 else ()
            why = (
                "under a dispatch mode PyTorch masks the weights of ignored targets instead of selecting"
                if parts
                else ""
            )
            cases += [call(name, x, y, f(7).fixed, reduction, -100, 0.1, skip=parts, why=why if parts else "")]
    for y, smoothing in ((i(4), 0.1), (f(4, 7).fixed, 0.0), (h(4, 7).fixed, 0.1)):
        cases += [call(name, h(4, 7), y, None, 1, -100, smoothing, autocast=True)]
    return [*cases, call(name, f(7), f(7).fixed)]


def _cells() -> list[Case]:
    """One step of recurrent layers; the GRU's, and an LSTM's without biases, have no fake kernel (test_cuda_only)."""
    lstm = f(3, 4), (f(3, 5), f(3, 5)), f(20, 4), f(20, 5), f(20), f(20)
    cases = [call("aten::lstm_cell", *lstm), call("aten::lstm_cell", *lstm, autocast=True)]
    for name in ("tanh", "relu"):
        for biases in ((f(5), f(5)), (None, None)):
            cases += [call(f"aten::rnn_{name}_cell", f(3, 4), f(3, 5), f(5, 4), f(5, 5), *biases)]
    return cases


def _rest() -> list[Case]:
    bags: tuple[Any, ...] = (i(9), i(4))
    cases = [call("aten::_embedding_bag", f(10, 3), *bags, False, mode, roots=(0,)) for mode in (0, 1)]
    cases += [call("aten::embedding_bag", f(10, 3), *bags, False, 0, roots=(0,))]
    cases += _cells()
    for aligned in (False, True):
        cases += [call("aten::affine_grid_generator", f(2, 2, 3), (2, 3, 5, 6), aligned)]
        cases += [call("aten::affine_grid_generator", f(2, 3, 4), (2, 3, 4, 5, 6), aligned)]
    cases += [
        call("aten::logaddexp", f(4, 3), f(4, 3)),
        call("aten::logaddexp2", f(4, 3), f(4, 3)),
        call("aten::hardshrink", f(4, 3), 0.5),
        call("aten::nan_to_num", f(4, 3)),
    ]
    cases += [call("aten::_upsample_nearest_exact1d.vec", f(2, 3, 4), None, (2.0,))]
    cases += [call("aten::_upsample_nearest_exact3d.vec", f(2, 3, 4, 5, 6), None, (2.0, 2.0, 2.0))]
    cases += [call(f"aten::{n}_pad3d", f(2, 3, 4, 5, 6), (1, 1, 1, 1, 1, 1)) for n in ("reflection", "replication")]
    cases += [call("aten::detach_", f(4).fixed), call("aten::to.dtype", i(4), dtypes.float32)]
    return cases


def _various() -> list[Case]:
    window = ((2, 2), (1, 1), (0, 0), (2, 2))
    cases = [call("aten::im2col", x, *window) for x in (f(2, 3, 6, 7), f(2, 3, 6, 7).channels_last, f(3, 6, 7))]
    cases += [call("aten::col2im", f(2, 12, 9), (6, 6), *window), call("aten::linalg_cross", f(4, 3), f(4, 3))]
    cases += [call("aten::cross", f(4, 3), f(4, 3), 1)]
    cases += [call("aten::cosine_similarity", x, f(4, 6), dim) for x in (f(4, 6), f(1, 6)) for dim in (1, 0)]
    cases += [call("aten::pow_.Scalar", f(4, 3), 3), call("aten::pow_.Tensor", f(4, 3), f(4, 3))]
    cases += [call(f"aten::{name}_", f(4, 3), f(4, 3), f(4, 3)) for name in ("addcmul", "addcdiv")]
    cases += [call("aten::tril_", f(4, 3)), call("aten::triu_", f(4, 3), 1), call("aten::clip_", f(4, 3), 0.0, 1.0)]
    cases += [call("aten::unsqueeze_", f(4, 3), 1), call("aten::squeeze_.dim", f(4, 1), 1)]
    cases += [call("aten::transpose_", f(4, 3), 0, 1), call("aten::t_", f(4, 3))]
    return cases


CASES = [*_losses(), *_rest(), *_various()]
