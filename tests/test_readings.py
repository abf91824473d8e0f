"""The comparison with readings of real cards: what it says of right and of wrong predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import staticmem

ROOT = Path(__file__).parents[1]
MODEL = "models/resnet18.pt2"
CUBLAS = 8519680  # bytes of a workspace below Hopper: 4096:2:16:8 KiB


def _compare(*words: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "readings" / "compare_readings.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_errors_and_bands_are_told_by_meter(tmp_path: Path) -> None:
    peak = staticmem.analyze(ROOT / MODEL, batch=4, gpu="rtx-3060").peak
    assert peak.allocated_bytes is not None
    assert peak.device_bytes is not None
    readings = [
        {"model": MODEL, "request": {"batch": 4}, "allocated_bytes": peak.allocated_bytes},
        {"model": MODEL, "request": {"batch": 4}, "device_bytes": peak.device_bytes * 4},
    ]
    path = tmp_path / "readings.json"
    path.write_text(
        json.dumps({"source": "me", "request": {"gpu": "rtx-3060"}, "readings": readings}), encoding="utf-8"
    )
    text = _compare(str(path), "--all")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if not line.lstrip().startswith(("+", "-"))}
    assert rows["allocated"] == ["1", "0.00%", "0.00%", "100%"]
    assert rows["device"] == ["1", "75.00%", "75.00%", "0%"]
    assert "reserved" not in rows
    assert "-75.00% device" in text


def test_published_readings_are_where_the_docs_say() -> None:
    """DenseNet-121 at batch 84 on a Titan V: within 0.5 %, the workspaces of cuBLAS aside."""
    lines = [line.split() for line in _compare("tests/data/measured/readings-dtr-titan-v.json").splitlines()]
    allocated = next(line for line in lines if line[0] == "allocated")
    assert int(allocated[1]) >= 1
    assert float(allocated[3].rstrip("%")) < 0.5


def test_the_page_has_every_reading_and_what_is_predicted_now(tmp_path: Path) -> None:
    """Two sizes of one series, compared anew: their rows are in the page as they are made today."""
    pytest.importorskip("torch")
    path = ROOT / "tests/data/measured/readings-liger-kernel.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    total = sum(len(series["allocated_bytes"]) for series in document["series"])
    published = (ROOT / "docs/generated/hardware-readings.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.count("| allocated |") for line in published if line.count("|") == 10 and ": " in line) > total
    few = [series for series in document["series"] if series["network"] in ("LayerNorm", "Softmax", "GroupNorm")]
    for series in few:
        series["allocated_bytes"] = dict(list(series["allocated_bytes"].items())[:2])
    given = tmp_path / "few.json"
    given.write_text(json.dumps({**document, "series": few}), encoding="utf-8")
    _compare(str(given), "--page", str(tmp_path / "page.md"))
    rows = [row for row in (tmp_path / "page.md").read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    every = rows[next(i for i, row in enumerate(rows) if row.startswith("| network and settings")) + 1 :]
    assert len(every) == sum(len(series["allocated_bytes"]) for series in few)
    assert not set(every) - set(published)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("sizes", "request_of_it"),
    [
        ({"network": "LitDecoder", "groups": 2, "adapters": {"rank": 4, "targets": "qv", "packed": "nf4"}}, {}),
        ({"network": "TuneDecoder", "chunked": True}, {"checkpoint": "Layer"}),
    ],
)
def test_a_decoder_grows_by_what_a_layer_adds(
    sizes: dict[str, object], request_of_it: dict[str, object], tmp_path: Path
) -> None:
    """Seven layers from two and four, beside all seven recorded. The row that is far off has its cause on the page."""
    pytest.importorskip("torch")
    architecture = {"layers": 7, "hidden": 64, "heads": 4, "inner": 128, "vocabulary": 512, **sizes}
    one = {"architecture": "tiny", "input": [2, 256], "allocated_bytes": 1, "explained": "why"}
    document = {
        "source": "me", "architectures": {"tiny": architecture}, "explanations": {"why": "It is tiny."},
        "request": {"mode": "train", "loss": "none", "outputs": "dropped", "optimizer": "adamw", **request_of_it},
        "readings": [one, {**one, "whole": True}],
        "not_tried": [{"rows": "others", "count": 3, "why": "no time"}],
    }  # fmt: skip
    given, page = tmp_path / "readings.json", tmp_path / "page.md"
    given.write_text(json.dumps(document), encoding="utf-8")
    _compare(str(given), "--page", str(page), "--state", str(tmp_path / "state.json"))
    kept = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
    (grown, low, high), (whole, *_) = (peak["allocated"] for _, _, peak in kept.values())
    assert low <= grown <= high
    assert abs(grown - whole) < 2048  # four tensors, rounded up to 512 bytes each
    text = page.read_text(encoding="utf-8")
    assert "It is tiny." in text
    assert "| me | others | 3 | no time |" in text


@pytest.mark.torch
def test_the_first_step_of_all_has_nothing_of_a_step_before(tmp_path: Path) -> None:
    """lit-gpt's longest sample comes first: neither the logits of a step before are there, nor the workspace of cuBLAS
    of the thread of the backward, as the peak is before its first product. `first` packs no weight by itself."""
    pytest.importorskip("torch")
    sizes = {"network": "LitDecoder", "layers": 3, "hidden": 64, "heads": 4, "inner": 128, "vocabulary": 4096}
    adapters = {"rank": 4, "targets": "qv", "dropout": 0.1}
    request = {"mode": "train", "loss": "none", "outputs": "dropped", "gpu": "a100-sxm-40gb"}
    readings = [
        {"architecture": "tiny", "sizes": {"adapters": {**adapters, **more}}, "input": [2, 256], "allocated_bytes": 1}
        for more in ({"first": True}, {}, {"first": True, "packed": "nf4"})
    ]
    document = {"source": "me", "architectures": {"tiny": sizes}, "whole": True, "request": request}
    given = tmp_path / "readings.json"
    given.write_text(json.dumps({**document, "readings": readings}), encoding="utf-8")
    _compare(str(given), "--state", str(tmp_path / "state.json"))
    kept = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
    first, later, packed = (peak["allocated"][0] for _, _, peak in kept.values())
    logits = 2 * 256 * 4096 * 4
    assert later - first >= logits  # those of the step before
    assert first - packed > 64 * 4096 * 2 // 2 - CUBLAS
    assert first > logits + CUBLAS


@pytest.mark.torch
def test_readings_between_steps_and_sums_over_cards(tmp_path: Path) -> None:
    """What is held between two decode steps is the model, the cache and one workspace of cuBLAS; two cards have the
    activations of a prompt twice, but for its embeddings, and two workspaces."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.20")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    words = {"mode": "generate", "prompt": 500, "new_tokens": 3, "batch": 1, "gpu": "a100-sxm-80gb"}
    ways: list[dict[str, object]] = [{}, {"moment": "between steps"}, {"cards": 2}]
    document = {
        "source": "me", "architectures": {"tiny": config}, "request": words,
        "readings": [{"architecture": "tiny", "allocated_bytes": 1, **way} for way in ways],
    }  # fmt: skip
    given = tmp_path / "readings.json"
    given.write_text(json.dumps(document), encoding="utf-8")
    _compare(str(given), "--state", str(tmp_path / "state.json"))
    kept = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
    one, between, two = (peak["allocated"] for _, _, peak in kept.values())
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128
    parameters = 2 * (3 * layer + 2 * 256 * 128 + 128)
    cache = 3 * 2 * 2 * 32 * 2 * (500 + 3 - 1)
    assert between[0] == between[1] == parameters + cache + CUBLAS
    assert between[0] < between[2] <= one[0]
    assert CUBLAS + 3 * 500 * 512 * 2 <= two[0] - one[0] < 2 * CUBLAS


def test_a_network_that_models_does_not_have_is_named(tmp_path: Path) -> None:
    path = tmp_path / "readings.json"
    series = {"network": "Nothing", "sizes": {}, "over": "rows", "allocated_bytes": {"1": 1}}
    path.write_text(json.dumps({"source": "me", "series": [series]}), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "readings" / "compare_readings.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "models/ has no network 'Nothing'" in done.stderr
