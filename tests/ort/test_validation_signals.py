"""A validation that is asked to end leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from onnxruntime_graphs import Net, image

from staticmem.ort.validation import validation

ROOT = Path(__file__).parents[2]


def _with_interrupts() -> None:
    """A job of a shell without a terminal, such as CI's, starts with SIGINT ignored, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not validation.installed(), reason="onnxruntime is not installed: pip install onnxruntime")
@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_temporary_folder_goes_with_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    net = Net()
    x = "x"
    for _ in range(40):  # half a minute of work
        x = net.op("MatMul", x, "x")
    onnx.save(net.model([image(2048, 2048)], [(x, TensorProto.FLOAT, 2)]), tmp_path / "net.onnx")
    folder = tmp_path / "temporary"
    folder.mkdir()
    words = ["validate", str(tmp_path / "net.onnx"), "--device", "cpu", "--runs", "20", "--optimization", "disable"]
    process = subprocess.Popen(
        [sys.executable, "-m", "staticmem", *words],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=_with_interrupts,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not list(folder.glob("staticmem-*/job.json")):
            assert process.poll() is None, "it ended before it ran"
            assert time.monotonic() < end, "it did not come to run"
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == (143 if number == signal.SIGTERM else 130)
        assert list(folder.glob("staticmem-*")) == []
    finally:
        process.kill()
        process.wait()
