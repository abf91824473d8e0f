"""The command as a user meets it: formats, files, streams, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cli_files as files
import pytest

from staticmem.cli.main import main

ROOT = files.ROOT
RESNET = str(ROOT / "models" / "resnet18.pt2")
SEED = str(files.SEED)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["analyze", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def analyzed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, *words, "--format", "json")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def console(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command in its own process."""
    command = [sys.executable, "-m", "staticmem", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, **options)


def test_table_begins_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, RESNET, "--batch", "32", "--optimizer", "adam")
    assert (code, err) == (0, "")
    answer = " ".join(out.split("\n\n")[0].split())
    # 872,955,392 bytes were measured with PyTorch 2.15, outputs held
    assert " 833 MiB of it are tensors at the peak, in backward (convolution_backward in " in answer
    assert "\n\nTraining resnet18.pt2, batch 32, Adam\n" in out
    assert "\x1b" not in out
    for heading in ("Memory at the peak", "Phases", "Largest tensors", "Coverage", "Assumptions"):
        assert heading in out


def test_json_has_what_a_tool_needs(capsys: pytest.CaptureFixture[str]) -> None:
    report = analyzed(capsys, RESNET, "--batch", "32", "--optimizer", "adam", "--loss", "cross-entropy")
    assert list(report)[:2] == ["schema", "model"]
    assert report["peak"]["phase"] == "backward"
    assert report["scenario"]["batch"] == 32
    assert "SM300" in [note["code"] for note in report["assumptions"]]


def test_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyzed(capsys, SEED)["scenario"]["mode"] == "infer"
    assert analyzed(capsys, SEED, "--optimizer", "sgd")["scenario"]["mode"] == "train"
    both = analyzed(capsys, SEED, "--mode", "infer", "--optimizer", "sgd")
    assert (both["scenario"]["mode"], both["scenario"]["optimizer"]) == ("infer", None)
    assert [w["code"] for w in both["warnings"]] == ["SM302"]
    loss = analyzed(capsys, SEED, "--loss", "mean")
    assert loss["scenario"]["mode"] == "infer"
    assert [(w["code"], w["text"]) for w in loss["warnings"]] == [
        ("SM302", "the loss (mean) is not used: inference needs none; --mode train, or an optimizer, makes it a step")
    ]
    alone = analyzed(capsys, SEED, "--mode", "train")
    assert (alone["phases"]["optimizer"], alone["peak"]["by_category"]["optimizer_state"]) == (None, 0)
    assert alone["phases"]["backward"]["peak_bytes"] > 0


def test_batch_is_assumed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    without = analyzed(capsys, SEED)
    assert without["scenario"]["batch"] == 1
    assert "SM301" in [a["code"] for a in without["assumptions"]]
    given = analyzed(capsys, SEED, "--batch", "1")
    assert "SM301" not in [a["code"] for a in given["assumptions"]]
    assert given["peak"] == without["peak"]


def test_batch_follows_the_range_of_the_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def at_least_two(document: dict[str, Any]) -> None:
        for bounds in document["range_constraints"].values():
            bounds["min_val"] = 2

    path = files.rewritten(tmp_path / "two.pt2", at_least_two)
    assert analyzed(capsys, str(path))["scenario"]["batch"] == 2


def test_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sized = analyzed(capsys, str(ROOT / "models" / "resnet50_hw.pt2"), "--resolution", "64x96", "--batch", "3")
    assert sized["model"]["inputs"][0]["shape"] == [3, 3, 64, 96]
    path = str(files.open_sequence(tmp_path / "seq.onnx"))
    named = analyzed(capsys, path, "--dim", "seq=5", "--dim", "n=4")
    assert named["model"]["inputs"][0]["shape"] == [4, 5, 6]
    assert named["scenario"]["dims"] == {"n": 4, "seq": 5}


def test_precision_names(capsys: pytest.CaptureFixture[str]) -> None:
    short = analyzed(capsys, SEED, "--dtype", "fp16")
    assert short["scenario"]["dtype"] == "float16"
    assert short["model"]["outputs"][0]["dtype"] == "float16"
    assert analyzed(capsys, SEED, "--dtype", "float16")["peak"] == short["peak"]
    assert analyzed(capsys, SEED, "--amp", "none")["scenario"]["amp"] is None
    assert analyzed(capsys, SEED, "--amp", "bf16")["scenario"]["amp"] == "bfloat16"


def test_content_decides_not_the_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for source, wrong in (("seed.pt2", "a.onnx"), ("seed.onnx", "b.pt2")):
        path = tmp_path / wrong
        path.write_bytes((ROOT / "models" / source).read_bytes())
        assert analyzed(capsys, str(path))["model"]["format"] == source.split(".")[1]


def test_output_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    code, out, err = run(capsys, SEED, "-o", str(target))
    assert (code, out, err) == (0, "", f"Wrote {target}\n")
    assert json.loads(target.read_text())["schema"] == "staticmem.report/1"
    before = target.read_text()
    code, _, err = run(capsys, SEED, "-o", str(target), "--optimizer", "adam")
    assert (code, target.read_text()) == (2, before)
    assert "--force" in err
    code, _, _ = run(capsys, SEED, "-o", str(target), "--optimizer", "adam", "--force")
    assert code == 0
    assert target.read_text() != before
    assert os.listdir(tmp_path) == ["report.json"]  # no temporary file stays
    table = tmp_path / "report.txt"
    assert run(capsys, SEED, "-o", str(table))[0] == 0
    assert "of it are tensors at the peak, " in table.read_text()


def test_quiet_is_one_line_with_warnings_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, str(files.unknown_op(tmp_path / "unknown.onnx")), "--quiet")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert " tensors at the peak, " in out
    assert "Frobnicate" in err


def test_units(capsys: pytest.CaptureFixture[str]) -> None:
    said = [run(capsys, SEED, "-q", "--units", units)[1] for units in ("binary", "decimal", "bytes")]
    live = [text.partition(" of it are tensors")[0].rpartition(". ")[2] for text in said]
    assert live == ["297 MiB", "312 MB", "311,716,352 B"]


def test_explain_peak_lists_everything_alive(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, SEED, "--optimizer", "adam", "--loss", "mean", "--explain-peak")
    assert "Alive at the peak, by module" in out
    assert "5.weight.exp_avg_sq" in out
    assert "saved for the backward of relu_ in 1, conv2d in 2" in out


def test_explain_peak_in_json_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    report = analyzed(capsys, SEED, "--optimizer", "adam", "--loss", "mean", "--explain-peak")
    assert len(report["top_tensors"]) == report["peak"]["tensors"] > 10
    assert sum(t["bytes"] for t in report["top_tensors"]) == report["peak"]["live_bytes"]


def test_fingerprint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads((ROOT / "models" / "manifest.json").read_text())
    entry = next(e for e in manifest["files"] if e["file"] == "seed.pt2")
    model = analyzed(capsys, SEED)["model"]
    assert (model["sha256"], model["file_bytes"]) == (entry["sha256"], entry["bytes"])
    monkeypatch.setattr("staticmem.studies.study.HASH_LIMIT", 10)
    assert analyzed(capsys, SEED)["model"]["sha256"] is None


def test_names_that_are_not_ascii(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They reach JSON escaped, so that no stream can fail on them."""
    path = tmp_path / "modèle.pt2"
    path.write_bytes(files.SEED.read_bytes())
    code, out, _ = run(capsys, str(path), "-f", "json")
    assert code == 0
    assert out.isascii()
    assert json.loads(out)["model"]["path"] == str(path)


def test_textbook_beside_liveness(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the worked example in docs/internals/textbook.md."""
    report = analyzed(capsys, SEED, "--method", "textbook", "--optimizer", "sgd", "--loss", "mean")
    book = report["textbook"]
    assert book["intermediate_bytes_forward"] == 336_089_600
    assert book["intermediate_bytes_with_backward"] == 672_179_200
    assert book["parameter_bytes"] == 450_304
    _, out, _ = run(capsys, SEED, "--method", "textbook", "--units", "decimal")
    assert "336 MB" in out
    assert "They differ because" in out
    assert analyzed(capsys, SEED)["textbook"] is None


@pytest.mark.parametrize("form", ["table", "json"])
def test_unknown_ops_are_seen_in_every_format(form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(files.unknown_op(tmp_path / "unknown.onnx"))
    code, out, _ = run(capsys, path, "-f", form)
    assert code == 0
    assert "custom::Frobnicate" in out
    code, out, err = run(capsys, path, "-f", form, "--strict")
    assert code == 1
    assert out  # the report is there all the same
    assert "custom::Frobnicate" in err


def test_unknown_op_keeps_its_result_for_backward(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(files.unknown_op(tmp_path / "unknown.onnx"))
    coverage = analyzed(capsys, path, "--batch", "64")["coverage"]
    assert coverage["ops"]["unknown"] == 1
    assert coverage["unknown"] == [{"op": "custom::Frobnicate", "count": 1, "bytes": 64 * 6 * 4}]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in ((["--version"], "staticmem 0."), (["--help"], "examples:"), (["analyze", "--help"], "--dim")):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        assert exit_.value.code == 0
        assert text in capsys.readouterr().out
    assert main([]) == 0
    assert "examples:" in capsys.readouterr().out


def test_short_help_has_the_flags_of_every_day(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for verb in ("analyze", "check", "gpus"):
        assert main([verb, "-h"]) == 0
        shown[verb, "-h"] = capsys.readouterr().out
        with pytest.raises(SystemExit) as exit_:
            main([verb, "--help"])
        assert exit_.value.code == 0
        shown[verb, "--help"] = capsys.readouterr().out
    short, whole = shown["analyze", "-h"], shown["analyze", "--help"]
    assert len(short.splitlines()) <= 50
    assert "usage: staticmem analyze MODEL [flags]" in short
    assert "--optimizer NAME" in short
    assert "--max-batch" in short
    assert "--nesterov" in whole
    assert "--nesterov" not in short
    assert "'staticmem analyze --help' has all" in short
    assert "--budget" in shown["check", "-h"]
    assert shown["gpus", "-h"] == shown["gpus", "--help"]


def test_schema_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == (ROOT / "schemas" / "report-1.schema.json").read_text()


def test_process_stdin_and_streams() -> None:
    with open(SEED, "rb") as source:
        done = console("analyze", "-", "-q", stdin=source)
    assert (done.returncode, done.stderr) == (0, "")
    assert "inference of stdin, batch 1 (assumed)). " in done.stdout


def test_commands_of_levers_read_stdin_again() -> None:
    with open(SEED, "rb") as source:
        done = console("levers", "-", "--optimizer", "adam", stdin=source)
    commands = [line.split() for line in done.stdout.splitlines() if "staticmem analyze" in line]
    assert done.returncode == 0
    assert commands
    assert {words[2] for words in commands} == {"-"}


def test_process_ascii_terminal() -> None:
    environment = dict(os.environ, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    done = console("analyze", SEED, "--optimizer", "adam", env=environment)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "####" in done.stdout


def test_process_closed_pipe() -> None:
    """`staticmem ... | head -1` ends without a traceback."""
    command = f"'{sys.executable}' -m staticmem analyze '{RESNET}' --optimizer adam --explain-peak | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_process_imports_only_what_it_needs() -> None:
    """No torch ever; no onnx for a .pt2; no networkx and numpy where nothing asks for them."""
    code = (
        "import sys; from staticmem.cli.main import main; main(['analyze', sys.argv[1], '-q']);"
        "print(sorted({'torch', 'onnx', 'networkx', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, SEED], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    onnx = str(ROOT / "models" / "seed.onnx")
    done = subprocess.run([sys.executable, "-c", code, onnx], capture_output=True, text=True, timeout=120)
    assert "torch" not in done.stdout.splitlines()[-1]
    code = "import sys, staticmem; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'staticmem'))"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert bare.stdout.strip() == "staticmem staticmem.errors staticmem.version"


def test_the_name_of_a_chip_is_its_usual_card_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    report = analyzed(capsys, SEED, "--gpu", "h100")
    assert report["gpu"]["slug"] == "h100-sxm-80gb"
    note = next(n["text"] for n in report["assumptions"] if n["code"] == "SM404")
    assert "'h100' may also mean h100-nvl, h100-pcie-80gb" in note


def test_inputs_that_require_a_gradient_are_named_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    words = (RESNET, "--batch", "2", "--mode", "train")
    every, named = (analyzed(capsys, *words, "--input-grad", name)["peak"] for name in ("all", "x"))
    assert every == named
    code, _, err = run(capsys, *words, "--input-grad", "y")
    assert code == 2
    assert "[SM165]" in err
