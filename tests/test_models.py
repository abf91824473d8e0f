"""The example files are what their manifest says, and carry no weights."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import sys
import zipfile
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest

from staticmem.frontends import open_model

MODELS = Path(__file__).resolve().parent.parent / "models"
MANIFEST: dict[str, Any] = json.loads((MODELS / "manifest.json").read_text())
FILES: list[dict[str, Any]] = MANIFEST["files"]
PARAMETERS = {
    "mobilenet_v2": 3_504_872,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "seed": 112_576,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

each_file = pytest.mark.parametrize("entry", FILES, ids=[entry["file"] for entry in FILES])
each_pt2 = pytest.mark.parametrize("path", sorted(MODELS.glob("*.pt2")), ids=lambda path: path.name)
each_onnx = pytest.mark.parametrize("path", sorted(MODELS.glob("*.onnx")), ids=lambda path: path.name)


def program(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith("models/model.json"))
        found: dict[str, Any] = json.loads(archive.read(member))
    return found


def parameters_of_pt2(path: Path) -> dict[str, int]:
    exported = program(path)["graph_module"]
    facts = exported["graph"]["tensor_values"]
    specs = [spec["parameter"] for spec in exported["signature"]["input_specs"] if "parameter" in spec]
    return {
        spec["parameter_name"]: prod(size["as_int"] for size in facts[spec["arg"]["name"]]["sizes"]) for spec in specs
    }


def parameters_of_onnx(path: Path) -> dict[str, int]:
    graph = onnx.load(path, load_external_data=False).graph
    return {tensor.name: prod(tensor.dims) for tensor in graph.initializer if not tensor.name.endswith(BUFFERS)}


def test_manifest_lists_every_file() -> None:
    listed = [entry["file"] for entry in FILES]
    assert sorted(listed) == sorted(path.name for path in MODELS.iterdir() if path.suffix in (".pt2", ".onnx"))
    assert {entry["network"] for entry in FILES} == set(PARAMETERS)
    assert set(MANIFEST["producers"]) == {"torch", "onnx", "onnx_ir", "onnxscript"}


@each_file
def test_file_is_the_one_of_the_manifest(entry: dict[str, Any]) -> None:
    content = (MODELS / entry["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert len(content) == entry["bytes"] < 1_000_000


@each_file
def test_parameter_count(entry: dict[str, Any]) -> None:
    path = MODELS / entry["file"]
    found = parameters_of_pt2(path) if entry["format"] == "pt2" else parameters_of_onnx(path)
    assert sum(found.values()) == entry["parameters"] == PARAMETERS[entry["network"]]
    assert len(found) == entry["parameter_tensors"]


@each_onnx
def test_both_formats_have_the_same_parameters(path: Path) -> None:
    assert parameters_of_onnx(path) == parameters_of_pt2(path.with_suffix(".pt2"))


@each_pt2
def test_archive_is_a_training_export_without_weights(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        weights = [item for item in archive.infolist() if "/data/weights/weight_" in item.filename]
        assert all(item.file_size == 0 for item in weights)
        assert not any(b"stack_trace" in archive.read(name) for name in archive.namelist())
    found = program(path)
    assert found["schema_version"]["major"] == 8
    nodes = found["graph_module"]["graph"]["nodes"]
    flags = {"torch.ops.aten.batch_norm.default": "training", "torch.ops.aten.dropout.default": "train"}
    for node in nodes:
        if node["target"] in flags:
            argument = {i["name"]: i["arg"] for i in node["inputs"]}[flags[node["target"]]]
            assert argument == {"as_bool": True}
    assert any(node["target"] in ("torch.ops.aten.relu_.default", "torch.ops.aten.hardtanh_.default") for node in nodes)


@each_file
def test_inputs(entry: dict[str, Any]) -> None:
    (listed,) = entry["inputs"]
    sizes: list[int | str | None]
    if entry["format"] == "onnx":
        (given,) = onnx.load(MODELS / entry["file"], load_external_data=False).graph.input
        name = given.name
        sizes = [dim.dim_param or dim.dim_value for dim in given.type.tensor_type.shape.dim]
        assert sizes == listed["shape"]
    else:  # archives name symbols by number: what is symbolic is what counts
        exported = program(MODELS / entry["file"])["graph_module"]
        (spec,) = [s["user_input"] for s in exported["signature"]["input_specs"] if "user_input" in s]
        name = spec["arg"]["as_tensor"]["name"]
        sizes = [size.get("as_int") for size in exported["graph"]["tensor_values"][name]["sizes"]]
        assert sizes == [size if isinstance(size, int) else None for size in listed["shape"]]
    assert name == listed["name"]


@each_onnx
def test_onnx_keeps_what_recovery_needs(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    assert all(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer)
    for node in model.graph.node:
        keys = {item.key for item in node.metadata_props}
        assert {"namespace", "pkg.torch.onnx.fx_node", "pkg.torch.onnx.name_scopes"} <= keys
        assert "pkg.torch.onnx.stack_trace" not in keys
    if path.stem.startswith(("resnet", "mobilenet")):
        assert any(node.op_type == "BatchNormalization" for node in model.graph.node)
    if path.stem.startswith(("vgg", "mobilenet")):
        assert any(node.op_type == "Dropout" for node in model.graph.node)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(MODELS))
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.torch
def test_architectures_have_the_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    architectures = script("architectures", monkeypatch)
    assert set(architectures.ARCHITECTURES) == set(PARAMETERS)
    for name, build in architectures.ARCHITECTURES.items():
        with torch.device("meta"):
            model = build()
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of PyTorch's own reader
def test_pytorch_loads_the_archives() -> None:
    torch = pytest.importorskip("torch")
    exported = torch.export.load(io.BytesIO((MODELS / "resnet18.pt2").read_bytes()))
    assert sum(p.numel() for p in exported.parameters()) == PARAMETERS["resnet18"]


@each_pt2
def test_a_recording_opens_batch_and_resolution(path: Path) -> None:
    """`--resolution 256` of `models:resnet50` is refused where its recording has its image fixed."""
    [image] = open_model(str(path)).inputs
    assert image.shape == ("batch", 3, "height", "width")
