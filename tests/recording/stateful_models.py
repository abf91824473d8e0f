"""Models that change what they own, keep tensors from one call to the next, or run checkpoints in functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from coded_models import Coded
from torch import nn
from torch.utils.checkpoint import checkpoint


class DataAveraged(Coded):
    """A slow copy of a layer, which follows it by `p.data = ...`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(256, 256).requires_grad_(False)

    def middle(self, x: Any) -> Any:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
                slow.data = slow.data * 0.99 + fast.data * 0.01
            target = self.slow(x)
        return F.relu(self.inner(x)) * target


class DataProjected(Coded):
    """A trained weight that each call normalises by `p.data = ...`."""

    def middle(self, x: Any) -> Any:
        self.inner.weight.data = F.normalize(self.inner.weight.data, dim=1)
        return F.relu(self.inner(x))


class DataClamped(Coded):
    """Trained weights that each call changes in place, without a history."""

    def middle(self, x: Any) -> Any:
        for p in self.inner.parameters():
            p.data.clamp_(-1, 1)
        return F.relu(self.inner(x))


class DataSwapped(Coded):
    """Weights that give way to others for one layer, and come back."""

    def middle(self, x: Any) -> Any:
        own = self.inner.weight.data
        self.inner.weight.data = own.sign()
        y = self.inner(x)
        self.inner.weight.data = own
        return F.relu(y.detach() + self.inner(x))


class BufferAssigned(Coded):
    """A buffer in whose place each call puts another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(2048, 256))
        self.bank: Any

    def middle(self, x: Any) -> Any:
        y = F.relu(self.inner(x))
        self.bank = torch.cat((self.bank[1:], y.detach()[:1]))
        return y + self.bank.mean(0)


class BufferInVariable(BufferAssigned):
    """The same, while a variable has the old one."""

    def middle(self, x: Any) -> Any:
        before = self.bank
        self.bank = torch.cat((before[1:], x.detach()[:1]))
        y = self.inner(x) + self.bank.mean(0)
        return F.relu(y - before.mean(0))


class HistoryKept(Coded):
    """Tensors with a history that leads to no output, which the module keeps."""

    def middle(self, x: Any) -> Any:
        self.aside = F.relu(self.inner(F.relu(self.inner(x))))
        return F.relu(self.inner(x))


class HistoriesKept(Coded):
    """Two of them, with ops in common, which the next call assigns at different times."""

    def middle(self, x: Any) -> Any:
        y = F.relu(self.inner(x))
        self.first = self.inner(F.relu(self.inner(y)))
        z = F.relu(self.inner(y))
        self.second = F.relu(self.first) * 2
        return z


class HistoryHasAnother(Coded):
    """An attribute that the history of another one holds for longer."""

    def middle(self, x: Any) -> Any:
        self.asides = [x]
        self.asides.append(F.relu(self.inner(F.relu(self.inner(x)))))
        y = F.relu(self.inner(x))
        self.penalty = self.asides[1].pow(2).mean()
        return y


class PeaksInForward(Coded):
    """Has its peak where the forward ends: for a moment it copies what goes in."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        with torch.no_grad():
            mean = x.repeat(1, 256).mean()
        return y + mean


class LetGoFirst(PeaksInForward):
    """Keeps a result until the next call begins, before whose first op it is let go of."""

    kept: Any = None

    def middle(self, x: Any) -> Any:
        self.kept = F.relu(self.inner(x))
        return self.kept * 2

    def forward(self, x: Any) -> Any:
        self.kept = None
        return super().forward(x)


class Adversary(Coded):
    """Two losses of one critic, which learns from the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))

    def middle(self, x: Any) -> Any:
        made = F.relu(self.inner(x))
        learns = self.critic(made.detach())
        for p in self.critic.parameters():
            p.requires_grad_(False)
        judged = self.critic(made)
        for p in self.critic.parameters():
            p.requires_grad_(True)
        return made * (learns - judged)


class FreezesItself(Coded):
    """The first call switches off what all steps but the first do without."""

    def middle(self, x: Any) -> Any:
        y = F.relu(self.inner(x))
        self.inner.requires_grad_(False)
        return F.relu(self.inner(y)) + y


class TrainsInTurn(Coded):
    """Trains one of two layers in each call."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(256, 256)

    def middle(self, x: Any) -> Any:
        self.inner.requires_grad_(self.step % 2 == 0)
        self.other.requires_grad_(self.step % 2 == 1)
        self.step += 1
        return F.relu(self.other(F.relu(self.inner(x))))


class KeepsThree(Coded):
    """Has the results of the last three calls, and adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []

    def middle(self, x: Any) -> Any:
        self.history = [*self.history, F.relu(self.inner(x)).detach()][-3:]
        return F.relu(self.inner(sum(self.history)))


class KeepsAll(KeepsThree):
    """Has the results of all calls."""

    def middle(self, x: Any) -> Any:
        self.history.append(F.relu(self.inner(x)).detach())
        return F.relu(self.inner(self.history[-1]))


class ScalesGradient(Coded):
    """A hook that gives another gradient, by a tensor of the forward."""

    def middle(self, x: Any) -> Any:
        y = self.inner(x)
        positive = y > 0
        if y.requires_grad:
            y.register_hook(lambda grad: grad * positive)
        return F.relu(y + 1)


class KeepsGradient(Coded):
    """A hook that keeps the gradient until the next backward, and another that keeps a part of it."""

    def middle(self, x: Any) -> Any:
        y = F.relu(self.inner(x))
        if y.requires_grad:
            y.register_hook(lambda grad: setattr(self, "whole", grad))
            y.register_hook(lambda grad: setattr(self, "norm", (grad * grad).sum(0)))
        return F.relu(self.inner(y)) + y


class RetainsGradients(Coded):
    """An activation that the module keeps with its gradient, and one that ends before the backward."""

    def middle(self, x: Any) -> Any:
        self.kept = F.relu(self.inner(x))
        ends = self.kept + 1
        if x.requires_grad:
            self.kept.retain_grad()
            ends.retain_grad()
        return F.relu(self.inner(ends * 2))


class LogsGradients(Coded):
    """Backward hooks of modules: one keeps what it is given, one changes it, one only looks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.inner.register_full_backward_hook(lambda _, into, out: self.seen.update(into=into[0], out=out[0]))
        self.inner.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,))
        self.head.register_full_backward_hook(lambda *_: None)

    def middle(self, x: Any) -> Any:
        return F.relu(self.inner(F.relu(x)))


class Squares(torch.autograd.Function):  # type: ignore[misc]
    """Has its input as an attribute of `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 * ctx.x


class Both(torch.autograd.Function):  # type: ignore[misc]
    """Two results, of which a caller may drop one."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        one, other = x.sigmoid(), x.tanh()
        ctx.save_for_backward(one, other)
        return one, other

    @staticmethod
    def backward(ctx: Any, by_one: Any, by_other: Any) -> Any:
        one, other = ctx.saved_tensors
        return by_one * one * (1 - one) + by_other * (1 - other * other)


class DropsResult(Coded):
    """A function one of whose results has no gradient: its backward gets zeros."""

    def middle(self, x: Any) -> Any:
        return Both.apply(self.inner(x))[0]


class Unfilled(Both):
    """The same, whose backward gets None."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return Both.forward(ctx, x)


class DropsUnfilled(Coded):
    def middle(self, x: Any) -> Any:
        return Unfilled.apply(self.inner(x))[0]


class KeepsGraphOfCtx(PeaksInForward):
    """What it keeps has a history with attributes of `ctx`, which the loss of the step before has too."""

    def middle(self, x: Any) -> Any:
        self.kept = Squares.apply(F.relu(self.inner(x)) + 1)
        return self.kept * 2


class CheckpointsInFunctions(Coded):
    """A checkpoint within another one, with no module between them, and both end with the same op."""

    def middle(self, x: Any) -> Any:
        def inside(y: Any) -> Any:
            return F.relu(self.inner(F.relu(self.inner(y))))

        def outside(y: Any) -> Any:
            return checkpoint(inside, F.relu(self.inner(y)), use_reentrant=False)

        return self.inner(checkpoint(outside, x, use_reentrant=False))


UNEQUAL = (TrainsInTurn, KeepsThree, KeepsAll)  # calls of these differ
STATEFUL = (
    DataAveraged, DataProjected, DataClamped, DataSwapped, BufferAssigned, BufferInVariable,
    HistoryKept, HistoriesKept, HistoryHasAnother, LetGoFirst, KeepsGraphOfCtx, Adversary, FreezesItself,
    ScalesGradient, KeepsGradient, RetainsGradients, LogsGradients, DropsResult,
    CheckpointsInFunctions,
)  # fmt: skip
