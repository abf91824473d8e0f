"""Why a tensor is alive, for a terminal and in Markdown: the chains of owners that keep it."""

from __future__ import annotations

from staticmem.report.formats import Format
from staticmem.report.markdown import code, escape
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import category_name, plural, shape_text, tensor_name
from staticmem.report.why import KeptTensor, Why


def render(why: Why, view: View = PLAIN) -> str:
    """The answer, and for each tensor the chains of owners, the shortest first."""
    if view.quiet:
        return view.line(verdict(why, view))
    text = Text(view)
    text.answer(verdict(why, view))
    for tensor in why.tensors:
        text.heading(_title(tensor, view))
        for chain in tensor.chains:
            text.wrap(_sentence(chain.links), "      ", "  - ")
    rest = why.count - len(why.tensors)
    if rest:
        text.lines.append("")
        text.add(f"  and {plural(rest, 'smaller tensor')}")
    return text.end()


def render_markdown(why: Why, view: View = PLAIN) -> str:
    """The same in Markdown."""
    lines = [f"**{escape(verdict(why, view))}**", ""]
    for tensor in why.tensors:
        lines += [f"- {code(tensor_name(tensor.module, tensor.name))}, {escape(_facts(tensor, view))}"]
        lines += [f"  - {escape(_sentence(chain.links))}" for chain in tensor.chains]
    return "\n".join(lines) + "\n"


def verdict(why: Why, view: View = PLAIN) -> str:
    """The one line: how much it is, and who holds it."""
    size, moment = view.size(why.bytes), "the peak" if why.at == "peak" else why.at
    if why.at != why.phase:
        moment += f" ({why.phase})"
    if why.count == 1:
        holders = plural(len(why.tensors[0].chains), "owner")
        return f"{why.asked}: {size}, alive at {moment}, held by {holders}."
    return f"{why.asked}: {plural(why.count, 'tensor')} of {size} in all are alive at {moment}."


def _title(tensor: KeptTensor, view: View) -> str:
    return f"{tensor_name(tensor.module, tensor.name)}: {_facts(tensor, view)}"


def _facts(tensor: KeptTensor, view: View) -> str:
    return f"{view.size(tensor.bytes)}, {category_name(tensor.category)}, {shape_text(tensor.dtype, tensor.shape)}"


def _sentence(links: tuple[str, ...]) -> str:
    return " → ".join(links)


FORMATS = (Format("table", "txt", render), Format("md", "md", render_markdown))
