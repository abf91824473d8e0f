"""What a terminal gets: colour, characters, words."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest

import staticmem
from staticmem.report.formats.report import render
from staticmem.report.model import Coverage, NoteInfo, OpCount, Report, UnknownOp
from staticmem.report.text import Style, View, style_for
from staticmem.report.verdict import optimizer_name, verdict

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> Report:
    return staticmem.analyze(ROOT / "models" / "seed.pt2", batch=2, optimizer="adam", loss="mean")


class Terminal(io.StringIO):
    def __init__(self, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._tty, self._encoding = tty, encoding

    def isatty(self) -> bool:
        return self._tty

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


@pytest.mark.parametrize(
    ("tty", "colour", "environment", "expected"),
    [
        (True, "auto", {"TERM": "xterm"}, True),
        (False, "auto", {"TERM": "xterm"}, False),
        (True, "auto", {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, "auto", {"TERM": "xterm", "NO_COLOR": ""}, True),  # no-color.org: only if not empty
        (True, "auto", {"TERM": "dumb"}, False),
        (True, "never", {"TERM": "xterm"}, False),
        (False, "always", {"NO_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_colour(tty: bool, colour: str, environment: dict[str, str], expected: bool) -> None:
    assert style_for(Terminal(tty), colour, environment).colour is expected


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "?"])
def test_unicode(encoding: str) -> None:
    assert style_for(Terminal(True, encoding), "never", {}).unicode is (encoding == "utf-8")


def test_colour_changes_nothing_but_colour(report: Report) -> None:
    plain, painted = render(report), render(report, View(Style(colour=True)))
    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain


def test_verdict(report: Report) -> None:
    assert verdict(report).endswith("training seed.pt2, batch 2, Adam.")
    # 4 tensors of 2 x 64 x 682 x 700 floats are 932.4 MiB, the outputs that the loop holds half of one; the image,
    # parameters, gradients and Adam's state the rest
    assert verdict(report).startswith("Peak 1.04 GiB live tensor memory in backward (threshold_backward in 3)")
    assert verdict(report, View(units="bytes")).startswith(f"Peak {report.peak.live_bytes:,} B live")
    fused = dataclasses.replace(report.scenario, optimizer="sgd", momentum=0.9, optimizer_impl="fused")
    assert optimizer_name(fused) == "SGD with momentum 0.9 (fused)"


def test_meter_is_explained(report: Report) -> None:
    text = " ".join(render(report).split())
    assert "nvidia-smi shows more" in text


def test_warnings_and_unknown_ops_come_just_before_the_verdict(report: Report) -> None:
    changed = dataclasses.replace(
        report,
        warnings=(NoteInfo("SM999", "BatchNorm was folded away", 53),),
        coverage=Coverage(OpCount(5, 0, 1), (UnknownOp("custom::f", 3, 4096),)),
    )
    text = render(changed)
    assert "unknown: custom::f, 3 calls, 4.00 KiB of results" in text
    assert "Coverage: 5 of 6 ops known" in text
    assert text.index("BatchNorm was folded away (53 places) [SM999]") > text.index("Assumptions")


def test_control_characters_are_not_printed(report: Report) -> None:
    entry = dataclasses.replace(report.top_tensors[0], name="evil\x1b[2J\nname", module="m\x07")
    changed = dataclasses.replace(report, top_tensors=(entry,))
    text = render(changed)
    assert "\x1b" not in text
    assert "evil?[2J?name" in text
