"""The report of a serving engine for a terminal; whether it starts comes first."""

from __future__ import annotations

from staticmem.frontends.architectures import model_name
from staticmem.report.formats import JSON, Format
from staticmem.report.formats.report import note_list
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import with_article
from staticmem.serving.report import ServeReport, ServeStage

_TITLES = {
    "weights": "weights",
    "activation": "activations of the profile run",
    "non_torch": "outside of PyTorch",
    "kv_cache": "cache of keys and values",
    "cuda_graph": "CUDA graphs, beside that share",
    "at_start": "held before the engine starts, beside it",
}


def render(report: ServeReport, view: View = PLAIN) -> str:
    """The report as text with a final newline."""
    if view.quiet:
        return view.line(verdict(report, view))
    text = Text(view)
    text.answer(verdict(report, view), *_reasons(report, view), next_step=_next_step(report))
    scenario, model = report.scenario, report.model
    packing = f", {model.packing}" if model.packing else ""
    text.heading(f"{scenario.engine} {scenario.version}, {model_name(model.path)} ({model.dtype}{packing})")
    cards = scenario.tensor_parallel * scenario.pipeline_parallel
    how = "that share its layers" if scenario.tensor_parallel > 1 else "in a pipeline"
    ranks = f"{cards} x {scenario.gpu} {how}" if cards > 1 else scenario.gpu
    rows = [("cards", ranks), ("longest request", f"{scenario.max_len:,} tokens")]
    rows.append(("at once", f"{scenario.max_seqs:,} requests, {scenario.max_batched_tokens:,} tokens of a step"))
    rows.append(("cache", f"{scenario.kv_dtype}, blocks of {view.size(report.serve.block_bytes)}"))
    text.columns(rows)
    if not report.serve.starts and not report.serve.missing_bytes:  # nothing is loaded
        return text.end()
    of_rank = f" of rank {report.serve.rank}, which holds the fewest blocks" if len(report.stages) > 1 else " of a rank"
    text.heading(f"Parts{of_rank if cards > 1 else ''}: {view.size(report.serve.requested_bytes)} of the card")
    text.columns([_part(report, name, view) for name in _TITLES], right=(1,))
    if len(report.stages) > 1:
        text.heading("Stages")
        heads = ("rank", "layers", "weights", "activations", "cache", "blocks")
        text.columns([heads, *(_stage(one, view) for one in report.stages)], right=range(6))
    text.heading("Where each part is from")
    text.columns([(_TITLES[name].split(",")[0], source) for name, source in report.sources.items()])
    for title, notes, heading in (("Assumptions", report.assumptions, "bold"), ("Warnings", report.warnings, "yellow")):
        if notes:
            note_list(text, title, notes, heading=heading)
    return text.end()


def verdict(report: ServeReport, view: View = PLAIN) -> str:
    """Whether the engine starts, and what it holds."""
    serve, scenario = report.serve, report.scenario
    count = scenario.tensor_parallel * scenario.pipeline_parallel
    where = with_article(scenario.gpu) if count == 1 else f"{count} x {scenario.gpu}"
    word = stands(starts=serve.starts, certain=serve.certain)
    if not serve.starts:
        return f"{scenario.engine} {word} on {where}: {serve.message}"
    answer = f"{scenario.engine} {word} on {where}: its cache holds {serve.kv_cache_tokens:,} tokens"
    return f"{answer}, {serve.max_concurrency:,.2f} requests of {scenario.max_len:,} at once."


def stands(*, starts: bool, certain: bool) -> str:
    """The word of every verb: `starts`, or `probably does not start` where a band says both."""
    return f"{'' if certain else 'probably '}{'starts' if starts else 'does not start'}"


def starts_with(change: str) -> str:
    """The first change with which an engine starts that does not."""
    return f"At the middle of its bands it starts with {change}."


def _reasons(report: ServeReport, view: View) -> list[str]:
    serve = report.serve
    if not serve.starts:
        return [f"{view.size(serve.missing_bytes)} are missing."] if serve.missing_bytes else []
    bounds = serve.bands["kv_cache_tokens"]
    reasons = [f"Of tokens it holds at least {bounds.low:,} and at most {bounds.high:,}."]
    if serve.at_once is not None:
        lengths = f"Of requests as long as {report.scenario.lengths} it holds {serve.at_once:,.1f} on average"
        reasons.append(f"{lengths}, and at least {serve.at_once_95:,} in 95 of 100 draws.")
        if serve.at_once_95 == report.scenario.max_seqs:
            reasons[-1] += f" --max-seqs {report.scenario.max_seqs} is the limit, not the cache."
    if not serve.certain:
        reasons.append("Within its bands it may not start; its log of a start settles it.")
    return reasons


def _next_step(report: ServeReport) -> str:
    serve = report.serve
    if serve.starts:
        limits = f"With these cards it starts up to --max-len {serve.largest_max_len}"
        return f"{limits}, and up to --max-seqs {serve.largest_max_seqs}."
    if serve.change:
        return starts_with(serve.change)
    return "No single change starts it: shorter or fewer requests, another share of the card, more cards (up to 8)."


def _stage(stage: ServeStage, view: View) -> tuple[str, ...]:
    sizes = (stage.weights_bytes, stage.activation_bytes, stage.kv_cache_bytes)
    return str(stage.rank), str(stage.layers), *(view.size(nbytes) for nbytes in sizes), f"{stage.kv_cache_blocks:,}"


def _part(report: ServeReport, name: str, view: View) -> tuple[str, str, str]:
    band = report.serve.bands[name]
    at = f"in {report.serve.peak_at}; " if name == "activation" else ""
    bounds = f"{at}at least {view.size(band.low)}, at most {view.size(band.high)}"
    return _TITLES[name], view.size(getattr(report.serve, f"{name}_bytes")), bounds


FORMATS = (Format("table", "txt", render), JSON)
