"""Which sizes stay open, and that a trace holds at every size that it allows."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.errors import DimensionError, ModelFileError
from staticmem.frontends import traced_sizes
from staticmem.frontends.export_program import read_archive
from staticmem.ir.model_file import TracedSizes, resolve
from staticmem.recording import tracing, writing

torch: Any = pytest.importorskip("torch")
from torch import nn  # noqa: E402

pytestmark = pytest.mark.torch


def empty(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def names(*tensors: Any, **keywords: Any) -> list[str]:
    return [" ".join(f"{axis}:{name}" for axis, name in axes.items()) for axes in tracing.open_axes(tensors, keywords)]


def test_axes_of_one_name_have_one_size() -> None:
    assert names(empty(1, 3, 64, 64)) == ["0:batch 1:axis1 2:height 3:width"]
    assert names(empty(2, 16), empty(2, 16), mask=empty(1, 1, 16, 16, dtype=torch.bool)) == [
        "0:batch 1:axis1", "0:batch 1:axis1", "2:axis2 3:axis3",
    ]  # fmt: skip
    assert names(empty(2, 10, 8), empty(2, 12, 8)) == ["0:batch 1:axis1 2:axis2", "0:batch 1:axis1_2 2:axis2"]
    assert names(empty(5, 8), empty(2, 40)) == ["1:axis1", "1:axis1_2"]  # no batch: nodes and edges
    assert names([empty(2, 8), 3.0], {"b": empty(2)}) == ["0:batch 1:axis1", "", "0:batch"]
    assert names(empty(1, 1), empty(1, 1)) == ["0:batch 1:axis1"] * 2
    assert names(empty(1, 1), empty(1, 4)) == ["0:batch", "0:batch 1:axis1"]


class Net(nn.Module):  # type: ignore[misc]
    """Convolutions with a tail whose layout and broadcasting depend on sizes of 1."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, 2), norm, nn.Linear(8, 4)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        y = torch.relu(self.norm(self.conv(x))) * scale
        weights = y.flatten(2).transpose(1, 2).contiguous().softmax(-1)
        pooled = (y.flatten(2) @ weights).mean(-1).squeeze()
        return self.head(pooled.view(x.shape[0], 8) + pooled.new_zeros(x.shape[0], 1).expand(-1, 8))


def written(module: Any, path: Path, *args: Any, **kwargs: Any) -> Path:
    traced = tracing.trace(module.train(), args, kwargs, as_given=False)
    write = writing.pt2_bytes if path.suffix == ".pt2" else writing.onnx_bytes
    extra = {traced_sizes.NAME: traced_sizes.write(traced.sizes)}
    path.write_bytes(write(traced.program, stack_traces=False, extra=extra))
    return path


def figures(report: Any) -> Any:
    return report.peak.live_bytes, report.peak.by_category, report.phases


@pytest.mark.parametrize("mode", [{"optimizer": "adam"}, {}])
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_any_size_is_as_if_exported_at_that_size(tmp_path: Path, mode: dict[str, Any], suffix: str) -> None:
    """Also 1, at which PyTorch drops gradients' reductions and tells contiguous from not otherwise."""
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    with torch.device("meta"):
        net = Net(nn.BatchNorm2d(8))
    file = written(net, tmp_path / f"m.{suffix}", empty(1, 3, 32, 32))
    for batch, resolution in ((1, (32, 32)), (2, (32, 32)), (5, (48, 33)), (1, (24, 24))):
        program = torch.export.export(net, (empty(batch, 3, *resolution),), strict=False)
        fixed = staticmem.analyze(program, **mode)
        report = staticmem.analyze(file, batch=batch, resolution=resolution, **mode)
        assert figures(report) == figures(fixed), (batch, resolution)
    assert staticmem.analyze(file, batch=3).model.inputs[0].shape == (3, 3, 32, 32)  # the example's resolution


class Asks(nn.Module):  # type: ignore[misc]
    """Python code that takes several ways."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] == 1:
            return x.repeat(100, 1)
        if x.shape[1] % 4:
            x = torch.cat([x, x], 1)
        return x.relu()


def test_sizes_at_which_the_code_takes_another_way_are_refused(tmp_path: Path) -> None:
    traced = tracing.trace(Asks(), (empty(1, 8),), as_given=False)
    assert traced.open == ("batch (not 1)", "axis1 (not 1)")
    model = read_archive(str(written(Asks(), tmp_path / "m.pt2", empty(1, 8))))
    assert resolve(model, batch=2).shapes["x"] == (2, 8)
    for sizes in ({"batch": 1}, {"batch": 2, "dims": {"x[1]": 7}}):
        with pytest.raises(DimensionError) as caught:
            resolve(model, **sizes)
        assert "x[" in caught.value.why
    assert resolve(model, batch=7, dims={"x[1]": 12}).shapes["x"] == (7, 12)


def test_a_module_in_memory_has_the_sizes_of_its_inputs() -> None:
    assert staticmem.analyze(Asks(), (empty(1, 8),)).model.inputs[0].shape == (1, 8)
    report = staticmem.analyze(Asks(), (empty(1, 8),))
    assert report.peak.live_bytes > 100 * 8 * 4
    with pytest.raises(DimensionError):
        staticmem.analyze(nn.BatchNorm1d(4).train(), (empty(1, 4),), optimizer="sgd")  # PyTorch refuses it, too
    assert staticmem.analyze(nn.BatchNorm1d(4), (empty(1, 4),), mode="infer").model.inputs[0].shape == (1, 4)


def test_what_the_code_fixes_is_told() -> None:
    class Fixed(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            assert x.shape[2] == 16
            return x * y

    traced = tracing.trace(Fixed(), (empty(4, 3, 16, 20), empty(4, 3, 16, 20)), as_given=True)
    assert traced.open == ("batch", "axis1", "width")
    assert set(traced.fixed) == {"x[2] = 16", "y[2] = 16"}


def test_inputs_that_share_a_size_share_a_symbol_even_where_the_code_relates_them_nowhere(tmp_path: Path) -> None:
    class Apart(nn.Module):  # type: ignore[misc]
        def forward(self, ids: Any, mask: Any = None, factor: float = 2.0) -> Any:
            return ids.float().sin() * factor, mask.float().cos()

    model = read_archive(str(written(Apart(), tmp_path / "m.pt2", empty(1, 16), factor=3.0, mask=empty(1, 16))))
    assert len(model.symbols) == 2
    assert resolve(model, batch=3, dims={"ids[1]": 5}).shapes == {"ids": (3, 5), "mask": (3, 5)}


def test_the_file_is_one_for_torch_too(tmp_path: Path) -> None:
    file = written(Net(nn.BatchNorm2d(8)), tmp_path / "m.pt2", torch.randn(1, 3, 32, 32), scale=2.0)
    program = torch.export.load(file)
    net = Net(nn.BatchNorm2d(8))
    program._state_dict = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    loaded = program.module()
    for shape in ((1, 3, 32, 32), (4, 3, 40, 24)):
        assert loaded(torch.randn(shape), scale=2.0).shape == (shape[0], 4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"example":{"s":-1},"least":{},"conditions":[]}',
        '{"example":{},"least":{},"conditions":["x("]}',
    ],
)
def test_damaged_sizes_are_an_error(tmp_path: Path, text: str) -> None:
    written(nn.ReLU(), tmp_path / "m.pt2", empty(2, 2))
    with zipfile.ZipFile(tmp_path / "m.pt2") as source, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as target:
        for member in source.namelist():
            target.writestr(member, text if member.endswith(traced_sizes.NAME) else source.read(member))
    with pytest.raises(ModelFileError):
        read_archive(str(tmp_path / "bad.pt2"))


def test_the_text_comes_back() -> None:
    sizes = TracedSizes({"s0": 2}, {"s0": 1}, ("And(Ne(s0, 3), Lt(s0, 9))",))
    assert traced_sizes.read(traced_sizes.write(sizes), "m.pt2") == sizes
    assert sizes.refusal({"s0": 4}) is None
    assert sizes.refusal({"s0": 3}) == sizes.refusal({"s0": 9}) == sizes.conditions[0]
    assert sizes.refusal({}) is None
