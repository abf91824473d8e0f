"""What a terminal gets: colour, characters, words."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import staticmem
from staticmem import units
from staticmem.devices import sizing
from staticmem.report.formats.report import render
from staticmem.report.model import Band, Coverage, GpuFit, NoteInfo, OpCount, Report, UnknownOp
from staticmem.report.text import PLAIN, Style, View, columns, style_for
from staticmem.report.verdict import fit_lines, optimizer_name, verdict, with_article
from staticmem.units import format_bytes

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
    # 4 tensors of 2 x 64 x 682 x 700 floats are 932.4 MiB, the outputs that the loop holds half of one; the image,
    # parameters, gradients and Adam's state the rest
    said = re.fullmatch(
        r"Needs \d\.\d\d GiB of GPU memory, at most \d\.\d\d GiB, on an H100 SXM 80 GB, which is assumed "
        r"\(training seed\.pt2, batch 2, Adam\)\. (.*)",
        verdict(report),
    )
    assert said is not None
    assert said[1] == "1.04 GiB of it are tensors at the peak, in backward (threshold_backward in 3)."
    assert f" {report.peak.live_bytes:,} B of it are tensors" in verdict(report, View(units="bytes"))
    alone = replace(report, peak=replace(report.peak, device_bytes=None))
    assert verdict(alone).startswith("Its tensors need 1.04 GiB at the peak, in backward (threshold_backward in 3)")
    fused = replace(report.scenario, optimizer="sgd", momentum=0.9, optimizer_impl="fused")
    assert optimizer_name(fused) == "SGD with momentum 0.9 (fused)"


def test_meter_is_explained(report: Report) -> None:
    assert "nvidia-smi shows more" in " ".join(render(report, View(verbose=True)).split())


def test_the_answer_comes_first_and_says_what_to_ask_next(report: Report) -> None:
    fit = GpuFit("l4", "L4", "sm_89", 20 << 30, "fits", 5 << 30, 0, ())
    peak = replace(report.peak, device_bytes=15 << 30, bands={**report.peak.bands, "device": Band(14 << 30, 18 << 30)})
    why = "the upper estimate is above 95 % of the card"
    for words, changed in (
        ("Fits an L4: needs 15.0 of 20.0 GiB, at most 18.0 GiB.", fit),
        (f"Tight on an L4: needs 15.0 of 20.0 GiB, at most 18.0 GiB.\nT{why[1:]}.", replace(fit, fit="tight", why=why)),
        (
            "Does not fit an L4: needs 15.0 of 20.0 GiB, 2.00 GiB short.",
            replace(fit, fit="does not fit", missing_bytes=2 << 30),
        ),
    ):
        answer, below, *_ = render(replace(report, gpu=changed, peak=peak)).split("\n\n")
        assert answer.startswith(words)
        assert below.startswith("Training seed.pt2, batch 2, Adam\n")
        assert answer.splitlines()[-1].startswith("Next: ")
        assert ("levers" in answer) == (changed.fit != "fits")


def test_the_answer_says_that_it_is_of_inference() -> None:
    """Who left the optimizer out reads it in the first line."""
    model = Path(__file__).resolve().parents[2] / "models" / "resnet18.pt2"
    for gpu, words in (
        (None, "Inference needs "),
        ("l4", "Fits an L4: inference needs "),
        ("300MiB", ": inference needs "),
    ):
        assert words in verdict(staticmem.analyze(model, batch=2, gpu=gpu)).partition(" (")[0]
        assert "nference needs" not in verdict(staticmem.analyze(model, batch=2, gpu=gpu, optimizer="adam"))


MIB, GIB = 1 << 20, 1 << 30
_CARD = GpuFit("l4", "L4", "sm_89", 20 * GIB, "fits", 0, 0, ())


@pytest.mark.parametrize(
    ("need", "high", "said"),
    [
        (10 * GIB, 12 * GIB, "Fits an L4: needs 10.0 of 20.0 GiB, at most 12.0 GiB."),
        (600 * MIB, 600 * MIB, "Fits an L4: needs 600 MiB of 20.0 GiB."),
        (10 * GIB, 10 * GIB + 1, "Fits an L4: needs 10.0 of 20.0 GiB."),
        (19 * GIB, 20 * GIB, "Tight on an L4: needs 19.0 of 20.0 GiB, in the worst case all of it."),
        (19 * GIB, 20 * GIB - 9 * MIB, "Tight on an L4: needs 19.0 of 20.0 GiB, in the worst case all but 9.00 MiB."),
        (
            20 * GIB - 9 * MIB,
            20 * GIB,
            "Tight on an L4: needs all but 9.00 MiB of 20.0 GiB, in the worst case all of it.",
        ),
        (20 * GIB, 20 * GIB, "Tight on an L4: needs all of 20.0 GiB."),
        (20 * GIB + 9 * MIB, 20 * GIB + 9 * MIB, "Does not fit an L4: needs 9.00 MiB more than 20.0 GiB."),
        (23 * GIB, 24 * GIB, "Does not fit an L4: needs 23.0 of 20.0 GiB, 3.00 GiB short."),
    ],
)
def test_sizes_that_look_the_same_are_told_as_a_difference(need: int, high: int, said: str) -> None:
    outcome = sizing.verdict(units.Band(need, need, high), _CARD.usable_bytes)
    card = replace(_CARD, fit=outcome.fit.value, missing_bytes=outcome.missing)
    assert fit_lines(card, need, Band(need, high), PLAIN) == [said]


def test_why_and_on_which_condition() -> None:
    card = replace(_CARD, fit="tight", why="it is so", condition="another wheel")
    only = "It runs there only with another wheel."
    first = "Tight on an L4 on a condition: needs 10.0 of 20.0 GiB."
    assert fit_lines(card, 10 * GIB, None, PLAIN) == [first, "It is so.", only]
    assert fit_lines(card, 10 * GIB, None, PLAIN, "It frees its cache.") == [first, "It frees its cache.", only]
    refused = replace(_CARD, fit="cannot run it", obstacle="it lacks bfloat16")
    without = "Without that, it would need 10.0 of 20.0 GiB."
    assert fit_lines(refused, 10 * GIB, None, PLAIN) == ["Cannot run on an L4: it lacks bfloat16.", without]
    small = replace(_CARD, fit="does not fit", missing_bytes=GIB, least_usable_bytes=21 * GIB)
    said = "Does not fit an L4: needs a card with 21.0 GiB; this one is 1.00 GiB short."
    assert fit_lines(small, 25 * GIB, None, PLAIN) == [said]
    said = "Does not fit an L4: needs a card with 21.0 GiB, at most 26.0 GiB; this one is 1.00 GiB short."
    assert fit_lines(small, 25 * GIB, Band(22 * GIB, 26 * GIB), PLAIN) == [said]
    best = "In the best case it needs 19.0 GiB, which fits."
    assert fit_lines(small, 25 * GIB, Band(19 * GIB, 26 * GIB), PLAIN) == [said, best]


@pytest.mark.parametrize(
    ("nbytes", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1.02 kB"),
        (MIB, "1.00 MiB", "1.05 MB"),
        (12 * MIB + MIB // 4, "12.3 MiB", "12.8 MB"),  # a half is rounded up
        (GIB - 1, "1.00 GiB", "1.07 GB"),
        (1010 * MIB, "1,010 MiB", "1.06 GB"),
        (999_500_000, "953 MiB", "1.00 GB"),
        (-123_456 * MIB, "-121 GiB", "-129 GB"),
    ],
)
def test_sizes_have_three_digits(nbytes: int, binary: str, decimal: str) -> None:
    assert (format_bytes(nbytes), format_bytes(nbytes, "decimal")) == (binary, decimal)
    assert format_bytes(nbytes, "bytes") == f"{nbytes:,} B"


@pytest.mark.parametrize(
    "name",
    "an A100 PCIe, an L4, an RTX A6000, an MI300X, an Arc B580, an H200, a Tesla T4, a GeForce RTX 4090, a B200, "
    "a V100, a GB200".split(", "),
)
def test_articles(name: str) -> None:
    assert with_article(name.split(" ", 1)[1]) == name


def test_notes_take_a_line_each_and_are_whole_on_request(report: Report) -> None:
    long = NoteInfo("SM999", "something is assumed, " * 8 + "and that is all", 1)
    changed = replace(report, assumptions=(long,))
    short = render(changed)
    assert "Assumptions (-v has them in full)\n  SM999  something is assumed, " in short
    assert "that is all" not in short
    assert "that is all" in render(changed, View(verbose=True))


@given(st.integers(20, 200), st.lists(st.text("abc .", min_size=1, max_size=60), min_size=2, max_size=6))
def test_a_table_fits_the_terminal(width: int, cells: list[str]) -> None:
    """Columns that may go are left out from the first on, and a line below names them; numbers are whole."""
    style, heads = Style(width=width), [f"head {i}" for i in range(len(cells))]
    rows = [[*heads, "number"], [*cells, "1234567"]]
    lines = columns(rows, style, right=(len(cells),), optional=range(len(cells) - 1, 0, -1))
    head, row, *below = lines
    assert head.endswith("number")
    assert row.endswith("1234567")
    assert max(map(len, lines)) <= max(width, 12 + 2 + 7)
    named = set(re.findall(r"head \d", " ".join(below)))
    assert {name for name in heads if name in head} | named == set(heads)


def test_what_is_left_out_is_named() -> None:
    rows = [["GPU", "needs", "left"], ["L4", "3.58 GiB", "18.46 GiB to spare"]]
    assert columns(rows, Style(width=40), right=(1,), optional=(2,)) == columns(rows, Style(), right=(1,))
    assert columns(rows, Style(width=30), right=(1,), optional=(2,))[-1] == "not shown at this width: left"
    without_heads = columns(rows, Style(width=30), right=(1,), optional=(2,), heads=False)
    assert without_heads == ["GPU     needs", "L4   3.58 GiB"]


def test_texts_are_cut_between_words() -> None:
    assert Style().cut("saved for the backward of conv1", 24) == "saved for the backward…"
    assert Style(unicode=False).cut("layer1.0.downsample.1", 18) == "layer1.0..."
    assert Style().cut("convolution", 6) == "convo…"
    assert Style().cut("whole", 5) == "whole"


def test_warnings_and_unknown_ops_come_last(report: Report) -> None:
    changed = replace(
        report,
        warnings=(NoteInfo("SM999", "BatchNorm was folded away", 53),),
        coverage=Coverage(OpCount(5, 0, 1), (UnknownOp("custom::f", 3, 4096),)),
    )
    text = render(changed)
    assert "unknown: custom::f, 3 calls, 4.00 KiB of results" in text
    assert "Coverage: 5 of 6 ops known" in text
    assert text.index("SM999  BatchNorm was folded away (53 places)") > text.index("Assumptions")


def test_control_characters_are_not_printed(report: Report) -> None:
    entry = replace(report.top_tensors[0], name="evil\x1b[2J\nname", module="m\x07")
    changed = replace(report, top_tensors=(entry,))
    text = render(changed)
    assert "\x1b" not in text
    assert "evil?[2J?name" in text


def test_what_a_file_does_not_say_of_training_is_asked_in_the_first_lines() -> None:
    """ONNX has no requires_grad, and no lines that would show checkpoints."""
    path = ROOT / "models" / "resnet18.onnx"
    open_ones = render(staticmem.analyze(path, batch=2, optimizer="adam"))
    first = " ".join(open_ones.partition("\n\n")[0].split())
    assert "does not say what is frozen and what runs in checkpoints" in first
    assert "--freeze none --checkpoint none" in first
    settled = staticmem.analyze(path, batch=2, optimizer="adam", freeze="none", checkpoint="none")
    assert "does not say" not in render(settled).partition("\n\n")[0]
    assert settled.peak.bands["live"].low > staticmem.analyze(path, batch=2, optimizer="adam").peak.bands["live"].low
