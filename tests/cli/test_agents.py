"""`staticmem mcp`: the four tools by the client of the SDK, in memory and over stdin and stdout of a process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli import agents
from staticmem.cli.main import main

MODEL = str(Path(__file__).parents[2] / "models" / "resnet18.pt2")
STEP = {"model": MODEL, "optimizer": "adam", "batch": 32}
STEP_OF_FIT = {"model": MODEL, "optimizer": "adam", "gpu": "l4"}

Call = Callable[..., dict[str, Any]]


def called(server: Any, tool: str, words: dict[str, Any]) -> dict[str, Any]:
    """What the client gets; of an error its text as `error`."""
    from mcp.client import Client

    async def ask() -> Any:
        async with Client(server) as client:
            return await client.call_tool(tool, words)

    result = asyncio.run(ask())
    if result.is_error:
        return {"error": json.loads("{" + result.content[0].text.partition("{")[2])}
    assert json.loads(result.content[0].text) == result.structured_content
    found: dict[str, Any] = result.structured_content
    return found


@pytest.fixture
def call() -> Call:
    pytest.importorskip("mcp")
    server = agents.make_server()
    return lambda tool, **words: called(server, tool, words)


def test_analyze_has_the_figures_of_the_command_line(call: Call) -> None:
    report = staticmem.analyze(MODEL, optimizer="adam", batch=32, amp="bf16", gpu="l4")
    found = call("analyze", **STEP, gpu="l4", options={"amp": "bf16"})
    assert report.gpu is not None
    assert found["verdict"] == report.gpu.fit == "fits"
    assert found["card"] == "L4"
    assert not found["card_is_assumed"]
    assert set(found["meters"]) == {"live", "allocated", "reserved", "device"}
    for meter, band in found["meters"].items():
        known = report.peak.bands[meter]
        assert list(band.values()) == [known.low, getattr(report.peak, f"{meter}_bytes"), known.high]
    assert "L4" in found["answer"]
    assert len(json.dumps(found)) < 3_000


def test_a_card_that_nobody_named_gives_no_verdict(call: Call) -> None:
    found = call("analyze", **STEP)
    assert found["verdict"] is None
    assert found["card_is_assumed"]
    assert any(note.startswith("SM405") for note in found["notes"])


def test_size_and_fit_answer_shortly(call: Call) -> None:
    rows = call("size", **STEP, gpus=["l4", "1GiB"])["cards"]
    assert [(row["gpu"], row["verdict"]) for row in rows] == [("1gib", "does not fit"), ("l4", "fits")]
    assert rows[1]["largest_safe_batch"] <= rows[1]["largest_batch"]
    found = call("fit", model=MODEL, optimizer="adam", global_batch=64, gpu="2GiB", library="pytorch")
    assert found["verdict"] == "fits"
    assert found["device"]["high"] <= found["usable"]
    assert "train_step.py" in found["settings"]


def test_explain(call: Call) -> None:
    assert call("explain", code="301")["title"] == "batch assumed"


@pytest.mark.parametrize(
    ("tool", "words", "code", "said"),
    [
        ("analyze", {"model": "nowhere.pt2"}, "SM101", "does not exist"),
        ("analyze", {**STEP, "options": {"ampp": "bf16"}}, "SM194", "Did you mean 'amp'"),
        ("analyze", {**STEP, "options": {"batch": 4}}, "SM113", "given twice"),
        ("analyze", {**STEP, "gpu": "l5"}, "SM402", "l5"),
        ("size", {**STEP, "gpus": ["l5"]}, "SM402", "l5"),
        ("size", {**STEP, "options": {"gpu": "l4"}}, "SM113", "Name them in `gpus`"),
        ("fit", {**STEP_OF_FIT, "options": {"optimizer": "sgd"}}, "SM113", "optimizer is given twice"),
        ("fit", {**STEP_OF_FIT, "options": {"gpu": "t4"}}, "SM113", "gpu is given twice"),
        ("fit", {**STEP_OF_FIT, "global_batch": 8, "options": {"global_batch": 16}}, "SM113", "given twice"),
        ("fit", {**STEP_OF_FIT, "options": {"model": MODEL}}, "SM113", "model is given twice"),
        ("fit", {**STEP_OF_FIT, "options": {"global_batch": 16, "batch": 8}}, "SM", "batch"),
        ("fit", {"model": MODEL, "gpu": "l4"}, "SM294", "training"),
        ("explain", {"code": "SM999"}, "SM134", "SM999"),
    ],
)
def test_errors_are_those_of_the_command_line(
    tool: str, words: dict[str, Any], code: str, said: str, call: Call
) -> None:
    error = call(tool, **words)["error"]
    assert error["code"].startswith(code)
    assert "unexpected" not in error["what"]
    assert said in json.dumps(error)


def test_code_is_no_model(call: Call, tmp_path: Path) -> None:
    """Neither the code of a factory runs, nor that of a pickle."""
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')"
    (tmp_path / "train.py").write_text(f"{code}\ndef build(): pass\n")
    (tmp_path / "model.pt").write_bytes(b"cbuiltins\nexec\n(V" + code.encode() + b"\ntR.")
    for model in (f"{tmp_path}/train.py:build", f"{tmp_path}/model.pt"):
        assert call("analyze", model=model)["error"]["code"].startswith("SM1")
    assert not ran.exists()


def test_a_process_serves_on_stdin_and_stdout() -> None:
    pytest.importorskip("mcp")
    from mcp.client.stdio import StdioServerParameters, stdio_client

    words = ["-c", "from staticmem.cli.main import main; main(['mcp'])"]
    process = stdio_client(StdioServerParameters(command=sys.executable, args=words))
    assert called(process, "explain", {"code": "SM301"})["code"] == "SM301"


def test_without_the_sdk_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp"]) == 2
    assert "pip install 'staticmem[mcp]'" in capsys.readouterr().err
