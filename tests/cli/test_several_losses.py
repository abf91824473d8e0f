"""--loss OUTPUT=LOSS,... as a user writes it: flags, configs, Python, sweeps, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cli_files as files
import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.errors import StaticmemError, UsageError
from staticmem.frontends.output_names import name_of, of_treespec
from staticmem.scenario.losses import Term, loss_text, terms_of
from staticmem.scenario.request import Request, as_flags, request_of

UNET = str(files.ROOT / "tests" / "data" / "own" / "attention_unet_supervised.pt2")  # three outputs


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("cross-entropy", ()),
        ("out=cross-entropy", (Term("out", "cross-entropy"),)),
        ("out=Cross-Entropy, aux = 0.4 * mse @ y", (Term("out", "cross-entropy"), Term("aux", "mse", "0.4", "y"))),
        ("a=mse+b=1e+5*sum", (Term("a", "mse"), Term("b", "sum", "1e+5"))),
        ("heads.0=-0.5*l1,2=none", (Term("heads.0", "l1", "-0.5"), Term("2", "none"))),
    ],
)
def test_terms(text: str, terms: tuple[Term, ...]) -> None:
    assert terms_of(text) == terms
    assert terms_of(loss_text(text)) == terms


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("a=", "'' is no loss"), ("=mse", "names no output"), ("mse,a=mse", "is not OUTPUT=LOSS"),
        ("a=foo", "'foo' is no loss"), ("a=nan*mse", "is no weight"), ("a=x*mse", "is no weight"),
        ("a=mse@", "no target"), ("a=sum@y", "has no target"),
        ("a=mse,a=l1", "two terms"), ("a=ctc", "'ctc' is no loss"), ("a=mse," * 999 + "b=mse", "characters long"),
        ({}, "names no output"), ({"a": 3}, "is no text"), ({"a,b": "mse"}, "cannot name"), (["mse"], "neither"),
    ],
)  # fmt: skip
def test_what_is_no_loss_is_refused(value: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what.replace("(", r"\(")) as caught:
        loss_text(value)
    assert caught.value.code == "SM139"


def test_flag_mapping_and_config_are_one_request(tmp_path: Path) -> None:
    text = "0=bce,1=0.5*bce"
    asked = request_of({"loss": {0: "bce", "1": "0.5*bce"}, "optimizer": "sgd"})
    assert asked == Request(loss=text, optimizer="sgd")
    assert as_flags({"loss": asked.loss}) == "--loss '0=bce,1=0.5*bce'"
    config = tmp_path / "staticmem.yaml"
    config.write_text("version: 1\ntrain:\n  optimizer: sgd\n  loss: {0: bce, 1: 0.5*bce}\n", encoding="utf-8")
    peaks = []
    for words in (["--optimizer", "sgd", "--loss", text, "--no-config"], ["--config", str(config)]):
        target = tmp_path / "report.json"
        assert main(["analyze", UNET, *words, "-f", "json", "-o", str(target), "--force"]) == 0
        report = json.loads(target.read_text(encoding="utf-8"))
        assert report["scenario"]["loss"] == text
        peaks.append(report["peak"]["live_bytes"])
    peaks.append(staticmem.analyze(UNET, optimizer="sgd", loss={0: "bce", 1: "0.5*bce"}).peak.live_bytes)
    assert len(set(peaks)) == 1


def test_a_config_says_where_it_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "staticmem.yaml"
    config.write_text("version: 1\ntrain:\n  loss: {0: bcd}\n", encoding="utf-8")
    assert main(["analyze", UNET, "--config", str(config)]) == 2
    message = capsys.readouterr().err
    assert "staticmem.yaml:3:" in message
    assert "Did you mean 'bce'?" in message


def test_more_outputs_need_more() -> None:
    """Where the loop holds the outputs, those that are left out keep what they have saved as well."""
    dropped: dict[str, Any] = {"optimizer": "adam", "outputs": "dropped"}
    one, all_of_them = (staticmem.analyze(UNET, **dropped, loss=loss) for loss in ("0=bce", "all=bce"))
    assert all_of_them.peak.live_bytes > one.peak.live_bytes
    assert [note.code for note in one.assumptions if note.code in ("SM215", "SM216", "SM331")] == ["SM215", "SM216"]
    assert "SM216" not in [note.code for note in all_of_them.assumptions]


def test_a_sweep_writes_terms_with_a_plus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", UNET, "--optimizer", "sgd", "--what-if", "loss=bce,0=bce+1=0.5*bce", "-f", "json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["settings"]["loss"] for row in rows] == ["bce", "0=bce,1=0.5*bce"]
    alone = staticmem.analyze(UNET, optimizer="sgd", loss="0=bce,1=0.5*bce")
    assert rows[1]["live_bytes"] == alone.peak.live_bytes


def test_compiled_code_has_the_loss_behind_it() -> None:
    """Backward of the outputs that have one begins with their gradients; those that have none get zeros."""
    report = staticmem.analyze(UNET, optimizer="sgd", loss="0=bce,2=bce", compile=True)
    assert report.peak.live_bytes < staticmem.analyze(UNET, optimizer="sgd", loss="0=bce,2=bce").peak.live_bytes


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_divided_models_are_refused(strategy: str) -> None:
    with pytest.raises(StaticmemError) as caught:
        staticmem.analyze(UNET, optimizer="sgd", loss="0=bce", parallel=strategy, devices=2)
    assert caught.value.code == "SM282"


def test_names_of_outputs_come_from_the_keys_of_a_pytree() -> None:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    pair: dict[str, Any] = {"type": "builtins.list", "context": "null", "children_spec": [leaf, leaf]}
    table: dict[str, Any] = {"type": "builtins.dict", "context": '["out", "aux"]', "children_spec": [leaf, pair]}
    assert of_treespec(json.dumps([1, table])) == ["out", "aux.0", "aux.1"]
    assert of_treespec(json.dumps([1, pair])) == ["", ""]
    assert of_treespec(json.dumps([2, table])) == []
    assert name_of(("heads", "0")) == "heads.0"
    assert name_of(("a" * 300,)) == name_of(("\x1b[2J",)) == ""
    deep = leaf
    for _ in range(30):
        deep = {"type": "builtins.list", "context": "null", "children_spec": [deep]}
    with pytest.raises(ValueError, match="too many parts"):
        of_treespec(json.dumps([1, deep]))
