"""Fourier transforms and complex tensors."""

from __future__ import annotations

from observe import Case, c, call, f


def _transforms() -> list[Case]:
    cases = [call(f"aten::fft_{name}", x) for name in ("fft", "ifft") for x in (f(4, 6), c(4, 6))]
    cases += [call("aten::fft_fft", x, n) for x in (f(4, 6), c(4, 6)) for n in (8, 4)]
    cases += [call("aten::fft_fft", x, None, 0) for x in (f(4, 6), c(4, 6))]
    cases += [call("aten::fft_rfft", f(4, n)) for n in (6, 7, 2)]
    cases += [call("aten::fft_rfft", f(4, 6), 8), call("aten::fft_rfft", f(4, 6), None, 0)]
    cases += [
        call("aten::fft_irfft", c(4, 4)),
        call("aten::fft_irfft", c(4, 4), 7),
        call("aten::fft_irfft", c(4, 4), 4),
    ]
    cases += [call("aten::fft_hfft", c(4, 4)), call("aten::fft_ihfft", f(4, 6))]
    for name in ("fft2", "ifft2", "fftn", "ifftn"):
        cases += [call(f"aten::fft_{name}", x) for x in (f(2, 4, 6), c(2, 4, 6))]
    cases += [call("aten::fft_fftn", c(2, 4, 6), None, (1, 2)), call("aten::fft_fftn", f(2, 4, 6), (4, 8), (1, 2))]
    cases += [call("aten::fft_rfft2", f(2, 4, 6)), call("aten::fft_rfftn", f(2, 4, 6), None, (1, 2), "ortho")]
    cases += [call("aten::fft_rfftn", f(2, 4, 6))]
    cases += [call("aten::fft_irfft2", c(2, 4, 4), size) for size in (None, (4, 6), (4, 7))]
    cases += [call("aten::fft_irfftn", c(2, 4, 4), None, (1, 2))]
    cases += [call("aten::fft_fftshift", f(6)), call("aten::fft_ifftshift", f(4, 6), (1,))]
    # whether fake tensors take a decomposition depends on what was imported before (`test_windows_are_views` is real)
    for name in ("hann", "hamming", "blackman", "bartlett"):
        cases.append(call(f"aten::{name}_window", 16, skip=("forward",), why="fake tensors may decompose it"))
    cases += [call("aten::fft_fftfreq", 8), call("aten::fft_rfftfreq", 8)]
    return cases


def _complex() -> list[Case]:
    cases = [call(f"aten::{name}", c(4, 3)) for name in ("view_as_real", "real", "imag", "conj", "abs", "angle")]
    cases += [call("aten::view_as_complex", f(4, 3, 2)), call("aten::real", f(4, 3)), call("aten::conj", f(4, 3))]
    cases += [call(f"aten::{name}", f(4, 3), f(4, 3)) for name in ("complex", "polar")]
    cases += [call("aten::mul.Tensor", c(4, 3), x) for x in (c(4, 3), f(4, 3), c(3))]
    cases += [call("aten::add.Tensor", c(4, 3), f(4, 3)), call("aten::matmul", c(4, 3), c(3, 5))]
    cases += [call("aten::einsum", "bixy,ioxy->boxy", (c(2, 3, 4, 5), c(3, 6, 4, 5)))]
    return cases


def _short_time() -> list[Case]:
    return [
        call("aten::stft", f(2, 64), 16, 4, 16, f(16).fixed, False, True, True),
        call("aten::stft", f(2, 64), 16, 4, None, None, False, True, False),
    ]


CASES = [*_transforms(), *_complex(), *_short_time()]
