"""--compile as a user asks for it: flags, configs, Python, levers, sweeps, formats, and what is refused.

Peaks of PyTorch 2.15: the code that Inductor made for torchvision's ResNet-18 at batch 32, with its allocations counted
without a GPU, outputs dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cli_files as files
import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.engine.compiled_step import DECIDE
from staticmem.errors import UsageError
from staticmem.report.load import load_report
from staticmem.scenario.compiling import AUTOTUNED, COMPILE_MODES, GRAPH_MODES, WHOLE
from staticmem.scenario.request import Request, as_flags, request_of

RESNET = str(files.ROOT / "models" / "resnet18.pt2")
STEP = ("--batch", "32", "--optimizer", "adam", "--outputs", "dropped")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main([*words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def analyzed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, "analyze", *words, "-f", "json")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.parametrize(
    ("options", "peak", "forward_end"),
    [(STEP, 776_122_880, 763_380_224), (("--batch", "32", "--mode", "infer"), 194_530_304, 66_207_744)],
)
def test_the_whole_model(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], peak: int, forward_end: int
) -> None:
    report = analyzed(capsys, RESNET, *options, "--compile")
    assert report["peak"]["live_bytes"] == pytest.approx(peak, rel=0.005)
    assert report["phases"]["forward_end_bytes"] == pytest.approx(forward_end, rel=0.001)
    assert report["scenario"]["compile"] == ["all"]
    assert report["compiled"]["graphs"] == 1
    assert report["compiled"]["torch"] == "2.15"
    assert "SM343" in [note["code"] for note in report["assumptions"]]


@pytest.mark.parametrize(
    ("options", "peak", "forward_end"),
    [(STEP, 896_453_120, 872_279_552), (("--batch", "32", "--mode", "infer"), 271_600_640, 66_207_744)],
)
def test_each_block(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], peak: int, forward_end: int) -> None:
    """`for block in ...: block.compile()`. Blocks of other sizes than the first are compiled for symbolic ones, without
    channels last (automatic_dynamic_shapes)."""
    blocks = analyzed(capsys, RESNET, *options, "--compile", "BasicBlock")
    assert blocks["compiled"]["graphs"] == 8
    assert blocks["peak"]["live_bytes"] == pytest.approx(peak, rel=0.001)
    assert blocks["phases"]["forward_end_bytes"] == pytest.approx(forward_end, rel=0.001)
    assert analyzed(capsys, RESNET, *options)["compiled"] is None


def test_the_flag_before_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    behind = analyzed(capsys, RESNET, "--batch", "2", "--compile")
    assert analyzed(capsys, "--batch", "2", "--compile", RESNET)["peak"] == behind["peak"]


def test_a_compiled_optimizer_makes_no_temporary(capsys: pytest.CaptureFixture[str]) -> None:
    plain = analyzed(capsys, RESNET, *STEP)
    compiled = analyzed(capsys, RESNET, *STEP, "--compile-optimizer")
    counters = 62 * 512  # `step` of each parameter is on the device
    assert plain["multipliers"]["optimizer_step_over_parameters"] > 0.9
    assert compiled["multipliers"]["optimizer_step_over_parameters"] == 0
    assert compiled["phases"]["start_bytes"] - plain["phases"]["start_bytes"] == counters
    _, out, _ = run(capsys, "analyze", RESNET, *STEP, "--compile-optimizer", "-q")
    assert "Adam (compiled)" in out


@pytest.mark.parametrize("form", ["table", "md", "html", "json"])
def test_every_format_says_that_the_step_is_compiled(capsys: pytest.CaptureFixture[str], form: str) -> None:
    code, out, _ = run(capsys, "analyze", RESNET, "--batch", "2", "--optimizer", "sgd", "--compile", "-f", form)
    assert code == 0
    for part in (
        ("2.15", "SM343") if form == "json" else ("SGD, compiled", "by the rules of PyTorch 2.15", "computed again")
    ):
        assert part in out


def test_a_saved_report_is_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "report.json")
    run(capsys, "analyze", RESNET, "--batch", "2", "--compile", "-o", path)
    report = load_report(path)
    assert report.compiled is not None
    assert report.compiled.graphs == 1


def test_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "staticmem.yaml"
    config.write_text(
        f"version: 1\nmodel: {RESNET}\ntrain: {{batch: 2, optimizer: adam, compile: true, compile_optimizer: true}}\n"
        "what_if: {compile: [false, true, BasicBlock, [layer1.*, layer2.*]]}\n"
    )
    code, out, _ = run(capsys, "analyze", "--config", str(config), "-f", "json")
    assert code == 0
    assert json.loads(out)["scenario"]["compile"] == ["all"]
    code, out, _ = run(capsys, "sweep", str(config), "-f", "json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert len(rows) == 4
    assert all(row["error"] is None for row in rows)
    assert len({row["live_bytes"] for row in rows}) >= 3


def test_levers_try_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "levers", RESNET, *STEP)
    assert code == 0
    assert "--compile" in out


def test_python() -> None:
    compiled = staticmem.analyze(RESNET, batch=2, compile=True)
    assert compiled.compiled is not None
    assert staticmem.analyze(RESNET, batch=2, compile=False).compiled is None
    blocks = staticmem.analyze(RESNET, batch=2, compile="BasicBlock")
    assert blocks.scenario.compile == ("BasicBlock",)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (True, (WHOLE,)),
        (False, ()),
        ("Block", ("Block",)),
        (["A", "b.*"], ("A", "b.*")),
        ("none", ()),
        (["all", "A"], (WHOLE,)),
    ],
)
def test_what_compile_takes(given: Any, kept: tuple[str, ...]) -> None:
    assert Request(compile=given).compile == kept


def test_flags_to_copy() -> None:
    assert as_flags({"compile": (WHOLE,)}) == "--compile"
    assert as_flags({"compile": ("A", "b.*")}) == "--compile A --compile 'b.*'"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"compile": True, "parallel": "zero3", "devices": 8, "optimizer": "adam"}, "SM167"),
        ({"compile": True, "parallel": "fsdp", "devices": 8, "optimizer": "adam"}, "SM167"),
        ({"compile": "Block", "parallel": "tp", "devices": 8, "optimizer": "adam"}, "SM167"),
        ({"compile": True, "parallel": "ddp", "devices": 8, "compile_mode": "reduce-overhead"}, "SM185"),
        ({"compile_optimizer": True, "optimizer": "rmsprop"}, "SM161"),
    ],
)
def test_what_is_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as error:
        request_of(options).scenario()
    assert error.value.code == code


def test_onnxruntime_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "analyze", str(files.SEED), "--runtime", "onnxruntime", "--compile")
    assert code == 2
    assert "SM513" in err


def test_a_name_that_no_module_has(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "analyze", RESNET, "--compile", "BasicBlok")
    assert code == 2
    assert "--compile 'BasicBlok' names no module [SM163]" in err


@pytest.mark.parametrize("option", [{"retain_graph": True}, {"input_grad": "all"}, {"checkpoint": "BasicBlock"}])
def test_plans_are_kept_for_what_decides_them(option: dict[str, Any]) -> None:
    """The graph of a file is kept for the next analysis, with what was compiled for another step."""
    plain: dict[str, Any] = {"batch": 4, "optimizer": "sgd", "compile": True}
    one, other = (request_of(options).scenario()[0] for options in (plain, plain | option))
    assert any(getattr(one, name) != getattr(other, name) for name in DECIDE)


def test_cards_that_are_too_old(capsys: pytest.CaptureFixture[str]) -> None:
    """`GPUTooOldForTriton`: compiled code needs compute capability 7.0. Eager code runs."""
    old = ("--gpu", "gtx-1080-ti")
    for words in (("--compile",), ("--optimizer", "adam", "--compile-optimizer")):
        code, out, _ = run(capsys, "analyze", RESNET, "--batch", "2", *old, *words, "-f", "json")
        assert (code, json.loads(out)["gpu"]["fit"]) == (0, "cannot run it")
        assert "Triton" in json.loads(out)["gpu"]["obstacle"]
    assert "Fits" in run(capsys, "analyze", RESNET, "--batch", "2", *old)[1]
    sizing = ("size", RESNET, "--batch", "2", "--no-batches", "-f", "json")
    code, out, _ = run(capsys, *sizing, *old, "--gpu", "t4")
    cards = {card["slug"]: card for card in json.loads(out)["cards"]}
    assert cards["gtx-1080-ti"]["device_compiled_bytes"] is None
    assert cards["t4"]["device_compiled_bytes"] is not None
    code, out, _ = run(capsys, *sizing, *old, "--gpu", "t4", "--compile")
    report = json.loads(out)
    assert report["recommended"] == "t4"
    assert {card["slug"]: card["fit"] for card in report["cards"]} == {"t4": "fits", "gtx-1080-ti": "cannot run it"}
    need = analyzed(capsys, RESNET, "--batch", "2", "--gpu", "t4", "--compile")["peak"]["device_bytes"]
    assert next(card for card in report["cards"] if card["slug"] == "t4")["device_bytes"] == need


def test_cuda_graphs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The figures are those of the process in tests/data/allocator/compiled.json, whose cuDNN takes no workspace."""
    mode = ("--compile", "--compile-mode", "reduce-overhead")
    report = analyzed(capsys, RESNET, *STEP, *mode)
    assert report["scenario"]["compile_mode"] == "reduce-overhead"
    assert report["compiled"]["cuda_graphs"] == 2
    batch, logits = 32 * 3 * 224 * 224 * 4, 32 * 1000 * 4
    assert report["compiled"]["copied_bytes"] == batch + logits
    assert "SM346" in [note["code"] for note in report["assumptions"]]
    plain = analyzed(capsys, RESNET, *STEP, "--compile")
    assert plain["compiled"]["cuda_graphs"] == 0
    assert report["peak"]["reserved_bytes"] > plain["peak"]["reserved_bytes"]
    text = run(capsys, "analyze", RESNET, *STEP, *mode)[1]
    assert "CUDA graphs      2 in a pool of their own, over 18.5 MiB of copied inputs" in text
    config = tmp_path / "c.yaml"
    step = "train: {batch: 2, optimizer: adam, compile: true, compile_mode: max-autotune}"
    config.write_text(f"version: 1\nmodel: {RESNET}\n{step}\n")
    tuned = json.loads(run(capsys, "analyze", "--config", str(config), "-f", "json")[1])
    assert tuned["compiled"]["cuda_graphs"] == 2
    assert "SM347" in [note["code"] for note in tuned["warnings"]]


@pytest.mark.parametrize(
    "options",
    [
        {"compile_mode": "reduce-overhead"},
        {"compile": True, "compile_mode": "reduce-overhead", "accumulate": 2},
        {"compile": True, "compile_mode": "max-autotune", "set_to_none": False},
    ],
)
def test_modes_that_are_refused(options: dict[str, Any]) -> None:
    """`CUDAGraphTreeManager.format_dealloc_msg`: gradients in the pool are overwritten by the next forward."""
    with pytest.raises(UsageError) as error:
        request_of({"mode": "train", **options}).scenario()
    assert error.value.code == "SM185"


@pytest.mark.torch
def test_modes_are_those_of_pytorch() -> None:
    inductor = pytest.importorskip("torch._inductor")
    known = inductor.list_mode_options()
    assert set(COMPILE_MODES) <= set(known)
    assert {m for m, options in known.items() if options.get("triton.cudagraphs")} == set(GRAPH_MODES)
    assert {m for m, options in known.items() if options.get("max_autotune")} == set(AUTOTUNED)
