"""The page as text: escaping, policy, size, and what it holds; a browser's view of it is in test_page_browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import zlib
from pathlib import Path

import pytest
from html_pages import MODELS, hostile_model, large, study_of
from hypothesis import given
from hypothesis import strategies as st

from staticmem.cli.analyze import SLIDERS, without
from staticmem.cli.main import main
from staticmem.report.html import Extras, render
from staticmem.report.html.charts import timeline
from staticmem.report.html.page import (
    block,
    cut,
    esc,
    json_text,
    packed_text,
    stacked_bar,
    table,
    unpacked_text,
    visible,
)
from staticmem.report.json import dumps
from staticmem.report.sweep import LeverRow
from staticmem.scenario.request import Request
from staticmem.studies import Study
from staticmem.studies.page import extras, page


class Elements(html.parser.HTMLParser):
    """What a reader of HTML makes of a page: elements with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of(MODELS / "seed.pt2", batch=8, optimizer="adam", gpu="rtx-3060")


@pytest.fixture(scope="module")
def text(study: Study) -> str:
    return page(study, command="staticmem analyze models/seed.pt2 --batch 8")


def block_of(text: str, id: str) -> str:
    found = re.search(f'<script type="[^"]*" id="{id}">([^<]*)</script>', text)
    assert found is not None
    return found[1]


def test_it_asks_for_nothing(text: str) -> None:
    """No address but the name of the SVG namespace, no element that loads, no attribute that runs."""
    assert set(re.findall(r"[a-z]+://[^\s\"'`)]*", text)) == {"http://www.w3.org/2000/svg"}
    for tag, attributes in Elements(text).found:
        assert tag not in {"iframe", "object", "embed", "img", "form"} or tag == "form"
        assert not [key for key in attributes if key.startswith("on") or key in {"src", "style", "srcset", "action"}]
        assert tag != "link" or attributes == {"rel": "icon", "href": "data:,"}


def test_policy_allows_its_own_style_and_script_only(text: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    for tag in ("style", "script"):
        body = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]


def test_scripts_make_no_html_of_strings(text: str) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)


def test_the_report_in_it_is_that_of_the_json_format(study: Study, text: str) -> None:
    assert unpacked_text(block_of(text, "sm-report")) == dumps(study.report)


def test_the_same_report_gives_the_same_page(study: Study, text: str) -> None:
    again = study.ask(study.request)
    assert page(again, command="staticmem analyze models/seed.pt2 --batch 8") == text


def test_every_section_is_there_and_named_once(text: str) -> None:
    ids = [attributes["id"] for _, attributes in Elements(text).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {"meters", "fit", "timeline", "peak", "modules", "addresses", "what-if", "basis", "model"}
    assert wanted <= set(ids)
    links = {attributes["href"] for tag, attributes in Elements(text).found if tag == "a"}
    assert {f"#{id}" for id in wanted} <= links


def test_every_category_of_a_rank_has_a_colour_in_bars_and_charts() -> None:
    rank = Study.open(MODELS / "resnet18.pt2", Request(batch=2, optimizer="adam", parallel="fsdp", devices=2))
    categories = {buffer.category for buffer in rank.result.trace.buffers}
    assert "communication" in categories
    shown = page(rank)
    assert "c-plain" not in shown.partition('class="meters"')[2].partition("</section>")[0]  # no bar is of one colour
    colours = shown.partition("const CATEGORY_COLOURS = {")[2].partition("}")[0]
    for category in categories:
        assert f".c-{category} {{" in shown
        assert f"{category}: " in colours


def test_a_report_alone_is_a_page(study: Study) -> None:
    """As from a saved report: no charts, and no links to them."""
    text = render(study.report)
    assert 'id="timeline-chart"' not in text
    assert 'href="#timeline"' not in text
    assert 'id="tensors"' in text
    assert unpacked_text(block_of(text, "sm-report")) == dumps(study.report)


def test_timeline_is_the_step(study: Study) -> None:
    """The columns alone give the curve that the report is of."""
    found = timeline(study.result.graph, study.lifetimes)
    live = [0] * (found.ticks + 1)
    columns = {name: values for name, (_, values) in found.columns.items()}
    for born, life, size in zip(columns["born"], columns["life"], columns["size"], strict=True):
        live[born] += size * 512
        live[born + life] -= size * 512
    curve = [sum(live[: tick + 1]) for tick in range(found.ticks)]
    assert max(curve) == curve[found.peak_tick] == study.report.peak.live_bytes


def test_blocks_of_the_map_do_not_overlap(study: Study) -> None:
    found = extras(study).addresses
    assert found is not None
    assert found.reserved_bytes == max(
        sum(row.size for row in found.rows if row.start <= time < row.end) for time in range(found.events)
    )
    columns = {name: values for name, (_, values) in found.columns.items()}
    parts = zip(*(columns[name] for name in ("row", "offset", "size", "born", "life")), strict=True)
    blocks = sorted((row, offset, size, born, born + life) for row, offset, size, born, life in parts)
    for index, (row, offset, size, born, died) in enumerate(blocks):
        segment = found.rows[row]
        assert 0 <= offset * 512 <= (offset + size) * 512 <= segment.size
        assert segment.start <= born < died <= segment.end
        for other, at, _, start, end in blocks[index + 1 :]:
            if other != row or at >= offset + size:
                break
            assert end <= born or died <= start


def test_card_of_the_report_is_marked_and_agrees(study: Study) -> None:
    report = study.report
    asked = [card for card in extras(study).cards if card.asked]
    assert report.gpu is not None
    assert [card.slug for card in asked] == [report.gpu.slug]
    assert (asked[0].fit, asked[0].expected) == (report.gpu.fit, report.peak.device_bytes)


def test_levers_are_those_that_save_the_most_helpful_first(study: Study) -> None:
    peak = study.report.peak.live_bytes
    rows = (
        LeverRow("worse", "--worse", peak + 512, None, None, -512, 0, 0.0, "none", "", command="a --worse"),
        LeverRow("good <b>", "--good", peak // 2, None, None, peak // 2, 0, 0.33, "numerics", "", command="a --good"),
        LeverRow("best", "--best", peak // 4, None, None, peak // 4 * 3, 0, -0.5, "none", "", command="a --best"),
    )
    text = render(study.report, Extras(levers=rows))
    assert "<code>a --worse" not in text
    assert text.index("<code>a --best") < text.index("<code>a --good")
    assert "good &lt;b&gt;" in text
    assert "+33%" in text
    assert "\u221250%" in text


def test_what_is_left_out_is_said(study: Study) -> None:
    assert "staticmem levers" in " ".join(extras(study).left_out)
    assert extras(study, levers=()).left_out == ()


# -- names out of models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_hostile_names_are_text(tmp_path: Path, optimizer: str | None) -> None:
    path = hostile_model(tmp_path)
    text = page(study_of(path, batch=4, optimizer=optimizer), command=f"staticmem analyze '{path}'")
    safe = page(study_of(MODELS / "seed.pt2", batch=4, optimizer=optimizer), command="x")
    elements = Elements(text).found
    kinds = {tag for tag, _ in Elements(safe).found} | {"strong", "details", "summary"}
    assert {tag for tag, _ in elements} <= kinds
    assert not [key for _, attributes in elements for key in attributes if key.startswith("on")]
    assert "\u202e" not in text
    assert "\u2028" not in text
    assert "&lt;img src=x onerror=window.hacked=1&gt;" in text
    assert json.loads(unpacked_text(block_of(text, "sm-report")))["model"]["path"] == str(path)


@given(st.text())
def test_escaped_text_has_no_markup(raw: str) -> None:
    said = esc(raw)
    assert not re.search("[<>\"']", said)
    assert said.isprintable()
    assert not re.search(r"</|<!--|[\u2028\u2029]", json_text({"name": raw, raw: 1}))
    assert json.loads(json_text(raw)) == raw


@pytest.mark.parametrize(
    ("raw", "said"), [("a.b", "a.b"), ("a\nb", "a⟨000A⟩b"), ("\u202eab", "⟨202E⟩ab"), ("日本", "日本")]
)
def test_what_has_no_shape_is_spelled_out(raw: str, said: str) -> None:
    assert visible(raw) == said


def test_long_names_keep_both_ends() -> None:
    assert cut("a" * 400) == "a" * 400
    assert len(cut("a" * 300 + "b" * 300)) <= 400
    assert cut("a" * 300 + "b" * 300).endswith("b")


# -- columns -------------------------------------------------------------------------------------------------------


def unpacked_columns(packed: str) -> dict[str, list[int]]:
    """The page's reader (pack.js), again."""
    head, body = zlib.decompress(base64.b64decode(packed), -15).split(b"\n", 1)
    columns, at = {}, 0
    for name, kind, count, _ in json.loads(head)["columns"]:
        values, last = [], 0
        for _ in range(count):
            value = shift = 0
            while True:
                byte = body[at]
                at += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            if kind == "delta":
                last += value // 2 if value % 2 == 0 else -(value + 1) // 2
                value = last
            values.append(value)
        columns[name] = values
    return columns


@given(st.lists(st.integers(0, 2**45)), st.lists(st.integers(-(2**45), 2**45)))
def test_columns_come_back(plain: list[int], delta: list[int]) -> None:
    packed = block({"plain": ("plain", plain), "delta": ("delta", delta)})
    assert unpacked_columns(packed) == {"plain": plain, "delta": delta}


def test_a_negative_number_is_not_plain() -> None:
    with pytest.raises(ValueError, match="-1 in an unsigned column"):
        block({"plain": ("plain", [-1])})


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_packed_text_comes_back(raw: str) -> None:
    assert unpacked_text(packed_text(raw)) == raw


# -- pieces that other pages use ------------------------------------------------------------------------------------


def test_table_marks_numbers_and_escapes_heads() -> None:
    text = table(("<a>", "Bytes"), [("x", "1")], right=(1,), caption="A & B")
    assert "&lt;a&gt;" in text
    assert '<td class="num">1</td>' in text
    assert 'aria-label="A &amp; B"' in text


def test_bar_segments_lie_one_after_another() -> None:
    text = stacked_bar([("a", 0.25, "one"), ("b", 0.5, "two"), ("c", 0.0, "none")], "label", (0.5, 0.9))
    assert re.findall(r'x="([\d.]+)" y="4" width="([\d.]+)"', text) == [("0.00", "250.00"), ("250.00", "500.00")]
    assert 'd="M500.00 1V23M500.00 12H900.00M900.00 1V23"' in text


# -- the command line ----------------------------------------------------------------------------------------------


def test_the_suffix_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    words = ["analyze", str(MODELS / "seed.pt2"), "--batch", "4", "--optimizer", "sgd", "-o", str(target)]
    assert main(words) == 0
    assert capsys.readouterr().err == f"Wrote {target}\n"
    text = target.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert f"--batch 4 --optimizer sgd -o {target}" in text
    assert '<section id="levers"' in text
    assert "--amp bf16" in text
    what_if = json.loads(block_of(text, "sm-what-if"))
    assert what_if["command"] == f"staticmem analyze {MODELS / 'seed.pt2'}"
    assert main(words) == 2  # it exists


def test_a_saved_report_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, target = tmp_path / "saved.json", tmp_path / "again.html"
    assert main(["analyze", str(MODELS / "seed.pt2"), "--batch", "4", "-o", str(saved)]) == 0
    assert main(["report", str(saved), "-o", str(target)]) == 0
    capsys.readouterr()
    held = unpacked_text(block_of(target.read_text(encoding="utf-8"), "sm-report"))
    assert json.loads(held)["peak"]["live_bytes"] == json.loads(saved.read_text(encoding="utf-8"))["peak"]["live_bytes"]


def test_units_are_those_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(MODELS / "seed.pt2"), "--batch", "4", "-f", "html", "--units", "decimal"]) == 0
    assert not re.search(r"\d [KMG]iB<", capsys.readouterr().out)


def test_flags_are_taken_out_in_every_form() -> None:
    words = ["analyze", "m.pt2", "-b8", "--batch=8", "--batch", "8", "-b", "8", "--dim", "s=2", "--force", "-o", "x"]
    assert without(words, SLIDERS) == ["analyze", "m.pt2", "--dim", "s=2"]


# -- size ----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_graph_of_ten_thousand_ops_is_below_two_megabytes() -> None:
    study, text = large()
    assert study.report.model.ops == 10_000
    assert len(text.encode()) < 2_000_000
    assert 'id="sm-timeline"' in text
    assert 'id="sm-addresses"' in text
