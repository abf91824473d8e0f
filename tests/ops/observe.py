"""The vocabulary of rule tests: a case is a small program over inputs; PyTorch and the rules each give an Observation.

Storages have labels: `in0`, `in1`... are the inputs', `new0`, `new1`... those that forward makes, in order, `root0`...
the incoming gradients, `back0`... those that backward makes. A step is (bytes allocated, bytes alive after it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType

Program = Callable[..., Any]


@dataclass(frozen=True)
class Spec:
    """An input: `grad` says whether it needs a gradient, None means "try both" (floating point only)."""

    shape: tuple[int, ...]
    dtype: DType = dtypes.float32
    strides: tuple[int, ...] | None = None
    grad: bool | None = None

    @property
    def layout(self) -> tuple[int, ...]:
        return layout.contiguous_strides(self.shape) if self.strides is None else self.strides

    def permute(self, *dims: int) -> Spec:
        """The layout that `.permute(dims)` of a contiguous tensor has; `shape` is that of the tensor before."""
        shape = tuple(self.shape[d] for d in dims)
        return replace(self, shape=shape, strides=tuple(self.layout[d] for d in dims))

    @property
    def transposed(self) -> Spec:
        """The same shape, with the last two dimensions swapped in memory."""
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        strides = layout.contiguous_strides(shape)
        return replace(self, strides=(*strides[:-2], strides[-1], strides[-2]))

    @property
    def channels_last(self) -> Spec:
        return replace(self, strides=layout.channels_last_strides(self.shape))

    def expand(self, *shape: int) -> Spec:
        return replace(self, shape=shape, strides=layout.expand_strides(self.shape, self.layout, shape))

    def wide(self) -> Spec:
        """The left half of a twice as wide tensor: not dense."""
        strides = layout.contiguous_strides((*self.shape[:-1], 2 * self.shape[-1]))
        return replace(self, strides=strides)

    @property
    def fixed(self) -> Spec:
        """An input that never needs a gradient."""
        return replace(self, grad=False)

    @property
    def trained(self) -> Spec:
        """An input that always needs a gradient."""
        return replace(self, grad=True)


def f(*shape: int) -> Spec:
    return Spec(shape)


def h(*shape: int) -> Spec:
    return Spec(shape, dtypes.bfloat16)


def i(*shape: int) -> Spec:
    return Spec(shape, dtypes.int64, grad=False)


def c(*shape: int) -> Spec:
    return Spec(shape, dtypes.complex64)


def b(*shape: int) -> Spec:
    return Spec(shape, dtypes.bool_, grad=False)


@dataclass(frozen=True)
class View:
    """A tensor: where it lives and how it lies. Strides of dimensions of size 1 say nothing and are left out."""

    label: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, label: str, shape: Sequence[int], strides: Sequence[int], dtype: str) -> View:
        shown = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
        return cls(label, tuple(shape), (0,) * len(shape) if 0 in shape else shown, dtype)


@dataclass
class Observation:
    """What a call did. `saved` are the labels of the storages that backward nodes hold on to."""

    outputs: list[View | None] = field(default_factory=list)
    forward: list[tuple[int, int]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    backward: list[tuple[int, int]] = field(default_factory=list)
    grads: dict[str, View | None] = field(default_factory=dict)

    def only(self, *parts: str) -> dict[str, Any]:
        return {part: getattr(self, part) for part in parts}


PARTS = ("outputs", "forward", "saved", "backward", "grads")


@dataclass(frozen=True)
class Case:
    """A program and its inputs. `roots`: which outputs receive a gradient (all by default). `root`: how that gradient
    lies: like the output ("like"), "contiguous" or "expanded" (as from a sum). `skip`: parts of the observation that
    differ for a reason that `why` gives. `device`: fake CUDA, or fake CPU where a CPU build has no CUDA kernel and
    would compose the op. `real`: the parts ("forward", "backward") whose steps come from the CPU allocator, because
    PyTorch takes another, out-of-place branch while a dispatch mode watches (`areAnyTensorSubclassLike`)."""

    name: str
    program: Program
    inputs: tuple[Spec | tuple[Spec, ...], ...]
    targets: tuple[str, ...]
    roots: tuple[int, ...] | None = None
    root: str = "like"
    skip: tuple[str, ...] = ()
    why: str = ""
    autocast: bool = False
    device: str = "cuda"
    real: tuple[str, ...] = ()

    @property
    def flat(self) -> tuple[Spec, ...]:
        return tuple(s for spec in self.inputs for s in (spec if isinstance(spec, tuple) else (spec,)))

    def patterns(self) -> list[tuple[bool, ...]]:
        """Which inputs need a gradient: every combination of those that leave it open."""
        patterns: list[tuple[bool, ...]] = [()]
        for spec in self.flat:
            choices = [spec.grad] if spec.grad is not None else [True, False]
            if not spec.dtype.is_differentiable:
                choices = [False]
            patterns = [(*p, bool(c)) for p in patterns for c in choices]
        return patterns


def call(target: str, *args: Any, roots: tuple[int, ...] | None = None, root: str = "like", name: str = "",
         skip: tuple[str, ...] = (), why: str = "", autocast: bool = False, device: str = "cuda",
         real: tuple[str, ...] = (),
         **kwargs: Any) -> Case:  # fmt: skip
    """The case of one call: Specs among the arguments are its inputs."""
    places: list[int] = [k for k, a in enumerate(args) if _is_input(a)]
    names = [k for k, a in kwargs.items() if _is_input(a)]

    def program(op: Any, *inputs: Any) -> Any:
        given = iter(inputs)
        filled = [next(given) if k in places else a for k, a in enumerate(args)]
        named = {k: next(given) if k in names else a for k, a in kwargs.items()}
        return op(target, *filled, **named)

    inputs = (*(args[k] for k in places), *(kwargs[k] for k in names))
    shown = ", ".join([*map(_show, args), *(f"{k}={_show(v)}" for k, v in kwargs.items())])
    title = name or f"{target.removeprefix('aten::')}({shown}){'' if root == 'like' else ' root ' + root}"
    if roots is not None:
        title = f"{title} roots {roots}"
    if autocast:
        title = f"{title} autocast"
    return Case(title, program, inputs, (target,), roots, root, skip, why, autocast, device, real)


def _is_input(value: Any) -> bool:
    return isinstance(value, Spec) or (isinstance(value, tuple) and any(isinstance(v, Spec) for v in value))


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ",".join(map(_show, value)) + ")"
    if not isinstance(value, Spec):
        return str(value)
    shape = "x".join(map(str, value.shape))
    strides = "" if value.strides is None else "/" + "x".join(map(str, value.strides))
    return f"{value.dtype.name[0]}{value.dtype.bits}[{shape}{strides}]"
