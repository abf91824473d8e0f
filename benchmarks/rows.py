"""Lines of the table of results."""

from __future__ import annotations

from dataclasses import dataclass

from measure import Series


@dataclass
class Row:
    """A line of the table. `ok` is None where there is no target."""

    what: str
    value: str
    rss: str = ""
    against: str = ""
    target: str = ""
    ok: bool | None = None


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def ratio(what: str, series: Series, base: Series, over: str, target: float) -> Row:
    """A series against another, of which it may take at most `target` times the time."""
    found = series.seconds / base.seconds
    return Row(what, ms(series.seconds), mib(series.rss), f"{found:.2f}x {over}", f"<= {target}x", found <= target)


def table(rows: list[Row]) -> str:
    """The rows as an aligned Markdown table."""
    head = ["", "median", "peak RSS", "", "target", ""]
    word = {True: "pass", False: "MISS", None: ""}
    cells = [[row.what, row.value, row.rss, row.against, row.target, word[row.ok]] for row in rows]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]

    def line(texts: list[str]) -> str:
        aligned = [
            t.ljust(w) if i in (0, 5) else t.rjust(w) for i, (t, w) in enumerate(zip(texts, widths, strict=True))
        ]
        return "| " + " | ".join(aligned) + " |"

    rule = ["-" * w if i in (0, 5) else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(head), line(rule), *map(line, cells)])
