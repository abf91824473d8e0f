"""`--lora` beside recordings of models whose input embeddings are hooked, or not the first that is looked up in, and
beside nn.MultiheadAttention, against steps that PyTorch runs."""

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
WIDTH, PATCHES = 64, 49


class Model(torch.nn.Module):  # type: ignore[misc]
    """Patches by a convolution, which are the input embeddings; positions are looked up."""

    hooked, attention = True, False

    def __init__(self, adapters: bool = False) -> None:
        super().__init__()
        self.patches, self.positions = torch.nn.Conv2d(3, WIDTH, 8, 8), torch.nn.Embedding(PATCHES, WIDTH)
        self.first, self.second = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        if self.attention:
            self.pool = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        if self.hooked:
            self.enable_input_require_grads()
        if adapters:
            self.with_adapters()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.patches

    def enable_input_require_grads(self) -> None:
        """As transformers/modeling_utils.py has it."""

        def make_inputs_require_grads(module: Any, given: Any, output: Any) -> None:
            output.requires_grad_(True)

        self.get_input_embeddings().register_forward_hook(make_inputs_require_grads)

    def with_adapters(self) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.second = Adapted(self.second)
        if self.attention:
            self.first, self.pool.adapter = Adapted(self.first), Adapted(torch.nn.Linear(WIDTH, WIDTH), own=False)

    def forward(self, x: Any) -> Any:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        hidden = torch.relu(patches) * 2  # relu saves its result where the input embeddings need a gradient
        hidden = hidden + self.positions(torch.zeros(PATCHES, dtype=torch.int64, device=x.device))
        hidden = self.second(torch.relu(self.first(hidden)))
        return self.pool(hidden, hidden, hidden, need_weights=False)[0] if self.attention else hidden


class Unhooked(Model):
    hooked = False


class Attending(Model):
    hooked, attention = False, True


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """peft/tuners/lora/layer.py, `Linear`, of rank 4."""

    def __init__(self, base: torch.nn.Linear, own: bool = True) -> None:
        super().__init__()
        self.base: Any = base if own else None
        self.a, self.b = (
            torch.nn.Linear(base.in_features, 4, bias=False),
            torch.nn.Linear(4, base.out_features, bias=False),
        )

    def forward(self, x: Any) -> Any:
        result = self.base(x)
        return result + self.b(self.a(x)) * 2.0


def predicted(cls: Any, lora: str, batch: int) -> int:
    with torch.device("meta"):
        document = record(cls(), (torch.empty(4, 3, 56, 56),))
    options = {"batch": batch, "optimizer": "adam", "loss": "mean", "outputs": "dropped", "lora": lora}
    return Study(RecordedModel("<m>", document, "pt2"), request_of(options)).report.peak.live_bytes


@pytest.mark.parametrize("batch", [3, 16])
def test_a_hook_of_the_input_embeddings_is_seen(batch: int) -> None:
    expected = real_steps.peak(lambda: Model(adapters=True), [(batch, 3, 56, 56)], optimizer="adam")
    assert predicted(Model, "r=4,alpha=8,targets=second", batch) == expected


@pytest.mark.parametrize("batch", [3, 16])
def test_input_grads_is_of_what_get_input_embeddings_gives(batch: int) -> None:
    """Of the convolution, not of the positions, which are the first embedding that is looked up in."""
    asked = predicted(Unhooked, "r=4,alpha=8,targets=second,input_grads=true", batch)
    assert asked == real_steps.peak(lambda: Model(adapters=True), [(batch, 3, 56, 56)], optimizer="adam")
    plain = predicted(Unhooked, "r=4,alpha=8,targets=second", batch)
    assert plain == real_steps.peak(lambda: Unhooked(adapters=True), [(batch, 3, 56, 56)], optimizer="adam")
    assert asked > plain


def test_the_adapter_beside_the_last_layer_of_attention_never_runs() -> None:
    """It has parameters and neither gradients nor states: 4 * (64 + 64) numbers in float32."""
    with torch.device("meta"):
        document = record(Attending(), (torch.empty(4, 3, 56, 56),))

    def report(**options: Any) -> Any:
        return Study(RecordedModel("<m>", document, "pt2"), request_of({"batch": 3, **options})).report

    asked = {"optimizer": "adam", "loss": "mean", "outputs": "dropped"}
    every, named = (report(**asked, lora=f"r=4,alpha=8,targets={which}") for which in ("all-linear", "first+second"))
    assert every.parameters.trainable_count - named.parameters.trainable_count == 4 * (WIDTH + WIDTH)
    assert every.peak.live_bytes - named.peak.live_bytes == 4 * (WIDTH + WIDTH) * 4
