"""Outcomes of budgets as text, Markdown, annotations of GitHub Actions, and JUnit XML."""

from __future__ import annotations

from staticmem.devices.sizing import Fit
from staticmem.frontends.architectures import model_name
from staticmem.report.formats import Format
from staticmem.report.markdown import code, escape, table
from staticmem.report.sweep import Check, Outcome
from staticmem.report.text import PLAIN, Text, View, columns, printable

HEADS = ("budget", "limit", "needs", "left", "configuration")
_COLOURS = {"": "bold", "ok": "green", "over": "red", "warn": "yellow", "error": "red"}
ANNOTATIONS = 10  # GitHub shows no more of a level and step


def headline(check: Check, view: View = PLAIN) -> str:
    """`2 of 6 budgets exceeded, the worst by 1.20 GiB.`"""
    evaluated = [o for o in check.outcomes if o.error is None]
    over = [o for o in evaluated if not o.passed]
    errors = len(check.outcomes) - len(evaluated)
    unknown = f"{errors} of {_count(len(check.outcomes))} could not be checked" if errors else ""
    if over:
        worst = min(o.margin_bytes or 0 for o in over)
        warnings = sum(o.level == "warning" for o in over)
        mild = f" ({warnings} of them warnings)" if warnings else ""
        text = f"{len(over)} of {_count(len(check.outcomes))} {'exceeded' if worst < 0 else 'not kept'}{mild}"
        text += f", the worst by {view.size(-worst)}" if worst < 0 and len(over) > 1 else ""
        text += f", by {view.size(-worst)}" if worst < 0 and len(over) == 1 else ""
        refused = next((o for o in over if _refusal(o, view)), None)
        text += f"; {refused.gpu}: {_refusal(refused, view)}" if refused is not None else ""
        return f"{text}; {unknown}." if unknown else f"{text}."
    if unknown:
        return f"{unknown}."
    least = min((o.margin_bytes or 0 for o in evaluated), default=0)
    return f"{_count(len(evaluated))} kept; the tightest leaves {view.size(least)}."


def _count(n: int) -> str:
    return f"{n} budget" if n == 1 else f"{n} budgets"


def _refusal(o: Outcome, view: View) -> str:
    """Why a step does not run on the card of a budget that fails: `it cannot run it, ...`; empty where it does."""
    if o.passed or o.fit not in (Fit.DOES_NOT_FIT.value, Fit.CANNOT_RUN.value):
        return ""
    return f"{o.fit}, {o.why}" if o.why else f"{o.fit}, {view.size(o.missing_bytes)} short"


def _standing(o: Outcome, view: View) -> str:
    """What is to be known of the card of a budget beside its figures; empty for nothing."""
    if not o.passed:
        return _refusal(o, view)
    parts = [f"only with {o.condition}"] * bool(o.condition)
    if o.why and not o.condition:
        parts.append(f"tight: {o.why}")
    if o.high_bytes is not None and o.high_bytes > o.limit_bytes:
        parts.append(
            f"the upper estimate is {view.size(o.high_bytes - o.limit_bytes)} above {view.size(o.limit_bytes)}"
        )
    return "; ".join(parts)


def render(check: Check, view: View = PLAIN) -> str:
    """The headline, and a row for each outcome."""
    if view.quiet:
        return view.line(headline(check, view))
    text, marks = Text(view), [_mark(o) for o in check.outcomes]
    text.answer(headline(check, view))
    text.lines.append("")
    rows = [("", *HEADS), *[(_mark(o), _metric(o), *_sizes(o, view), _configuration(o)) for o in check.outcomes]]
    lines = columns(rows, view.style, right=(2, 3, 4), optional=(4, 2))
    text.lines += [view.style.paint(line, _COLOURS[mark]) for line, mark in zip(lines, ["", *marks], strict=True)]
    for outcome in check.outcomes:
        if outcome.error is not None:
            text.heading(f"{_configuration(outcome)}: {outcome.error.what}: {outcome.error.why}", "")
    said = dict.fromkeys(f"{o.gpu}: {_standing(o, view)}" for o in check.outcomes if _standing(o, view))
    text.lines += [""] * bool(said)
    for line in said:
        text.wrap(line, "    ", "  - ")
    text.add_assumptions(check.assumed)
    return text.end()


def _mark(o: Outcome) -> str:
    if o.error is not None:
        return "error"
    if o.passed:
        return "ok"
    return "warn" if o.level == "warning" else "over"


def _metric(o: Outcome) -> str:
    return f"{o.metric} on {o.gpu}" if o.gpu else o.metric


def _sizes(o: Outcome, view: View) -> tuple[str, str, str]:
    if o.bytes is None or o.margin_bytes is None:
        return view.size(o.limit_bytes), "-", "-"
    return tuple(view.size(n) for n in (o.limit_bytes, o.bytes, o.margin_bytes))  # type: ignore[return-value]


def _configuration(o: Outcome) -> str:
    return f"{model_name(o.model)}: {o.configuration}"


def render_markdown(check: Check, view: View = PLAIN) -> str:
    """The headline, and a table."""
    marks = {"ok": "kept", "over": "**exceeded**", "warn": "exceeded (warning)", "error": "not checked"}
    rows = [(marks[_mark(o)], code(_metric(o)), *_sizes(o, view), code(_configuration(o))) for o in check.outcomes]
    listed = table(["", *HEADS], rows)
    said = dict.fromkeys(f"- {o.gpu}: {_standing(o, view)}" for o in check.outcomes if _standing(o, view))
    notes = "".join(f"\n{escape(line)}" for line in [*said, *(f"- assumed: {one}" for one in check.assumed)])
    return f"**{escape(headline(check, view))}**\n\n{listed}\n{notes}{chr(10) * bool(notes)}"


def render_github(check: Check, view: View = PLAIN) -> str:
    """Workflow commands: an annotation for each budget that is exceeded, the worst first."""
    failed = [o for o in check.outcomes if not o.passed]
    bad = sorted(failed, key=lambda o: (o.error is None, o.level == "warning", o.margin_bytes or 0))
    lines = []
    for o in bad[:ANNOTATIONS]:
        level = "warning" if o.level == "warning" and o.error is None else "error"
        limit, needs, _ = _sizes(o, view)
        text = f"{o.error.what}: {o.error.why}" if o.error else f"needs {needs}, {limit} are allowed"
        refusal = _refusal(o, view)
        text = f"{text}; the GPU: {refusal}" if refusal else text
        title = f"GPU memory: {_metric(o)}"
        lines.append(f"::{level} title={_property(title)}::{_data(f'{_configuration(o)}: {text}')}")
    if len(bad) > ANNOTATIONS:
        lines.append(_data(f"and {len(bad) - ANNOTATIONS} more"))
    return "\n".join([*lines, _data(headline(check, view))]) + "\n"


def _data(text: str) -> str:
    """Text of a workflow command: a line break would begin another command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def render_junit(check: Check, view: View = PLAIN) -> str:
    """JUnit XML: a test case for each outcome; exceeded budgets of level warning pass, with a note."""
    from xml.etree import ElementTree

    failures = sum(not o.passed and o.level == "error" and o.error is None for o in check.outcomes)
    errors = sum(o.error is not None for o in check.outcomes)
    suite = ElementTree.Element(
        "testsuite", name="staticmem", tests=str(len(check.outcomes)), failures=str(failures), errors=str(errors)
    )
    for o in check.outcomes:
        name = f"{_metric(o)} <= {view.size(o.limit_bytes)}"
        case = ElementTree.SubElement(suite, "testcase", classname=printable(_configuration(o)), name=printable(name))
        stands = _standing(o, view)
        text = f"needs {_sizes(o, view)[1]}{f'; the GPU: {stands}' if stands else ''}"
        if o.error is not None:
            ElementTree.SubElement(case, "error", message=printable(f"{o.error.what}: {o.error.why}"))
        elif not o.passed and o.level == "error":
            ElementTree.SubElement(case, "failure", message=printable(text))
        else:
            ElementTree.SubElement(case, "system-out").text = printable(text if o.passed else f"warning: {text}")
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


FORMATS = (
    Format("table", "txt", render),
    Format("github", "", render_github),
    Format("md", "md", render_markdown),
    Format("junit", "xml", render_junit),
)
