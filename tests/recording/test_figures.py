"""Figures of recorded modules against steps that PyTorch runs (`real_steps`), to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from sampling import sampled

pytest.importorskip("torch")

import coded_models
import real_steps
import stateful_models
from coded_models import WIDTH, on_meta

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
