"""What the dynamo exporter says of a whole graph: which tensors are parameters, their names, ranges of symbols.

The texts are `str(ExportedProgram.graph_signature)` and `str(range_constraints)` of torch.export
(torch/export/graph_signature.py); the exporter stores them in GraphProto.metadata_props and the kind of each input in
its ValueInfoProto (torch/onnx/_internal/exporter/_core.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from staticmem.frontends import traced_sizes
from staticmem.ir.model_file import SymbolRange, TracedSizes

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_ORIGINAL = "pkg.torch.onnx.original_node_name"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_RANGES = "pkg.torch.export.ExportedProgram.range_constraints"
_SPEC = re.compile(r"^(\w+): (PARAMETER|BUFFER|CONSTANT_TENSOR|USER_INPUT)(?: target='([^']*)')?", re.MULTILINE)
_RANGE = re.compile(r"(\w+): VR\[(-?\w+), (-?\w+)\]")


@dataclass(slots=True)
class Signature:
    """Kinds by the file's names; `aliases` maps FX placeholders (`p_conv1_weight`) to the file's names."""

    kinds: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    user_inputs: list[str] = field(default_factory=list)
    ranges: dict[str, SymbolRange] = field(default_factory=dict)


def read(graph: Any) -> Signature:
    """The signature of a GraphProto; empty for files of other exporters."""
    signature = Signature()
    texts = {entry.key: entry.value for entry in graph.metadata_props}
    for match in _SPEC.finditer(texts.get(_SIGNATURE, "").partition("# outputs")[0]):
        name, kind, target = match.groups()
        if kind == "USER_INPUT":
            signature.user_inputs.append(name)
        elif target:
            signature.kinds[target] = kind
            signature.aliases[name] = target
    for name, low, high in _RANGE.findall(texts.get(_RANGES, "")):
        signature.ranges[name] = SymbolRange(_bound(low), _bound(high))
    for value in (*graph.value_info, *graph.input):
        for entry in value.metadata_props:
            if entry.key == _KIND and entry.value != "USER_INPUT":
                signature.kinds[value.name] = entry.value.rpartition(".")[2]
            elif entry.key == _ORIGINAL:
                signature.aliases[entry.value] = value.name
    return signature


def sizes(model: Any, path: str) -> TracedSizes:
    """What `staticmem export` wrote of open sizes into a ModelProto; nothing in other files."""
    text = next((entry.value for entry in model.metadata_props if entry.key == traced_sizes.NAME), None)
    return TracedSizes() if text is None else traced_sizes.read(text, path)


def _bound(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:  # int_oo
        return None


def inherit(graph: Any, start: int, node: Any) -> None:
    """Nodes of a GraphProto from `start` on that stand for `node` (a body that was put in its place) have its metadata:
    the text of the call that the exporter wrote as a loop or a branch."""
    if node.metadata_props:
        for new_node in graph.node[start:]:
            if not any(entry.key.endswith("fx_node") for entry in new_node.metadata_props):
                new_node.metadata_props.extend(node.metadata_props)
