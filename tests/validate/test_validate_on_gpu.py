"""The script for rented GPUs, rehearsed without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "readings" / "validate_on_gpu.py"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)


@pytest.mark.torch
def test_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    done = _run("--device", "cpu", "--only", "mlp", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    schema = json.loads((ROOT / "schemas" / "record-1.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), schema)
    assert "exact    torch-mlp_blocks.pt2" in done.stdout
    assert "live, peak" in done.stdout
    assert _run("--device", "cpu", "-o", str(folder)).returncode != 0  # never into a folder that is there


def test_nothing_to_run(tmp_path: Path) -> None:
    done = _run("--device", "cpu", "--only", "no such model", "-o", str(tmp_path / "records"))
    assert done.returncode == 1
    assert "No record" in done.stdout


def test_models_of_the_jobs_are_there() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import validate_on_gpu as v; "
    code += "print([j.model for j in v.JOBS if not (v.ROOT / j.model).exists()], len({j.name for j in v.JOBS}))"
    words = [sys.executable, "-c", code, str(SCRIPT.parent)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "17"]
