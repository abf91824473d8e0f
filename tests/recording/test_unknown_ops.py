"""What the note of ops without a rule says: kept for backward only where autograd makes a node of the op."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from coded_models import WIDTH, OfLibrary

from staticmem.scenario.request import request_of
from staticmem.studies.study import Study

pytestmark = pytest.mark.torch
OP = "staticmem_tests::squashed"


def notes(study: Study) -> list[str]:
    return [note.text for note in study.notes if note.code == "SM201"]


def test_a_recording_has_the_backward_of_the_op() -> None:
    training = request_of({"optimizer": "sgd", "loss": "mean"})
    study = Study.open(OfLibrary().train(), training, (torch.empty(4, WIDTH),))
    (text,) = notes(study)
    assert OP in text
    assert "nothing is kept for backward" in text
    assert study.live_band is not None
    low, high = study.live_band
    assert low == study.lifetimes.peak_bytes < high  # only what the op allocates besides is open
    assert not {"SM306", "SM308"} & {note.code for note in study.notes}


def test_an_export_does_not_have_it() -> None:
    with torch.device("meta"):
        model = OfLibrary()
        exported = torch.export.export(model.train(), (torch.empty(4, WIDTH),), strict=False)
    (text,) = notes(Study.open(exported, request_of({"optimizer": "sgd", "loss": "mean"})))
    assert OP in text
    assert "inputs and results are kept for backward" in text
    (text,) = notes(Study.open(exported, request_of({"mode": "infer"})))
    assert "nothing is kept for backward" in text


class NamedInPlace(torch.nn.Module):  # type: ignore[misc]
    """Its running rank is written in place by an op that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angle", torch.ones(1000, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.angle.heaviside_(self.angle)
        y: torch.Tensor = self.inner(x)
        return y


def test_an_op_in_place_without_history_makes_no_tensor() -> None:
    def peak(model: torch.nn.Module) -> Study:
        return Study.open(model, request_of({"optimizer": "sgd", "loss": "mean"}), (torch.empty(4, WIDTH),))

    study, plain = peak(NamedInPlace().train()), peak(torch.nn.Linear(WIDTH, WIDTH).train())
    assert "heaviside_" in notes(study)[0]
    assert study.lifetimes.peak_bytes == plain.lifetimes.peak_bytes + 4 * 1000 * WIDTH
