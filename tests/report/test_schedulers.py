"""What schedulers are asked for, against their schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import staticmem
from staticmem.cli.main import main
from staticmem.errors import UsageError

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "resnet18.pt2")
SCHEMAS = json.loads((ROOT / "tests" / "data" / "kubernetes_schemas.json").read_text("utf-8"))
STEP = ["--batch", "8", "--optimizer", "adamw", "--gpu", "l4", "--no-config"]


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["analyze", MODEL, *STEP, *words]) == 0
    return capsys.readouterr().out


def megabytes(text: str) -> int:
    return int(re.fullmatch(r"(\d+)M(?:i)?", text)[1])  # type: ignore[index]


def test_a_pod(capsys: pytest.CaptureFixture[str]) -> None:
    text = written(capsys, "-f", "k8s", "--workers", "4")
    pod: dict[str, Any] = yaml.safe_load(text)
    jsonschema.validate(pod, SCHEMAS["pod"])
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == 1
    assert megabytes(resources["requests"]["memory"]) < megabytes(resources["limits"]["memory"])
    assert text.startswith("# GPU: Fits an L4")
    assert "No nodeSelector" in text


def test_a_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(written(capsys, "-f", "trainjob", "--parallel", "ddp", "--devices", "4"))
    jsonschema.validate(job, SCHEMAS["trainjob"])
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 4


def test_the_schemas_refuse_what_kubernetes_refuses() -> None:
    wrong = {"requests": {"memory": "12 GiB"}}
    job = {"spec": {"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": 1, "resourcesPerNode": wrong}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMAS["trainjob"])


def test_directives_of_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of sbatch, whose `--mem` is a number with K, M, G or T (https://slurm.schedmd.com/sbatch.html)."""
    lines = written(capsys, "-f", "slurm", "--devices", "2", "--parallel", "ddp").splitlines()
    assert lines[0] == "#!/bin/bash"
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH"))
    assert options.keys() == {"nodes", "ntasks-per-node", "gres", "mem"}
    assert (options["nodes"], options["ntasks-per-node"], options["gres"]) == ("1", "2", "gpu:2")
    assert re.fullmatch(r"\d+M", options["mem"])


def test_more_confidence_is_more_memory(capsys: pytest.CaptureFixture[str]) -> None:
    limits = []
    for confidence in ("0.5", "0.95", "0.99"):
        pod = yaml.safe_load(written(capsys, "-f", "k8s", "--confidence", confidence))
        limits.append(megabytes(pod["spec"]["containers"][0]["resources"]["limits"]["memory"]))
    assert limits == sorted(set(limits))


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(ROOT / "models" / "plan.yaml"), "-f", "k8s"]) == 0
    jsonschema.validate(yaml.safe_load(capsys.readouterr().out), SCHEMAS["pod"])


def test_what_sleeps_is_on_the_host() -> None:
    """ResNet-18 has 11,689,512 parameters and 9,600 floats of buffers; 20 counters are int64."""
    step = {"model": "a", "batch": 2, "optimizer": "adamw"}
    instants = [{"step": step}, {"sleep": {"model": "a", "parts": "all"}}, {"evaluate": {"model": "b", "batch": 2}}]
    config = {"version": 1, "plan": {"models": {"a": MODEL, "b": MODEL}, "instants": instants}}
    sleeping = staticmem.plan(config).host
    config["plan"] = {"models": {"a": MODEL, "b": MODEL}, "instants": [instants[0], instants[2]]}
    awake = staticmem.plan(config).host
    assert sleeping is not None
    assert awake is not None
    assert sleeping.parts.get("tensors", 0) >= 3 * 4 * 11_689_512
    assert awake.parts.get("tensors", 0) == 0


def test_figures_of_the_host_in_a_report() -> None:
    report = staticmem.analyze(MODEL, batch=8, optimizer="adamw", workers=2)
    assert report.host is not None
    assert sum(report.host.parts.values()) == report.host.bytes
    assert report.host.band.low < report.host.bytes < report.host.band.high
    assert staticmem.analyze(MODEL, batch=8, optimizer="adamw").host is None


def test_a_confidence_is_a_probability() -> None:
    with pytest.raises(UsageError) as caught:
        staticmem.analyze(MODEL, batch=8, confidence=0.4)
    assert caught.value.code == "SM446"
