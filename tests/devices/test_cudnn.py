"""The exact way through libcudnn: what needs no library, and its answers against the tables where one is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from staticmem.devices import conv_tables, cudnn
from staticmem.devices.conv import FORWARD, Convolution
from staticmem.devices.conv_tables import form_bytes
from staticmem.devices.conv_workspace import plans, workspace
from staticmem.devices.cudnn import ARCHITECTURES, describe
from staticmem.errors import UsageError

CONV = Convolution(FORWARD, "tf32", False, (32, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1))
TENSOR_CORE, DOWN_CONVERT, NONDETERMINISTIC = 0, 1, 4


@pytest.mark.parametrize(
    ("notes", "precision", "deterministic", "excluded"),
    [
        (set(), "tf32", False, False), ({TENSOR_CORE}, "tf32", False, False), ({TENSOR_CORE}, "float32", False, True),
        ({DOWN_CONVERT}, "tf32", False, True), ({DOWN_CONVERT}, "float16", False, False),
        ({NONDETERMINISTIC}, "float16", False, False), ({NONDETERMINISTIC}, "float16", True, True),
    ],
)  # fmt: skip
def test_engines_that_pytorch_filters(notes: set[int], precision: str, deterministic: bool, excluded: bool) -> None:
    assert cudnn._excluded(notes, precision, deterministic) is excluded


def test_strides() -> None:
    assert cudnn._strides((2, 3, 4, 5), channels_last=False) == [60, 20, 5, 1]
    assert cudnn._strides((2, 3, 4, 5), channels_last=True) == [60, 1, 15, 3]
    assert cudnn._strides((2, 3, 4, 5, 6), channels_last=True) == [360, 1, 90, 18, 3]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_described_card_is_of_its_architecture(architecture: str) -> None:
    assert f"sm_{describe(architecture)['deviceVer'] // 10}" == architecture


def test_an_unknown_architecture() -> None:
    with pytest.raises(UsageError, match="sm_85"):
        describe("sm_85")


def test_a_library_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "b" / "libcudnn.so.9"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    monkeypatch.setenv("STATICMEM_CUDNN_LIBRARY", str(path))
    with pytest.raises(cudnn.CudnnError, match="cannot load"):
        cudnn.Cudnn()


def test_nothing_is_loaded_unless_asked() -> None:
    import subprocess

    code = "import sys; import staticmem.devices.kernels; print('staticmem.devices.cudnn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


LIBRARY = cudnn.installed()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="no libcudnn that answers without a GPU")


@needs_library
def test_a_plan_for_every_architecture() -> None:
    assert LIBRARY is not None
    for architecture in ARCHITECTURES:
        found = LIBRARY.plans(CONV, architecture, limit=3)
        assert found
        assert all(plan.workspace >= 0 for plan in found)
        assert workspace(CONV, architecture, "", LIBRARY).expected == found[0].workspace
        assert plans(CONV, architecture, "", LIBRARY) == tuple(plan.workspace for plan in found)


@needs_library
def test_the_tables_agree_with_the_library(sampling: ModuleType) -> None:
    """Queries that nobody has asked before, of the version that the tables are of, else of the closest one."""
    assert LIBRARY is not None
    version = f"{LIBRARY.version // 10000}.{LIBRARY.version // 100 % 100}.{LIBRARY.version % 100}"
    same = total = 0
    for precision, last, direction in sampling.cells(("tf32", "float32", "float16")):
        for conv in sampling.sample(77, precision, last, direction, 8):
            for architecture in ("sm_80", "sm_90"):
                found = LIBRARY.plans(conv, architecture)
                if found:
                    size = form_bytes(conv, conv_tables.forms(conv, architecture, version)[0])
                    total += 1
                    same += abs(size - found[0].workspace) <= max(2**20, 0.02 * found[0].workspace)
    assert same / total > (0.75 if version in conv_tables.versions() else 0.6)


def test_a_library_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATICMEM_CUDNN_LIBRARY", "/nowhere.so")
    with pytest.raises(cudnn.CudnnError, match="does not exist"):
        cudnn.Cudnn()
