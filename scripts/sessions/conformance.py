"""Runs every conformance model of the onnx package through verbs of staticmem and through the ONNX Runtime.

    python scripts/sessions/conformance.py [-o FILE.json] [--only NAME] [--verbs analyze layers levers] [--workers 2]
    python scripts/sessions/conformance.py --table conformance.json     # the table of docs/internals/faults.md

The models are the node cases of `onnx.backend.test.case` and the files of `onnx.backend.test.data`. Open dimensions get
the sizes of the case's own inputs. A model that the runtime runs and that staticmem refuses is in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

COMMANDS = {  # what follows the name of the file
    "analyze": ("analyze",),
    "training": ("analyze", "--optimizer", "adam"),
    "session": ("analyze", "--runtime", "onnxruntime"),
    "html": ("analyze", "-f", "html"),
    "layers": ("layers",),
    "trace": ("trace",),
    "levers": ("levers",),
    "size": ("size", "--gpu", "l4"),
}
VERBS = ("analyze", "training", "layers")
LIMIT = 30  # seconds for one verb, and for one run of the runtime
SMALL = 6  # letters of what tells cases of one operator apart


def models(only: str = "") -> Iterator[tuple[str, bytes, list[Any]]]:
    """Name, bytes and inputs of every case. The package's files give their first set of inputs."""
    import onnx
    from onnx import numpy_helper
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators of the cases divide by zero on purpose
        cases = collect_testcases(None)
    for case in cases:
        if case.model is not None and only in case.name:
            yield case.name, case.model.SerializeToString(), list(case.data_sets[0][0]) if case.data_sets else []
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for path in sorted(data.rglob("*.onnx")):
        if only not in path.parent.name or path.parent.parent.name == "node":
            continue
        inputs = []
        for index in range(64):
            file = path.parent / "test_data_set_0" / f"input_{index}.pb"
            if not file.exists():
                break
            tensor = onnx.TensorProto()
            with contextlib.suppress(Exception):
                tensor.ParseFromString(file.read_bytes())
                inputs.append(numpy_helper.to_array(tensor))
        yield path.parent.name, path.read_bytes(), inputs


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"{seconds} s are over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def by_runtime(data: bytes, inputs: list[Any]) -> str:
    """Empty where the ONNX Runtime runs the model on the CPU, else why it does not."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        with limited(LIMIT):
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            names = [i.name for i in session.get_inputs()]
            session.run(None, {k: v for k, v in zip(names, inputs, strict=False) if v is not None})
    except Exception as error:  # whatever the runtime's bindings raise
        return (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ""


def sizes(path: str, inputs: list[Any]) -> list[str]:
    """`--dim` for every open dimension, as large as in the inputs of the case."""
    from staticmem.frontends import open_model

    found: dict[str, int] = {}
    for index, spec in enumerate(open_model(path).inputs):
        given = getattr(inputs[index], "shape", ()) if index < len(inputs) else ()
        for axis, dim in enumerate(spec.shape or ()):
            if isinstance(dim, str):
                found.setdefault(dim, given[axis] if len(given) == len(spec.shape or ()) and given[axis] else 2)
    return [word for name, size in found.items() for word in ("--dim", f"{name}={size}")]


def answer(verb: str, path: str, inputs: list[Any]) -> str:
    """Empty where the verb answers, else its refusal: `CODE what | why`."""
    from staticmem.cli.main import main
    from staticmem.errors import StaticmemError

    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    try:
        with limited(LIMIT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            words = COMMANDS[verb]
            main([words[0], path, *words[1:], *sizes(path, inputs), "--debug"])
    except StaticmemError as error:
        return f"{error.code} {error.what} | {error.why}"
    except TimeoutError:
        return f"TIME over {LIMIT} s"
    except Exception as error:  # a bug of staticmem: what the script looks for
        return f"SM190 {type(error).__name__}: {error}"
    return ""


def look(task: tuple[str, bytes, list[Any], Sequence[str]]) -> dict[str, Any]:
    name, data, inputs, verbs = task
    row: dict[str, Any] = {"name": name, "runtime": by_runtime(data, inputs)}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        Path(path).write_bytes(data)
        start = time.monotonic()
        for verb in verbs:
            row[verb] = answer(verb, path, inputs).replace(path, "the file")
        row["seconds"] = round(time.monotonic() - start, 2)
    return row


def summary(rows: list[dict[str, Any]]) -> str:
    verbs = [verb for verb in COMMANDS if verb in rows[0]]
    runs = [row for row in rows if not row["runtime"]]
    lines = ["| verb | models | refused | the runtime runs | of those refused | SM190 |", "|---|--:|--:|--:|--:|--:|"]
    for verb in verbs:
        refused, of_runs = (sum(bool(row[verb]) for row in some) for some in (rows, runs))
        bugs = sum(row[verb].startswith(("SM190", "TIME")) for row in rows)
        lines.append(f"| `{verb}` | {len(rows):,} | {refused} | {len(runs):,} | {of_runs} | {bugs} |")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """The models that the runtime runs and a verb refuses, one line for each reason."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        refusals = {text for verb in COMMANDS if (text := row.get(verb, ""))}
        if row["runtime"] or not refusals:
            continue
        code, _, text = min(refusals).partition(" ")
        groups[code, _reason(text)].append(row["name"].removeprefix("test_"))
    lines = ["| models | | code | reason |", "|---|--:|---|---|"]
    for (code, reason), names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        lines.append(f"| {_names(names)} | {len(names)} | {code} | {reason} |")
    return "\n".join(lines)


def _reason(text: str) -> str:
    """What is the same for models that are refused for the same thing: names and numbers are left out."""
    text = re.sub(r"'[^']*'(?=[ ,])", "…", text.replace(" | ", ": "))
    return re.sub(r"\[[\d, ]*\]|\d+", "…", text).replace("|", "\\|").rstrip(".")


def _names(names: list[str]) -> str:
    first, last = min(names), max(names)
    stem = first[: next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))]
    if len(names) == 1 or len(stem) < SMALL:
        return ", ".join(f"`{name}`" for name in names[:4]) + (", …" if len(names) > 4 else "")
    return f"`{stem}*`"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--verbs", nargs="+", default=VERBS, choices=[*COMMANDS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", metavar="FILE", help="of an earlier run")
    args = parser.parse_args()
    if args.table:
        rows = json.loads(Path(args.table).read_text(encoding="utf-8"))
    else:
        tasks = [(*model, args.verbs) for model in models(args.only)]
        with ProcessPoolExecutor(args.workers) as pool:
            rows = list(pool.map(look, tasks, chunksize=8))
        if args.output:
            Path(args.output).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"{summary(rows)}\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
