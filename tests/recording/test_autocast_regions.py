"""Where copies of weights that autocast keeps end: with the outermost region of `torch.autocast`, as PyTorch does
(torch/amp/autocast_mode.py, `autocast.__exit__`)."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from coded_models import Coded  # noqa: E402
from recorded_programs import ops_named, program  # noqa: E402
from torch import nn  # noqa: E402

import staticmem  # noqa: E402
from staticmem.ir import dtypes  # noqa: E402

pytestmark = pytest.mark.torch


def region(x: Any, dtype: Any = torch.bfloat16, enabled: bool = True) -> Any:
    return torch.autocast(x.device.type, dtype=dtype, enabled=enabled)


class Nested(Coded):
    def middle(self, x: Any) -> Any:
        with region(x):
            y = self.inner(x)
            with region(x, torch.float16):
                y = self.inner(y)
            with region(x, enabled=False):
                y = self.inner(y.float())
            return self.inner(y)


class Adjacent(Coded):
    def middle(self, x: Any) -> Any:
        with region(x):
            y = self.inner(x)
        with region(x):
            return self.inner(y)


class Cleared(Coded):
    def middle(self, x: Any) -> Any:
        with region(x):
            y = self.inner(x)
            torch.clear_autocast_cache()
            return self.inner(y)


@pytest.mark.parametrize(
    ("model", "alone", "within_that_of_the_step"),
    [
        (Nested, [False, False, False, False, True, False], [False] * 6),
        (Adjacent, [False, True, True, False], [False] * 4),
        (Cleared, [False, True, True, False], [False, True, False, False]),
    ],
)
def test_ends_are_recorded(model: Any, alone: list[bool], within_that_of_the_step: list[bool]) -> None:
    """The region of the loop is around those of the code, which clear nothing then."""
    assert [op.clears for op in ops_named(program(model), "linear")] == alone
    amp = program(model, amp=dtypes.bfloat16)
    assert [op.clears for op in ops_named(amp, "linear")] == within_that_of_the_step


class Wide(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (
            nn.Linear(*sizes) for sizes in ((512, 1024), (1024, 1024), (1024, 1024), (1024, 64), (1024, 1024))
        )


class WideNested(Wide):
    def forward(self, x: Any) -> Any:
        with region(x):
            h = self.b(self.a(x).relu()).relu()
            with region(x, torch.float16):
                h = self.c(h).relu()
            h = self.e(h)
        return self.d(h.float())


class WideAdjacent(Wide):
    def forward(self, x: Any) -> Any:
        with region(x):
            h = self.b(self.a(x).relu()).relu()
        with region(x):
            h = self.b(self.c(h).relu()).relu()
        return self.d(h.float())


class WideLoop(Wide):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        for layer in (self.b, self.c, self.b):
            with region(x):
                h = layer(h).relu()
        return self.d(h.float())


# bytes that live tensors take at most in a call under no_grad(): PyTorch 2.14 on fake CUDA tensors
@pytest.mark.parametrize(
    ("model", "peak"), [(WideNested, 22_831_616), (WideAdjacent, 19_681_792), (WideLoop, 17_713_664)]
)
def test_peaks_are_those_of_pytorch(model: Any, peak: int) -> None:
    with torch.device("meta"):
        report = staticmem.analyze(model(), (torch.empty(64, 512),), mode="infer", outputs="dropped")
    assert report.peak.live_bytes == peak


class Teacher(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.o = (
            nn.Linear(*sizes) for sizes in ((256, 1024), (1024, 1024), (1024, 1024), (1024, 8))
        )

    def forward(self, x: Any) -> Any:
        with torch.inference_mode():
            mean = self.b(self.a(x).relu()).mean(0)
        return self.o(self.c(self.a(x)) * mean.clone())


class Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class InFloat32(Teacher):
    def forward(self, x: Any) -> Any:
        return self.o(self.c(Product.apply(self.a(x), self.b.weight)).relu())


class Adapts(Teacher):
    """Second-order MAML: a gradient with a history reads what autocast has cast, and copies of weights."""

    def forward(self, x: Any) -> Any:
        weights = dict(self.b.named_parameters())
        h = self.a(x).relu()
        inner = torch.func.functional_call(self.b, weights, (h,)).pow(2).mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads, strict=True)}
        return self.o(torch.func.functional_call(self.b, fast, (h,)).relu())


# bytes of the second step: PyTorch 2.14 on fake CUDA tensors
@pytest.mark.parametrize(("model", "peak"), [(Teacher, 29_442_048), (InFloat32, 46_221_312), (Adapts, 69_289_984)])
def test_peaks_of_training_are_those_of_pytorch(model: Any, peak: int) -> None:
    """Autocast keeps no copy that is made under `inference_mode`; `custom_fwd` casts what is on the GPU; the gradient
    that comes to a custom function goes before those that it returns are cast."""
    with torch.device("meta"):
        report = staticmem.analyze(
            model(), (torch.empty(2048, 256),), optimizer="sgd", amp="bf16", loss="mean", outputs="dropped"
        )
    assert report.peak.live_bytes == peak
