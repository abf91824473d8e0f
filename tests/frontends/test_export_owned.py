"""What a .pt2 says of parameters: which are frozen, which are one tensor, which weights a module keeps."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prepared import run_step  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

import staticmem  # noqa: E402
from staticmem.frontends.export_program import read_archive, tied_names  # noqa: E402
from staticmem.ir.model_file import resolve  # noqa: E402
from staticmem.liveness import Lifetimes  # noqa: E402
from staticmem.passes.pipeline import bind  # noqa: E402
from staticmem.recording.writing import pt2_bytes  # noqa: E402
from staticmem.scenario.step import Scenario  # noqa: E402

pytestmark = pytest.mark.torch
PARAMETER = 256 * 256 * 4


class Twice(nn.Module):  # type: ignore[misc]
    """A layer under two names, as in `self.conv1 = ...; self.net = nn.Sequential(self.conv1, ...)`."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.a = nn.Linear(256, 256, bias=False)
        self.net = nn.Sequential(self.a if same else nn.Linear(256, 256, bias=False), nn.Tanh())

    def forward(self, x: Any) -> Any:
        return self.net(x)


def test_a_loaded_file_without_weights_has_no_tied_names(tmp_path: Path) -> None:
    """torch.export.load gives all its tensors one storage on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    made = torch.export.export(model, (torch.ones(2, 256, device="meta"),), strict=False)
    (tmp_path / "m.pt2").write_bytes(pt2_bytes(made, stack_traces=False))
    assert parameter_bytes(torch.export.load(tmp_path / "m.pt2")) == parameter_bytes(tmp_path / "m.pt2")


def program(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model.train(), (torch.ones(2, 256),), strict=False)


def saved(model: Any, path: Path) -> Path:
    torch.export.save(program(model), path)
    return path


def parameter_bytes(model: Any) -> int:
    return staticmem.analyze(model, mode="infer").parameters.bytes


@pytest.mark.parametrize("same", [True, False])
def test_a_module_with_two_names_counts_once(same: bool, tmp_path: Path) -> None:
    """From the file's storages, from the module itself, and from what `staticmem export` writes."""
    model, expected = Twice(same), PARAMETER * (1 if same else 2)
    assert parameter_bytes(saved(model, tmp_path / "m.pt2")) == expected
    assert parameter_bytes(program(model)) == expected
    (tmp_path / "light.pt2").write_bytes(pt2_bytes(program(model), stack_traces=False))
    assert parameter_bytes(tmp_path / "light.pt2") == expected


def test_tensors_on_the_meta_device_are_not_taken_for_one(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    path = tmp_path / "m.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.export.export(model, (torch.ones(2, 256, device="meta"),), strict=False)
        torch.export.save(made, path)
    assert parameter_bytes(path) == 3 * PARAMETER


@pytest.mark.parametrize("content", [b"[]", b'{"config": 1}', b"{", b'{"config": {"a": {"path_name": 3}}}'])
def test_a_config_that_is_nonsense_says_nothing(content: bytes) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data/weights/model_weights_config.json", content)
        assert tied_names(archive) == {}


def test_what_is_written_beside_the_graph_is_checked() -> None:
    for content, expected in (({"b": "a"}, {"b": "a"}), ({"b": 1}, {}), ([1], {})):
        with zipfile.ZipFile(io.BytesIO(), "w") as archive:
            archive.writestr("m/extra/staticmem_tied.json", json.dumps(content))
            assert tied_names(archive) == expected


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    """As many gradients and states as PyTorch makes for the parameters that require one."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    model[0].requires_grad_(False)
    report = staticmem.analyze(saved(model, tmp_path / "m.pt2"), optimizer="adam", loss="mean")
    assert report.parameters.trainable_count == sum(p.numel() for p in model.parameters() if p.requires_grad)
    states = {t.name for t in report.alive if t.category == "optimizer_state"}
    assert states
    assert not any(name.startswith("0.") for name in states)


def test_a_file_for_inference_is_trained_as_a_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    trained = staticmem.analyze(saved(model, tmp_path / "a.pt2"), optimizer="adam", loss="mean")
    frozen = staticmem.analyze(saved(model.requires_grad_(False), tmp_path / "b.pt2"), optimizer="adam", loss="mean")
    assert frozen.peak.live_bytes == trained.peak.live_bytes
    assert "SM315" in {note.code for note in frozen.assumptions}


def left(norm: Any, path: Path) -> int:
    """Bytes that are alive when a step with SGD is done."""
    archive = read_archive(str(saved(norm(nn.Linear(256, 256, bias=False)), path)))
    graph = bind(archive, resolve(archive))
    return Lifetimes(run_step(graph, Scenario(mode="train", optimizer="sgd", loss="mean")).trace).live[-1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_the_weight_of_the_old_norms_outlives_the_step(name: str, tmp_path: Path) -> None:
    """The module has the computed weight as an attribute; parametrizations compute it and let it go."""
    old, new = getattr(torch.nn.utils, name), getattr(parametrizations, name)
    for norm, kept in ((old, True), (new, False)):
        layer = norm(nn.Linear(256, 256, bias=False))
        layer(torch.ones(2, 256))
        assert isinstance(layer.__dict__.get("weight"), torch.Tensor) is kept
    assert left(old, tmp_path / "old.pt2") - left(new, tmp_path / "new.pt2") == PARAMETER
