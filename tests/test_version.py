"""One version of the package and one of PyTorch, in all places that need them."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import staticmem
from staticmem.devices import profile
from staticmem.version import REFERENCE_TORCH

ROOT = Path(__file__).parent.parent
SHORT = REFERENCE_TORCH.rpartition(".")[0]


def test_version_is_that_of_the_package() -> None:
    assert staticmem.__version__ == metadata.version("staticmem")


def test_whoever_installs_pytorch_installs_the_one_that_is_compared_with() -> None:
    files = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [*(ROOT / "models").glob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / ".ci").iterdir()]
    named = {file: set(re.findall(r"\btorch==([\d.]+)", file.read_text(encoding="utf-8"))) for file in files}
    assert named[ROOT / "pyproject.toml"] == {REFERENCE_TORCH}
    assert {file for file, versions in named.items() if versions - {REFERENCE_TORCH}} == set()


def test_it_is_assumed_and_the_documentation_says_so() -> None:
    assert profile.DEFAULT_TORCH == SHORT
    limitations = (ROOT / "docs" / "limitations.md").read_text(encoding="utf-8")
    assert f"**PyTorch** without `--torch-version`: {SHORT}." in limitations
