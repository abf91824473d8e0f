"""What tensors hold in a run on example inputs, for code that asks: `if torch.all(mask == 1)`, `if x.max() > 3`.

A recording has fake tensors, which hold nothing. Code that branches on what they hold is recorded a second time with
real ones beside them: the example inputs, and the weights where there are few, on the CPU at the sizes of the example.
What follows from them is computed too, so that each branch goes as it goes in that run. Sizes that come out of tensors
stay open, as in any recording, unless the code makes them integers.

PyTorch asks its `ShapeEnv`, which takes the values of such a run for what it does not know
(torch/fx/experimental/symbolic_shapes.py, `evaluate_expr`, `real_tensor_prop_unbacked_vals`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from staticmem.recording.holders import Line

_CONTENT = "_staticmem_content"  # the attribute of a fake tensor that has the real one
_KNOWN, _SIZES, _SAID = "real_tensor_prop_unbacked_vals", "backed_var_to_val", "_log_real_tensor_propagation"
MOST_WEIGHTS = 1 << 24  # elements: 64 MiB in float32, which a run on the CPU takes a second or two for
_SPREAD = 0.02  # of weights that have no bytes, as most code draws them


class _UnknownError(Exception):
    """A tensor of which nobody knows what it holds."""


def asks_for_contents(error: Exception | None) -> bool:
    """Whether code could not be recorded because it asks what a tensor holds."""
    return any(text in f"{type(error).__name__} {error}" for text in ("data-dependent", "DataDependent"))


class Contents:
    """The real tensors beside those of one recording. `decided` has the branches: the line, and how it goes."""

    def __init__(self, env: ShapeEnv, weights: int) -> None:
        self.env, self.has_weights = env, weights <= MOST_WEIGHTS
        self.available = all(hasattr(env, name) for name in (_KNOWN, _SIZES, _SAID))
        self.decided: dict[Line, str] = {}
        self.place: Callable[[], Line | None] = lambda: None
        self.random = torch.Generator().manual_seed(0)
        if self.available:
            setattr(env, _SAID, lambda asked, answer: self.note(answer))

    def add(self, fake: torch.Tensor, given: torch.Tensor) -> None:
        """An input or a weight with what it holds: numbers of its own where it has no bytes."""
        real = given.detach()
        if not real.is_cpu or isinstance(real, FakeTensor):
            shape = tuple(int(n) for n in given.shape)
            real = torch.zeros(shape, dtype=given.dtype)
            if given.is_floating_point():
                real = (torch.randn(shape, generator=self.random) * _SPREAD).to(given.dtype)
        setattr(fake, _CONTENT, real)

    def note(self, answer: Any) -> None:
        place = self.place()
        if place is not None:
            self.decided.setdefault(place, str(answer))

    def rows(self) -> list[list[Any]]:
        """As a recording has them: file, line, function, answer."""
        return [[*place, answer] for place, answer in self.decided.items()]

    def run(self, func: Any, args: Any, kwargs: Any, make: Callable[[], Any]) -> Any:
        """The result of an op, which `make` has of fake tensors, with what it holds."""
        try:
            real = self._computed(func, args, kwargs)
        except Exception:  # no contents, or an op that the CPU does not run
            return make()
        if isinstance(real, bool):  # `equal`, `is_nonzero`: fake tensors have no answer
            self.note(real)
            return real
        result = make()
        self._keep(result, real)
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(self._real, (list(args), dict(kwargs)))
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            return func(*args, **kwargs)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not hasattr(value, _CONTENT):
                raise _UnknownError
            return getattr(value, _CONTENT)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            number = value.node.expr.xreplace(getattr(self.env, _SIZES)).xreplace(getattr(self.env, _KNOWN))
            return value.node.pytype(number)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _keep(self, result: Any, real: Any) -> None:
        if isinstance(result, (list, tuple)):
            for one, content in zip(result, real, strict=True):
                self._keep(one, content)
        elif isinstance(result, torch.Tensor):
            setattr(result, _CONTENT, real)
            for size, n in zip(result.shape, real.shape, strict=True):
                self._keep(size, n)
        elif isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            for symbol in result.node.expr.free_symbols - getattr(self.env, _SIZES).keys():
                getattr(self.env, _KNOWN).setdefault(symbol, _sympified(real))


def _sympified(value: Any) -> Any:
    import sympy

    return sympy.sympify(int(value) if isinstance(value, bool) else value)
