"""The page that runs the package in a browser (docs/browser): it is built, served, and asked in Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from browser import Browser, Page, find
from loading import load_module

import staticmem

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "browser" / "build_site.py"

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find() is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return load_module(SCRIPT)


@pytest.fixture(scope="module")
def site(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    try:
        pyodide = builder.fetch_pyodide(None)
    except urllib.error.URLError as error:
        pytest.skip(f"the registry of npm is out of reach: {error}")
    package = out.parent / "pyodide.tgz"
    package.write_bytes(pyodide)
    builder.build(out, None, package)
    return out


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a test has no console."""

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    executable = find()
    assert executable is not None
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    try:
        yield browser.open(address)
    finally:
        browser.close()


def ask(page: Page, **values: str) -> None:
    """Sets fields of the form, sends it, and waits for the answer."""
    for field, value in values.items():
        page.js(f"document.getElementById({json.dumps(field)}).value = {json.dumps(value)}")
    if "known" in values:
        page.js("document.getElementById('known').dispatchEvent(new Event('change'))")
    page.js("document.getElementById('go').click()")
    page.wait("!document.getElementById('go').disabled")


def text(page: Page, name: str) -> str:
    return str(page.js(f"document.getElementById({json.dumps(name)}).textContent"))


def test_figures_are_those_of_the_package(page: Page, site: Path) -> None:
    model = str(site / "models" / "resnet50.pt2")
    for amp, flags in ((None, ""), ("bf16", "--amp bf16")):
        ask(page, known="resnet50", optimizer="adamw", batch="64", gpu="rtx-4090", precision=flags)
        report = staticmem.analyze(model, batch=64, optimizer="adamw", gpu="rtx-4090", amp=amp)
        peak = report.peak
        bytes_of = [peak.live_bytes, peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes]
        assert page.js("[...document.querySelectorAll('.meter')].map(e => e.title)") == [f"{b} bytes" for b in bytes_of]
        command = ["staticmem analyze resnet50.pt2 --batch 64 --optimizer adamw", flags, "--gpu rtx-4090"]
        assert text(page, "command") == " ".join(word for word in command if word)
    assert page.problems == []


def test_a_card_that_is_too_small(page: Page) -> None:
    ask(page, known="resnet50", optimizer="adam", batch="512", gpu="rtx-3060")
    assert text(page, "verdict") == "Does not fit: GeForce RTX 3060 12 GB"
    assert page.js("document.getElementById('verdict').className") == "does-not-fit"


def test_an_error_is_said(page: Page) -> None:
    ask(page, flags="--optimizr adam")
    assert "--optimizr" in text(page, "what")
    assert "--optimizer" in text(page, "hint")
    assert not page.js("document.getElementById('error').hidden")
    ask(page, flags="")
    assert page.js("document.getElementById('error').hidden")


def test_every_known_model_is_there(site: Path) -> None:
    build = json.loads((site / "build.json").read_text("utf-8"))
    names = [row["name"] for row in build["models"]]
    assert len(names) == len(set(names))
    assert {f"{name}.pt2" for name in names} == {path.name for path in (site / "models").glob("*.pt2")}


def test_nothing_else_is_asked_for(page: Page, address: str) -> None:
    assert [url for url in page.requests if not url.startswith((address, "data:", "blob:"))] == []


def test_another_package_of_pyodide_is_refused(builder: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / "pyodide.tgz"
    other.write_bytes(b"another")
    with pytest.raises(SystemExit, match="not the package whose digest is known"):
        builder.fetch_pyodide(other)
