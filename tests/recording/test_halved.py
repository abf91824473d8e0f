"""Code that takes dtypes from tensors, asked for as a model cast to 16 bits (`--dtype bf16`)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import real_steps
import torch

from staticmem.frontends.recorded import RecordedModel
from staticmem.recording.record import record
from staticmem.scenario.request import request_of
from staticmem.studies.study import Study

pytestmark = pytest.mark.torch
WIDTH = 64


class Scored(torch.nn.Module):  # type: ignore[misc]
    """Attention by hand, whose softmax has the dtype of its scores, or float32 by name."""

    softmax_dtype: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        scores = self.query(x) @ x.T
        mask = torch.zeros(scores.shape, dtype=scores.dtype, device=x.device)
        weights = torch.softmax(scores + mask, dim=-1, dtype=self.softmax_dtype or scores.dtype)
        return weights.to(x.dtype) @ self.value(x)


class Named(Scored):
    softmax_dtype = torch.float32


class Typed(Scored):
    """`type_as` of a tensor that was cast to float32: in float32 the cast returns that tensor itself."""

    def forward(self, x: Any) -> Any:
        query = self.query(x)
        wide = query.float()
        return (wide * wide.mean(-1, keepdim=True)).type_as(query) * self.value(x)


class OfWeight(Scored):
    """The input in the type of the weight, as embeddings of images have it: no float32 is named."""

    def forward(self, x: Any) -> Any:
        x = x.to(dtype=self.query.weight.dtype)
        return self.query(x).relu() * self.value(x)


class Norm(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x.to(dtype)


class Normed(Scored):
    """Casts to float32 and back alone, in a module of their own, as norms of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Any) -> Any:
        x = self.value(x)
        return x + self.query(self.norm(x))


class Formatted(Scored):
    """Heads cast to float32 in a memory format: in float32 the cast returns its input, as it has that format."""

    def forward(self, x: Any) -> Any:
        heads = self.query(x).view(-1, 2, 4, WIDTH // 4).transpose(0, 1)
        wide = heads.to(torch.float32, memory_format=torch.contiguous_format)
        columns = wide.reshape(wide.shape[0], -1) * 2  # a copy, unless the cast was one to a contiguous tensor
        return columns.sum(0).to(x.dtype) * self.value(x).sum()


class HeldNorm(Norm):
    """A variable has what the cast to float32 makes until the norm returns."""

    def forward(self, x: Any) -> Any:
        dtype = x.dtype
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


class Held(Scored):
    """Nothing of the norm is saved: its input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = HeldNorm()

    def forward(self, x: Any) -> Any:
        return self.query(self.norm(x * 2)) * self.value(x)


def document_of(cls: Any) -> dict[str, Any]:
    with torch.device("meta"):
        return record(cls(), (torch.empty(32, WIDTH),))


@pytest.mark.parametrize("cls", [Scored, Named, Typed, OfWeight, Normed, Formatted, Held])
def test_peaks_of_a_cast_module(cls: Any) -> None:
    model = RecordedModel("<m>", document_of(cls), "pt2")
    for batch in (24, 700):
        for optimizer in ("sgd", None):
            options = {"outputs": "dropped", **({"optimizer": optimizer, "loss": "mean"} if optimizer else {})}
            for dtype in (
                ("bf16", "fp16", None) if cls is not Named else ("bf16", None)
            ):  # CUDA's softmax casts float16 itself
                kind = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}[dtype]
                report = Study(model, request_of({"batch": batch, "dtype": dtype, **options})).report

                def build(kind: Any = kind) -> Any:
                    before = torch.get_default_dtype()
                    torch.set_default_dtype(kind)
                    try:
                        return cls()
                    finally:
                        torch.set_default_dtype(before)

                expected = real_steps.peak(build, [(batch, WIDTH)], optimizer=optimizer, dtype=kind)
                assert report.peak.live_bytes == expected, (batch, optimizer, dtype)


def test_all_modes_of_the_cast_module_are_there_where_more_than_casts_differs() -> None:
    def modes(cls: Any) -> int:
        return sum(len(program["modes"]) for program in document_of(cls)["halved"])

    others = (Scored, Named, Typed, OfWeight, Formatted, Held)
    assert {cls: modes(cls) for cls in others} == dict.fromkeys(others, 4)
    assert modes(Normed) == 1


class HalfAlready(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


def test_a_module_in_16_bits_is_not_cast_again() -> None:
    with torch.device("meta"):
        document = record(HalfAlready(), (torch.empty(32, WIDTH, dtype=torch.bfloat16),))
    assert "halved" not in document
    assert {row[3] for row in document["parameters"]} == {"bfloat16"}


class OnlyWide(Scored):
    def forward(self, x: Any) -> Any:
        if x.dtype is not torch.float32:
            raise TypeError("float32 alone")
        return super().forward(x)


def test_code_that_does_not_run_in_16_bits_is_recorded_in_32() -> None:
    document = document_of(OnlyWide)
    assert "halved" not in document
    modes = [mode for program in document["programs"] for mode in program["modes"]]
    assert sorted(modes, key=str) == [[False, "bfloat16"], [False, None], [True, "bfloat16"], [True, None]]


class Experts(torch.nn.Module):  # type: ignore[misc]
    """Rows of experts in a grouped product, which CUDA runs in float32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(4, 2 * WIDTH, WIDTH))

    def forward(self, x: Any, ends: Any) -> Any:
        return torch._grouped_mm(x, self.weights.transpose(-2, -1), offs=ends)


def test_grouped_products_in_float32() -> None:
    """Live tensors of the backward: rows, weights, ends, the result, its gradient (expanded, then whole for the
    product) and both gradients of the product."""
    with torch.device("meta"):
        module, inputs = Experts(), (torch.empty(32, WIDTH), torch.empty(4, dtype=torch.int32))
        document = record(module, inputs, axes=[{0: "rows"}, {}])
    assert "aten::_grouped_mm" in document["targets"]
    model = RecordedModel("<m>", document, "pt2")
    report = Study(model, request_of({"dims": {"rows": 128}, "optimizer": "sgd", "loss": "mean"})).report
    assert report.coverage.unknown == ()
    rows, weights, results = 128 * WIDTH * 4, 4 * 2 * WIDTH * WIDTH * 4, 128 * 2 * WIDTH * 4
    assert report.phases.forward_end_bytes - rows - weights - results in range(512, 4 * 512 + 1)  # ends, and the loss


class Attends(torch.nn.Module):  # type: ignore[misc]
    """Self-attention by one call, or written out as models before PyTorch 2.0 have it."""

    def __init__(self, written_out: bool, rate: float) -> None:
        super().__init__()
        self.written_out, self.rate = written_out, rate
        self.inner, self.outer = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        batch, tokens, _ = x.shape
        query, key, value = self.inner(x).view(batch, tokens, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.written_out:
            weights = query @ key.transpose(-2, -1) * 0.25
            weights = torch.softmax(weights, dim=-1)
            result = torch.nn.functional.dropout(weights, self.rate, self.training) @ value
        else:
            result = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.rate)
        return self.outer(result.transpose(1, 2).reshape(batch, tokens, WIDTH))


@pytest.mark.parametrize(
    ("options", "rate"),
    [({"dtype": "fp32"}, 0.1), ({"dtype": "fp32"}, 0.0), ({"dtype": "bf16"}, 0.1), ({"amp": "fp16"}, 0.1)],
)
def test_attention_before_2_0_is_written_out_in_the_dtype_of_its_inputs(options: dict[str, str], rate: float) -> None:
    """The plain kernel of later releases computes it in float32, and scales queries and keys."""
    peaks = []
    for written_out in (True, False):
        with torch.device("meta"):
            document = record(Attends(written_out, rate), (torch.zeros(4, 256, WIDTH),))
        request = request_of({"batch": 4, "optimizer": "adamw", "torch_version": "1.13", **options})
        peaks.append(Study(RecordedModel("<m>", document, "pt2"), request).report.peak.live_bytes)
    assert peaks[0] == peaks[1]
