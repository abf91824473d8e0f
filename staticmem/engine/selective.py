"""Selective checkpoints: what the forward keeps for the recomputation, which takes it in place of calling again.

Every result of a kept call stays from the forward to its place in the recomputation, whether the backward reads it or
not; what nobody took ends with the checkpoint.

Source: torch/utils/checkpoint.py (`_CachingTorchDispatchMode`, `_CachedTorchDispatchMode`).
"""

from __future__ import annotations

from collections import Counter, deque

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Tensor
from staticmem.scenario.checkpointing import Policy


class Selection:
    """What one call of a checkpoint keeps. `skipped`: the ops whose results the recomputation took, by index."""

    def __init__(self, policy: Policy, who: str, op: int) -> None:
        self.policy, self.who, self.op = policy, who, op
        self.kept: deque[list[tuple[Tensor, int]]] = deque()  # of each kept call, in order: tensors with their holds
        self.counts: Counter[str] = Counter()
        self.recomputes = self.is_kept = False
        self.running: deque[tuple[Tensor, int]] = deque()  # of the call that the recomputation takes the results of
        self.taken: list[Tensor] = []  # of these, what it has got
        self.skipped: set[int] = set()

    def recompute(self) -> None:
        """The calls from now on are those of the recomputation."""
        self.recomputes, self.is_kept = True, False
        self.counts.clear()

    def begins(self, e: Eager, kernel: str) -> bool:
        """A kernel is called; False where its results were kept, so that it does not run."""
        self.is_kept = self.policy.keeps(kernel.removeprefix("aten."), self.counts)
        if not self.is_kept:
            return True
        if not self.recomputes:
            self.kept.append([])
            return True
        self.running, self.taken = deque(self.kept.popleft() if self.kept else ()), []
        if self.running:
            self.skipped.add(e.trace.op)
        return not self.running

    @property
    def skips(self) -> bool:
        """The call at hand does not run: its results are there."""
        return self.recomputes and self.is_kept

    def keep(self, e: Eager, tensor: Tensor) -> None:
        """Keeps a result of the running call, if the policy names that."""
        if self.is_kept and not self.recomputes:
            kept = Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)
            self.kept[-1].append((kept, e.take(kept, Reason.CHECKPOINT, self.who, self.op)))

    def result(self, e: Eager) -> Tensor | None:
        """The next result of a call that was kept; None where the call runs."""
        if not self.skips or not self.running:
            return None
        kept, hold = self.running.popleft()
        e.leave_to_scope(kept, hold)
        again = Tensor(kept.storage, kept.shape, kept.strides, kept.dtype)
        again.known_form = kept.form
        self.taken.append(kept)
        return again

    def give_back(self, e: Eager) -> None:
        """The call at hand has not run after all: an early stop came before it, so its results stay kept."""
        self.running.extendleft([(kept, e.take(kept, Reason.CHECKPOINT, self.who, self.op)) for kept in self.taken])
        self.skipped.discard(e.trace.op)

    def release(self, e: Eager) -> None:
        """The checkpoint ends with what nobody has taken."""
        for results in (*self.kept, self.running):
            for tensor, hold in results:
                e.end(tensor, hold)
        self.kept.clear()
        self.running.clear()
