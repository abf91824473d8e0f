"""Another method's estimate beside the report's own."""

from __future__ import annotations

from dataclasses import replace

from staticmem.ir.graph import Graph
from staticmem.report.model import NoteInfo, Report, Textbook
from staticmem.studies.textbook import textbook_estimate

_WHY_TEXTBOOK = (
    "They differ because the textbook adds up results that never coexist, and knows nothing of the gradients of "
    "parameters, of optimizer state, and of what autograd saves or frees; liveness is what PyTorch holds at the worst "
    "moment."
)


def with_textbook(report: Report, graph: Graph) -> Report:
    """The report with the textbook estimate of the same graph beside it."""
    book = textbook_estimate(graph)
    forward, backward = book.intermediate_bytes_forward, book.intermediate_bytes_with_backward
    total = book.parameter_bytes + (backward if report.scenario.mode == "train" else forward)
    shown = Textbook(book.parameter_bytes, forward, backward, total, _WHY_TEXTBOOK)
    warnings = report.warnings
    if book.unsized:
        text = "results without a shape in the file, which the textbook estimate leaves out"
        warnings = (*warnings, NoteInfo("SM203", text, len(book.unsized)))
    return replace(report, textbook=shown, warnings=warnings)
