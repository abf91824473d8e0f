"""Markdown as GitHub renders it: tables, folded sections, and names from a file that stay text."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

_SPECIAL = re.compile(r"([\\`*_\[\]|~@<>&]|:(?=//)|^[#+-])")
_NUMBER = re.compile(r"[-+]?\d|-?$")


def escape(text: str) -> str:
    """`text` as it is: no markup, no mention, no link, one line."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[1])};" if match[1] in "<>&@:|" else f"\\{match[1]}", _line(text))


def code(text: str) -> str:
    """`text` in a code span; nothing in it is markup."""
    text = _line(text).replace("|", "\\|")
    run = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * (run + 1)
    pad = " " if run else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers are right-aligned. Cells must be escaped or code already."""
    numbers = [all(_NUMBER.match(row[i]) for row in rows) for i in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(' ---: ' if number else ' --- ' for number in numbers)}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def details(summary: str, body: str) -> str:
    """A section that is folded until it is clicked; the summary is text, the body Markdown."""
    title = html.escape(_line(summary)).replace("](", "&#93;(")  # some renderers look for links inside of HTML
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
