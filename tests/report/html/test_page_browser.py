"""The page in a real browser: what a user sees, points at and moves. Skipped where there is no Chromium.

apt-get install chromium, or STATICMEM_CHROMIUM=/path/to/chrome
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, find
from html_pages import HOSTILE, MODELS, hostile_model, large, study_of, write_page

import staticmem
from staticmem.report.json import dumps
from staticmem.studies import Study
from staticmem.studies.owners import with_owners
from staticmem.studies.page import page as page_of

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium: apt-get install chromium")

LEFT = 76  # chart.js: where the axis of ticks begins


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find()
    assert executable is not None
    found = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of(MODELS / "resnet18.pt2", batch=8, optimizer="adam", gpu="rtx-3060")


@pytest.fixture(scope="module")
def path(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(study, tmp_path_factory.mktemp("page") / "report.html", command="staticmem analyze it")


@pytest.fixture
def page(browser: Browser, path: Path) -> Iterator[Page]:
    found = browser.open(path)
    yield found
    assert found.problems == []
    found.close()


def view(page: Page, chart: str = "timeline") -> tuple[int, int]:
    first, end = page.js(f"[staticmem.{chart}.first, staticmem.{chart}.end]")
    return first, end


def middle(page: Page, selector: str) -> tuple[float, float]:
    left, top, width, height = page.box(selector)
    return left + width / 2, top + height / 2


def put(page: Page, id: str, value: object, event: str) -> None:
    """Gives a control a value, as a user would."""
    page.js(
        f"(e => {{ e.focus(); e.value = {json.dumps(value)}; e.dispatchEvent(new Event('{event}')); }})"
        f"(document.getElementById('{id}'))"
    )


# -- it loads ------------------------------------------------------------------------------------------------------


def test_it_asks_the_network_for_nothing(page: Page, path: Path) -> None:
    assert page.requests == [path.resolve().as_uri()]
    blocked = page.js("fetch('https://example.com').then(() => 'sent', () => 'blocked')")
    assert blocked == "blocked"
    page.browser.events = [e for e in page.browser.events if e["method"] not in ("Log.entryAdded",)]  # our own try


def test_timeline_reaches_the_peak_of_the_report(page: Page, study: Study) -> None:
    peak = study.report.peak.live_bytes
    assert page.js("staticmem.timeline.source.most") == peak
    assert page.js("staticmem.timeline.source.total[staticmem.timeline.source.peak_tick]") == peak
    assert page.js("document.getElementById('peak-bytes').dataset.bytes") == str(peak)


def test_categories_at_the_peak_are_those_of_the_report(page: Page, study: Study) -> None:
    shown = page.js(
        "(t => Object.fromEntries(t.categories.map((name, i) => [name, t.levels[i][t.peak_tick]])))"
        "(staticmem.timeline.source)"
    )
    assert shown == study.report.peak.by_category


def test_no_column_of_pixels_loses_the_peak(page: Page, study: Study) -> None:
    """However far out: the tallest tick of what a column stands for is drawn."""
    page.js("staticmem.timeline.show(0, staticmem.timeline.source.length)")
    drawn = page.js(
        "(c => Math.max(...[...c.source.columnsOf(c.pen(c.canvas))].map(([, , tick]) => c.source.total[tick])))"
        "(staticmem.timeline)"
    )
    assert drawn == study.report.peak.live_bytes


def test_the_embedded_report_is_the_json_format(page: Page, study: Study) -> None:
    assert page.js("staticmem.reportText()") == dumps(study.report)


def test_download_is_the_report(page: Page, study: Study) -> None:
    page.js(
        "URL.createObjectURL = blob => { window.saved = blob.text(); return 'blob:x'; };"
        "HTMLAnchorElement.prototype.click = function () { window.savedAs = this.download; };"
        "document.getElementById('download').click()"
    )
    page.wait("window.saved !== undefined")
    assert page.js("window.saved") == dumps(study.report)
    assert page.js("window.savedAs") == "resnet18.pt2.json"


# -- pointing ------------------------------------------------------------------------------------------------------


def test_hover_names_the_tensor(page: Page, study: Study) -> None:
    """At the peak, at the height where an activation lies that is large enough to point at."""
    page.js("staticmem.timeline.show(0, staticmem.timeline.source.length)")
    left, top, width, height = page.box("#timeline-chart canvas.main")
    wanted = page.js(
        "(t => { const i = t.categories.indexOf('activation'), tick = t.peak_tick;"
        " let below = 0; for (const k of t.order) { if (k === i) break; below += t.levels[k][tick]; }"
        " const alive = t.members[i].filter(b => t.columns.born[b] <= tick && tick < t.died[b]);"
        " const k = alive.findIndex((b, at) => at > 5 && t.columns.size[b] * 512 > t.ceiling / 60);"
        " for (const b of alive.slice(0, k)) below += t.columns.size[b] * 512;"
        " const size = t.columns.size[alive[k]] * 512;"
        " return [below + size / 2, t.ceiling, tick, t.length, size]; })(staticmem.timeline.source)"
    )
    height_bytes, ceiling, tick, length, size = wanted
    x = left + LEFT + (tick + 0.5) / length * (width - LEFT)
    plot = page.js("[TOP, BOTTOM]")
    y = top + height - plot[1] - height_bytes / ceiling * (height - plot[0] - plot[1])
    page.move(x, y)
    tip = page.js("document.querySelector('#timeline-chart .tip').innerText")
    found = page.js("staticmem.timeline.found.title")
    entry = next(entry for entry in study.report.alive if entry.name == found)
    assert entry.bytes == size
    assert f"{size:,} B" in tip
    for part in (entry.name, entry.module, entry.op, entry.dtype, ", ".join(map(str, entry.shape)), "forward, event"):
        assert part in tip
    assert found in page.js("document.querySelector('#timeline-chart .now').textContent")
    page.move(left + width / 2, top - 60)
    assert page.js("document.querySelector('#timeline-chart .tip').hidden") is True


def test_above_the_stack_it_says_the_moment(page: Page) -> None:
    left, top, width, _ = page.box("#timeline-chart canvas.main")
    page.move(left + width - 30, top + 60)
    assert "alive" in page.js("document.querySelector('#timeline-chart .tip .title').textContent")
    assert "optimizer" in page.js("document.querySelector('#timeline-chart .now').textContent")


def test_wheel_zooms_where_the_pointer_is_once_chosen(page: Page) -> None:
    first, end = view(page)
    x, y = middle(page, "#timeline-chart canvas.main")
    page.wheel(x, y, -400)
    assert view(page) == (first, end)  # the page scrolls
    page.click(*middle(page, "#timeline-chart canvas.main"))
    page.wheel(*middle(page, "#timeline-chart canvas.main"), -400)
    page.wait(f"staticmem.timeline.end - staticmem.timeline.first < {(end - first) * 0.6}")
    closer = view(page)
    assert first < closer[0] < closer[1] < end


def test_drag_moves_and_buttons_zoom(page: Page) -> None:
    left, top, width, height = page.box("#timeline-chart canvas.main")
    whole = view(page)
    page.click(*middle(page, "#timeline-chart [data-do='in']"))
    page.click(*middle(page, "#timeline-chart [data-do='in']"))
    first, end = view(page)
    assert end - first == pytest.approx((whole[1] - whole[0]) / 4, abs=2)
    left, top, width, height = page.box("#timeline-chart canvas.main")
    page.drag(left + 700, top + height / 2, left + 500, top + height / 2)
    moved = view(page)
    assert moved[0] - first == pytest.approx(200 / (width - LEFT) * (end - first), abs=3)
    assert moved[1] - moved[0] == end - first
    page.click(*middle(page, "#timeline-chart [data-do='all']"))
    assert view(page) == whole
    page.click(*middle(page, "#timeline-chart [data-do='peak']"))
    first, end = view(page)
    assert first <= page.js("staticmem.timeline.source.peak_tick") < end


def test_overview_selects_a_range(page: Page) -> None:
    left, top, width, height = page.box("#timeline-chart canvas.overview")
    page.drag(left + LEFT + 100, top + height / 2, left + LEFT + 400, top + height / 2)
    length = page.js("staticmem.timeline.source.length")
    first, end = view(page)
    assert first == pytest.approx(100 / (width - LEFT) * length, abs=3)
    assert end == pytest.approx(400 / (width - LEFT) * length, abs=3)


def test_keyboard_walks_zooms_and_climbs(page: Page) -> None:
    page.js("document.querySelector('#timeline-chart canvas.main').focus()")
    first, end = view(page)
    page.key("+", text="+")
    page.key("+", text="+")
    assert view(page)[1] - view(page)[0] == pytest.approx((end - first) / 4, abs=2)
    page.key("0", text="0")
    assert view(page) == (first, end)
    page.key("p", text="p")
    assert page.js("staticmem.timeline.cursor") == page.js("staticmem.timeline.source.peak_tick")
    before = page.js("staticmem.timeline.cursor")
    page.key("ArrowRight")
    assert page.js("staticmem.timeline.cursor") == before + 1
    page.key("ArrowUp")
    lower = page.js("staticmem.timeline.found.buffer")
    page.key("ArrowUp")
    assert page.js("staticmem.timeline.found.buffer") != lower
    page.key("ArrowDown")
    assert page.js("staticmem.timeline.found.buffer") == lower
    page.key("Escape")
    assert page.js("document.activeElement === document.body")


def test_legend_takes_categories_away(page: Page, study: Study) -> None:
    page.js("document.querySelector('#legend [data-category=activation]').click()")
    assert page.js("document.querySelector('#legend [data-category=activation]').ariaPressed") == "false"
    without = study.report.peak.live_bytes - study.report.peak.by_category["activation"]
    assert page.js("staticmem.timeline.source.total[staticmem.timeline.source.peak_tick]") == without
    page.js("document.querySelector('#legend [data-category=activation]').click()")
    assert page.js("staticmem.timeline.source.most") == study.report.peak.live_bytes


def test_a_card_is_a_line(page: Page, study: Study) -> None:
    """Not at first, where it has room for many times the peak; then the axis reaches it."""
    gpu = study.report.gpu
    assert gpu is not None
    assert page.js("staticmem.timeline.source.capacity") is None
    options = page.js("[...document.getElementById('capacity').options].map(o => o.text)")
    put(page, "capacity", str(next(i for i, text in enumerate(options) if gpu.name in text) - 1), "change")
    assert page.js("staticmem.timeline.source.capacity.bytes") == gpu.usable_bytes
    assert page.js("staticmem.timeline.source.ceiling") > gpu.usable_bytes


def test_the_asked_card_is_a_line_where_it_is_near(browser: Browser, tmp_path: Path) -> None:
    study = study_of(MODELS / "resnet18.pt2", batch=250, optimizer="adam", gpu="rtx-3070")
    page = browser.open(write_page(study, tmp_path / "near.html"))
    gpu = study.report.gpu
    assert gpu is not None
    assert study.report.peak.live_bytes > gpu.usable_bytes / 2.5
    assert page.js("staticmem.timeline.source.capacity.bytes") == gpu.usable_bytes
    assert page.problems == []
    page.close()


def test_address_map_names_blocks(page: Page) -> None:
    most = page.js("staticmem.addresses.source.most")
    left, top, width, height = page.box("#address-chart canvas.main")
    target = page.js(
        "(a => { const c = a.columns; let best = 0; const area = i => c.buffer[i] ? c.size[i] * c.life[i] : 0;"
        " for (let i = 0; i < c.row.length; i++) if (area(i) > area(best)) best = i;"
        " return [a.base[c.row[best]] + (c.offset[best] + c.size[best] / 2) * 512, c.born[best] + c.life[best] / 2,"
        " a.timeline.words[a.timeline.columns.name[c.buffer[best] - 1]]]; })(staticmem.addresses.source)"
    )
    at, event, name = target
    plot = page.js("[TOP, BOTTOM]")
    x = left + LEFT + event / page.js("staticmem.addresses.source.length") * (width - LEFT)
    page.move(x, top + height - plot[1] - at / most * (height - plot[0] - plot[1]))
    tip = page.js("document.querySelector('#address-chart .tip').innerText")
    assert name in tip
    assert "0x" in tip


# -- modules -------------------------------------------------------------------------------------------------------


def test_icicle_adds_up_and_is_walked_by_keys(page: Page, study: Study) -> None:
    assert page.js("staticmem.icicle.root.bytes") == study.report.peak.live_bytes
    layers = sum(row.bytes for row in study.report.peak.by_module if row.module.split(".")[0] == "layer1")
    assert page.js("staticmem.icicle.root.children.get('layer1').bytes") == layers
    page.js("document.querySelector('#icicle g').focus()")
    page.key("ArrowDown")
    path = page.js("document.activeElement.dataset.path")
    assert path
    page.key("Enter")
    assert page.js("staticmem.icicle.top.path") == path
    page.key("Backspace")
    assert page.js("staticmem.icicle.top.path") == ""


def test_icicle_of_owners_adds_up_and_is_walked_by_keys(browser: Browser, study: Study, tmp_path: Path) -> None:
    report = with_owners(study, study.report)
    target = tmp_path / "owners.html"
    target.write_text(page_of(study, report), encoding="utf-8")
    page = browser.open(target)
    assert page.js("staticmem.owners.root.bytes") == report.peak.live_bytes
    assert page.js("staticmem.owners.root.children.size") == len(report.owners)
    largest = report.owners[0]
    assert page.js(f"staticmem.owners.root.children.get({largest.owner!r}).bytes") == largest.bytes
    page.js("document.querySelector('#owners-icicle g').focus()")
    page.key("ArrowDown")
    assert page.js("document.activeElement.dataset.path") == largest.owner
    page.key("Enter")
    assert page.js("staticmem.owners.top.path") == largest.owner
    assert page.js("staticmem.icicle.top.path") == ""
    page.key("Backspace")
    assert page.js("staticmem.owners.top.path") == ""
    assert page.problems == []
    page.close()


def test_filter_of_tensors(page: Page, study: Study) -> None:
    put(page, "tensor-filter", "layer1 relu", "input")
    shown = page.js(
        "[...document.querySelectorAll('#tensors tbody tr')].filter(r => !r.hidden).map(r => r.textContent)"
    )
    assert 0 < len(shown) < 50
    assert all("layer1" in text and "relu" in text for text in shown)


# -- sliders -------------------------------------------------------------------------------------------------------


def slide(page: Page, batch: int, **selected: str) -> int | None:
    for id, value in selected.items():
        put(page, id, value, "change")
    put(page, "batch", batch, "input")
    shown = page.js("document.getElementById('what-if-peak').dataset.bytes")
    return None if shown is None else int(shown)


@pytest.mark.parametrize(
    ("batch", "selected", "words"),
    [
        (8, {}, {"optimizer": "adam"}),
        (1, {}, {"optimizer": "adam"}),
        (37, {"optimizer": "SGD, momentum 0.9"}, {"optimizer": "sgd", "momentum": 0.9}),
        (100, {"precision": "autocast to bfloat16"}, {"optimizer": "adam", "amp": "bfloat16"}),
        (513, {"precision": "bfloat16 model", "optimizer": "SGD"}, {"optimizer": "sgd", "dtype": "bfloat16"}),
    ],
)
def test_sliders_say_what_analyze_says(page: Page, batch: int, selected: dict[str, str], words: dict[str, Any]) -> None:
    report = staticmem.analyze(MODELS / "resnet18.pt2", batch=batch, **words)
    assert slide(page, batch, **selected) == report.peak.live_bytes
    command = page.js("document.getElementById('what-if-command').textContent")
    assert f"--batch {batch}" in command
    assert f"--optimizer {words['optimizer']}" in command


def test_resolutions_of_an_open_model(browser: Browser, tmp_path: Path) -> None:
    study = study_of(MODELS / "vgg16_hw.pt2", batch=2, optimizer="sgd", resolution=128)
    page = browser.open(write_page(study, tmp_path / "hw.html"))
    assert slide(page, 2) == study.report.peak.live_bytes
    wanted = staticmem.analyze(MODELS / "vgg16_hw.pt2", batch=12, optimizer="sgd", resolution=192)
    assert slide(page, 12, resolution="192 \u00d7 192") == wanted.peak.live_bytes
    assert "--resolution 192x192" in page.js("document.getElementById('what-if-command').textContent")
    assert page.problems == []
    page.close()


def test_the_range_sets_the_batch(page: Page) -> None:
    put(page, "batch-range", 1000, "input")
    assert page.js("staticmem.whatIf.batch") == page.js("staticmem.whatIf.model.base.high")
    assert slide(page, 8) == page.js("staticmem.settings.peak_bytes")


def test_a_setting_without_a_form_says_so(page: Page) -> None:
    first = "staticmem.whatIf.model.settings[1]"
    other, precision = page.js(f"{first}.optimizer"), page.js(f"{first}.precision")
    page.js(
        f"const {{optimizer, precision}} = {first}; for (const one of staticmem.whatIf.model.settings)"  # at each size
        " if (one.optimizer === optimizer && one.precision === precision) {delete one.moments; one.reason = 'because';}"
    )
    assert slide(page, 8, optimizer=other, precision=precision) is None
    assert "because" in page.js("document.getElementById('what-if-reason').textContent")


# -- looks ---------------------------------------------------------------------------------------------------------


def test_theme_follows_the_system_and_the_button(browser: Browser, path: Path) -> None:
    page = browser.open(path, dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.js(background)
    page.click(*middle(page, "#theme"))
    light = page.js(background)
    assert page.js("document.documentElement.dataset.theme") == "light"
    assert dark != light == "rgb(255, 255, 255)"
    page.click(*middle(page, "#theme"))
    assert page.js(background) == dark
    page.click(*middle(page, "#theme"))
    assert page.js("document.documentElement.dataset.theme") is None
    assert page.problems == []
    page.close()


def test_text_is_legible_in_both_themes(browser: Browser, path: Path) -> None:
    """WCAG 2.1, 1.4.3: a contrast of 4.5 for text, measured on the colours that the page uses for it."""
    for dark in (False, True):
        page = browser.open(path, dark=dark)
        ratios = page.js(
            """(() => {
              const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
                .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
              const light = (name) => (([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b)(parse(colour(name)));
              const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
              const inks = ["ink", "soft", "link", "good", "warn", "bad"];
              const pairs = inks.flatMap((ink) => [[ink, "paper"], [ink, "raised"]]);
              return Object.fromEntries(pairs.map(([ink, on]) => [`${ink} on ${on}`, ratio(ink, on)]));
            })()"""
        )
        assert {pair: round(ratio, 1) for pair, ratio in ratios.items() if ratio < 4.5} == {}
        page.close()


def test_it_prints(page: Page) -> None:
    answer = page.call("Page.printToPDF", printBackground=True)
    assert answer["data"].startswith("JVBERi")  # %PDF in base64


def test_narrow_windows_do_not_scroll_sideways(browser: Browser, path: Path) -> None:
    page = browser.open(path, width=420, height=800)
    assert page.js("document.documentElement.scrollWidth") <= 420
    page.close()


def test_what_can_be_reached_has_a_name(page: Page) -> None:
    """Controls and regions that take the focus are named for readers of screens."""
    nameless = page.js(
        """[...document.querySelectorAll(
          "button, select, input, canvas[tabindex], [role=region], svg[role]"
        )].filter((e) =>
          !e.textContent.trim() && !e.getAttribute("aria-label") && !e.labels?.length && !e.closest("[hidden]")
        ).map((e) => e.outerHTML.slice(0, 90))"""
    )
    assert nameless == []


# -- harm and size -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_hostile_names_are_shown_and_not_run(browser: Browser, tmp_path: Path, optimizer: str | None) -> None:
    study = study_of(hostile_model(tmp_path), batch=4, optimizer=optimizer)
    page = browser.open(write_page(study, tmp_path / "hostile.html", command=f"staticmem analyze {HOSTILE[1]}"))
    for tick in range(0, page.js("staticmem.timeline.source.length")):
        page.js(f"staticmem.timeline.point({tick}, 0.3); staticmem.timeline.climb(1); staticmem.timeline.climb(1)")
    page.js("staticmem.icicle.root.children.forEach(c => staticmem.icicle.go([staticmem.icicle.root, c]))")
    shown = page.js("document.body.innerText")
    assert "<img src=x onerror=window.hacked=1>" in shown
    assert "</script><script>window.hacked=1</script>" in shown
    assert page.js("window.hacked") is None
    assert page.js("document.querySelectorAll('img').length") == 0
    assert page.js("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.js("staticmem.report().then(r => r.model.path)") == study.report.model.path
    assert page.problems == []
    page.close()


def test_ten_thousand_ops(browser: Browser, tmp_path: Path) -> None:
    """Everything is there and exact; how fast is in docs/html.md."""
    study, text = large()
    path = tmp_path / "large.html"
    path.write_text(text, encoding="utf-8")
    page = browser.open(path)
    assert page.js("staticmem.timeline.source.most") == study.report.peak.live_bytes
    assert page.js("staticmem.timeline.source.count") == len(study.result.trace.buffers)
    assert page.js("staticmem.addresses.source.columns.row.length") > 10_000
    assert slide(page, 8) == study.report.peak.live_bytes
    assert page.problems == []
    page.close()
