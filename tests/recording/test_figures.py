"""Figures of recorded modules against steps that PyTorch runs (`real_steps`), to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sampling import sampled

pytest.importorskip("torch")

import coded_models
import real_steps
import stateful_models
import torch
from coded_models import WIDTH, Coded, on_meta

from staticmem.errors import ModelFileError
from staticmem.frontends.recorded import RecordedModel
from staticmem.recording.record import record
from staticmem.scenario.request import request_of
from staticmem.studies.study import Study

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint in inference
@pytest.mark.parametrize("cls", sampled(coded_models.COUNTED + stateful_models.STATEFUL, 3), ids=lambda c: c.__name__)
def test_peaks_are_those_of_a_run(cls: Any) -> None:
    module, inputs = on_meta(cls)
    model = RecordedModel("<m>", record(module, inputs), "pt2")
    for batch in (1, 24, 700):
        for optimizer, outputs in (("adam", "held"), ("sgd", "dropped"), (None, "held"), (None, "dropped")):
            options = {"optimizer": optimizer, "loss": "mean"} if optimizer else {}
            report = Study(model, request_of({"batch": batch, "outputs": outputs, **options})).report
            expected = real_steps.peak(cls, [(batch, WIDTH)], optimizer=optimizer, outputs=outputs)
            assert report.peak.live_bytes == expected, (batch, optimizer, outputs)


@pytest.mark.parametrize("cls", stateful_models.UNEQUAL, ids=lambda c: c.__name__)
def test_bands_have_the_calls_that_differ(cls: Any) -> None:
    module, inputs = on_meta(cls)
    model = RecordedModel("<m>", record(module, inputs), "pt2")
    for batch, optimizer in ((24, "adam"), (700, "sgd")):
        report = Study(model, request_of({"batch": batch, "optimizer": optimizer, "loss": "mean"})).report
        peaks = [
            real_steps.peak(cls, [(batch, WIDTH)], optimizer=optimizer, outputs="held", calls=n) for n in (2, 3, 4)
        ]
        band = report.peak.bands["live"]
        assert report.peak.live_bytes == peaks[0], (batch, optimizer)
        assert band.low == min(peaks)
        assert band.high >= max(peaks)
        assert any(note.code == "SM388" for note in report.warnings)


WITH_HISTORY: dict[str, Callable[[Any], Any]] = {
    "saves its result": lambda x: x.exp(),
    "saves its input": lambda x: x**3,
    "a norm saves both": lambda x: x.norm(dim=1),
    "an activation": lambda x: torch.tanh(x) * torch.nn.functional.leaky_relu(x)[:, :100].sum(1, keepdim=True),
    "of two ops": lambda x: x.cumsum(1) ** 2,
}


@pytest.mark.parametrize("function", WITH_HISTORY.values(), ids=WITH_HISTORY)
@pytest.mark.parametrize("optimizer", ["adam", None])
def test_gradients_with_a_history(function: Callable[[Any], Any], optimizer: str | None) -> None:
    """What an inner backward reads of the forward: results of ops, and the weight of a linear layer, turned."""

    class Penalised(Coded):
        def middle(self, x: Any) -> Any:
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                energy = function(self.inner(x)).sum()
                (grad,) = torch.autograd.grad(energy, x, create_graph=True)
            return x + grad

    assert figure(Penalised, optimizer) == real_steps.peak(Penalised, [(512, WIDTH)], optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_leaf_that_the_code_makes(optimizer: str) -> None:
    """The loss of the step before has it, and its gradient, until the next loss is there (a gradient penalty)."""

    class Mixed(Coded):
        def middle(self, x: Any) -> Any:
            with torch.enable_grad():
                mixed = (x * 0.5).detach().requires_grad_()
                scores = self.inner(torch.nn.functional.leaky_relu(self.inner(mixed)))
                (grad,) = torch.autograd.grad(scores.sum(), mixed, create_graph=True)
            return (self.inner(x) + (grad.norm(2, dim=1) - 1).pow(2).mean()).exp()

    assert figure(Mixed, optimizer) == real_steps.peak(Mixed, [(512, WIDTH)], optimizer=optimizer)


def figure(cls: Any, optimizer: str | None) -> int:
    module, inputs = on_meta(cls)
    options = {"optimizer": optimizer, "loss": "mean"} if optimizer else {}
    request = request_of({"batch": 512, "outputs": "dropped", **options})
    return Study(RecordedModel("<m>", record(module, inputs), "pt2"), request).report.peak.live_bytes


def test_gradients_with_a_history_of_what_an_op_keeps_for_itself() -> None:
    class Masked(Coded):
        def middle(self, x: Any) -> Any:
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                masked = torch.dropout(self.inner(x), 0.5, True)
                (grad,) = torch.autograd.grad(masked.pow(2).sum(), x, create_graph=True)
            return x + grad

    with pytest.raises(ModelFileError, match="keeps more than its results"):
        figure(Masked, "adam")
