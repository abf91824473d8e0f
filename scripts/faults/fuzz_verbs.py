"""What every ONNX file has to stand: five verbs, meters that contain each other, and the same answer by other names.

A check that fails raises `WrongError`, whose text begins with what is wrong.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnx
import random_graphs

METERS = ("live_bytes", "allocated_bytes", "reserved_bytes", "device_bytes")
SESSION = ("tensors_bytes", "requested_bytes", "workspace_bytes", "held_bytes", "device_bytes", "host_bytes")
dear = 1.0  # the part of files that `size` and `-f html` see, which make dozens of steps each
SLOW = 30  # seconds of one verb


class WrongError(Exception):
    """An answer that contradicts itself or another one."""


def told(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and the error of a command line; any exception but a StaticmemError comes out."""
    from staticmem import StaticmemError
    from staticmem.cli.main import main

    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    started = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*words, "--debug"])  # without its net for bugs
            error = err.getvalue()
        except StaticmemError as refusal:
            code, error = 2, f"error: {refusal.what} [{refusal.code}]\n  {refusal.why}\n"
    if time.process_time() - started > SLOW:
        raise WrongError(f"slow: {words[0]} took {time.process_time() - started:.0f} s")
    out.flush()
    text = out.buffer.getvalue().decode("utf-8", "replace")
    if code not in (0, 1, 2):
        raise WrongError(f"exit code {code} of {words[0]} {' '.join(words[2:])}")
    if "SM190" in error or "SM191" in error or "MemoryError" in error:
        raise WrongError(f"{words[0]}: {error}")
    return code, text, error


def meters(report: dict[str, Any]) -> None:
    """No meter is negative, and each contains the one before it."""
    peak = report["peak"]
    found = [(name, peak[name]) for name in METERS if peak[name] is not None]
    for (name, one), (other, two) in itertools.pairwise(found):
        if one > two:
            raise WrongError(f"meters: {name} {one:,} is above {other} {two:,}")
    _positive(report, "")
    for name, band in peak["bands"].items():
        expected = peak.get(f"{name}_bytes")
        if band["low"] > band["high"] or (expected is not None and not band["low"] <= expected <= band["high"]):
            raise WrongError(f"band of {name}: {band} around {expected}")
    total = sum(peak["by_category"].values())
    if total != peak["live_bytes"]:
        raise WrongError(f"categories add up to {total:,}, live is {peak['live_bytes']:,}")


def _positive(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _positive(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            _positive(item, path)
    elif isinstance(value, int) and value < 0 and re.search("bytes|count|categor|shape|dims|tensors|band", path):
        raise WrongError(f"negative: {path.strip('.')} is {value:,}")


def refusal(error: str) -> str:
    """The same for refusals of one kind: the code, and the words without names and numbers."""
    line = " ".join(error.split("\n  ")[:2])
    return re.sub(r"\s+", " ", re.sub(r"'[^']*'|\"[^\"]*\"|\S*/\S+|\b\S*\d\S*\b", "#", line))[:220]


WORDS: list[list[str]] = [[], [], ["--batch", "3"], ["--optimizer", "adam"], ["--optimizer", "sgd", "--amp", "bf16"]]


def _words(rng: random.Random, batch: bool) -> list[str]:
    words = rng.choice(WORDS)
    return words if batch or "--batch" not in words else []


def any_graph(path: str, words: list[str], dear: bool) -> dict[str, str]:
    """The verbs on a file; the error of those that refuse it. `dear`: those too that make dozens of steps."""
    try:
        return _verbs(path, words, dear)
    except WrongError as wrong:
        raise WrongError(f"{wrong}\nwith {' '.join(words) or 'no options'}") from wrong


def _verbs(path: str, words: list[str], dear: bool) -> dict[str, str]:
    errors = {}
    code, text, error = told("analyze", path, "-f", "json", *words)
    if code == 2:
        errors["analyze"] = error
    else:
        meters(json.loads(text))
    code, text, error = told("layers", path, "-f", "json", *words)
    if code == 2:
        errors["layers"] = error
    else:
        _positive(json.loads(text), "")
    if ("analyze" in errors) != ("layers" in errors):
        raise WrongError(f"layers and analyze disagree: {refusal(errors.get('layers') or errors['analyze'])}")
    code, text, error = told(
        "analyze", path, "--runtime", "onnxruntime", "-f", "json", *words[: 2 * ("--batch" in words)]
    )
    if code == 2:
        errors["session"] = error
    else:
        session = json.loads(text)
        _positive(session, "")
        peak = session["peak"]
        if peak["held_bytes"] is not None and peak["requested_bytes"] > peak["held_bytes"]:
            raise WrongError(f"meters: requested {peak['requested_bytes']:,} is above held {peak['held_bytes']:,}")
    if not dear:
        return errors
    code, text, error = told("size", path, "--gpu", "l4", "-f", "json", *words)
    if code == 2:
        errors["size"] = error
    else:
        _positive(json.loads(text), "")
    code, text, error = told("analyze", path, "-f", "html", *words)
    if code == 2:
        errors["html"] = error
    if "analyze" not in errors and ({"html", "size"} & set(errors)):
        which = sorted({"html", "size"} & set(errors))[0]
        raise WrongError(f"{which} refuses what analyze takes: {refusal(errors[which])}")
    return errors


def damaged_graph(path: str, rng: random.Random) -> None:
    words = _words(rng, True)
    any_graph(path, words, rng.random() < dear)


# Refusals that are true of a valid graph: what it needs is not in the file, or is not asked for in a sensible way.
TRUE_REASONS = ("[SM116]", "[SM117]", "[SM130]", "[SM131]")


def valid_graph(path: str, rng: random.Random) -> None:
    """The same, and nothing is refused but for a true reason, and equal graphs have equal answers."""
    model = onnx.load(path)
    ends = [d for i in model.graph.input for d in i.type.tensor_type.shape.dim[:1]]
    batch = bool(ends) and all(d.dim_param for d in ends)
    words = _words(rng, batch)
    errors = any_graph(path, words, rng.random() < dear)
    for verb, error in errors.items():
        if not any(code in error for code in TRUE_REASONS):
            runtime = of_runtime(path, 3 if "3" in words else 1)
            without_kernel = runtime == "it has no kernel" and "[SM502]" in error
            if "it refuses" not in runtime and not without_kernel:  # onnx's inference takes some that are not valid
                raise WrongError(f"refused though valid: {verb}: {refusal(error)} ONNX Runtime: {runtime}\n{error}")
    if "analyze" in errors:
        return
    if rng.random() < 0.5:
        return
    first = _figures(path)
    _same(first, random_graphs.renamed(model), path, "other names")
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(model)
    tensors = list(model.graph.initializer)
    rng.shuffle(tensors)
    del shuffled.graph.initializer[:]
    shuffled.graph.initializer.extend(tensors)
    _same(first, shuffled, path, "initializers in another order")
    if first and batch:
        one, two = _figures(path, "--batch", "2"), _figures(path, "--batch", "4")
        if one and two and two["live_bytes"] < one["live_bytes"]:
            raise WrongError(f"batch: 4 needs {two['live_bytes']:,}, 2 needs {one['live_bytes']:,}")


def _figures(path: str, *words: str) -> dict[str, Any] | None:
    code, text, _ = told("analyze", path, "-f", "json", *words)
    if code == 2:
        return None
    report = json.loads(text)
    return {**{name: report["peak"][name] for name in METERS[:2]}, "parameters": report["parameters"]["bytes"]}


def _same(first: dict[str, Any] | None, model: Any, path: str, what: str) -> None:
    other = Path(path).with_suffix(".other.onnx")
    other.write_bytes(model.SerializeToString())
    try:
        second = _figures(str(other))
    finally:
        other.unlink()
    if first != second:
        raise WrongError(f"{what} change the figures: {first} and {second}")


RUN = """
import sys
import numpy as np
import onnxruntime as runtime
kinds = {"float": "f4", "double": "f8", "float16": "f2", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1",
         "uint64": "u8", "uint32": "u4", "uint16": "u2", "uint8": "u1", "bool": "?", "string": "O"}
options = runtime.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
try:
    session = runtime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    given = {}
    for end in session.get_inputs():
        kind = kinds.get(end.type[7:-1])
        if kind is None:
            print("it loads")
            raise SystemExit
        shape = [d if isinstance(d, int) else int(sys.argv[2]) for d in end.shape]
        given[end.name] = np.full(shape, "a" if kind == "O" else 0, kind)
    session.run(None, given)
    print("it runs")
except Exception as error:
    text = " ".join(str(error).split())
    print("it has no kernel" if "NOT_IMPLEMENTED" in text else "it refuses: " + text[:200])
"""


def of_runtime(path: str, size: int) -> str:
    """What the ONNX Runtime does with a file whose open sizes are this, in a process of its own."""
    words = [sys.executable, "-c", RUN, path, str(size)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or f"it ends with {done.returncode}"
