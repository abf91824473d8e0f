"""Complex numbers, and Fourier transforms: the three kernels of cuFFT, and what torch.fft calls around them.

Conjugation is a flag of a view (aten/src/ATen/native/ComplexHelper.h, c10 `Conjugate` key): it allocates nothing
until a kernel that cannot read it gets a copy.

Sources: aten/src/ATen/native/SpectralOps.cpp (which kernel, padding, default dimensions), derivatives.yaml and
FunctionsManual.cpp (`fft_r2c_backward`, `fft_c2r_backward`). A transform over dimensions that are not the last ones
gives a result whose memory has them last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.arithmetic import mul
from staticmem.ops.casts import to_copy
from staticmem.ops.pointwise import grad_of
from staticmem.ops.rearranging import constant_pad_nd, roll
from staticmem.ops.registry import rule
from staticmem.ops.views import alias, as_strided, clone, narrow, select, transpose


def _as_real(tensor: Tensor) -> tuple[layout.Shape, layout.Strides]:
    return (*tensor.shape, 2), (*(2 * s for s in tensor.strides), 1)


def _view(e: Eager, out: Tensor, self: Tensor, node: str, gradient: Any) -> Tensor:
    """A view of another element type that autograd knows."""
    out.base = self.base if self.base is not None else self
    return e.record(node, out, [self], [Formula((0,), gradient)])


def _retyped(tensor: Tensor, shape: layout.Shape, strides: layout.Strides, dtype: DType) -> Tensor:
    return Tensor(tensor.storage, shape, strides, dtype)


@rule("view_as_real", kinds=("view",))
def view_as_real(e: Eager, self: Tensor) -> Tensor:
    """A view with one more dimension of size 2; so is its gradient."""

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        if not grad.is_contiguous:
            grad = e.empty(grad.shape, grad.dtype, kernel="aten.clone.default")
        strides = tuple(s // 2 for s in grad.strides[:-1])
        return _retyped(grad, grad.shape[:-1], strides, dtypes.complex_of(grad.dtype))

    out = _retyped(self, *_as_real(self), dtypes.real_of(self.dtype))
    return _view(e, out, self, "ViewAsRealBackward0", gradient)


@rule("view_as_complex", kinds=("view",))
def view_as_complex(e: Eager, self: Tensor) -> Tensor:
    """A view without the last dimension; so is its gradient."""

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return _retyped(grad, *_as_real(grad), dtypes.real_of(grad.dtype))

    strides = tuple(s // 2 for s in self.strides[:-1])
    out = _retyped(self, self.shape[:-1], strides, dtypes.complex_of(self.dtype))
    return _view(e, out, self, "ViewAsComplexBackward0", gradient)


@rule("real imag", kinds=("view",))
def real(e: Eager, self: Tensor) -> Tensor:
    """A view; backward makes a complex tensor of zeros for the other part. Real tensors are their own real part."""
    return select(e, view_as_real(e, self), -1, 0) if self.dtype.kind == "complex" else self


@rule("conj")
def conj(e: Eager, self: Tensor) -> Tensor:
    """A view of the same numbers (the tensor itself where they are real)."""
    return alias(e, self) if self.dtype.kind == "complex" else self


@rule("complex")
def complex(e: Eager, real: Tensor, imag: Tensor) -> Tensor:
    """Saves a part that needs a gradient (for its dtype); the gradients are views of the incoming one."""
    dtype = dtypes.complex_of(real.dtype)
    out = e.pointwise("aten.complex.default", real, imag, dtype=dtype)

    def part(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        return _retyped(grad, grad.shape, tuple(2 * s for s in grad.strides), real.dtype)

    saves = [t if e.needs_grad(t) else None for t in (real, imag)]
    return e.record("ComplexBackward0", out, [real, imag], [Formula((0,), part), Formula((1,), part)], saves)


@rule("polar")
def polar(e: Eager, abs: Tensor, angle: Tensor) -> Tensor:
    """Saves the result; each gradient is a complex product with a conjugated copy, of which the real part is a view."""
    out = e.pointwise("aten.polar.default", abs, angle, dtype=dtypes.complex_of(abs.dtype))

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)  # FunctionsManual.cpp, polar_backward

        def times_conjugate(kernel: str) -> Tensor:
            factor = e.pointwise(kernel, out)
            conjugate = e.empty_like(factor, kernel="aten.clone.default")
            product = e.pointwise("aten.mul.Tensor", grad, conjugate)
            e.free(conjugate, factor)
            return product

        return times_conjugate("aten.sgn.default"), times_conjugate("aten.mul.Scalar")

    return e.record("PolarBackward0", out, [abs, angle], [Formula((0, 1), gradients)], [out])


@rule("angle")
def angle(e: Eager, self: Tensor) -> Tensor:
    """Saves its input; backward of a complex one takes its size, its square and five complex tensors of its size."""
    floating = self.dtype if self.dtype.is_differentiable else dtypes.float32
    dtype = dtypes.real_of(floating)
    out = e.pointwise("aten.angle.default", self, dtype=dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)  # FunctionsManual.cpp, angle_backward
        if self.dtype.kind != "complex":
            return e.empty((), grad.dtype, kernel="aten.zeros.default")
        size = e.pointwise("aten.abs.default", self, dtype=dtype)
        e.pointwise("aten.pow.Tensor_Scalar", size)
        product = e.pointwise("aten.mul.Tensor", grad, self)
        ratio = e.pointwise("aten.div.Tensor", product)
        scaled = e.pointwise("aten.mul.Scalar", ratio)
        e.empty((), self.dtype, kernel="aten.zeros.default")
        e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", scaled, dtype=self.dtype)

    return e.record("AngleBackward0", out, [self], [Formula((0,), gradient)], [self])


Axes = tuple[int, ...]


def _strides(shape: layout.Shape, axes: Axes) -> layout.Strides:
    """Contiguous after the transformed dimensions were moved to the end."""
    order = [*(d for d in range(len(shape)) if d not in axes), *axes]
    strides = [0] * len(shape)
    for d, stride in zip(order, layout.contiguous_strides(tuple(shape[d] for d in order)), strict=True):
        strides[d] = stride
    return tuple(strides)


def _with(shape: layout.Shape, axis: int, size: int) -> layout.Shape:
    return tuple(size if d == axis else s for d, s in enumerate(shape))


def c2c(e: Eager, self: Tensor, axes: Axes) -> Tensor:
    """Saves nothing; backward is one transform."""
    out = e.empty(self.shape, self.dtype, _strides(self.shape, axes), "aten._fft_c2c.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, _strides(self.shape, axes), "aten._fft_c2c.default")

    return e.record("FftC2CBackward0", out, [self], [Formula((0,), gradient)])


def _real_strides(shape: layout.Shape, axes: Axes) -> layout.Strides:
    """cuFFT takes up to three dimensions at once, unless they begin with the first two of the tensor
    (`use_optimized_cufft_path`): then the last one goes first, and the others end up last in memory."""
    in_steps = len(axes) > 3 or axes[:2] == (0, 1)
    return _strides(shape, axes[:-1] if in_steps and len(axes) > 1 else axes)


def r2c(e: Eager, self: Tensor, axes: Axes, onesided: bool, conjugated: bool = False) -> Tensor:
    """Saves its input (for its dtype). Backward of the onesided form fills zeros up to full size and transforms them;
    the gradient is the real part, a view of that. A result that is `conjugated` has its gradient copied first."""
    last = axes[-1]
    shape = _with(self.shape, last, self.shape[last] // 2 + 1) if onesided else self.shape
    dtype = dtypes.complex_of(self.dtype)
    out = e.empty(shape, dtype, _real_strides(shape, axes), "aten._fft_r2c.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        copy = e.empty(shape, dtype, kernel="aten.clone.default") if conjugated else None
        if onesided and self.shape[last] != grad_of(grads).shape[last]:
            e.empty(self.shape, dtype, kernel="aten.new_zeros.default")
            if copy is not None:
                e.free(copy)
        return e.empty(self.shape, dtype, _strides(self.shape, axes), "aten._fft_c2c.default")

    return e.record("FftR2CBackward0", out, [self], [Formula((0,), gradient)], [self])


def c2r(e: Eager, self: Tensor, axes: Axes, size: int) -> Tensor:
    """Saves nothing; backward is one transform."""
    shape = _with(self.shape, axes[-1], size)
    out = e.empty(shape, dtypes.real_of(self.dtype), _strides(shape, axes), "aten._fft_c2r.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(self.shape, self.dtype, _strides(self.shape, axes), "aten._fft_r2c.default")

    return e.record("FftC2RBackward0", out, [self], [Formula((0,), gradient)])


def _resized(e: Eager, self: Tensor, axes: Axes, sizes: Sequence[int]) -> Tensor:
    """`resize_fft_input`: a narrowed view where a size shrinks, one pad where any grows."""
    pads = [0] * (2 * self.ndim)
    for axis, size in zip(axes, sizes, strict=True):
        if size < self.shape[axis]:
            self = narrow(e, self, axis, 0, size)
        elif size > self.shape[axis]:
            pads[2 * (self.ndim - 1 - axis) + 1] = size - self.shape[axis]
    return constant_pad_nd(e, self, tuple(pads)) if any(pads) else self


def _axes(self: Tensor, s: Any, dim: Any, default: Axes | None) -> tuple[Axes, list[int]]:
    """Transformed dimensions, and their sizes (-1 keeps one)."""
    if dim is None:
        dim = default
    if dim is None and s:
        dim = tuple(range(self.ndim - len(s), self.ndim))
    axes = tuple(range(self.ndim)) if dim is None else tuple(self.dim(d) for d in dim)
    sizes = [self.shape[a] if n in (None, -1) else n for a, n in zip(axes, s or (-1,) * len(axes), strict=True)]
    return axes, sizes


def _promoted(e: Eager, self: Tensor, complex: bool) -> Tensor:
    dtype = self.dtype if self.dtype.is_differentiable else dtypes.float32
    dtype = dtypes.complex_of(dtype) if complex else dtype
    return self if self.dtype is dtype else to_copy(e, self, dtype)


def _one(kind: str) -> Callable[..., Tensor]:
    def run(e: Eager, self: Tensor, n: int | None = None, dim: int = -1, norm: Any = None) -> Tensor:
        axis = self.dim(dim)
        return _run(e, kind, self, (axis,), [self.shape[axis] if n is None else n], n is not None)

    return run


def _many(kind: str, default: Axes | None) -> Callable[..., Tensor]:
    def run(e: Eager, self: Tensor, s: Any = None, dim: Any = default, norm: Any = None) -> Tensor:
        axes, sizes = _axes(self, s, dim, default)
        return _run(e, kind, self, axes, sizes, bool(s), many=True)

    return run


def _run(e: Eager, kind: str, self: Tensor, axes: Axes, sizes: list[int], given: bool, many: bool = False) -> Tensor:
    if kind in ("rfft", "ihfft"):
        return r2c(e, _resized(e, _promoted(e, self, False), axes, sizes), axes, True, kind == "ihfft")
    if kind in ("irfft", "hfft"):
        full = sizes[-1] if given else 2 * (self.shape[axes[-1]] - 1)
        sizes[-1] = full // 2 + 1
        source = _resized(e, _promoted(e, self, True), axes, sizes)
        if kind == "hfft":
            source = clone(e, source)  # of its conjugate
        return c2r(e, source, axes, full)
    if self.dtype.kind != "complex" and not many:
        return r2c(e, _resized(e, _promoted(e, self, False), axes, sizes), axes, False, kind == "ifft")
    return c2c(e, _resized(e, _promoted(e, self, True), axes, sizes), axes)


_FACTS = {
    "fft": "A complex transform, which saves nothing, or that of a real tensor, which saves it; one tensor back.",
    "rfft": "Saves its input; backward fills zeros to full size and transforms them: two complex tensors.",
    "irfft": "Saves nothing; backward is one transform of the input's size.",
}


def _define() -> None:
    for kind, names in (("fft", ("fft", "ifft")), ("rfft", ("rfft", "ihfft")), ("irfft", ("irfft", "hfft"))):
        for name in names:
            function = _one(name)
            function.__doc__ = _FACTS[kind]
            rule(f"fft_{name}")(function)
            if "h" in name:
                continue  # hfft2 and its kin compose several transforms
            for suffix, default in (("2", (-2, -1)), ("n", None)):
                function = _many(name, default)
                function.__doc__ = _FACTS[kind]
                rule(f"fft_{name}{suffix}")(function)


_define()


@rule("fft_fftshift fft_ifftshift")
def fft_shift(e: Eager, self: Tensor, dim: Any = None) -> Tensor:
    """As `roll` by half of each dimension."""
    axes = tuple(range(self.ndim)) if dim is None else tuple(self.dim(d) for d in dim)
    return roll(e, self, tuple(self.shape[a] // 2 for a in axes), axes)


@rule("fft_fftfreq")
def fft_frequencies(e: Eager, n: int, d: float = 1.0, *, dtype: Any = None, **_: Any) -> Tensor:
    """A 1-D tensor without gradient."""
    return e.empty((n,), dtype or dtypes.float32, kernel="aten.arange.start")


@rule("fft_rfftfreq")
def fft_real_frequencies(e: Eager, n: int, d: float = 1.0, *, dtype: Any = None, **_: Any) -> Tensor:
    """A 1-D tensor of half the size without gradient."""
    return e.empty((n // 2 + 1,), dtype or dtypes.float32, kernel="aten.arange.start")


@rule("hann_window hamming_window blackman_window bartlett_window")
def window(e: Eager, window_length: int, periodic: bool = True, *, dtype: Any = None, **_: Any) -> Tensor:
    """A 1-D tensor without gradient; a periodic one is a view of one more element."""
    size = window_length + 1 if periodic and window_length > 1 else window_length
    out = e.empty((size,), dtype or dtypes.float32, kernel="aten.hann_window.default")
    return e.alias(out, (window_length,), (1,))


@rule("stft")
def stft(
    e: Eager, self: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Tensor:  # fmt: skip
    """Frames as an overlapping view, times the window (one tensor, saved), and a transform of each frame."""
    hop = hop_length or n_fft // 4
    signal = self if self.ndim == 2 else as_strided(e, self, (1, *self.shape), (0, *self.strides))
    frames = 1 + (signal.shape[-1] - n_fft) // hop
    size = (signal.shape[0], frames, n_fft)
    cut = as_strided(e, signal, size, (signal.strides[0], hop * signal.strides[1], signal.strides[1]))
    if window is not None:
        cut = mul(e, cut, window)
    complex_input = self.dtype.kind == "complex"
    out = c2c(e, cut, (2,)) if complex_input else r2c(e, cut, (2,), onesided is not False)
    out = transpose(e, out, 1, 2)
    return out if return_complex else view_as_real(e, out)
