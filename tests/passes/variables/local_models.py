"""Modules whose code keeps, drops, collects and passes on values in the ways that people write.

Every op allocates one tensor (no views), so that op k of the export is call k of a run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Reassign(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x)
        x = torch.sin(x)
        x = torch.cos(x)
        return torch.tanh(x)


class OwnNames(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        a = torch.exp(x)
        b = torch.sin(a)
        c = torch.cos(b)
        d = torch.tanh(c)
        return torch.neg(d)


class OneStatement(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.cos(torch.sin(torch.exp(x))))
        return torch.neg(y)


class Unpack(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        values, places = torch.max(x, 0)
        x = torch.exp(values)
        x = torch.mul(x, places)
        values = torch.sin(x)
        return torch.cos(values)


class Collect(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        found = []
        for _ in range(3):
            x = torch.sin(x)
            found.append(x)
        x = torch.exp(x)
        y = torch.cat(found)
        return torch.cos(y)


class Join(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.cos(torch.exp(x)))


class Dense(nn.Module):  # type: ignore[misc]
    """A list whose line joins it within a call: only the call's result is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Join(), Join()])

    def forward(self, x: Tensor) -> Tensor:
        feats = [torch.sin(x)]
        for layer in self.layers:
            feats.append(layer(torch.cat(feats)))
        return torch.cat(feats)


class Branch(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x)
        y = torch.sin(x)
        y = torch.cos(y)
        x = torch.add(x, y)
        return torch.tanh(x)


class Augmented(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        y = y + torch.sin(y)
        z = torch.cos(y)
        z = z * y
        return torch.neg(z)


class Step(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        return torch.cos(y)


class Child(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x)
        y = self.step(x)
        y = torch.tanh(y)
        return torch.neg(y)


class Layers(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Step(), nn.Sigmoid(), Step(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x)
        x = self.layers(x)
        return torch.neg(x)


class Loop(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Step(), nn.Sigmoid(), Step()])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x)
        for layer in self.layers:
            x = layer(x)
        return torch.neg(x)


def helper(x: Tensor) -> Tensor:
    wide = torch.sin(x)
    narrow = torch.cos(wide)
    return torch.tanh(narrow)


class Helper(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x)
        x = helper(x)
        return torch.neg(x)


class Nested(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Child(), Step()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(torch.exp(x)))


class Residual(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Step(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x)
        identity = x
        out = self.a(x)
        out = self.b(out)
        out = torch.add(out, identity)
        return torch.sin(out)


class _Appends(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        parts.append(torch.exp(x))
        parts.append(torch.sin(parts[-1]))
        return torch.cat(parts)


class CallersList(nn.Module):  # type: ignore[misc]
    """A list that a child module adds to lives until its maker returns."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = _Appends()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        output = [x]
        x = self.mid(x, output)
        x = torch.cos(x)
        x = torch.neg(x)
        return torch.exp(x)


class _Sine(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class TwoCalls(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.f1, self.f2 = _Sine(), _Sine()

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.f1(x), self.f2(x)
        x = torch.mul(x1, x2)
        x = torch.cos(x)
        return torch.neg(x)


class Comprehension(nn.Module):  # type: ignore[misc]
    """Lists that one line fills, and names that take what was a list."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([_Sine() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        xs = [step(x) for step in self.steps]
        ys = [torch.cos(y) for y in xs]
        x = torch.cat(xs)
        xs, ys = torch.cat(xs), torch.cat(ys)
        x = torch.mul(xs, ys)
        x = torch.exp(x)
        return torch.neg(x)


class Shortcuts(nn.Module):  # type: ignore[misc]
    """A name that is given without an op lives on when the other one is assigned again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([_Sine() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        for step in self.steps:
            residual = x
            x = torch.exp(x)
            x = step(x) + residual
        x = torch.cos(x)
        return torch.neg(x)


class Stages(nn.Module):  # type: ignore[misc]
    """Arguments that a line computes before its one call: the name keeps its last value until the call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = _Slope()

    def forward(self, y: Tensor) -> Tensor:
        for _ in range(2):
            k = self.slope(y)
            k = self.slope(y + 0.5 * k)
            y = torch.mul(y, k)
        return torch.neg(y)


class _Slope(nn.Module):  # type: ignore[misc]
    def forward(self, y: Tensor) -> Tensor:
        y = torch.sin(y)
        y = torch.cos(y)
        return torch.exp(y)


class _Steps(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([_Sine() for _ in range(3)])


class TailInLoop(_Steps):
    """A loop of one line, which goes on after its call."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        for step in self.steps:
            x = x + torch.cos(step(x))
        return torch.neg(x)


class ArgumentsInLoop(_Steps):
    """A loop of one line, with ops before its call and after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        for step in self.steps:
            x = x * torch.cos(step(torch.exp(x)))
        return torch.neg(x)


class CallInLoop(_Steps):
    """A loop of one line, which ends with its call."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        for step in self.steps:
            x = step(torch.exp(x))
        return torch.neg(x)


class AppendInLoop(_Steps):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        results = []
        for step in self.steps:
            results.append(torch.cos(step(torch.exp(x))))  # noqa: PERF401
        return torch.cat(results)


class PairsInLoop(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([nn.ModuleList([_Sine(), _Slope()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        for first, second in self.pairs:
            x = first(x) + second(torch.exp(x))
        return torch.neg(x)


class NamedInLoop(nn.Module):  # type: ignore[misc]
    """One module that a loop calls by its name, within another call."""

    def __init__(self) -> None:
        super().__init__()
        self.sine, self.slope = _Sine(), _Slope()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        for _ in range(3):
            x = x + self.sine(self.slope(x))
        return torch.neg(x)


class OpsInLoop(nn.Module):  # type: ignore[misc]
    """A loop of one line without a call of a module."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        for _ in range(3):
            x = torch.sin(x) * y
        return torch.neg(x)


class Element(nn.Module):  # type: ignore[misc]
    """Statements that take one result of their call."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        order = torch.exp(x).sort(-1)[1]
        y = torch.cos(x)
        largest = torch.max(y, -1).values
        return torch.gather(torch.sin(y), -1, order) * torch.sum(largest)


MODELS = (Element, TailInLoop, ArgumentsInLoop, CallInLoop, AppendInLoop, PairsInLoop, NamedInLoop, OpsInLoop,
    CallersList, Stages, TwoCalls, Comprehension, Shortcuts, Dense,
    Reassign, OwnNames, OneStatement, Unpack, Collect, Branch, Augmented, Child, Layers, Loop, Nested, Residual,
)  # fmt: skip
