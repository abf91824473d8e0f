"""`staticmem mcp`: tools for agents over the Model Context Protocol, on stdin and stdout.

The tools are plain functions that answer with what is short: a sentence, the verdict, and each meter with its band.
Models are read as by the command line: data in a file never becomes code. The SDK is imported by the server alone.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from staticmem.cli.flags import add_verb
from staticmem.cli.output import add_debug
from staticmem.errors import StaticmemError, UsageError, unexpected
from staticmem.report.text import View, printable
from staticmem.version import __version__

MCP = """\
Tools for agents over the Model Context Protocol, on stdin and stdout: analyze, size, fit and explain, each with a short
answer, its verdict and its band. An agent's client starts it. It needs: pip install 'staticmem[mcp]'
"""

MCP_EXAMPLES = """\
examples:
  claude mcp add staticmem -- staticmem mcp
"""

INSTRUCTIONS = (
    "Predicts the GPU memory of a PyTorch or ONNX model from its file: no GPU, no weights, no run. Figures are "
    "predictions in bytes, never measurements: state the band with them. `model` is the path of an .onnx or .pt2 file. "
    "`options` are those of `staticmem analyze --help`, with underscores: {'amp': 'bf16', 'dims': {'seq': 2048}}. "
    "What is left out changes the answer: name batch, optimizer and precision as they will run."
)
MOST_CARDS = 12  # rows of an answer that named no card
ONE_AT_A_TIME = threading.Lock()  # the SDK runs tools in threads; a step takes memory and all of a core

Options = dict[str, Any]
Tool = TypeVar("Tool", bound=Callable[..., dict[str, Any]])


def add_mcp(verbs: Any) -> None:
    about = "tools for agents over the Model Context Protocol"
    add_debug(add_verb(verbs, "mcp", run, about, MCP, MCP_EXAMPLES))


def run(_: argparse.Namespace) -> int:
    """Serves until the client closes stdin."""
    make_server().run("stdio")
    return 0


def make_server() -> Any:
    """The server of the SDK with the four tools.

    Raises:
        UsageError: the SDK is not installed.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        why, hint = "The Model Context Protocol is spoken by its own SDK.", "pip install 'staticmem[mcp]'"
        raise UsageError("the package mcp is not installed", why, hint, "SM146") from error
    server = MCPServer("staticmem", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for tool in (analyze, size, fit, explain):
        server.add_tool(_answering(tool))
    return server


def _answering(tool: Tool) -> Tool:
    """The tool with the errors of the command line as errors of the protocol: a code, what, why and what to do."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    def answer(*args: Any, **keywords: Any) -> dict[str, Any]:
        try:
            with ONE_AT_A_TIME:
                return tool(*args, **keywords)
        except StaticmemError as error:
            raise ToolError(_told(error)) from error
        except Exception as error:
            raise ToolError(_told(unexpected(error))) from error

    return answer  # type: ignore[return-value]


def _told(error: StaticmemError) -> str:
    row = {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint}
    return json.dumps({name: printable(text) for name, text in row.items() if text})


def analyze(
    model: str,
    batch: int | None = None,
    optimizer: str | None = None,
    gpu: str | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """GPU memory of one training step (with an optimizer) or inference of a model, and whether it fits a card.

    `meters` have low, expected and high bytes; `device` is what nvidia-smi shows and decides the verdict.
    """
    from staticmem import studies
    from staticmem.report.formats.report import render
    from staticmem.report.verdict import METERS

    report = studies.run(model, _request("analyze", options, batch=batch, optimizer=optimizer, gpu=gpu))
    peak, meters = report.peak, {}
    for meter in METERS:
        if meter in peak.bands:
            band = peak.bands[meter]
            meters[meter] = _band(band.low, getattr(peak, f"{meter}_bytes"), band.high)
    shown = {
        "answer": render(report, View(quiet=True)).strip(),
        "verdict": report.gpu.fit if report.gpu is not None else None,
        "card": report.device.name if report.device is not None else None,
        "card_is_assumed": report.gpu is None,
        "meters": meters,
    }
    return {**shown, "notes": [f"{note.code}: {note.text}" for note in (*report.warnings, *report.assumptions)]}


def size(
    model: str,
    batch: int | None = None,
    optimizer: str | None = None,
    gpus: list[str] | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """Which cards hold a step, with which largest batches. Name a few `gpus`: the whole catalog takes half a minute."""
    from staticmem.devices import gpus as catalog
    from staticmem.studies import Study
    from staticmem.studies.sizing import Options as Asked
    from staticmem.studies.sizing import size as sized

    if "gpu" in (options or {}):
        raise UsageError("gpu is no option of size", "It compares cards.", "Name them in `gpus`.", "SM113")
    request = _request("analyze", options, batch=batch, optimizer=optimizer)
    file = request.gpus_file
    cards = [catalog.find(name, file=file) for name in gpus or ()] or list(catalog.catalog(file).values())
    cards.sort(key=lambda card: (card.nominal, card.usable, card.slug))
    sizing = sized(Study.open(model, request), Asked(cards))
    shown = sizing.cards if gpus else [row for row in sizing.cards if row.fit == "fits"][:MOST_CARDS]
    rows = []
    for row in shown:
        needs = _band(row.device_low_bytes, row.device_bytes, row.device_high_bytes)
        batches = {"largest_batch": row.max_batch, "largest_safe_batch": row.safe_batch}
        rows.append({"gpu": row.slug, "verdict": row.fit, "device": needs, "usable": row.usable_bytes, **batches})
    return {
        "answer": sizing.recommendation.replace("\n", " "),
        "cards": rows,
        "cards_left_out": len(sizing.cards) - len(rows),
    }


def fit(
    model: str,
    gpu: str,
    global_batch: int | None = None,
    optimizer: str | None = None,
    allow: list[str] | None = None,
    library: str | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """How a training step fits a card: what it gives up, and settings for `library` (pytorch, transformers, ...).

    `allow` names changes of training that may be made: precision, optimizer, adapters.
    """
    from staticmem.report.formats.fit import advice, answer, concessions
    from staticmem.studies.api import fit as fitted

    own = {"optimizer": optimizer, "global_batch": global_batch, "allow": tuple(allow or ()) or None}
    _refuse_twice(options, {**own, "model": model, "gpu": gpu, "library": library})
    given = {name: value for name, value in own.items() if value is not None}
    result = fitted(model, gpu, **{"library": library, **given, **(options or {})})
    way = result.way
    return {
        "answer": answer(result),
        "verdict": way.fit,
        "device": _band(way.device_low_bytes, way.device_bytes, way.device_high_bytes),
        "usable": result.usable_bytes,
        "gives_up": list(concessions(result)),
        "next": advice(result),
        "command": way.analyze,
        "settings": {one.file: one.text for one in result.settings} if library is not None else {},
        "notes": list(result.assumed),
    }


def explain(code: str) -> dict[str, Any]:
    """What the code of an error, warning or assumption means, such as SM301."""
    from staticmem.cli.explain import entry_of

    written, title, text = entry_of(code)
    return {"code": written, "title": title, "text": text}


def _request(function: str, options: Options | None, **own: Any) -> Any:
    """The request of a tool's own words and of its options, which are read as those of a call in Python.

    Raises:
        UsageError: an option is unknown, of a wrong type, or given twice.
    """
    from staticmem.scenario.kinds import read_keywords
    from staticmem.scenario.request import request_of

    _refuse_twice(options, own)
    return request_of(read_keywords(function, {**own, **(options or {})}))


def _refuse_twice(options: Options | None, own: Options) -> None:
    """Raises:
    UsageError: an option is a tool's own word too, which is given.
    """
    twice = [name for name in options or () if own.get(name) is not None]
    if twice:
        what, why = f"{twice[0]} is given twice", "It has its own parameter."
        raise UsageError(what, why, "Leave it out of `options`.", "SM113")


def _band(low: int | None, expected: int | None, high: int | None) -> dict[str, int | None]:
    return {"low": low, "expected": expected, "high": high}
