"""Runs many ONNX files with the ONNX Runtime and compares every node (docs/internals/onnxruntime.md).

    python scripts/sessions/onnxruntime_agreement.py FILE... [--levels disable basic all] [-o agreement.json]

Open dimensions get small sizes. Each file is run at every level with and without reuse and memory pattern; the last
lines are the table of docs/internals/onnxruntime.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

from staticmem.errors import StaticmemError
from staticmem.frontends import open_model
from staticmem.ort.options import SessionOptions
from staticmem.ort.validation.validation import validate_session
from staticmem.scenario.request import Request

MODES = ((True, True), (False, True), (True, False), (False, False))  # pattern, reuse
LEVELS = ("disable", "basic", "all")


def sizes(path: str, batch: int, image: int, length: int) -> dict[str, int]:
    """A small size for every open dimension of a file."""
    found: dict[str, int] = {}
    for spec in open_model(path).inputs:
        for axis, dim in enumerate(spec.shape or ()):
            if isinstance(dim, str):
                picture = len(spec.shape or ()) == 4 and axis > 1
                found.setdefault(dim, batch if axis == 0 else image if picture else length)
    return found


def run(path: str, args: argparse.Namespace, options: SessionOptions) -> dict[str, Any]:
    pattern, reuse = options.enable_mem_pattern, options.enable_mem_reuse
    row: dict[str, Any] = {
        "file": os.path.basename(path), "level": options.graph_optimization_level, "pattern": pattern, "reuse": reuse,
    }  # fmt: skip
    try:
        dims = sizes(path, args.batch, args.image, args.length)
        record = validate_session(path, Request(dims=dims), options, "cpu", args.timeout)
    except StaticmemError as error:
        return {**row, "verdict": "error", "text": f"{error.what} [{error.code}] {error.why}"}
    meters = {meter.name: meter for meter in record.meters}
    held = meters["arena held"]
    row.update(
        verdict=record.verdict, nodes=record.nodes.compared, equal=record.nodes.equal,
        held=held.measured, held_difference=held.difference, weights=meters["weights in the arena"].difference,
        text="; ".join(record.explanations), version=record.runtime["version"],
    )  # fmt: skip
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("--modes", type=int, default=len(MODES), help="how many of the four modes")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in args.files:
        for level in args.levels:
            for pattern, reuse in MODES[: args.modes]:
                options = SessionOptions(graph_optimization_level=level, intra_op_num_threads=args.threads)
                options = replace(options, enable_mem_pattern=pattern, enable_mem_reuse=reuse)
                row = run(path, args, options)
                rows.append(row)
                print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                if row["verdict"] == "error":
                    break
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    print(table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Runs with all nodes equal, and with the arena within 2 %, by level."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        if row["verdict"] == "error":
            continue
        count = counts[row["level"]]
        count[0] += 1
        count[1] += row["nodes"] > 0 and row["nodes"] == row["equal"]
        count[2] += row["held"] is not None and abs(row["held_difference"]) <= 0.02 * row["held"]
        count[3] += row["verdict"] == "exact"
    lines = ["| level | runs | all nodes equal | arena within 2 % | everything equal |", "|---|--:|--:|--:|--:|"]
    lines += [f"| {level} | {' | '.join(str(n) for n in count)} |" for level, count in counts.items()]
    files = len({row["file"] for row in rows if row["verdict"] != "error"})
    return "\n".join([*lines, f"{files} files"])


if __name__ == "__main__":
    sys.exit(main())
