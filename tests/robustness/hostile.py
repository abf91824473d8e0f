"""Models that are well formed and mean harm: names for terminals, spreadsheets, browsers, CI logs and viewers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parents[2]
SEED = ROOT / "models" / "seed.pt2"

NAMES: dict[str, str] = {
    "terminal": "\x1b[2J\x1b]0;owned\x07\x9b31m\x08\x7f",
    "html": "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'--><!--",
    "formula": "=HYPERLINK(\"http://evil.example\",\"x\")",
    "formula after blanks": "\t@SUM(1+1)*cmd|' /C calc'!A0",
    "markdown": "|`x`| [a](javascript:alert(1)) ![](http://evil.example/x.png)\n# heading\n```",
    "workflow": "\n::error file=a.py::owned\r\n::set-env name=PATH::x%0A::stop-commands::y",
    "xml": "]]><!ENTITY x SYSTEM 'file:///etc/passwd'>&x;\x00\x0b\ufffe",
    "direction": "\u202egnp.exe\u2066\u200b\ufeff",
    "template": "{{7*7}}${7*7}<%= 7*7 %>{0.__class__}%s%n",
    "path": "../../../../etc/passwd",
    "long": "x" * 60_000,
    "empty": " ",
    "emoji": "\U0001f4a3\u0301" * 50,
}  # fmt: skip
LONE = "\ud800half\udfff"  # JSON can say it, UTF-8 cannot


def onnx_model(path: Path, name: str) -> Path:
    """x @ w with every name hostile."""
    name = name.replace("\x00", "")
    x, w, h, y = (f"{name}{k}" for k in "xwhy")
    nodes = [
        helper.make_node("MatMul", [x, w], [h], f"{name}n", doc_string=name),
        helper.make_node(f"{name}Op", [h], [y], f"{name}m", domain=f"{name}d"),
    ]
    for node in nodes:
        for key in ("namespace", "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"):
            node.metadata_props.add(key=key, value=f"['', '{name}', '{name}.a']")
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=f'File "{name}", line 3, in {name}\n    {name}')
    graph = helper.make_graph(
        nodes,
        f"{name}g",
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [f"{name}b", 8])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, [f"{name}b", 8])],
        [helper.make_tensor(w, TensorProto.FLOAT, [8, 8], [0.0] * 64)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(f"{name}d", 1)]
    producer = "".join(c for c in name if c.isprintable())  # by its text a file is known as ONNX
    model = helper.make_model(graph, producer_name=producer, producer_version=producer, opset_imports=opsets)
    path.write_bytes(model.SerializeToString())
    return path


def pt2_model(path: Path, name: str) -> Path:
    """`models/seed.pt2` with the name before those of its parameters, modules, input and source lines."""
    with zipfile.ZipFile(SEED) as source:
        members = {member: source.read(member) for member in source.namelist()}
    key = next(member for member in members if member.endswith(".json") and "/models/" in member)
    document = json.loads(members[key])
    module = document["graph_module"]
    renamed = {spec["user_input"]["arg"]["as_tensor"]["name"] for spec in module["signature"]["input_specs"]
               if "user_input" in spec}  # fmt: skip
    for spec in module["signature"]["input_specs"]:
        if "parameter" in spec:
            renamed.add(spec["parameter"]["parameter_name"])
    document["torch_version"] = name
    document = _renamed(document, renamed, name)
    for node in document["graph_module"]["graph"]["nodes"]:
        metadata = node["metadata"]
        if "nn_module_stack" in metadata:
            metadata["nn_module_stack"] = metadata["nn_module_stack"].replace("torch.nn", f"{name}torch.nn")
        metadata["stack_trace"] = f'File "{name}", line 3, in forward\n    {name}\n'
        metadata["torch_fn"] = f"{name};{name}"
    members[key] = json.dumps(document).encode()
    with zipfile.ZipFile(path, "w") as target:
        for member, data in members.items():
            target.writestr(member, data)
    return path


def _renamed(value: Any, names: set[str], prefix: str) -> Any:
    if isinstance(value, dict):
        return {prefix + k if k in names else k: _renamed(v, names, prefix) for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names, prefix) for item in value]
    return prefix + value if isinstance(value, str) and value in names else value
