"""Every verb states the same largest batch and the same fit: `analyze`, `sweep`, `check`, `size`, the page, Python."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.studies import Study, request_of
from staticmem.studies.page import page

ROOT = Path(__file__).parents[2]
GRAPHS = ROOT / "tests" / "data" / "graphs"

# Five models on six cards each; a size in place of a name makes the batches small.
PAIRS: list[tuple[Path, list[str], list[str]]] = [
    (ROOT / "models" / "seed.pt2", ["--optimizer", "sgd"], ["6GiB", "7GiB", "10GiB", "t4", "rtx-4090", "h200"]),
    (GRAPHS / "alexnet.pt2", ["--optimizer", "sgd", "--amp", "fp16"], ["2GiB", "3GiB", "4GB", "5GB", "6GB", "t4"]),
    (GRAPHS / "alexnet.pt2", ["--optimizer", "rmsprop"], ["2GiB", "3GiB", "4GiB", "rtx-3070", "t4", "l4"]),
    (ROOT / "models" / "seed.pt2", ["--optimizer", "adam"], ["3GiB", "4GiB", "8GiB", "24GB", "l4", "b200"]),
    (ROOT / "models" / "seed.pt2", [], ["2GiB", "4GiB", "mi300x", "l4", "t4", "rtx-5090"]),
]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "-f", "json"]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("path", "flags", "cards"), PAIRS)
def test_verbs_agree(capsys: pytest.CaptureFixture[str], path: Path, flags: list[str], cards: list[str]) -> None:
    asked = [word for card in cards for word in ("--gpu", card)]
    sized = {row["slug"]: row for row in said(capsys, "size", str(path), *flags, *asked)["cards"]}
    swept = said(capsys, "sweep", str(path), *flags, *asked, "--max-batch", "-j", "1")["rows"][0]["cards"]
    assert len(sized) == len(swept) == 6
    for found in swept:
        largest, row = found["max_batch"], sized[found["gpu"]]
        assert (row["max_batch"], row["safe_batch"]) == (largest["batch"], largest["safe_batch"])
        assert (row["device_bytes"], row["fit"]) == (found["device_bytes"], found["fit"])
        assert largest["safe_batch"] <= largest["batch"] <= largest["live_batch"]
    gpu, largest = cards[1], swept[1]["max_batch"]
    report = said(capsys, "analyze", str(path), *flags, "--gpu", gpu, "--max-batch")
    assert report["max_batch"] == largest
    batches = [largest["safe_batch"], largest["safe_batch"] + 1, largest["batch"], largest["batch"] + 1]
    listed = f"batch={','.join(map(str, batches))}"
    tried = said(capsys, "sweep", str(path), *flags, "--gpu", gpu, "--what-if", listed, "-j", "1")
    fits = [row["cards"][0]["fit"] for row in tried["rows"]]
    assert fits[0] == "fits"
    assert fits[1] != "fits"
    assert fits[2] in ("fits", "tight")
    assert fits[3] == "does not fit"
    assert tried["rows"][2]["cards"][0]["device_bytes"] == largest["device_bytes"] == report["peak"]["device_bytes"]
    assert tried["rows"][3]["cards"][0]["device_bytes"] == largest["next_device_bytes"]
    limit = f"device={largest['device_bytes']}B"
    for batch, passed in ((largest["batch"], True), (largest["batch"] + 1, False)):
        words = ("check", str(path), *flags, "--gpu", gpu, "--batch", str(batch), "--budget", limit, "-j", "1")
        assert said(capsys, *words)["outcomes"][0]["passed"] is passed


def test_the_sentences_agree(capsys: pytest.CaptureFixture[str]) -> None:
    path, flags = GRAPHS / "mlp_blocks.pt2", ["--optimizer", "rmsprop", "--gpu", "2GiB"]
    found = staticmem.max_batch(path, "2GiB", optimizer="rmsprop")
    assert main(["analyze", str(path), *flags, "--max-batch", "-q"]) == 0
    says = capsys.readouterr().out
    assert f"is {found.batch:,} (" in says
    assert f"{found.safe_batch:,} is safe: its upper estimate is at most 95 %" in says
    batches = f"batch={found.safe_batch},{found.safe_batch + 1},{found.batch},{found.batch + 1}"
    assert main(["sweep", str(path), *flags, "--what-if", batches, "-j", "1", "-q"]) == 0
    says = capsys.readouterr().out
    assert "4 configurations; 1 fits 2gib" in says
    assert f"(batch {found.safe_batch}), 2 are tight" in says  # tight is not to fit
    assert main(["sweep", str(path), *flags, "--max-batch", "-j", "1", "-q"]) == 0
    assert f"the largest batch on 2gib is {found.batch:,}, {found.safe_batch:,} safe" in capsys.readouterr().out
    assert main(["size", str(path), *flags, "--batch", "8"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("GPU of 2GiB"))
    assert re.search(rf"\b{found.batch}\s+{found.safe_batch}\b", row)


def test_levers_of_a_report_are_those_of_the_verb() -> None:
    """For 8-bit Adam too, which saves live memory and may take more on the device."""
    from staticmem.devices import gpus
    from staticmem.studies.levers import levers
    from staticmem.studies.sizing import Options, size

    study = Study.open(GRAPHS / "mlp_blocks.pt2", request_of({"batch": 64, "optimizer": "adam"}))
    sizing = size(study, Options([gpus.find("t4"), gpus.find("l4")], batches=False))
    assert sizing.recommended == "t4"
    assert sizing.levers_of == sizing.curves_of == "Tesla T4"
    verb = {row.flags: row for row in levers(study, "t4").rows}
    assert sizing.levers
    for lever in sizing.levers:
        row = verb[lever.flags]
        assert (lever.saved_bytes, lever.device_bytes, lever.live_bytes) == (
            row.saved_bytes, row.device_bytes, row.live_bytes,
        )  # fmt: skip
    assert not [row for row in verb.values() if "infer" in row.does]  # that is no training step
    assert "Tesla T4" in page(study.ask(request_of({"batch": 64, "optimizer": "adam", "gpu": "t4"})))


def test_a_report_answers_for_any_card() -> None:
    path = GRAPHS / "alexnet.pt2"
    step: dict[str, Any] = {"optimizer": "rmsprop", "batch": 64}
    report = staticmem.analyze(path, **step)
    for card in ("2GiB", "3GiB", "4GiB", "l4"):
        on_card = staticmem.analyze(path, gpu=card, **step).gpu
        assert on_card is not None
        assert report.fits(card) == (on_card.fit == "fits")
    assert (report.fits("2GiB"), report.fits("l4")) == (False, True)
    assert report.fits("gtx-1080-ti")  # on condition of another wheel of the assumed PyTorch, which reports name
    with pytest.raises(staticmem.StaticmemError, match="unknown GPU"):
        report.fits("l5000")
    sent = pickle.loads(pickle.dumps(report))
    assert sent == report
    with pytest.raises(staticmem.StaticmemError, match="cannot be asked for other GPUs"):
        sent.fits("l4")
