"""Files with a recording: the figures of the module in every format, other tools, changed graphs, `annotate`."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main

torch: Any = pytest.importorskip("torch")
onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import coded_models  # noqa: E402
from coded_models import WIDTH, on_meta  # noqa: E402
from test_objects import image, network  # noqa: E402

from staticmem.frontends import carried, open_model, traced_sizes  # noqa: E402
from staticmem.frontends import recording_format as written  # noqa: E402
from staticmem.recording.record import record  # noqa: E402
from staticmem.recording.told import with_recording  # noqa: E402

pytestmark = pytest.mark.torch
FORMATS = (("m.pt2", "dynamo"), ("m.onnx", "dynamo"), ("scripted.onnx", "torchscript"))
STEPS: tuple[dict[str, Any], ...] = ({"optimizer": "adam"}, {"optimizer": "sgd", "amp": "bf16"}, {})


def codes(report: Any) -> set[str]:
    return {note.code for note in (*report.assumptions, *report.warnings, *report.notes)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("recorded")
    for name, exporter in FORMATS:
        module, inputs = on_meta(coded_models.Skips)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            staticmem.export(module, inputs, folder / name, exporter=exporter)
    return [folder / name for name, _ in FORMATS]


@pytest.mark.parametrize("options", STEPS, ids=str)
def test_all_formats_give_the_figures_of_the_module(files: list[Path], options: dict[str, Any]) -> None:
    module, inputs = on_meta(coded_models.Skips)
    expected = staticmem.analyze(module, inputs, batch=40, **options)
    for file in files:
        report = staticmem.analyze(str(file), batch=40, **options)
        assert report.peak.live_bytes == expected.peak.live_bytes, file.name
        assert report.parameters.bytes == expected.parameters.bytes
        assert not codes(report) & {"SM327", "SM328"}


def test_other_tools_read_the_files(files: list[Path]) -> None:
    program = torch.export.load(str(files[0]))
    assert len(list(program.parameters())) == 6
    for file in files[1:]:
        onnx.shape_inference.infer_shapes(onnx.load(file, load_external_data=False), strict_mode=True)


def test_a_changed_graph_has_no_recording(files: list[Path], tmp_path: Path) -> None:
    proto = onnx.load(files[1], load_external_data=False)
    assert open_model(str(files[1])).__class__.__name__ == "RecordedModel"
    node = next(node for node in proto.graph.node if node.op_type == "Relu")
    node.op_type = "Sigmoid"
    changed = tmp_path / "changed.onnx"
    changed.write_bytes(proto.SerializeToString())
    report = staticmem.analyze(str(changed), batch=4, optimizer="adam")
    assert "SM327" in codes(report)


def test_metadata_alone_changes_nothing(files: list[Path], tmp_path: Path) -> None:
    proto = onnx.load(files[1], load_external_data=False)
    proto.producer_name, proto.doc_string = proto.producer_name, "text of another tool"
    for node in proto.graph.node:
        del node.metadata_props[:]
    other = tmp_path / "other.onnx"
    other.write_bytes(proto.SerializeToString())
    assert "SM327" not in codes(staticmem.analyze(str(other), batch=4))


def test_a_mode_that_is_missing(files: list[Path], tmp_path: Path) -> None:
    module, inputs = on_meta(coded_models.Skips)
    document = record(module, inputs)
    for program in document["programs"]:
        program["modes"] = [mode for mode in program["modes"] if not mode[0]]
    document["programs"] = [program for program in document["programs"] if program["modes"]]
    file = tmp_path / "m.pt2"
    file.write_bytes(with_recording(files[0].read_bytes(), ".pt2", document))
    assert "SM328" in codes(staticmem.analyze(str(file), batch=4, optimizer="adam"))
    assert "SM328" not in codes(staticmem.analyze(str(file), batch=4))


def test_a_recording_is_small(tmp_path: Path) -> None:
    """At most a fifth of the smallest file without it."""
    file = tmp_path / "m.pt2"
    staticmem.export(network("resnet18"), (image(2),), file)
    with zipfile.ZipFile(file) as archive:
        (member,) = [info for info in archive.infolist() if info.filename.endswith(written.MEMBER)]
    size = member.compress_size + 30 + 46 + 2 * len(member.filename)  # with its headers
    assert size <= 0.2 * (file.stat().st_size - size)


CODE = f"""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear({WIDTH}, {WIDTH})

    def forward(self, x):
        skips = [torch.relu(self.inner(x)) for _ in range(3)]
        return sum(skips)

def build():
    return Net(), (torch.zeros(2, {WIDTH}),)

def other():
    return Net(), (torch.zeros(2, 3, {WIDTH}),)
"""


def test_annotate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file, out = tmp_path / "net.py", tmp_path / "m.pt2", tmp_path / "out.pt2"
    script.write_text(CODE)
    assert main(["export", f"{script}:build", "-o", str(file)]) == 0
    recorded = staticmem.analyze(str(file), batch=8, optimizer="adam").peak.live_bytes
    plain = carried.into_archive(file.read_bytes(), {"format": "none"})
    file.write_bytes(plain)
    assert main(["annotate", str(file), "--from", f"{script}:build", "-o", str(out)]) == 0
    assert staticmem.analyze(str(out), batch=8, optimizer="adam").peak.live_bytes == recorded
    capsys.readouterr()
    assert main(["annotate", str(file), "--from", f"{script}:other", "-o", str(tmp_path / "x.pt2")]) == 2
    assert "SM174" in capsys.readouterr().err
    assert file.read_bytes() == plain


PLAIN = {
    "m.pt2": lambda net, x, file: torch.export.save(torch.export.export(net, x), file),
    "m.onnx": lambda net, x, file: torch.onnx.export(net, x, file, dynamo=True, external_data=False, verbose=False),
    "scripted.onnx": lambda net, x, file: torch.onnx.export(net, x, file, dynamo=False, input_names=["x"]),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.filterwarnings("ignore")
def test_a_file_with_weights_runs_as_before(tmp_path: Path, name: str) -> None:
    """Exported by PyTorch, recorded by `annotate`, run by others: the results of the module."""
    script, file = tmp_path / "net.py", tmp_path / name
    script.write_text(CODE)
    scope: dict[str, Any] = {}
    exec(CODE, scope)
    net, inputs = scope["build"]()
    net.eval()
    PLAIN[name](net, inputs, str(file))
    plain = file.read_bytes()
    assert main(["annotate", str(file), "--from", f"{script}:build"]) == 0
    assert open_model(str(file)).__class__.__name__ == "RecordedModel"
    x = torch.rand(2, WIDTH)
    expected = net(x).detach()
    if file.suffix == ".pt2":
        assert torch.equal(torch.export.load(str(file)).module()(x), expected)
        with zipfile.ZipFile(file) as archive, zipfile.ZipFile(io.BytesIO(plain)) as before:
            assert archive.testzip() is None
            assert all(archive.read(member) == before.read(member) for member in before.namelist())
        return
    onnx.checker.check_model(str(file), full_check=True)
    before, after = onnx.load_from_string(plain), onnx.load(file)
    assert after.graph == before.graph
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(result), expected, atol=1e-5)


def test_sizes_are_written_once(files: list[Path]) -> None:
    """A recording knows them; the graph of an ONNX file, which `--runtime onnxruntime` reads, has its own."""
    with zipfile.ZipFile(files[0]) as archive:
        assert not any(name.endswith(traced_sizes.NAME) for name in archive.namelist())
    names = {p.key for p in onnx.load(files[1], load_external_data=False).metadata_props}
    assert {written.PROPERTY, traced_sizes.NAME} <= names


def test_damaged_recordings_in_files(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = onnx.load(files[1], load_external_data=False)
    (entry,) = [p for p in proto.metadata_props if p.key == written.PROPERTY]
    whole, file = entry.value, tmp_path / "damaged.onnx"
    for text in ("", "!!", whole[: len(whole) // 2], whole[:400] + "AAAA" + whole[404:]):
        entry.value = text
        file.write_bytes(proto.SerializeToString())
        assert main(["analyze", str(file), "--batch", "2"]) == 2
        assert "SM108" in capsys.readouterr().err
