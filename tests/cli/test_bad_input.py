"""What users get wrong: exit code 2, three lines on stderr, nothing on stdout, never a traceback."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_files as files
import pytest

from staticmem.cli.main import main

ROOT = files.ROOT
SEED = str(files.SEED)
RESNET = str(ROOT / "models" / "resnet18.pt2")


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Runs `staticmem analyze` and returns the three lines."""
    code = main(["analyze", *words])
    captured = capsys.readouterr()
    lines: list[str] = captured.err.splitlines()
    assert code == 2, captured.out[-500:]
    assert captured.out == ""
    assert len(lines) == 3, captured.err
    assert lines[0].startswith("error: ")
    assert lines[0].endswith("]")
    assert "[SM1" in lines[0]
    assert all(line.startswith("  ") and line.strip() for line in lines[1:])
    assert "Traceback" not in captured.err
    return lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h100", "--gpu", "l4"), "--gpu is given twice: 'h100' and 'l4'"),
        (("--batch", "4", "-b", "8"), "--batch is given twice: '4' and '8'"),
        (("-b4", "--batch=8"), "--batch is given twice: '4' and '8'"),
        (("--resolution", "224", "--resolution=256"), "--resolution is given twice: '224' and '256'"),
        (("-f", "json", "--format", "md"), "--format is given twice: 'json' and 'md'"),
    ],
)
def test_two_values_of_one_flag(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    """argparse takes the last, and the one before would be ignored."""
    assert main(["analyze", SEED, *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said} [SM140]")


def test_one_value_twice_and_lists_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("analyze", "--batch", "4", "--batch", "4"), ("size", "--gpu", "h100", "--gpu", "l4")):
        verb, *flags = words
        assert main([verb, SEED, *flags, "-q"]) == 0
    capsys.readouterr()
    assert main(["analyze", SEED, "--gpu", "h100,l4"]) == 2
    assert "'staticmem size', each with its flag: --gpu l4 --gpu t4" in capsys.readouterr().err


def test_examples_of_help_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diff", "--help"])
    assert "%%" not in capsys.readouterr().out


def written(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def truncated(source: str, size: int) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        return written(folder / f"cut-{source}", (ROOT / "models" / source).read_bytes()[:size])

    return make


def zipped(folder: Path) -> str:
    with zipfile.ZipFile(folder / "other.pt2", "w") as archive:
        archive.writestr("readme.txt", "hello")
    return str(folder / "other.pt2")


def future(document: dict[str, Any]) -> None:
    document["schema_version"]["major"] = 99


def without_nodes(document: dict[str, Any]) -> None:
    del document["graph_module"]["graph"]["nodes"]


FILES: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing": (lambda folder: str(folder / "nothing.onnx"), "does not exist"),
    "directory": (str, "is a directory"),
    "empty": (lambda folder: written(folder / "a.onnx", b""), "is empty"),
    "text": (lambda folder: written(folder / "a.onnx", b"import torch\n" * 9), "is a text file"),
    "random": (lambda folder: written(folder / "a.onnx", bytes(range(255, 0, -1)) * 9), "is not a model graph"),
    "pickle": (lambda folder: written(folder / "a.pt", pickle.dumps({"w": 1})), "pickle"),
    "gguf": (lambda folder: written(folder / "a.gguf", b"GGUF\x03\0\0\0" * 9), "GGUF"),
    "lfs pointer": (
        lambda folder: written(folder / "a.onnx", b"version https://git-lfs.github.com/spec/v1\n"),
        "git lfs",
    ),
    "other zip": (zipped, "zip file without a graph"),
    "cut onnx": (truncated("seed.onnx", 3000), "damaged or incomplete"),
    "cut pt2": (truncated("seed.pt2", 2000), "damaged"),
    "other protobuf": (lambda folder: written(folder / "a.onnx", b"\x08\x01\x12\x03abc"), "is not an ONNX model"),
    "future schema": (lambda folder: str(files.rewritten(folder / "a.pt2", future)), "schema 99"),
    "no nodes": (lambda folder: str(files.rewritten(folder / "a.pt2", without_nodes)), "not a well-formed"),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make, expected = FILES[kind]
    assert expected in "\n".join(fails(capsys, make(tmp_path)))


def test_a_near_name_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    lines = fails(capsys, str(ROOT / "models" / "resnet5.pt2"))
    assert "resnet50.pt2'?" in lines[2]


FLAGS: dict[str, tuple[list[str], str]] = {
    "optimizer": (["--optimizer", "adamm"], "Did you mean 'adam'?"),
    "implementation": (["--optimizer", "adam", "--optimizer-impl", "fuse"], "Did you mean 'fused'?"),
    "no fused rmsprop": (["--optimizer", "rmsprop", "--optimizer-impl", "fused"], "has no fused implementation"),
    "loss": (["--optimizer", "sgd", "--loss", "crossentropy"], "Did you mean 'cross-entropy'?"),
    "mode": (["--mode", "training"], "Did you mean 'train'?"),
    "dtype": (["--dtype", "int8"], "unknown dtype 'int8'"),
    "amp": (["--amp", "bf61"], "Did you mean 'bf16'?"),
    "method": (["--method", "textbok"], "Did you mean 'textbook'?"),
    "in place": (["--inplace-activations", "some"], "auto, none, all"),
    "format": (["--format", "jsn"], "Did you mean 'json'?"),
    "units": (["--units", "GiB"], "binary, decimal, bytes"),
    "momentum of adam": (["--optimizer", "adam", "--momentum", "0.9"], "does not apply to adam"),
    "momentum range": (["--optimizer", "sgd", "--momentum", "9"], "out of range"),
    "batch": (["--batch", "0"], "is not a size"),
    "batch text": (["--batch", "many"], "is not a size"),
    "batch overflow": (["--batch", "999999999999999"], "is not a size"),
    "resolution": (["--resolution", "1x2x3"], "is not a resolution"),
    "dim": (["--dim", "seq"], "is not NAME=N"),
    "dim twice": (["--dim", "x[0]=1", "--dim", "x[0]=2"], "given twice"),
    "unknown dim": (["--dim", "foo=3"], "unknown dimension 'foo'"),
    "contradiction": (["--batch", "2", "--dim", "x[0]=3", "--dim", "batch=4"], "both"),
    "unknown flag": (["--optimiser", "adam"], "Did you mean '--optimizer NAME'?"),
    "no such flag": (["--xyzzy"], "See 'staticmem analyze --help'."),
    "output suffix": (["-o", "report.pdf"], "no format for 'report.pdf'"),
    "output folder": (["-o", "/no/such/folder/report.json"], "is not a directory"),
}


@pytest.mark.parametrize("kind", FLAGS)
def test_flags(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = FLAGS[kind]
    assert expected in "\n".join(fails(capsys, RESNET, *words))


def test_open_dimensions_are_named_with_their_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = fails(capsys, str(files.open_sequence(tmp_path / "a.onnx")))
    assert "'seq' (axis 1 of 'x')" in lines[0]
    assert "--dim seq=N" in lines[2]
    assert "--batch" not in lines[2]  # it has a default
    lines = fails(capsys, str(ROOT / "models" / "resnet50_hw.onnx"))
    assert "'height'" in lines[0]
    assert "--resolution N" in lines[2]


def test_baked_batch_names_the_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(files.baked_batch(tmp_path / "a.onnx"))
    assert main(["analyze", path, "--batch", "2", "-q"]) == 0
    capsys.readouterr()
    assert "the_reshape" in fails(capsys, path, "--batch", "4")[0]


@pytest.mark.parametrize(
    ("op", "shape", "axes", "what"),
    [
        ("Atan", [-2147483648], (), "'x' has a negative size [SM157]"),
        ("Atan", [-9223372036854775808, -1], (), "'x' has a negative size [SM157]"),
        ("ReduceSum", [], (-2,), "node 'y' (aten::sum.dim_IntList) does not fit these sizes [SM118]"),
    ],
)
def test_shapes_that_no_tensor_has(
    op: str, shape: list[int], axes: tuple[int, ...], what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    weights = [onnx.TensorProto(name="x", data_type=1, dims=shape)]
    if axes:
        weights.append(onnx.helper.make_tensor("axes", 7, [len(axes)], axes))
    node = onnx.helper.make_node(op, [weight.name for weight in weights], ["y"])
    y = onnx.helper.make_tensor_value_info("y", 1, None)
    path = tmp_path / "damaged.onnx"
    graph = onnx.helper.make_graph([node], "g", [], [y], weights)
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    assert what in fails(capsys, str(path))[0]


def test_output_exists_or_is_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("mine")
    assert "--force" in fails(capsys, SEED, "-o", str(target))[2]
    assert target.read_text() == "mine"
    assert "is a directory" in fails(capsys, SEED, "-o", str(tmp_path), "--force")[0]


@pytest.mark.parametrize(
    "flags",
    [
        ["-f", "json"],
        ["--format=json"],
        ["-fjson"],
        ["-qf", "json"],
        ["--format", "json", "--xyzzy"],
        ["-f", "json", "--outputs", "dropt"],
        ["--outputs=held", "-f", "json"],
        ["-f", "json", "--outputs"],
        ["-f", "json", "--optimizer", "adam", "--outputs", "dropped"],
        ["-f", "json", "--let-go", "x"],
        ["-f", "json", "--zero-grad", "never"],
    ],
)
def test_errors_are_json_where_json_is_asked_for(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert main(["analyze", "nothing.onnx", *flags]) == 2
    shown = capsys.readouterr()
    row = json.loads(shown.out)
    jsonschema.validate(row, json.loads((ROOT / "schemas" / "error-1.schema.json").read_text()))
    assert shown.err == f"error: {row['what']} [{row['code']}]\n  {row['why']}\n  {row['hint']}\n"
    for others in (["-f", "md"], ["-f", "json", "-o", "a.json"], ["-f", "json", "-oa.json", "--outputs", "held"]):
        assert main(["analyze", "nothing.onnx", *others]) == 2
        assert not capsys.readouterr().out


@pytest.mark.parametrize("words", [["--format=json"], ["--xyzzy", "-f", "json"], ["size", "-f", "json", "--gpu"]])
def test_errors_without_a_model_are_json_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "SM140"


def test_a_dependency_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "onnx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    what, _, hint = fails(capsys, str(ROOT / "models" / "seed.onnx"), "--batch", "3")
    assert (what, hint.strip()) == ("error: onnx is not installed [SM146]", "pip install onnx")


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", SEED]) == 2
    assert "Did you mean 'analyze'?" in capsys.readouterr().err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="does not exist"):
        main(["analyze", "nothing.onnx", "--debug"])


def test_internal_errors_are_one_line_and_a_way_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("staticmem.studies.study.step_of", broken)
    assert main(["analyze", SEED]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == "error: internal error: ZeroDivisionError: oh [SM190]"
    assert "--debug" in captured.err
    assert "Traceback" not in captured.err


def test_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("staticmem.studies.study.step_of", interrupted)
    assert main(["analyze", SEED]) == 130
    assert capsys.readouterr().out == ""


def test_names_of_a_file_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Escape sequences in a file's names are not printed."""
    code = main(["analyze", str(tmp_path / "a\x1b[2Jb.onnx")])
    assert code == 2
    assert "\x1b" not in capsys.readouterr().err

    def escape(document: dict[str, Any]) -> None:
        for spec in document["graph_module"]["signature"]["input_specs"]:
            if "parameter" in spec:
                spec["parameter"]["parameter_name"] = "\x1b[2J" + spec["parameter"]["parameter_name"]

    path = files.rewritten(tmp_path / "a.pt2", escape)
    assert main(["analyze", str(path), "--explain-peak"]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="the installed script has another name")
def test_console_script() -> None:
    """The installed command itself, once."""
    script = Path(sys.executable).with_name("staticmem")
    if not script.exists():
        pytest.skip("not installed")
    done = subprocess.run([script, "analyze", "nothing.onnx"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 3
    done = subprocess.run([script, "analyze", SEED, "-q"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
