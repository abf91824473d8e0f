"""The graph of a step in the formats of other tools, by NetworkX's own writers."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from staticmem.report.formats import Format
from staticmem.report.text import PLAIN, Text, View, printable
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
    nodes = [{"id": node, **attributes} for node, attributes in graph.nodes(data=True)]
    links = [{"source": a, "target": b, **attributes} for a, b, attributes in graph.edges(data=True)]
    whole = {"directed": True, "multigraph": False, "graph": graph.graph, "nodes": nodes, "links": links}
    return json.dumps(whole, indent=1) + "\n"


def _printable(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph with names that XML and Graphviz can hold: a file may have put any character into them."""
    import networkx as nx

    def plain(value: Any) -> Any:
        return printable(value, "<{:04X}>") if isinstance(value, str) else value

    result = nx.DiGraph(**{key: plain(value) for key, value in graph.graph.items()})
    for node, data in graph.nodes(data=True):
        result.add_node(plain(node), **{key: plain(value) for key, value in data.items()})
    result.add_edges_from((plain(a), plain(b), data) for a, b, data in graph.edges(data=True))
    return result


def render_graphml(graph: nx.DiGraph, view: View = PLAIN) -> bytes:
    """GraphML, which yEd, Gephi and igraph read."""
    import networkx as nx

    written = io.BytesIO()
    nx.write_graphml(_printable(graph), written)
    return written.getvalue()


def render_gexf(graph: nx.DiGraph, view: View = PLAIN) -> bytes:
    """GEXF, which Gephi reads."""
    import networkx as nx

    written = io.BytesIO()
    nx.write_gexf(_printable(graph), written)
    return written.getvalue()


def render_dot(graph: nx.DiGraph, view: View = PLAIN) -> str:
    """Graphviz's language: storages as boxes with their bytes, and an edge's kind as its style."""
    return (
        "\n".join(
            [
                "digraph step {",
                "  rankdir=LR;",
                "  node [fontname=Helvetica];",
                *_dot_lines(_printable(graph), view),
                "}",
            ]
        )
        + "\n"
    )


_SHAPES = {"storage": "box", "kernel": "ellipse", "owner": "house", "autograd": "hexagon", "root": "doublecircle"}
_STYLES = {"holds": "solid", "keeps": "bold", "allocates": "dashed", "reads": "dotted"}


def _dot_lines(graph: nx.DiGraph, view: View) -> Iterator[str]:
    for node, data in graph.nodes(data=True):
        label = _quoted(data["name"])
        if "bytes" in data:  # `\\n` breaks a line of a label
            label = f'{label[:-1]}\\n{view.size(data["bytes"])}"'
        yield f"  {_quoted(node)} [label={label}, shape={_SHAPES[data['kind']]}];"
    for a, b, kind in graph.edges(data="kind"):
        yield f"  {_quoted(a)} -> {_quoted(b)} [style={_STYLES[kind]}, tooltip={_quoted(kind)}];"


def _quoted(text: str) -> str:
    """A string of Graphviz's language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


FORMATS = (
    Format("table", "txt", render),
    Format("json", "json", render_json),
    Format("graphml", "graphml", render_graphml),
    Format("gexf", "gexf", render_gexf),
    Format("dot", "dot gv", render_dot),
)
