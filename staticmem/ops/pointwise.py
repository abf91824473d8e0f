"""What elementwise ops share: in-place results, dtypes beside numbers, common formulas, rows of one-input functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.registry import Autocast, Kind, rule

Scalar = int | float | bool


def inplace(e: Eager, self: Tensor, kernel: str) -> Tensor:
    """The result of an in-place op: the tensor itself, whose history `Eager.record` moves on."""
    e.kernel(kernel)
    return e.mutate(self)


def clone_for_backward(e: Eager, self: Tensor, *inputs: Tensor | None) -> Tensor | None:
    """An in-place op whose derivative needs its input saves a clone that is made first (gen_variable_type.py)."""
    return e.empty_like(self, kernel="aten.clone.default") if e.needs_grad(*inputs) else None


def scalar_dtype(self: Tensor, other: Any) -> DType:
    """The result dtype of a tensor and a Python number."""
    if isinstance(other, bool):
        return self.dtype
    if isinstance(other, float) and not self.dtype.is_differentiable:
        return dtypes.float32
    if isinstance(other, int) and self.dtype is dtypes.bool_:
        return dtypes.int64
    return self.dtype


def end_statement(e: Eager, *temporaries: Tensor) -> None:
    """The end of a C++ statement: what its backward has not saved is gone."""
    e.free(*temporaries)


def grad_of(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


def same(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """The incoming gradient itself."""
    return grad_of(grads)


def gradient_like(tensor: Tensor, kernel: str, dtype: DType | None = None) -> Any:
    """A kernel that makes a contiguous gradient of a tensor's sizes, in the dtype of the incoming one."""
    shape = tensor.shape

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(shape, dtype or grad_of(grads).dtype, kernel=kernel)

    return formula


def tensors_of(self: Any, other: Any) -> tuple[Tensor | None, Tensor | None]:
    """The operands that are tensors. PyTorch takes a number for either of them, also where the schema of its operator
    has a tensor (python_arg_parser.cpp, should_allow_numbers_as_tensors); it stays on the CPU."""
    a = self if isinstance(self, Tensor) else None
    b = other if isinstance(other, Tensor) else None
    if (a is None and b is None) or (a is None and not isinstance(self, (int, float, complex))):
        raise TypeError("the first operand is neither a tensor nor a number beside one")
    return a, b


def result_of(e: Eager, kernel: str, a: Tensor | None, b: Tensor | None, number: Any) -> Tensor:
    """The new result of two operands, of which `number` takes the place of the one that is missing."""
    if a is not None and b is not None:
        return e.pointwise(kernel, a, b)
    tensor = a if a is not None else b
    assert tensor is not None
    return e.pointwise(kernel, tensor, dtype=scalar_dtype(tensor, number))


def negate(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    return e.pointwise("aten.neg.default", grad_of(grads))


def times(scale: Tensor) -> Any:
    """grad times a tensor."""

    def formula(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        if scale.dtype.kind == "complex":  # a conjugated view: kernels get a copy of it
            conjugate = e.empty_like(scale, kernel="aten.clone.default")
            return e.pointwise("aten.mul.Tensor", grad_of(grads), conjugate)
        return e.pointwise("aten.mul.Tensor", grad_of(grads), scale)

    return formula


def scale_grad(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """grad times a number."""
    return e.pointwise("aten.mul.Tensor", grad_of(grads))


def zeros(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
    """`zeros_like` of the incoming gradient."""
    return e.empty_like(grad_of(grads), kernel="aten.zeros_like.default")


# The gradient of a function of one tensor from (calls, incoming gradient, input, result), as derivatives.yaml has it.
# `Eager` answers the calls with allocations, the tracer of `torch.compile` with nodes.
Gradient = Callable[[Any, Any, Any, Any], Any]


def written_once(gradient: Callable[..., Any], *operands: Any) -> Any:
    """A formula of `Eager` from one that traces share, of (calls, incoming gradient, operands)."""
    return lambda e, grads, need: gradient(e, grad_of(grads), *operands)


class Unary(NamedTuple):
    """A row of the table."""

    name: str
    node: str
    gradient: Gradient
    autocast: Autocast = ""
    also: str = ""  # other names that PyTorch dispatches to it, in-place ones end in `_`
    inplace_saves: str = ""  # where the in-place form differs
    in_place: bool = True  # there is an in-place form

    def result(self, dtype: DType) -> DType:
        """The dtype of the result."""
        if dtype.kind == "complex" and self.name == "abs":
            return dtypes.real_of(dtype)
        return dtype if dtype.is_differentiable or self.name in _INTEGER else dtypes.float32


class _Reading(Eager):
    """Notes what a formula calls, and what it reads."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.read: set[object] = set()

    def pointwise(self, kernel: str, *operands: Any, dtype: DType | None = None) -> Any:
        self.kernels.append(kernel.split(".")[1])
        self.read.update(operands)
        return kernel

    def empty_like(self, tensor: Any, dtype: DType | None = None, kernel: str = "", memory_format: Any = None) -> Any:
        return self.pointwise(kernel)


def fused(name: str, saves: str, first: bool = False) -> Gradient:
    """A gradient that is one kernel: of the incoming one and what is saved, `self` or `result`. `first`: the kernel has
    the saved tensor before the gradient, whose layout then counts less."""

    def gradient(calls: Any, grad: Any, self: Any, result: Any) -> Any:
        saved = self if saves == "self" else result
        return calls.call(name, *((saved, grad) if first else (grad, saved)))

    return gradient


def kernels_of(gradient: Gradient) -> tuple[list[str], str]:
    """What a gradient runs, and what it reads: `self`, `result` or nothing."""
    reading = _Reading()
    gradient(reading, "grad", "self", "result")
    return reading.kernels, next((name for name in ("self", "result") if name in reading.read), "")


def define_unary(row: Unary, kinds: tuple[Kind, ...] = ()) -> None:
    """Registers the rules of a row."""
    run, saves = kernels_of(row.gradient)
    saved_in_place = row.inplace_saves or saves

    def formula(self: Tensor, result: Tensor) -> Formula:
        return Formula((0,), written_once(row.gradient, self, result))

    def out_of_place(e: Eager, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = e.pointwise(f"aten.{row.name}.default", self, dtype=row.result(self.dtype))
        return e.record(row.node, out, [self], [formula(self, out)], [{"self": self, "result": out, "": None}[saves]])

    def in_place(e: Eager, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        original = clone_for_backward(e, self, self) if saved_in_place == "self" else None
        out = inplace(e, self, f"aten.{row.name}_.default")
        saved = {"self": original, "result": out, "": None}[saved_in_place]
        return e.record(row.node, out, [self], [formula(original or self, out)], [saved])

    needs = {"self": "its input", "result": "its result", "": "nothing"}[saves]
    kernels = ", ".join(run) or "nothing"
    out_of_place.__doc__ = f"Saves {needs}; backward runs {kernels}."
    in_place.__doc__ = f"In place: saves {'its result' if saved_in_place else 'nothing'}; backward runs {kernels}."
    if saved_in_place == "self":
        in_place.__doc__ = f"In place: clones its input first and saves the clone; backward runs {kernels}."
    also = [name for name in row.also.split() if not name.endswith("_")]
    if run == ["zeros_like"]:
        kinds = ("step",)
    rule(row.name, kinds, row.autocast, aliases=" ".join(also))(out_of_place)
    if row.in_place:
        rule(f"{row.name}_", kinds, aliases=" ".join(set(row.also.split()).difference(also)))(in_place)


_INTEGER = {"abs", "neg", "sign", "floor", "ceil", "round", "trunc", "square", "relu"}  # of integers give integers
