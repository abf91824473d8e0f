"""`doctor` and `completion`: what is installed, and scripts that shells accept."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from importlib import metadata

import pytest

from staticmem.cli.doctor import inspect, problems
from staticmem.cli.main import VERBS, main


def test_versions_are_those_of_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {package["name"]: package for package in found["packages"]}
    for name in ("numpy", "onnx", "networkx"):
        assert by_name[name]["version"] == metadata.version(name)
        assert by_name[name]["required"]
    assert not by_name["torch"]["required"]
    assert found["hardware_data"][:2] == "20"


def test_table_begins_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "Everything that is needed is installed."
    assert main(["doctor", "-q"]) == 0
    assert capsys.readouterr().out == text.splitlines()[0] + "\n"


def test_problems() -> None:
    found = inspect("utf-8")
    assert problems(found) == []
    missing = tuple(replace(p, version=None) if p.name == "onnx" else p for p in found.packages)
    assert problems(replace(found, packages=missing)) == ["onnx is missing"]
    old = tuple(
        replace(p, version="1.0", problem="too old, 1.17 is needed") if p.name == "onnx" else p for p in found.packages
    )
    assert problems(replace(found, packages=old)) == ["onnx 1.0 is too old, 1.17 is needed"]
    both = tuple(replace(p, version="1.31") if p.name.startswith("onnxruntime") else p for p in found.packages)
    assert "overwrite each other" in problems(replace(found, packages=both))[0]


def test_a_missing_package_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = metadata.version

    def without(name: str) -> str:
        if name == "networkx":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without)
    assert main(["doctor"]) == 1
    assert "networkx is missing" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb in VERBS:
        assert verb in script
    assert "--optimizer" in script or shell == "tcsh"
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = "COMP_WORDS=(staticmem analyze --optimizer-i); COMP_CWORD=2; _shtab_staticmem staticmem --optimizer-i analyze"
    run = subprocess.run(
        [bash, "-c", f"{script}\n{ask}; printf '%s\\n' \"${{COMPREPLY[@]}}\""],
        text=True,
        capture_output=True,
        check=True,
    )
    assert run.stdout.split() == ["--optimizer-impl"]


def test_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "bash" in capsys.readouterr().err
