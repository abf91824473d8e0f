"""Peaks of architectures that nobody had looked at before, from recordings of their float32 code.

docs/internals/measurements.md has all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staticmem.frontends import recording_format as written
from staticmem.frontends.recorded import RecordedModel
from staticmem.scenario.request import request_of
from staticmem.studies.study import Study

FOLDER = Path(__file__).parent / "data" / "fresh"
ROWS = json.loads((FOLDER / "peaks.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize(("name", "options", "peak"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_peaks_are_those_of_pytorch(name: str, options: dict[str, Any], peak: int) -> None:
    path = FOLDER / f"{name}.xz"
    model = RecordedModel(str(path), written.unpack(path.read_bytes(), str(path)), "pt2")
    alone = {"outputs": "dropped"} if options.get("mode") == "infer" else {}
    report = Study(model, request_of({**options, **alone})).report
    assert report.peak.live_bytes == peak
    assert not report.coverage.unknown
