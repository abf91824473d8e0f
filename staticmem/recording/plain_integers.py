"""Functions that take plain integers, called with sizes that are open.

PyTorch would fix such a size: `torch.linspace(-1, 1, x.shape[2])` and `F.avg_pool2d(x, x.shape[2:])` are recorded with
their symbolic arguments instead, and their results have symbolic sizes. `torch.einsum` of three operands or more asks
opt_einsum, where it is installed, for an order of contractions, which is that of the sizes of the example. `min(h, w)`
is the smaller of two sizes, whichever it is, and asks nothing: `F.affine_grid` looks so whether any size is 0.

Source: torch/functional.py (`einsum`), aten/src/ATen/native/native_functions.yaml (`int steps`, `int[2] kernel_size`).
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.backends import opt_einsum
from torch.nn import functional

if TYPE_CHECKING:
    from staticmem.recording.watch import Watch

_POOLS = [f"{kind}_pool{rank}d" for kind in ("avg", "max") for rank in (1, 2, 3)]


@contextmanager
def symbolic_integers(watch: Watch) -> Iterator[None]:
    """Within it these functions take symbolic integers."""
    linspace = torch.linspace

    def recorded_linspace(*args: Any, **kwargs: Any) -> Any:
        steps = kwargs.get("steps", args[2] if len(args) > 2 else 100)
        if not isinstance(steps, torch.SymInt):
            return linspace(*args, **kwargs)
        start, end = (float(kwargs[k]) if k in kwargs else args[i] for i, k in enumerate(("start", "end")))
        dtype, device = kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device")
        return watch.stand_in(
            "aten::linspace", (start, end, steps), {"dtype": dtype},
            lambda: torch.empty((steps,), dtype=dtype, device=device),
        )  # fmt: skip

    with ExitStack() as stack:
        for name, of_two in (("min", torch.sym_min), ("max", torch.sym_max)):
            stack.enter_context(mock.patch.object(builtins, name, _extreme(getattr(builtins, name), of_two)))
        stack.enter_context(mock.patch.object(torch, "linspace", recorded_linspace))
        if opt_einsum.is_available():
            package = opt_einsum.get_opt_einsum()
            stack.enter_context(mock.patch.object(package, "contract_path", _contract_path(package.contract_path)))
        for name in _POOLS:
            stack.enter_context(mock.patch.object(functional, name, _pool(watch, name)))
        yield


def _extreme(call: Any, of_two: Any) -> Any:
    """`min` or `max` for the code of models: of open sizes it is an expression of them."""

    def extreme(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if kwargs or (caller.startswith("torch.") and not caller.startswith("torch.nn.")):
            return call(*args, **kwargs)
        values = list(args[0]) if len(args) == 1 else list(args)
        types = {type(value) for value in values}
        if torch.SymInt in types and types <= {int, torch.SymInt}:
            return functools.reduce(of_two, values)
        return call(values)

    return extreme


def _contract_path(call: Any) -> Any:
    def contract_path(equation: Any, *operands: Any, **kwargs: Any) -> Any:
        if not isinstance(equation, str) or not all(isinstance(x, torch.Tensor) for x in operands):
            return call(equation, *operands, **kwargs)
        shapes = [tuple(n if isinstance(n, int) else n.node.hint for n in x.shape) for x in operands]
        return call(equation, *shapes, shapes=True, **kwargs)

    return contract_path


def _pool(watch: Watch, name: str) -> Any:
    call, rank = getattr(functional, name), int(name[-2])

    def recorded_pool(input: torch.Tensor, kernel_size: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = list(kernel_size) if isinstance(kernel_size, (tuple, list)) else [kernel_size] * rank
        if args or kwargs or not any(isinstance(n, torch.SymInt) for n in sizes):
            return call(input, kernel_size, *args, **kwargs)
        sizes *= rank if len(sizes) == 1 else 1
        axes = tuple(range(-rank, 0))

        def result() -> torch.Tensor:
            counts = [(n - k) // k + 1 for n, k in zip(input.shape[-rank:], sizes, strict=True)]
            pooled = input.mean(axes, keepdim=True).expand(*input.shape[:-rank], *counts)
            return pooled.clone(memory_format=torch.contiguous_format)

        return watch.stand_in(f"aten::{name}", (input, sizes), {}, result)

    return recorded_pool
