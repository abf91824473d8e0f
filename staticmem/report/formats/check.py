"""Outcomes of budgets as text, Markdown, annotations of GitHub Actions, and JUnit XML."""

from __future__ import annotations

import os
from collections.abc import Sequence

from staticmem.report.markdown import code, escape, table
from staticmem.report.style import Style
from staticmem.report.sweep import Check, Outcome
from staticmem.units import format_bytes

ANNOTATIONS = 10  # GitHub shows no more of a level and step


def headline(check: Check, units: str = "binary") -> str:
    """`2 of 6 budgets exceeded, the worst by 1.20 GiB.`"""
    known = [o for o in check.outcomes if o.error is None]
    over = [o for o in known if not o.passed]
    errors = len(check.outcomes) - len(known)
    unknown = f"{errors} of {_count(len(check.outcomes))} could not be checked" if errors else ""
    if over:
        worst = min(o.margin_bytes or 0 for o in over)
        warnings = sum(o.level == "warning" for o in over)
        mild = f" ({warnings} of them warnings)" if warnings else ""
        text = f"{len(over)} of {_count(len(check.outcomes))} exceeded{mild}, by at most {format_bytes(-worst, units)}"
        return f"{text}; {unknown}." if unknown else f"{text}."
    if unknown:
        return f"{unknown}."
    least = min((o.margin_bytes or 0 for o in known), default=0)
    return f"{_count(len(known))} kept; the tightest leaves {format_bytes(least, units)}."


def _count(n: int) -> str:
    return f"{n} budget" if n == 1 else f"{n} budgets"


def render(check: Check, style: Style | None = None, units: str = "binary") -> str:
    """A row for each outcome, and the headline as the last line."""
    style = style or Style()
    rows = [("", "budget", "limit", "needs", "left", "configuration")]
    rows += [(_mark(o), _metric(o), *_sizes(o, units), _configuration(o)) for o in check.outcomes]
    cells = [tuple(style.plain(cell) for cell in row) for row in rows]
    wide = [max(len(row[i]) for row in cells) for i in range(6)]
    lines = []
    for index, row in enumerate(cells):
        line = (
            f"{row[0]:<{wide[0]}}  {row[1]:<{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]:>{wide[3]}}  {row[4]:>{wide[4]}}  "
        )
        colour = "bold" if index == 0 else {"ok": "green", "over": "red", "warn": "yellow"}.get(row[0], "red")
        lines.append(style.paint((line + row[5]).rstrip(), colour))
    for outcome in check.outcomes:
        if outcome.error is not None:
            lines += ["", style.plain(f"{_configuration(outcome)}: {outcome.error.what}: {outcome.error.why}")]
    return "\n".join([*lines, "", style.paint(style.plain(headline(check, units)), "bold")]) + "\n"


def _mark(o: Outcome) -> str:
    if o.error is not None:
        return "error"
    return "ok" if o.passed else "warn" if o.level == "warning" else "over"


def _metric(o: Outcome) -> str:
    return f"{o.metric} on {o.gpu}" if o.gpu else o.metric


def _sizes(o: Outcome, units: str) -> tuple[str, str, str]:
    if o.bytes is None or o.margin_bytes is None:
        return format_bytes(o.limit_bytes, units), "-", "-"
    return tuple(format_bytes(n, units) for n in (o.limit_bytes, o.bytes, o.margin_bytes))  # type: ignore[return-value]


def _configuration(o: Outcome) -> str:
    return f"{os.path.basename(o.model)}: {o.configuration}"


def render_markdown(check: Check, units: str = "binary") -> str:
    """The headline, and a table."""
    marks = {"ok": "kept", "over": "**exceeded**", "warn": "exceeded (warning)", "error": "not checked"}
    rows = [
        (marks[_mark(o)], code(_metric(o)), *_sizes(o, units), code(_configuration(o))) for o in check.outcomes
    ]  # fmt: skip
    heads = ("", "budget", "limit", "needs", "left", "configuration")
    return f"**{escape(headline(check, units))}**\n\n{table(heads, rows)}\n"


def render_github(check: Check, units: str = "binary") -> str:
    """Workflow commands: an annotation for each budget that is exceeded, the worst first."""
    bad: Sequence[Outcome] = [o for o in check.outcomes if not o.passed]
    ordered = sorted(bad, key=lambda o: (o.error is None, o.level == "warning", o.margin_bytes or 0))
    lines = []
    for o in ordered[:ANNOTATIONS]:
        level = "warning" if o.level == "warning" and o.error is None else "error"
        limit, needs, _ = _sizes(o, units)
        text = f"{o.error.what}: {o.error.why}" if o.error else f"needs {needs}, {limit} are allowed"
        title = f"GPU memory: {_metric(o)}"
        lines.append(f"::{level} title={_property(title)}::{_data(f'{_configuration(o)}: {text}')}")
    if len(ordered) > ANNOTATIONS:
        lines.append(_data(f"and {len(ordered) - ANNOTATIONS} more"))
    return "\n".join([*lines, _data(headline(check, units))]) + "\n"


def _data(text: str) -> str:
    """Text of a workflow command: a line break would begin another command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def render_junit(check: Check, units: str = "binary") -> str:
    """JUnit XML: a test case for each outcome; exceeded budgets of level warning pass, with a note."""
    from xml.etree import ElementTree

    failures = sum(not o.passed and o.level == "error" and o.error is None for o in check.outcomes)
    errors = sum(o.error is not None for o in check.outcomes)
    suite = ElementTree.Element(
        "testsuite", name="staticmem", tests=str(len(check.outcomes)), failures=str(failures), errors=str(errors)
    )
    for o in check.outcomes:
        name = f"{_metric(o)} <= {format_bytes(o.limit_bytes, units)}"
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(_configuration(o)), name=_xml(name))
        text = f"needs {_sizes(o, units)[1]}"
        if o.error is not None:
            ElementTree.SubElement(case, "error", message=_xml(f"{o.error.what}: {o.error.why}"))
        elif not o.passed and o.level == "error":
            ElementTree.SubElement(case, "failure", message=_xml(text))
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(text if o.passed else f"warning: {text}")
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """XML 1.0 has no way to write most control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
