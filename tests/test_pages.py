"""Pages that a script writes as a whole are those of what it reads them from.

Refresh them: pytest tests/test_pages.py --overwrite-golden
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts" / "pages").glob("*_page.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_page_is_fresh(script: Path, request: pytest.FixtureRequest) -> None:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = ROOT / "docs" / "generated" / f"{script.stem.removesuffix('_page')}.md"
    if request.config.getoption("--overwrite-golden"):
        page.write_text(module.page(), encoding="utf-8", newline="\n")
    assert page.read_text(encoding="utf-8") == module.page(), f"run: python {script.relative_to(ROOT)} > {page}"


def test_each_page_has_its_script() -> None:
    written = {page.stem for page in (ROOT / "docs" / "generated").glob("*.md")}
    assert written - {"hardware-readings"} == {script.stem.removesuffix("_page") for script in SCRIPTS}
