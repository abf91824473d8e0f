"""torch.export archives made on the spot: a small document that is whole, and ways to write one that is not."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

Document = dict[str, Any]
MODELS = Path(__file__).parents[2] / "models"
GRAPHS = Path(__file__).parents[1] / "data" / "graphs"


def read(path: Path) -> Document:
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".json") and "/models/" in n)
        document: Document = json.loads(archive.read(name))
    return document


def write(path: Path, document: Document | str | bytes) -> Path:
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/models/model.json", text)
    return path


def write_without_recording(source: Path, path: Path) -> Path:
    """A copy of an archive that has the graph alone."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in archive.namelist():
            if "/extra/" not in name:
                target.writestr(name, archive.read(name))
    return path


def tensor(*sizes: int | str, dtype: int = 7) -> dict[str, Any]:
    """The description of a tensor; a string is a size expression."""
    made = [{"as_int": s} if isinstance(s, int) else {"as_expr": {"expr_str": s}} for s in sizes]
    return {"dtype": dtype, "sizes": made, "strides": [], "requires_grad": False}


def argument(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if value is None:
        return {"as_none": True}
    if isinstance(value, list):
        kind = "as_tensors" if value and isinstance(value[0], str) else "as_ints"
        return {kind: [{"name": v} for v in value] if kind == "as_tensors" else value}
    if isinstance(value, str):
        return {"as_tensor": {"name": value}}
    kind = {bool: "as_bool", int: "as_int", float: "as_float"}[type(value)]
    return {kind: value}


def node(target: str, *args: Any, out: Any = (), **kwargs: Any) -> dict[str, Any]:
    """A call: strings are tensors."""
    outputs = [argument(o) for o in ([out] if isinstance(out, str | dict) else out)]
    if not target.startswith(("torch", "_operator")):
        target = f"torch.ops.aten.{target}"
    inputs = [{"name": f"a{k}", "arg": argument(v), "kind": 1} for k, v in enumerate(args)]
    inputs += [{"name": k, "arg": argument(v), "kind": 2} for k, v in kwargs.items()]
    return {
        "target": target,
        "inputs": inputs,
        "outputs": outputs,
        "metadata": {},
        "name": out if isinstance(out, str) else "",
    }


def document(
    tensors: dict[str, dict[str, Any]],
    nodes: list[dict[str, Any]],
    inputs: tuple[str, ...] = ("x",),
    parameters: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("y",),
    ranges: dict[str, tuple[int | None, int | None]] | None = None,
) -> Document:
    specs: list[dict[str, Any]] = [{"parameter": {"arg": {"name": n}, "parameter_name": n}} for n in parameters]
    specs += [{"user_input": {"arg": {"as_tensor": {"name": n}}}} for n in inputs]
    return {
        "schema_version": {"major": 8, "minor": 8},
        "torch_version": "2.13.0",
        "range_constraints": {k: {"min_val": a, "max_val": b} for k, (a, b) in (ranges or {}).items()},
        "graph_module": {
            "graph": {"nodes": nodes, "tensor_values": tensors, "sym_int_values": {}},
            "signature": {
                "input_specs": specs,
                "output_specs": [{"user_output": {"arg": {"as_tensor": {"name": n}}}} for n in outputs],
            },
        },
    }
