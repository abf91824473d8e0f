"""Tables of options on reference pages are those of the declarations.

Refresh them: pytest tests/cli/test_reference.py --overwrite-golden
"""

from __future__ import annotations

from pathlib import Path

import pytest
from option_tables import MARKED, TABLES, refreshed

from staticmem.scenario.request import OPTIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if MARKED.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_fresh(page: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text(encoding="utf-8")
    if request.config.getoption("--overwrite-golden"):
        page.write_text(refreshed(text), encoding="utf-8", newline="\n")
    else:
        assert refreshed(text) == text


def test_every_table_is_on_a_page() -> None:
    shown = [match["name"] for page in PAGES for match in MARKED.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(TABLES)


def test_options_are_clauses_without_a_period() -> None:
    for one in OPTIONS.values():
        assert not one.about.endswith("."), one.name
        assert not one.details.endswith("."), one.name
