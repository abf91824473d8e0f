"""Writes docs/generated/codes.md, what each code of an error or a note means.

python scripts/pages/codes_page.py > docs/generated/codes.md
"""

from __future__ import annotations

import sys

from staticmem.cli.explain import KINDS, entries


def page() -> str:
    """The page: a table for each kind of code."""
    intro = (
        "Errors, warnings and assumptions have codes that keep their meaning; `staticmem explain CODE` shows these\n"
        "texts. This page is made by `python scripts/pages/codes_page.py > docs/generated/codes.md`."
    )
    parts = ["# Codes", intro]
    codes = entries()
    for prefix, kind in KINDS.items():
        rows = [f"| {code} | {title} | {text} |" for code, (title, text) in codes.items() if code.startswith(prefix)]
        parts.append(f"## {prefix}xx: {kind}\n\n| code | | |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
