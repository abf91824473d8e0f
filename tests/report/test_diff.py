"""Diffs add up; headline, Markdown and exit codes are those that a pull request needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from staticmem import analyze
from staticmem.cli.main import main
from staticmem.report.diff import diff
from staticmem.report.formats.diff import headline, render, render_markdown
from staticmem.report.markdown import code, escape
from staticmem.report.model import Report
from staticmem.report.text import View

MODELS = Path(__file__).resolve().parents[2] / "models"


@pytest.fixture(scope="module")
def small() -> Report:
    return analyze(MODELS / "resnet18.pt2", batch=2, optimizer="adam")


@pytest.fixture(scope="module")
def large() -> Report:
    return analyze(MODELS / "resnet18.pt2", batch=16, optimizer="sgd")


def test_parts_add_up(small: Report, large: Report) -> None:
    found = diff(small, large)
    assert found.live.delta == large.peak.live_bytes - small.peak.live_bytes
    for rows in (found.categories, found.modules):
        assert sum(row.delta or 0 for row in rows) == found.live.delta
    assert sum(t.delta for t in (*found.new, *found.gone, *found.changed)) == found.live.delta
    assert found.complete
    assert {name for name, _, _ in found.settings} >= {"batch", "optimizer"}


def test_what_a_saved_report_does_not_list_is_not_told(small: Report, large: Report) -> None:
    """A tensor below the ten largest is neither new nor gone."""
    cut = replace(small, alive=small.alive[:10])
    for found in (diff(cut, large), diff(large, cut), diff(cut, cut)):
        assert not found.complete
        assert (found.new, found.gone, found.changed) == ((), (), ())
        assert "tensors at the peak" not in render(found)
        assert "Tensors are not compared" in render(found)
        assert "Tensors are not compared" in render_markdown(found)


def test_tensors_have_their_dtype(small: Report) -> None:
    half = analyze(MODELS / "resnet18.pt2", batch=2, optimizer="adam", dtype="bf16")
    text = render(diff(small, half), View(top=500))
    assert "conv1.weight  float32[64, 3, 7, 7]" in text
    assert "conv1.weight  bfloat16[64, 3, 7, 7]" in text


def test_order_of_sides(small: Report, large: Report) -> None:
    there, back = diff(small, large), diff(large, small)
    assert [(m.before, m.after) for m in there.meters] == [(m.after, m.before) for m in back.meters]
    assert {t.name for t in there.new} == {t.name for t in back.gone}


def test_nothing_changed(small: Report) -> None:
    found = diff(small, small)
    for rows in (found.settings, found.categories, found.modules, found.new, found.gone, found.changed):
        assert rows == ()
    assert headline(found).startswith("Peak stays at ")


def test_headline(small: Report) -> None:
    peak = replace(small.peak, live_bytes=3 << 30)
    before, after = replace(small, peak=peak), replace(small, peak=replace(peak, live_bytes=4 << 30))
    assert headline(diff(before, after)) == "Peak grows by 1.00 GiB (+33.3 %), from 3.00 GiB to 4.00 GiB."
    assert headline(diff(after, before)) == "Peak shrinks by 1.00 GiB (-25.0 %), from 4.00 GiB to 3.00 GiB."


def test_headline_with_a_card() -> None:
    def fit(batch: int) -> Report:
        return analyze(MODELS / "resnet18.pt2", batch=batch, optimizer="adam", gpu="8GB")

    small, large = fit(8), fit(1024)
    assert small.gpu is not None
    assert headline(diff(small, large)).endswith(f"; no longer fits: {small.gpu.name}.")
    assert headline(diff(large, small)).endswith(f"; now fits: {small.gpu.name}.")
    assert small.gpu.name not in headline(diff(small, small))


def test_text_and_markdown_begin_with_the_headline(small: Report, large: Report) -> None:
    found = diff(small, large)
    assert render(found, View(top=3)).startswith(f"{headline(found)}\n\n")
    text = render_markdown(found, View(top=3))
    assert text.startswith(f"**{escape(headline(found))}**")
    assert text.count("<details>") == text.count("</details>") == 1


HOSTILE = ["`rm`", "a|b", "<img src=x>", "@everyone", "[x](http://e)", "two\nlines", "``` ```", "\x1b[31m"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text(small: Report, name: str) -> None:
    alive = tuple(replace(t, name=name, module=name) for t in small.alive)
    text = render_markdown(diff(small, replace(small, alive=alive)))
    assert "\x1b" not in text
    for line in text.splitlines():
        if line.startswith("|"):  # the name is in a code span, and opens no further column
            assert line.replace("\\|", "").count("|") in (4, 5)
    assert "\x1b" not in render(diff(small, replace(small, alive=alive)))


def test_markdown_escapes() -> None:
    assert code("a`b") == "`` a`b ``"
    assert code("") == ""
    assert "<" not in escape("<b>")
    assert escape("*x*") == "\\*x\\*"
    assert escape("5 - 3 (two)") == "5 - 3 (two)"
    assert "://" not in escape("https://example.org")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["diff", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, saved = str(MODELS / "resnet18.pt2"), str(tmp_path / "a.json")
    words = ("--batch", "2", "--optimizer", "adam")
    assert main(["analyze", model, *words, "-o", saved]) == 0
    status, out, _ = run(capsys, saved, model, "--batch", "4", "--optimizer", "adam")
    assert status == 0
    assert "batch: 2 -> 4" in out
    assert "--explain-peak" in out  # the saved report is not complete
    status, out, _ = run(capsys, saved, model, *words, "-f", "json")
    found = json.loads(out)
    assert found["schema"] == "staticmem.diff/1"
    assert found["meters"][0]["delta"] == 0


def test_two_configs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, batch, optimizer in (("a", 2, "adam"), ("b", 4, "sgd")):
        text = f"version: 1\nmodel: {MODELS / 'resnet18.pt2'}\ntrain: {{batch: {batch}, optimizer: {optimizer}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    sides = (str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    status, out, _ = run(capsys, *sides, "-f", "json")
    assert status == 0
    meters = json.loads(out)["meters"]
    expected = [
        analyze(MODELS / "resnet18.pt2", batch=b, optimizer=o).peak.live_bytes for b, o in ((2, "adam"), (4, "sgd"))
    ]
    assert [meters[0]["before"], meters[0]["after"]] == expected
    status, out, _ = run(capsys, *sides, "--batch", "1", "-f", "json")  # flags hold over both
    assert ["batch"] not in [row[:1] for row in json.loads(out)["settings"]]


@pytest.mark.parametrize(("limit", "status"), [("0", 1), ("1GiB", 0), ("1000%", 0), ("0.5%", 1)])
def test_max_increase(capsys: pytest.CaptureFixture[str], limit: str, status: int, tmp_path: Path) -> None:
    model, saved = str(MODELS / "resnet18.pt2"), str(tmp_path / "a.json")
    assert main(["analyze", model, "--batch", "2", "-o", saved]) == 0
    capsys.readouterr()
    found, _, err = run(capsys, saved, model, "--batch", "4", "--max-increase", limit)
    assert found == status
    assert ("max-increase: the peak grows by" in err) == (status == 1)


def test_wrong_limits(capsys: pytest.CaptureFixture[str]) -> None:
    for limit in ("much", "-5%", "x%", "1e9%"):
        assert run(capsys, "a.json", "b.json", f"--max-increase={limit}")[0] == 2
