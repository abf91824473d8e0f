"""The graph of a step in the formats of other tools, by NetworkX's own writers."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from staticmem.report.formats import Format
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import plural

if TYPE_CHECKING:
    import networkx as nx


def render(graph: nx.DiGraph, view: View = PLAIN) -> str:
    """How many nodes and edges of each kind there are."""
    nodes = Counter(kind for _, kind in graph.nodes(data="kind"))
    edges = Counter(kind for _, _, kind in graph.edges(data="kind"))
    answer = (
        f"{plural(len(graph), 'node')} and {plural(graph.number_of_edges(), 'edge')}, moment {graph.graph['moment']}"
    )
    if view.quiet:
        return view.line(answer)
    text = Text(view)
    text.answer(f"{answer}. -o FILE.graphml, .gexf, .dot or .json writes them.")
    text.heading("Nodes")
    text.columns([(kind, f"{count:,}") for kind, count in sorted(nodes.items())], right=(1,))
    text.heading("Edges")
    text.columns([(kind, f"{count:,}") for kind, count in sorted(edges.items())], right=(1,))
    return text.end()


def render_json(graph: nx.DiGraph, view: View = PLAIN) -> str:
    """Nodes and links, as `networkx.node_link_graph(..., edges="links")` reads them."""
    import networkx as nx

    # NetworkX 3.2 and 3.3 have no `edges`, and write "links" by themselves
    data = {**graph.graph, **{"nodes": [], "links": []}}
    data["nodes"] = [{"id": node, **attributes} for node, attributes in graph.nodes(data=True)]
    data["links"] = [{"source": a, "target": b, **attributes} for a, b, attributes in graph.edges(data=True)]
    assert isinstance(graph, nx.DiGraph)
    return json.dumps({"directed": True, "multigraph": False, "graph": graph.graph, **data}, indent=1) + "\n"


def render_graphml(graph: nx.DiGraph, view: View = PLAIN) -> bytes:
    """GraphML, which yEd, Gephi and igraph read."""
    import networkx as nx

    written = io.BytesIO()
    nx.write_graphml(graph, written)
    return written.getvalue()


def render_gexf(graph: nx.DiGraph, view: View = PLAIN) -> bytes:
    """GEXF, which Gephi reads."""
    import networkx as nx

    written = io.BytesIO()
    nx.write_gexf(graph, written)
    return written.getvalue()


def render_dot(graph: nx.DiGraph, view: View = PLAIN) -> str:
    """Graphviz's language: storages as boxes with their bytes, and an edge's kind as its style."""
    return (
        "\n".join(["digraph step {", "  rankdir=LR;", "  node [fontname=Helvetica];", *_dot_lines(graph, view), "}"])
        + "\n"
    )


_SHAPES = {"storage": "box", "kernel": "ellipse", "owner": "house", "autograd": "hexagon", "root": "doublecircle"}
_STYLES = {"holds": "solid", "keeps": "bold", "allocates": "dashed", "reads": "dotted"}


def _dot_lines(graph: nx.DiGraph, view: View) -> Iterator[str]:
    for node, data in graph.nodes(data=True):
        label = f"{data['name']}\\n{view.size(data['bytes'])}" if "bytes" in data else data["name"]
        yield f"  {_quoted(node)} [label={_quoted(label)}, shape={_SHAPES[data['kind']]}];"
    for a, b, kind in graph.edges(data="kind"):
        yield f"  {_quoted(a)} -> {_quoted(b)} [style={_STYLES[kind]}, tooltip={_quoted(kind)}];"


def _quoted(text: str) -> str:
    """A string of Graphviz's language; `\\n` in a label breaks its line."""
    return '"' + text.replace('"', '\\"') + '"'


FORMATS = (
    Format("table", "txt", render),
    Format("json", "json", render_json),
    Format("graphml", "graphml", render_graphml),
    Format("gexf", "gexf", render_gexf),
    Format("dot", "dot gv", render_dot),
)
