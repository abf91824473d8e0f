"""Small tensors whose contents are known while code is recorded: those of example inputs, and what is made of them.

Code reads values: how many patches an image has, which tokens stand for images, whether a mask is all ones. Fake
tensors have none. A mode that is given the contents of inputs computes small results beside the recording, on the CPU,
wherever all that an op takes is known, and answers what the code reads. The recording then follows these contents: it
holds at the sizes of the example, as far as they decide what was read (`KnownValues.fixed`), and says where it read
(`KnownValues.reads`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map

LARGEST = 1 << 23  # elements of a tensor whose contents are computed
LARGEST_MADE = 1 << 16  # of one that is made of numbers alone
_KNOWN = "_staticmem_known"
# masks of transformers 5 look tokens up in it, under vmap
_INDEXING, _MOD_INDEX = "torch._dynamo._trace_wrapped_higher_order_op", "mod_index"
_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))

# what makes the contents of an input, by its sizes
Contents = Callable[[tuple[int, ...]], torch.Tensor]


class _UnknownError(Exception):
    """What an op takes is not known."""


class KnownValues(FakeTensorMode):  # type: ignore[misc]
    """A FakeTensorMode beside which known contents are computed, from the first on that it is told."""

    knows = False

    def know(self, tensor: Any, contents: torch.Tensor, symbols: frozenset[Any] = frozenset()) -> None:
        """Has the contents of a tensor; `symbols` are sizes that they depend on."""
        if not self.knows:
            self.knows = True
            self.fixed: set[Any] = set()
            self.reads: list[str] = []
            self.stale: set[int] = set()
        if tuple(map(_number, tensor.shape)) == tuple(contents.shape) and contents.numel() <= LARGEST:
            setattr(tensor, _KNOWN, (contents, symbols))

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.knows:
            return super().dispatch(func, types, args, kwargs or {})
        try:
            computed, symbols = self._compute(func, args, kwargs or {})
        except _UnknownError:
            self._forget_changed(func, args, kwargs or {})
            return super().dispatch(func, types, args, kwargs or {})
        if not isinstance(computed, torch.Tensor | list | tuple):  # a number, which the code reads
            self.fixed |= symbols
            self._note_read()
            return computed
        if torch.Tag.dynamic_output_shape in func.tags:
            self.fixed |= symbols
            self._note_read()
            with self:
                result = tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), computed)
        else:
            result = super().dispatch(func, types, args, kwargs or {})
        for one, contents in zip(tree_flatten(result)[0], tree_flatten(computed)[0], strict=False):
            if isinstance(one, FakeTensor) and isinstance(contents, torch.Tensor):
                self.know(one, contents, symbols)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, frozenset[Any]]:
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name() or func.namespace != "aten":
            raise _UnknownError
        symbols: set[Any] = set()
        seen = [0, 1]  # tensors, and the product of numbers

        def real(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                seen[0] += 1
                return self._contents(value, symbols)
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                symbols.update(value.node.expr.free_symbols)
                value = _number(value)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if type(value) is int:
                seen[1] *= max(abs(value), 1)
            return value

        own = tree_map(real, tuple(args)), tree_map(real, dict(kwargs))
        if not seen[0] and seen[1] > LARGEST_MADE:
            raise _UnknownError
        if not seen[0] and "device" in kwargs:
            own[1]["device"] = torch.device("cpu")
        try:
            with no_dispatch(), torch.no_grad():
                return func(*own[0], **own[1]), frozenset(symbols)
        except Exception as error:
            raise _UnknownError from error

    def _contents(self, tensor: torch.Tensor, symbols: set[Any]) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            if tensor.device.type != "cpu" or tensor.numel() > LARGEST_MADE:
                raise _UnknownError
            return tensor
        entry = getattr(tensor, _KNOWN, None)
        if entry is None or tensor.untyped_storage()._cdata in self.stale:
            raise _UnknownError
        symbols.update(entry[1])
        for size in tensor.shape:
            if isinstance(size, torch.SymInt):
                symbols.update(size.node.expr.free_symbols)
        contents: torch.Tensor = entry[0]
        return contents

    def _forget_changed(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """What is written to a tensor in place is not known."""
        if func._schema.is_mutable:
            for value, argument in zip(args, func._schema.arguments, strict=False):
                if argument.is_write and isinstance(value, FakeTensor):
                    self.stale.add(value.untyped_storage()._cdata)

    def _note_read(self) -> None:
        """Where the code is that reads."""
        frame: Any = sys._getframe(2)
        while frame is not None and os.path.dirname(frame.f_code.co_filename).startswith((_HERE, _TORCH)):
            frame = frame.f_back
        if frame is not None:
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
            if place not in self.reads:
                self.reads.append(place)


def _number(value: Any) -> Any:
    """A size of the example."""
    node = getattr(value, "node", None)
    if node is None:
        return value
    hint = node.hint
    if hint is None:
        raise _UnknownError
    return hint


@contextmanager
def known_literals(mode: Any) -> Iterator[None]:
    """Within it tensors that the code makes of lists of numbers are known to the mode."""
    make = torch.tensor

    def number(leaf: Any) -> Any:
        is_known = type(leaf) is FakeTensor and not leaf.dim() and getattr(leaf, _KNOWN, None) is not None
        return leaf.item() if is_known else leaf

    def with_contents(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list | tuple) and getattr(mode, "knows", False):
            data = tree_map(number, data)
        result = make(data, *args, **kwargs)
        if getattr(mode, "knows", False) and type(result) is FakeTensor and getattr(result, _KNOWN, None) is None:
            leaves = tree_flatten(data)[0]
            if len(leaves) <= LARGEST_MADE and all(type(leaf) in (int, float, bool) for leaf in leaves):
                with no_dispatch():
                    mode.know(result, make(data, dtype=result.dtype))
        return result

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "tensor", with_contents))
        for of in (torch, torch.Tensor):
            stack.enter_context(mock.patch.object(of, "repeat_interleave", _sized_repeats(of.repeat_interleave)))
        indexing = sys.modules.get(_INDEXING)
        if hasattr(indexing, _MOD_INDEX):  # a function of autograd for a lookup of integers, which needs no gradient
            stack.enter_context(mock.patch.object(indexing, _MOD_INDEX, _look_up))
        yield


def _sized_repeats(repeat: Any) -> Any:
    """`repeat_interleave` that says how long its result is, where it is known how often elements are repeated."""

    def repeated(x: Any, repeats: Any = None, *args: Any, **kwargs: Any) -> Any:
        counts = getattr(x if repeats is None else repeats, _KNOWN, None)
        if counts is not None and "output_size" not in kwargs and len(args) < 2:
            kwargs["output_size"] = int((x if repeats is None else repeats).sum().item())
        return repeat(x, *(() if repeats is None else (repeats,)), *args, **kwargs)

    return repeated


def _look_up(x: torch.Tensor, indices: Any) -> Any:
    return torch.ops.aten.index(x, indices)
