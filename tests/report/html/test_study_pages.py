"""The pages of a sweep and of a diff: what they hold, that they are safe, and that their tables sort in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, find

import staticmem
from staticmem.cli.main import main
from staticmem.report.diff import diff
from staticmem.report.formats import diff_html, sweep_html
from staticmem.report.formats.sweep import verdict
from staticmem.report.json import to_json
from staticmem.report.model import Report
from staticmem.report.sweep import Sweep
from staticmem.report.text import PLAIN

MODELS = Path(__file__).resolve().parents[3] / "models"
SEED = str(MODELS / "seed.pt2")
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J"


@pytest.fixture(scope="module")
def swept() -> Sweep:
    axes: dict[str, Any] = {"batch": [16, 2, 4], "optimizer": ["sgd", "adam"]}
    return staticmem.sweep(SEED, axes, gpus=["l4", "t4"])


@pytest.fixture(scope="module")
def pair() -> tuple[Report, Report]:
    return staticmem.analyze(SEED, batch=2, optimizer="sgd"), staticmem.analyze(SEED, batch=8, optimizer="adam")


class Tags(HTMLParser):
    """Elements of a page, and the texts of its table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.cells += tag == "td"
        assert not [key for key, _ in attrs if key.startswith("on") or key in {"src", "style", "action"}]


def block(text: str, id: str) -> object:
    match = re.search(f'<script type="application/json" id="{id}">([^<]*)</script>', text)
    assert match is not None
    return json.loads(match[1])


def test_a_sweep_has_a_row_for_each_configuration_and_a_line_for_each_optimizer(swept: Sweep) -> None:
    text = sweep_html.render(swept)
    assert verdict(swept) in text
    assert block(text, "sm-sweep") == to_json(swept)
    assert Tags(text).cells == 6 * (1 + 2 + 2 + 2 * 2)  # number, axes, live and phase, need and verdict of two cards
    assert text.count("<polyline") == 2 * 2  # for each card, for each optimizer
    assert text.count('<circle class="dot') == 2 * 6


def test_points_of_a_line_are_the_figures_of_its_rows(swept: Sweep) -> None:
    text = sweep_html.render(swept)
    for row in swept.rows:
        for card in row.cards:
            assert card.device_bytes is not None
            optimizer, batch = row.settings["optimizer"], row.settings["batch"]
            need = PLAIN.size(card.device_bytes)
            assert f"<title>optimizer {optimizer} at {batch}: {need}</title>" in text


def test_a_sweep_of_words_has_no_chart() -> None:
    text = sweep_html.render(staticmem.sweep(SEED, {"optimizer": ["sgd", "adam"]}))
    assert "<polyline" not in text
    assert Tags(text).cells == 2 * (1 + 1 + 2)


def test_errors_are_rows(swept: Sweep) -> None:
    failed = staticmem.sweep(SEED, {"resolution": [8, 1 << 39]})
    assert any(row.error is not None for row in failed.rows)
    text = sweep_html.render(failed)
    for row in failed.rows:
        assert row.error is None or f"[{row.error.code}]" in text


def test_a_diff_has_every_row_of_the_terminal(pair: tuple[Report, Report]) -> None:
    changes = diff(*pair)
    text = diff_html.render(changes)
    assert block(text, "sm-diff") == to_json(changes)
    for change in (*changes.meters, *changes.categories):
        assert change.delta is None or change.name.split("_")[0] in text
    assert Tags(text).tags.count("h1") == 1


def test_names_are_text(swept: Sweep, pair: tuple[Report, Report]) -> None:
    rows = tuple(replace(row, model=HOSTILE, name=HOSTILE, phase=HOSTILE) for row in swept.rows)
    for text in (
        sweep_html.render(replace(swept, models=(HOSTILE, SEED), rows=rows, gpus=(HOSTILE, "t4"))),
        diff_html.render(diff(pair[0], replace(pair[1], model=replace(pair[1].model, path=HOSTILE)))),
    ):
        assert "img" not in Tags(text).tags
        assert "\x1b" not in text


def test_they_ask_for_nothing(swept: Sweep, pair: tuple[Report, Report]) -> None:
    for text in (sweep_html.render(swept), diff_html.render(diff(*pair))):
        assert not re.findall(r"[a-z]+://(?!www\.w3\.org/2000/svg)", text)
        assert "default-src 'none'" in text


def test_the_suffix_chooses_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "sweep.html"
    assert main(["sweep", SEED, "--what-if", "batch=1,2", "-o", str(target)]) == 0
    assert target.read_text("utf-8").startswith("<!doctype html>")
    saved = []
    for batch in ("1", "2"):
        saved.append(str(tmp_path / f"{batch}.json"))
        assert main(["analyze", SEED, "--batch", batch, "-o", saved[-1]]) == 0
    assert main(["diff", *saved, "-o", str(tmp_path / "diff.html")]) == 0
    assert "Peak grows by" in (tmp_path / "diff.html").read_text("utf-8")
    capsys.readouterr()


@pytest.fixture
def opened(swept: Sweep, tmp_path: Path) -> Iterator[Page]:
    executable = find()
    if executable is None:
        pytest.skip("no Chromium: apt-get install chromium")
    path = tmp_path / "sweep.html"
    path.write_text(sweep_html.render(swept), "utf-8")
    browser = Browser(executable, tmp_path / "profile")
    page = browser.open(path)
    yield page
    assert page.problems == []
    page.close()
    browser.close()


def test_a_head_sorts_the_table_and_a_second_click_turns_it(opened: Page) -> None:
    click = "document.querySelectorAll('#rows th button')[1].click()"
    batches = "[...document.querySelectorAll('#rows tbody tr')].map((row) => row.cells[1].textContent)"
    assert opened.js(batches) == ["16", "16", "2", "2", "4", "4"]
    opened.js(click)
    assert opened.js(batches) == ["2", "2", "4", "4", "16", "16"]
    opened.js(click)
    assert opened.js(batches) == ["16", "16", "4", "4", "2", "2"]
    assert opened.js("document.querySelector('#rows th[aria-sort]').getAttribute('aria-sort')") == "descending"
