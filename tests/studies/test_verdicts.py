"""Every verb gives one verdict on a step and a card: in text, JSON, HTML, by its exit code, and in Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main

ROOT = Path(__file__).parents[2]
GRAPHS = ROOT / "tests" / "data" / "graphs"
MLP, ALEXNET, SEED = GRAPHS / "mlp_blocks.pt2", GRAPHS / "alexnet.pt2", ROOT / "models" / "seed.pt2"
WORDS = ("fits", "tight", "does not fit", "cannot run it")

# Models, options of their step, and cards that are compared for it: sizes at which the step is tight, cards whose chip
# the default wheel has no kernels for, and cards that PyTorch refuses the step on.
STEPS: list[tuple[Path, dict[str, Any], list[str]]] = [
    (
        MLP,
        {"batch": 64, "optimizer": "adam"},
        ["1300MiB", "1400MiB", "t4", "v100", "p40", "jetson-agx-orin-64gb", "2GiB"],
    ),
    (MLP, {"batch": 64, "optimizer": "adam", "amp": "bf16"}, ["t4", "v100", "p100-pcie-16gb", "l4", "1400MiB"]),
    (MLP, {"batch": 64, "optimizer": "sgd", "amp": "bf16", "torch_version": "2.2"}, ["t4", "v100", "l4", "a10"]),
    (MLP, {"batch": 64, "optimizer": "adam", "compile": True}, ["gtx-1080-ti", "p40", "v100", "t4", "1200MiB"]),
    (MLP, {"batch": 64, "optimizer": "adam", "dtype": "bf16", "compile": True}, ["t4", "v100", "rtx-2080-ti", "l4"]),
    (ALEXNET, {"batch": 64, "optimizer": "adam"}, ["2600MiB", "2700MiB", "2800MiB", "3GiB", "4GiB", "v100", "mi300x"]),
    (ALEXNET, {"batch": 256, "optimizer": "sgd"}, ["3GiB", "3350MiB", "3700MiB", "4GiB", "5GiB", "gtx-1080-ti"]),
    (ALEXNET, {"batch": 64, "mode": "infer", "dtype": "bf16"}, ["t4", "v100", "800MiB", "rtx-3060"]),
    (ALEXNET, {"batch": 64, "optimizer": "adam", "torch_version": "2.6"}, ["rtx-5090", "v100", "b200", "2700MiB"]),
    (ALEXNET, {"batch": 64, "optimizer": "adam", "torch_version": "2.15"}, ["v100", "p40", "t4", "2700MiB"]),
    (SEED, {"batch": 8, "optimizer": "sgd"}, ["6GiB", "7GiB", "10GiB", "l4", "p100-pcie-16gb"]),
    (SEED, {"batch": 8, "optimizer": "adam", "amp": "fp16"}, ["4GiB", "4700MiB", "6GiB", "v100", "rtx-5090"]),
]
PAIRS = [(path, words, card) for path, words, cards in STEPS for card in cards]
FEW = 4  # one in so many runs by default
VGG: dict[str, Any] = {"batch": 64, "optimizer": "adam"}
LARGE = [(ROOT / "models" / "vgg19.pt2", VGG, card) for card in ("7GiB", "8600MiB", "11GiB", "v100", "gtx-1080-ti")]
CASES = [
    pytest.param(*pair, marks=pytest.mark.exhaustive if index % FEW or pair in LARGE else ())
    for index, pair in enumerate([*PAIRS, *LARGE])
]


def flags_of(words: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in words.items():
        flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return flags


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["--no-config", *argv] if argv[0] == "--no-config" else list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def word_of(text: str) -> str:
    """The verdict of a sentence or a headline."""
    plain = " ".join(text.split()).lower()
    for word, pattern in (
        ("cannot run it", r"\bcannot run\b"),
        ("does not fit", r"\bdoes not fit\b|\bnone fits\b(?!.*\bis tight)"),
        ("tight", r"\btight\b"),
        ("fits", r"\bfits?\b|\btrains it\b|\bruns it\b"),
    ):
        if re.search(pattern, plain):
            return word
    return f"nothing: {plain[:120]}"


def answers(capsys: pytest.CaptureFixture[str], path: Path, words: dict[str, Any], card: str) -> dict[str, str]:
    """What each verb says, by its name; an answer that contradicts itself is its own text."""
    asked = [str(path), *flags_of(words), "--gpu", card]
    said: dict[str, str] = {}
    _, out, _ = run(capsys, "analyze", *asked, "-f", "json")
    report = json.loads(out) if out else {}
    fit = report["gpu"]["fit"] if report else "error"
    said["analyze json"] = fit
    said["analyze"] = word_of(run(capsys, "analyze", *asked, "-q")[1])
    page = run(capsys, "analyze", *asked, "-f", "html")[1]
    found = re.search(r'<p class="lead"><strong class="\w+">. ([a-z ]+)</strong>', page)
    said["page"] = found.group(1) if found else "error"
    _, out, _ = run(capsys, "sweep", *asked, "-f", "json", "-j", "1")
    said["sweep"] = json.loads(out)["rows"][0]["cards"][0]["fit"] if out else "error"
    said["sweep text"] = word_of(run(capsys, "sweep", *asked, "-q", "-j", "1")[1])
    code, _, _ = run(capsys, "check", *asked, "--budget", "device=900GiB", "-q", "-j", "1")
    said["check"] = fit if (code == 1) == (fit in ("does not fit", "cannot run it")) else f"exit code {code}"
    _, out, _ = run(capsys, "size", *asked, "--no-batches", "-f", "json")
    row = json.loads(out)["cards"][0] if out else {"fit": "error"}
    said["size"] = "cannot run it" if row.get("obstacle") else row["fit"]
    _, out, _ = run(capsys, "levers", *asked, "-f", "json")
    said["levers"] = json.loads(out)["base"]["fit"] if out else "error"
    safe = staticmem.analyze(path, **words).fits(card)
    said["fits()"] = fit if safe == (fit == "fits") else f"fits() is {safe}"
    if words.get("optimizer"):
        _, out, _ = run(capsys, "fit", *asked, "-f", "json")
        way: dict[str, Any] = json.loads(out)["way"] if out else {"fit": "error", "concessions": []}
        # where the step as asked is not safe, it looks for another way, and has no verdict on the one that was asked
        another = bool(way["concessions"]) and way["fit"] != "cannot run it"
        said["fit"] = fit if another and fit in ("tight", "does not fit") else way["fit"]
    return said


@pytest.mark.parametrize(("path", "words", "card"), CASES, ids=lambda value: str(value)[-20:])
def test_all_verbs_agree(capsys: pytest.CaptureFixture[str], path: Path, words: dict[str, Any], card: str) -> None:
    said = answers(capsys, path, words, card)
    assert said["analyze json"] in WORDS
    assert set(said.values()) == {said["analyze json"]}, said
