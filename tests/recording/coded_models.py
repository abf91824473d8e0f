"""Models whose memory is decided by their Python: what an exported graph alone does not say."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 64


class Swish(torch.autograd.Function):  # type: ignore[misc]
    """Keeps its input alone, and computes its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Mask(torch.autograd.Function):  # type: ignore[misc]
    """Keeps a tensor as an attribute of `ctx`, and gives its second argument no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, limit: float) -> Any:
        ctx.mask = x > limit
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.mask, None


@torch.library.custom_op("staticmem_tests::squashed", mutates_args=())  # type: ignore[untyped-decorator]
def squashed(x: torch.Tensor, scale: float) -> torch.Tensor:
    """An op of a library, whose backward reads its result."""
    return torch.tanh(x) * scale


@squashed.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _squashed_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _squashed_backward(ctx: Any, grad: Any) -> Any:
    (output,) = ctx.saved_tensors
    return grad * (ctx.scale - output * output / ctx.scale), None


squashed.register_autograd(_squashed_backward, setup_context=_squashed_context)


class Again(torch.autograd.Function):  # type: ignore[misc]
    """Computes again in its backward, and runs autograd there."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return torch.relu(x @ weight)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            result = torch.relu(x @ weight)
        return torch.autograd.grad(result, (x, weight), grad)


class Reversed(torch.autograd.Function):  # type: ignore[misc]
    """A reversible block: it keeps its results, and computes its inputs again from them."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, f: Any, g: Any, *parameters: Any) -> Any:
        with torch.no_grad():
            c = a + f(b)
            d = b + g(c)
        ctx.f, ctx.g = f, g
        ctx.save_for_backward(c.detach(), d.detach())
        return c, d

    @staticmethod
    def backward(ctx: Any, of_c: Any, of_d: Any) -> Any:
        c, d = ctx.saved_tensors
        with torch.enable_grad():
            c = c.detach().requires_grad_()
            second = ctx.g(c)
        torch.autograd.backward(second, of_d)
        with torch.no_grad():
            b = d - second
            of_c = of_c + c.grad
            c.grad = None
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            first = ctx.f(b)
        first.backward(of_c, retain_graph=True)
        return of_c, of_d + b.grad, None, None, *[None] * (len(ctx.needs_input_grad) - 4)


class Coded(nn.Module):  # type: ignore[misc]
    """Three linear layers, which the models below call in their ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, 8)

    def middle(self, x: Any) -> Any:
        return F.relu(self.inner(x))

    def forward(self, x: Any) -> Any:
        return self.head(self.middle(self.stem(x)))


class Custom(Coded):
    def middle(self, x: Any) -> Any:
        return Mask.apply(Swish.apply(self.inner(Swish.apply(x))), 0.5)


class OfLibrary(Coded):
    """An op with `torch.library.register_autograd`: a custom function that PyTorch makes."""

    def middle(self, x: Any) -> Any:
        return torch.ops.staticmem_tests.squashed(self.inner(squashed(x, 2.0)), 0.5)


class Skips(Coded):
    """A list that code appends to, and takes from."""

    def middle(self, x: Any) -> Any:
        skips = []
        for _ in range(3):
            x = F.relu(self.inner(x))
            skips.append(x)
        while skips:
            x = x + skips.pop()
        return x


class Held(Coded):
    """A local variable that nothing reads any more."""

    def middle(self, x: Any) -> Any:
        wide = torch.cat([x, x, x, x], 1)
        y = wide.sigmoid().sum(1, keepdim=True)
        return F.relu(self.inner(x)) + y


class Dropped(Held):
    """The same with `del`."""

    def middle(self, x: Any) -> Any:
        wide = torch.cat([x, x, x, x], 1)
        y = wide.sigmoid().sum(1, keepdim=True)
        del wide
        return F.relu(self.inner(x)) + y


class InPlace(Coded):
    def middle(self, x: Any) -> Any:
        return F.relu(self.inner(x).mul_(2).add_(1), inplace=True)


class Checkpointed(Coded):
    """A region of `torch.utils.checkpoint` around two layers."""

    reentrant = False
    ck = True

    def block(self, x: Any) -> Any:
        return F.relu(self.inner(F.relu(self.inner(x))))

    def middle(self, x: Any) -> Any:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant) if self.ck else self.block(x)
        return x


class Reentrant(Checkpointed):
    reentrant = True


class NotCheckpointed(Checkpointed):
    ck = False


class KeptOnCtx(torch.autograd.Function):  # type: ignore[misc]
    """Keeps a tensor as large as its input as an attribute of `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.twice = x * 2
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.twice


class OnCtx(Checkpointed):
    """Attributes of `ctx`, which the loss of the step before holds, and which no checkpoint frees."""

    ck = False

    def block(self, x: Any) -> Any:
        return self.inner(KeptOnCtx.apply(F.relu(self.inner(x))))


class KeptInTuple(torch.autograd.Function):  # type: ignore[misc]
    """The same in a tuple, as bitsandbytes' `ctx.tensors = (A, B)`."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.tensors = (x * 2, None)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.tensors[0]


class OnCtxInTuple(OnCtx):
    def block(self, x: Any) -> Any:
        return self.inner(KeptInTuple.apply(F.relu(self.inner(x))))


class OnCtxInCheckpoint(OnCtx):
    ck = True


class OnCtxInReentrant(OnCtxInCheckpoint):
    reentrant = True


class Frozen(Coded):
    """A part without gradient, of parameters and by `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)

    def middle(self, x: Any) -> Any:
        with torch.no_grad():
            scale = torch.sigmoid(self.inner(x))
        return F.relu(self.inner(x)) * scale.detach()


class Tied(Coded):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(256, 256)
        self.twin.weight = self.inner.weight

    def middle(self, x: Any) -> Any:
        return F.relu(self.twin(F.relu(self.inner(x))))


class Kept(Coded):
    """An attribute that lives until the next call."""

    features: Any = None

    def middle(self, x: Any) -> Any:
        self.features = F.relu(self.inner(x)).detach() * 2
        return F.relu(self.inner(x))


class Moved(Coded):
    """A plain tensor, which the forward assigns as its input has it: where nothing is to do it is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1, 256)

    def middle(self, x: Any) -> Any:
        self.scale = self.scale.type_as(x)
        return F.relu(self.inner(x * self.scale)) + self.scale


class Averaged(Coded):
    """A copy whose weights follow those of a trained layer, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(256, 256).requires_grad_(False)

    def middle(self, x: Any) -> Any:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return F.relu(self.inner(x)) + self.slow(x)


class KeptAgain(Coded):
    """An attribute with a history, which a checkpoint assigns again."""

    aside: Any = None

    def noted(self, x: Any) -> Any:
        y = F.relu(self.inner(x))
        self.aside = (y * y).mean()
        return torch.sigmoid(self.inner(y))

    def middle(self, x: Any) -> Any:
        return checkpoint(self.noted, x, use_reentrant=False)


class Nested(Coded):
    def middle(self, x: Any) -> Any:
        return Again.apply(x, self.inner.weight)


class OfGradients(Again):
    """A backward whose gradients have a history."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            result = torch.relu(x @ weight)
            (first,) = torch.autograd.grad(result, x, grad, create_graph=True)
        return first, (first * x).sum() * weight


class NotRepeated(Coded):
    def middle(self, x: Any) -> Any:
        return OfGradients.apply(x, self.inner.weight)


class Forces(Coded):
    """A gradient of an energy, in the forward."""

    def middle(self, x: Any) -> Any:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = F.gelu(self.inner(at)).sum()
            (force,) = torch.autograd.grad(energy, at)
        return self.inner(x) + force


class TrainedForces(Coded):
    """A gradient of an energy, in the forward, that the loss differentiates again."""

    def middle(self, x: Any) -> Any:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = F.gelu(self.inner(at)).sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return self.inner(x) + force


class Aside(Coded):
    """A branch that leads to no output, with an op in place on a view in it."""

    def middle(self, x: Any) -> Any:
        view = self.inner(F.gelu(self.inner(x))).view(-1, 2, 128)
        view.clamp_(-1, 1)
        beside = torch.sigmoid(view)
        del view, beside
        return F.relu(self.inner(x))


class Reversible(Coded):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)) for _ in range(2))

    def middle(self, x: Any) -> Any:
        a, b = x.chunk(2, 1)
        for _ in range(2):
            a, b = Reversed.apply(a, b, self.f, self.g, *self.f.parameters(), *self.g.parameters())
        return torch.cat([a, b], 1)


class Looked(Coded):
    """A table of biases, read by indices on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 256))

    def middle(self, x: Any) -> Any:
        return F.relu(self.inner(x)) + self.table[torch.arange(4) * 2].sum(0)


class Auxiliary(Coded):
    """A head in training that leads to no output."""

    def middle(self, x: Any) -> Any:
        aside = F.relu(self.inner(x)) if self.training else None
        y = F.relu(self.inner(x))
        del aside
        return y


class Counted(Coded):
    """A buffer that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(256))
        self.total: Any

    def middle(self, x: Any) -> Any:
        self.total.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return F.relu(self.inner(x)) + self.total


class Named(Coded):
    """A dictionary of results."""

    def forward(self, x: Any) -> Any:
        hidden = self.middle(self.stem(x))
        return {"out": self.head(hidden), "hidden": hidden}


class Halves(Coded):
    """Regions of autocast of the code's own."""

    def middle(self, x: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            y = self.inner(x.float())
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return F.relu(self.inner(y))


class Given(nn.Module):  # type: ignore[misc]
    """A block that reads one of the three tensors that it is given beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, x: Any, tables: Any, positions: Any = None) -> Any:
        return F.relu(self.inner(F.relu(self.inner(x)))) + tables[0]


class Unread(Coded):
    """Tensors that blocks are given and never read, as position ids in Llama: a checkpoint keeps them."""

    ck = reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Given() for _ in range(4)])

    def block(self, block: Any, x: Any, *given: Any) -> Any:
        return block(x, given[:2], positions=given[2])

    def middle(self, x: Any) -> Any:
        y = x.detach()
        given = [y.cos(), y.sin().repeat(1, 3), y.exp().repeat(1, 3)]
        for block in self.blocks:
            run = functools.partial(self.block, block)
            x = checkpoint(run, x, *given, use_reentrant=self.reentrant) if self.ck else run(x, *given)
        del given
        return F.relu(self.inner(F.relu(self.inner(x))))


class UnreadInCheckpoints(Unread):
    ck = True


class UnreadInReentrant(Unread):
    ck = reentrant = True


class UnreadInPairs(Unread):
    """Checkpoints around two blocks each."""

    nested = False

    def pair(self, blocks: Any, x: Any, *given: Any) -> Any:
        for block in blocks:
            run = functools.partial(self.block, block)
            x = checkpoint(run, x, *given, use_reentrant=False) if self.nested else run(x, *given)
        return x

    def middle(self, x: Any) -> Any:
        y = x.detach()
        given = [y.cos(), y.sin().repeat(1, 3), y.exp().repeat(1, 3)]
        for first in (0, 2):
            x = checkpoint(self.pair, self.blocks[first : first + 2], x, *given, use_reentrant=False)
        del given
        return F.relu(self.inner(F.relu(self.inner(x))))


class UnreadInNested(UnreadInPairs):
    """And one around each block inside of them."""

    nested = True


class UnreadInFunctions(Coded):
    """A checkpoint of a function, which has no module call: a tensor of its partial, and one that dies."""

    def block(self, positions: Any, x: Any, short: Any) -> Any:
        return F.relu(self.inner(F.relu(self.inner(x))))

    def middle(self, x: Any) -> Any:
        for positions in (x.exp().repeat(1, 3), x.sin().repeat(1, 3)):
            x = checkpoint(functools.partial(self.block, positions), x, x.cos().repeat(1, 2), use_reentrant=False)
        del positions
        return F.relu(x)


COUNTED = (
    Coded, Custom, OfLibrary, Skips, Held, Dropped, InPlace, Checkpointed, Reentrant, NotCheckpointed, Frozen, Tied,
    Kept, Auxiliary, Counted, Averaged, KeptAgain, Nested, Reversible, Forces, Aside,
    OnCtx, OnCtxInCheckpoint, OnCtxInReentrant, Unread, UnreadInCheckpoints, UnreadInReentrant, UnreadInFunctions,
    UnreadInPairs, UnreadInNested,
)  # fmt: skip


def on_meta(cls: type[Coded], batch: int = 2) -> tuple[Any, tuple[Any, ...]]:
    """A model without weights, and its example input."""
    with torch.device("meta"):
        return cls(), (torch.zeros(batch, WIDTH),)
