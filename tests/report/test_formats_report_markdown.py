"""The report in Markdown, from a run and from a saved report."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from staticmem import analyze
from staticmem.cli.main import main
from staticmem.report.formats.report_markdown import render
from staticmem.report.markdown import escape
from staticmem.report.model import NoteInfo, Report
from staticmem.report.text import View
from staticmem.report.verdict import verdict
from staticmem.units import format_bytes

MODEL = Path(__file__).resolve().parents[2] / "models" / "resnet18.pt2"


@pytest.fixture(scope="module")
def report() -> Report:
    return analyze(MODEL, batch=2, optimizer="adam", gpu="rtx-3060")


def test_verdict_comes_first_and_meters_are_there(report: Report) -> None:
    text = render(report)
    assert text.startswith(f"**{escape(verdict(report))}**\n")
    for meter in ("live", "allocated", "reserved", "device"):
        assert f"| {meter} | {format_bytes(getattr(report.peak, f'{meter}_bytes'))} |" in text
    assert text.count("<details>") == text.count("</details>")


def test_categories_are_those_of_the_peak(report: Report) -> None:
    rows = re.findall(r"\| [a-z ]+ \| ([\d,]+) B \| [\d.]+% \|", render(report, View(units="bytes")))
    assert sum(int(n.replace(",", "")) for n in rows) == report.peak.live_bytes


def test_warnings_stand_open(report: Report) -> None:
    text = render(replace(report, warnings=(NoteInfo("SM999", "something is <wrong> |here|", 2),)))
    assert "something is &#60;wrong&#62; &#124;here&#124; (2 places) [SM999]" in text
    assert text.index("SM999") < text.index("Assumptions")


@pytest.mark.parametrize("name", ["</details>", "`x`", "a|b", "new\nline", "![i](http://e/x.png)"])
def test_hostile_names(report: Report, name: str) -> None:
    def markup(name: str) -> list[str]:
        tensors = tuple(replace(t, name=name, module="") for t in report.top_tensors)
        text = render(replace(report, top_tensors=tensors, model=replace(report.model, path=name)))
        outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)  # what is in code spans is text
        return re.findall(r"[<>\n`]|(?<!\\)[|\[\]]", outside)

    assert markup(name) == markup("name")


def test_a_saved_report_in_every_format(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "r.json"
    words = [str(MODEL), "--batch", "2", "--optimizer", "adam", "--gpu", "rtx-3060"]
    assert main(["analyze", *words, "-o", str(saved)]) == 0
    for kind in ("table", "json", "md"):
        capsys.readouterr()
        assert main(["analyze", *words, "-f", kind]) == 0
        live = capsys.readouterr().out
        assert main(["report", str(saved), "-f", kind]) == 0
        assert capsys.readouterr().out == live
    assert main(["report", str(saved), "-o", str(tmp_path / "r.md"), "--top", "2"]) == 0
    assert (tmp_path / "r.md").read_text(encoding="utf-8").startswith("**Fits a GeForce ")
    assert main(["report", str(tmp_path / "none.json")]) == 2
