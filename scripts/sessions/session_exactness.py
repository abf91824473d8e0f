"""Where a prediction of an ONNX Runtime session says `exact`, is it? Runs generated graphs and files at every level.

    python scripts/sessions/session_exactness.py [FILE...] [--families recurrent half] [--levels disable all] [-o ROWS]

Each graph of session_graphs.py, and each FILE, is run by the installed onnxruntime and compared with the prediction for
the graph that was executed: bytes of every node, of weights, of the largest workspace, of the arena. The last lines
are the table of docs/internals/onnxruntime.md. The exit code is 1 where something said `exact` and was not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import session_graphs  # noqa: F401 -- it registers them in GRAPHS
from onnxruntime_agreement import sizes
from session_nets import GRAPHS, make

from staticmem.errors import StaticmemError
from staticmem.files import temporary_folder
from staticmem.ort.options import SessionOptions
from staticmem.ort.study import open_session, predicted
from staticmem.ort.validation import reconcile
from staticmem.ort.validation.model import plan_inputs, prepare
from staticmem.ort.validation.validation import measure, this_processor

LEVELS = ("disable", "basic", "extended", "all")


def compare(
    path: str, options: SessionOptions, timeout: float = 300, saved: bool = True, length: int = 16
) -> dict[str, Any]:
    """One run: what was predicted and read of each meter, whether it was said to be exact, and whether it was.

    `saved`: the prediction is for the graph that the runtime saved, else for that of the file. `length`: of open sizes.
    """
    opened = open_session(path, dims=sizes(path, 2, 64, length))
    with temporary_folder() as folder:
        inputs = [asdict(item) for item in plan_inputs(opened.proto.graph, opened.shapes)]
        job = {"model": prepare(path, folder).path, "inputs": inputs, "strict_provider": True, "memory_limit": None}
        read = measure(job, options, folder, timeout)
        found = predicted(opened, options, read.saved if saved else None)
    table, nodes = reconcile.meters(found, read), reconcile.nodes(found, read)
    verdict = reconcile.verdict(found, read, table, nodes)
    meters = {m.name: [m.low, m.measured] for m in table if m.low is not None and m.measured is not None}
    real = {"requested": meters.get("requested", [0, 0])[1], "held": meters.get("arena held", [0, 0])[1]}
    bands = {"requested": found.requested_band, "held": found.held_band}
    return {
        "said": found.exact,
        "exact": verdict == "exact" and meters["largest workspace"][0] == meters["largest workspace"][1],
        "in_band": all(low <= real[n] and (high is None or real[n] <= high) for n, (low, high) in bands.items()),
        "bands": bands,
        "verdict": verdict, "meters": meters, "nodes": [nodes.compared, nodes.equal],
        "notes": [f"{note.code} {note.text}" for note in found.notes],
        "text": "; ".join(reconcile.explanations(found, read, table, nodes)), "version": read.version,
    }  # fmt: skip


def table(rows: list[dict[str, Any]], levels: list[str]) -> str:
    """By family and level: runs, exact, said exact and wrong, in the band."""
    lines = ["| family | level | runs | exact | said exact and wrong | in band |", "|---|---|--:|--:|--:|--:|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["family"], row["level"]].append(row)
        groups["together", ""].append(row)
    for (family, level), members in sorted(
        groups.items(), key=lambda g: (g[0][0] == "together", g[0][0], levels.index(g[0][1]) if g[0][1] else 9)
    ):
        right = sum(row["said"] and row["exact"] for row in members)
        wrong = sum(row["said"] and not row["exact"] for row in members)
        inside = sum(row["in_band"] for row in members)
        lines.append(f"| {family} | {level} | {len(members)} | {right} | {wrong} | {inside} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="*", help="compared beside the generated graphs, as the family 'files'")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=(*LEVELS, "layout"))
    parser.add_argument("--families", nargs="*", help="of the generated graphs; none: only the files")
    parser.add_argument("--file-alone", action="store_true", help="predict from the file, not from the saved graph")
    parser.add_argument("--names", default="", help="only graphs whose names contain it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=16, help="of open sizes that are neither batches nor pictures")
    parser.add_argument(
        "--cpu", default=this_processor(), help="what weights are packed for; this machine's by default"
    )
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with temporary_folder() as folder:
        jobs = [("files", Path(path).name, path) for path in args.files]
        for name, (family, _) in GRAPHS.items():
            if (args.families is None or family in args.families) and args.names in name:
                path = str(Path(folder) / f"{name}.onnx")
                onnx.save(make(name), path)
                jobs.append((family, name, path))
        for family, name, path in jobs:
            for level in args.levels:
                row: dict[str, Any] = {"family": family, "name": name, "level": level}
                options = SessionOptions(
                    graph_optimization_level=level, intra_op_num_threads=args.threads, processor=args.cpu
                )
                try:
                    row |= compare(path, options, saved=not args.file_alone, length=args.length)
                except StaticmemError as error:
                    print(f"{name} {level}: {error.what} [{error.code}] {error.why}", flush=True)
                    continue
                rows.append(row)
                if not row["exact"] or row["said"] != row["exact"]:
                    mark = "WRONG" if row["said"] else "loose" if row["exact"] else "open"
                    print(f"{mark} {name} {level} {row['meters']} {row['text']} {row['notes']}", flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(rows, list(args.levels)))
    return 1 if any(row["said"] and not row["exact"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
