"""Pages that a script writes as a whole are those of what it reads them from.

Refresh them: pytest tests/test_pages.py --overwrite-golden
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loading import load_module

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts" / "pages").glob("*_page.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_page_is_fresh(script: Path, request: pytest.FixtureRequest) -> None:
    module = load_module(script)
    page = ROOT / "docs" / "generated" / f"{script.stem.removesuffix('_page')}.md"
    if request.config.getoption("--overwrite-golden"):
        page.write_text(module.page(), encoding="utf-8", newline="\n")
    assert page.read_text(encoding="utf-8") == module.page(), f"run: python {script.relative_to(ROOT)} > {page}"


def test_the_picture_of_readings_is_fresh(request: pytest.FixtureRequest) -> None:
    """It has every reading of the page that the axes have room for, and README says how many."""
    module = load_module(ROOT / "scripts" / "pictures" / "readings_picture.py")
    found = module.readings(module.PAGE.read_text(encoding="utf-8"))
    drawn, kept = module.picture(found), ROOT / "docs" / "images" / "readings.svg"
    if request.config.getoption("--overwrite-golden"):
        kept.write_text(f"{drawn}\n", encoding="utf-8", newline="\n")
    assert kept.read_text(encoding="utf-8") == f"{drawn}\n"
    assert drawn.count("<circle") == len(found) + 2  # two are the legend's
    assert f"{len(found)} published readings" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_agents_read_is_fresh(request: pytest.FixtureRequest) -> None:
    for path, text in load_module(ROOT / "scripts/pages/agent_files.py").documents().items():
        if request.config.getoption("--overwrite-golden"):
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.read_text(encoding="utf-8") == text, "run: python scripts/pages/agent_files.py"
        for target in re.findall(r"\]\(([^)#:]+)", text):
            assert (path.parent / target).exists(), target


def test_every_page_begins_with_what_it_is_for() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name not in ("adr", "generated")]
    assert [page.name for page in pages if not re.match(r"# .*\n\nThis page ", page.read_text("utf-8"))] == []


def test_the_site_has_every_page_in_its_navigation(tmp_path: Path) -> None:
    site = load_module(ROOT / "scripts/site/build_docs.py")
    pages = {target for source, target in site.stage(tmp_path).items() if source.endswith(".md")}
    config = (tmp_path / "zensical.toml").read_text(encoding="utf-8")
    shown = set(re.findall(r'"([^"]+\.md)"', next(line for line in config.splitlines() if line.startswith("nav = "))))
    assert pages - shown == {"security.md", "records.md"}
    assert shown <= pages
    assert "](contributing.md)" in (tmp_path / "pages" / "index.md").read_text(encoding="utf-8")


def test_each_page_has_its_script() -> None:
    written = {page.stem for page in (ROOT / "docs" / "generated").glob("*.md")}
    assert written - {"hardware-readings", "transformers"} == {script.stem.removesuffix("_page") for script in SCRIPTS}
