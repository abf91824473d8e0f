"""Writes docs/generated/combinations.md, what does not go together, from the table that requests are checked with.

python scripts/pages/combinations_page.py > docs/generated/combinations.md
"""

from __future__ import annotations

import re
import sys

from staticmem.scenario.combinations import FIT, LARGEST, RANKS, SIZE, Side, Sides, Table
from staticmem.scenario.options import Option
from staticmem.scenario.request import COMBINATIONS, OPTIONS

HEAD = """# What does not go together

Options that exclude each other, or need another: each is refused with, or without, what stands in the second column,
with a sentence of what happened, the reason, what to do, and exit code 2. `|` stands between words of which one is
enough. What depends on the model (a layer, a size) is refused where it is known, and is not here.

Written by `python scripts/pages/combinations_page.py` from `staticmem/scenario/combinations.py`, which a test compares.
"""
PARTS = {"A step": COMBINATIONS, "A rank": RANKS, "`fit`": FIT, "`size`": SIZE, "The largest size": LARGEST}
MORE = {"loss": ("OUTPUT=LOSS",)}  # what options take besides their choices


def written(side: Side) -> str:
    """A side with the words that it is about, or with what stands for a value in help."""
    option = OPTIONS.get(side.option, Option(side.option, None, "", metavar="NAME"))
    choices = [word for word in (*option.choices, *MORE.get(option.name, ())) if word != "none"]
    words = [word for word in choices if side.test is not None and side.test(word)]
    value = f"{{{side.option}}}"
    text = side.text if side.text != value else f"{option.flag} {value}"
    if words and text == option.flag:
        text = f"{text} {value}"
    text = text.format_map({side.option: "\\|".join(words) or option.metavar})
    return f"`{text}`" if text.startswith("--") else text


def alternatives(sides: Sides) -> str:
    """Sides of which one is enough."""
    listed = sides if isinstance(sides, tuple) else (sides,)
    return " or ".join([f"{'without ' * side.absent}{written(side)}" for side in listed])


def sentence(text: str) -> str:
    """A sentence of an error with what stands for values in help."""
    text = text.replace("{one}", "the first").replace("{other}", "the second")
    return re.sub(r"\{(\w+)\}", lambda name: OPTIONS[name[1]].metavar if name[1] in OPTIONS else "N", text)


def rows(table: Table) -> list[str]:
    """The rows of a table in Markdown."""
    lines = ["| option | with, or without | why | what to do | code |", "|---|---|---|---|---|"]
    for row, (why, instead) in table.items():
        others = ", and ".join([alternatives(row.other), *map(alternatives, row.also)])
        if row.when is not None:
            others += f", where {row.when[0]}"
        lines.append(f"| {alternatives(row.one)} | {others} | {sentence(why)} | {sentence(instead)} | {row.code} |")
    return lines


def page() -> str:
    """The page: a table for each place where requests are checked."""
    return "\n".join([HEAD, *["\n".join([f"## {title}\n", *rows(table), ""]) for title, table in PARTS.items()]])


if __name__ == "__main__":
    sys.stdout.write(page())
