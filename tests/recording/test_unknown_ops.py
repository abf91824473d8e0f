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
