"""The pytest plugin, run in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "models" / "resnet18.pt2"

TESTS = f"""
import pytest

MODEL = {str(MODEL)!r}

@pytest.mark.gpu_budget("1 GiB")
def test_fits(gpu_memory):
    assert gpu_memory(MODEL, batch=4, optimizer="adam").scenario.optimizer == "adam"

@pytest.mark.gpu_budget("100 MiB")
def test_too_much(gpu_memory):
    gpu_memory(MODEL, batch=4, optimizer="adam")

@pytest.mark.gpu_budget("1 MiB", metric="reserved")
def test_reserved(gpu_memory):
    gpu_memory(MODEL)

@pytest.mark.gpu_budget("400 MiB", gpu="l4", optimizer="adam")
def test_words_of_the_marker(gpu_memory):
    gpu_memory(MODEL, batch=1)

@pytest.mark.gpu_budget("1 GiB")
def test_forgotten(gpu_memory):
    pass

@pytest.mark.gpu_budget("1 GiB")
def test_without_the_fixture():
    pass

@pytest.mark.gpu_budget(40)
def test_without_a_unit(gpu_memory):
    gpu_memory(MODEL)

def test_without_a_budget(gpu_memory):
    assert gpu_memory(MODEL).peak.live_bytes > 0

@pytest.mark.gpu_budget("much")
def test_no_size(gpu_memory):
    gpu_memory(MODEL)
"""


def test_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "test_budgets.py"
    path.write_text(TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--strict-markers", "-q", str(path)],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    outcomes: dict[str, str] = {}
    for line in run.stdout.splitlines():
        outcome, _, test = line.split(" - ")[0].partition(" test_budgets.py::")
        outcomes[test] = outcome
    assert outcomes["test_fits"] == outcomes["test_without_a_budget"] == "PASSED", run.stdout
    assert outcomes["test_too_much"] == outcomes["test_reserved"] == outcomes["test_words_of_the_marker"] == "FAILED"
    assert outcomes["test_forgotten"] == outcomes["test_no_size"] == outcomes["test_without_a_unit"] == "ERROR"
    assert outcomes["test_without_the_fixture"] == "ERROR"
    assert "does not take the fixture gpu_memory" in run.stdout
    assert "exceeds the budget of 100 MiB" in run.stdout
    assert "device memory" in run.stdout
    assert "did not call gpu_memory()" in run.stdout
    assert "the limit is a size" in run.stdout
