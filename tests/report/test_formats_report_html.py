"""What a notebook shows, and the report as a DataFrame."""

from __future__ import annotations

import html.parser
from dataclasses import replace
from pathlib import Path

import pytest

from staticmem import analyze
from staticmem.report.model import NoteInfo, Report
from staticmem.report.verdict import verdict

MODEL = Path(__file__).resolve().parents[2] / "models" / "resnet18.pt2"


@pytest.fixture(scope="module")
def report() -> Report:
    return analyze(MODEL, batch=2, optimizer="adam")


class Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(report: Report) -> Reader:
    reader = Reader()
    reader.feed(report._repr_html_())
    return reader


def test_verdict_meters_and_categories(report: Report) -> None:
    shown = read(report)
    assert shown.text[0] == verdict(report)
    for word in ("live", "allocated", "reserved", "device", "activation", "optimizer state"):
        assert word in shown.text


def test_names_are_text(report: Report) -> None:
    hostile = "<script>alert(1)</script>"
    other = replace(report, model=replace(report.model, path=hostile), warnings=(NoteInfo("SM9", hostile, 1),))
    assert set(read(other).tags) == {"div", "p", "b", "table", "tr", "th", "td", "ul", "li"}


def test_to_pandas(report: Report) -> None:
    pytest.importorskip("pandas")
    frame = report.to_pandas()
    assert len(frame) == report.peak.tensors
    assert frame["bytes"].sum() == report.peak.live_bytes
    assert frame.groupby("category")["bytes"].sum().to_dict() == {k: v for k, v in report.peak.by_category.items() if v}
