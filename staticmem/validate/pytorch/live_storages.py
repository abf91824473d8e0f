"""Counts live storages on the CPU while PyTorch runs: what each op allocates, and what is alive after it.

A dispatch mode sees every op below autograd. It has one side effect: PyTorch takes tensors under a mode for subclasses
and computes some results out of place that it computes in place otherwise: the sum of two gradients that the engine
owns (torch/csrc/autograd/input_buffer.cpp), index_put in the backward of indexing, the bias of a linear layer over
a non-contiguous input, the mask of attention's math kernel. Such a result is marked, and counts only if the buffer that
it replaces is still alive at the next op.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from staticmem.eager.trace import round_up

# ops of a graph inside of which PyTorch adds in place where nothing watches it
ADDS_IN_PLACE = ("aten::linear", "aten::scaled_dot_product_attention")


@dataclass
class Row:
    """An op that allocates. `live` is what is alive after it; `node` the graph's op it belongs to, -1 for none.

    `optional`: a result that PyTorch may have written in place without a dispatch mode.
    """

    phase: str
    op: str
    node: int
    sizes: list[int]
    live: int
    optional: bool


class LiveStorages(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of live storages, each rounded up to 512, from the moment that they are counted or made under the mode.

    Numbers that an optimizer makes (step counters) are the CPU's on a machine with a GPU too: they do not count, and
    `skipped` says how many there were.
    """

    def __init__(self, node: Callable[[], int], adds_in_place: Container[int] = ()) -> None:
        super().__init__()
        self.node, self.adds_in_place = node, adds_in_place  # the ops of ADDS_IN_PLACE, by index
        self.live = self.peak = 0
        self.peak_at = ("", "")
        self.phase = "setup"
        self.rows: list[Row] = []
        self.skipped = 0
        self._ignored: set[int] = set()
        self._alive: dict[int, int] = {}
        self._replaces: int | None = None

    def begin(self) -> None:
        """A new step: rows and peak start again from what is alive."""
        self.rows, self.peak = [], self.live

    def count(self, tensor: Any) -> int:
        """Counts a tensor's storage, once; its size where it is new, else 0."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._ignored:
            return 0
        size = round_up(storage.nbytes())
        self._alive[key] = size
        self.live += size
        weakref.finalize(storage, self._free, key)
        return size

    def _free(self, key: int) -> None:
        self.live -= self._alive.pop(key, 0)

    def ignore(self, tensor: Any) -> None:
        """A tensor that is the CPU's on a machine with a GPU too: it does not count from here on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return
        self.live -= self._alive.pop(key, 0)
        self.skipped += 1
        self._ignored.add(key)
        weakref.finalize(storage, self._ignored.discard, key)

    def settle(self) -> None:
        """Decides about the last op: a result that replaced its input has no moment of its own."""
        if self._replaces is not None and self._replaces in self._alive:
            self._reached(self.rows[-1].live if self.rows else self.live)
            if self.rows:
                self.rows[-1].optional = False
        self._replaces = None

    def _reached(self, live: int) -> None:
        if live > self.peak:
            self.peak, self.peak_at = live, (self.phase, self.rows[-1].op if self.rows else "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        name = str(func)
        replaced = self._in_place_without_mode(func, args)
        out = func(*args, **(kwargs or {}))
        sizes = []
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                if name == "aten.lift_fresh.default" and self.phase == "optimizer" and tensor.dim() == 0:
                    self.ignore(tensor)
                    continue
                size = self.count(tensor)
                if size:
                    sizes.append(size)
        if sizes:
            self.rows.append(Row(self.phase, name, self.node(), sorted(sizes), self.live, replaced is not None))
            self._replaces = replaced
            if replaced is None:
                self._reached(self.live)
        return out

    def _in_place_without_mode(self, func: Any, args: Any) -> int | None:
        """The storage that PyTorch would have written to without this mode, or None."""
        if self.phase == "backward" and func is torch.ops.aten.index_put.default:
            return int(args[0].untyped_storage()._cdata)
        if func is not torch.ops.aten.add.Tensor or not all(isinstance(a, torch.Tensor) for a in args[:2]):
            return None
        old, new = args[:2]
        if old.untyped_storage().nbytes() < old.numel() * old.element_size():
            return None  # expanded: it cannot be written to
        gradients = self.phase == "backward" and old.shape == new.shape and old.dtype == new.dtype
        inside = self.phase == "forward" and self.node() in self.adds_in_place
        return int(old.untyped_storage()._cdata) if gradients or inside else None
