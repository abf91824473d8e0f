"""How long `staticmem analyze` takes and how much memory it needs, as ratios of medians measured in one go.

    python benchmarks/run.py               # about five minutes; the table of docs/internals/performance.md
    python benchmarks/run.py --quick       # about a minute: fewer rounds, no VGG-19, no 100,000 nodes
    python benchmarks/run.py --million     # a graph of 1,000,000 nodes too: minutes, and several GiB
    python benchmarks/run.py --json FILE   # every sample as well
    python benchmarks/run.py --exports FOLDER --peers PYTHON   # beside MemTracker and torchinfo (peers.py, exports.py)
    python benchmarks/run.py --only export --peers PYTHON      # exports with recordings beside torch.export
    python benchmarks/run.py --onnxsim PYTHON                  # beside onnxsim's memory footprint

A part that fails or takes too long is named and left out, and the exit status is 1. Times are processor time (see
measure.py). Nothing but staticmem and its dependencies is needed, except for --exports and --peers. Targets are what
the project aims at on one core of a recent server; a ratio hardly depends on the machine, a time does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from compare import compare, footprint
from measure import ROOT, ChildError, Series, interleaved, machine, run
from rows import Row, mib, ms, ratio, table

CHILD = [sys.executable, str(ROOT / "benchmarks" / "child.py")]
GRAPHS = [sys.executable, str(ROOT / "benchmarks" / "graphs.py")]
ONNX, PT2, VGG = (str(ROOT / "models" / name) for name in ("resnet50.onnx", "resnet50.pt2", "vgg19.onnx"))

COLD = 2.5  # times the floor
MILLION = 1800  # seconds on the clock that a graph of 1,000,000 nodes may take on a busy machine
FLOORS = 5  # runs of the floor in each round, where it is the yardstick of single runs
EMBEDDED = 1.1  # times the weightless file
MEMORY = 1.5  # times the weightless file's peak: the kernel maps 64 KiB of the file around each read
# Targets in seconds are for one core of a recent server (Intel Xeon, 22 November 2026), on which the floor took this
# long. A machine that needs twice as long for the floor may take twice as long for them.
FLOOR = 0.2
WARM = 0.025  # seconds
GROWTH = 1.5  # time per node of the largest graph over that of the 10,000 node one
PER_NODE = 60e-6  # seconds
EXPORTED = 2  # times torch.export with the same open sizes
BYTES_PER_NODE = 4295  # 4 GiB for a million nodes


ANALYZE = [sys.executable, "-m", "staticmem", "analyze"]


def analyze(path: str) -> list[str]:
    return [*ANALYZE, path, "--optimizer", "adam"]


def cold(rounds: int) -> tuple[list[Row], list[Series]]:
    """A fresh process against what any reader of ONNX pays."""
    found = interleaved({"floor": [*CHILD, "floor", ONNX], "onnx": analyze(ONNX), "pt2": analyze(PT2)}, rounds)
    floor = found["floor"]
    rows = [
        Row("floor: import onnx, load, infer shapes", ms(floor.seconds), mib(floor.rss)),
        ratio("cold resnet50.onnx --optimizer adam", found["onnx"], floor, "floor", COLD),
        ratio("cold resnet50.pt2 --optimizer adam", found["pt2"], floor, "floor", COLD),
    ]
    return rows, list(found.values())


def embedded(name: str, source: str, folder: Path, rounds: int) -> tuple[list[Row], list[Series]]:
    """A file with its weights in it against the same without."""
    full = folder / f"{name}.onnx"
    run([*GRAPHS, "embed", source, str(full)])
    found = interleaved({f"{name} weightless": analyze(source), f"{name} embedded": analyze(str(full))}, rounds)
    base, series = found.values()
    size = full.stat().st_size
    full.unlink()
    memory = series.rss / base.rss
    rows = [
        ratio(f"cold {name}.onnx with {size / 1e6:.0f} MB of weights", series, base, "weightless", EMBEDDED),
        Row(
            f"  its peak memory (weightless {mib(base.rss)})",
            "",
            mib(series.rss),
            f"{memory:.2f}x weightless",
            f"<= {MEMORY}x",
            memory <= MEMORY,
        ),
    ]
    return rows, [base, series]


def warm(rounds: int, count: int) -> tuple[list[Row], list[Series]]:
    """`staticmem.analyze(path)` in a process that has done it before: median of medians.

    The file is known (`staticmem.frontends.recent`), unless it is read again, and the step (`analysis.steps`) where
    the question is the same or about another card.
    """
    ways = {
        "again": "", "card": ", another card", "step": ", step worked out anew", "other": ", other batch and optimizer",
        "read": ", file read anew",
    }  # fmt: skip
    commands = {
        f"{Path(p).name}{words}": [*CHILD, "warm", p, str(count), how]
        for p in (ONNX, PT2)
        for how, words in ways.items()
    }
    floors = {f"floor {number}": [*CHILD, "floor", ONNX] for number in range(FLOORS)}
    found = interleaved({**floors, **commands}, rounds)
    floor = median(found[name].seconds for name in floors)
    rows = []
    for name in commands:
        seconds = found[name].reported("seconds")
        share, most = seconds / floor, WARM / FLOOR
        row = Row(f"warm analyze, {name}", ms(seconds), "", f"{share:.3f}x floor")
        if not name.endswith((ways["other"], ways["read"])):  # those are for comparison
            row.target, row.ok = f"<= {most:.3f}x", share <= most
        rows.append(row)
    return rows, list(found.values())


def exported(python: str, rounds: int) -> tuple[list[Row], list[Series]]:
    """The export of ResNet-50 with its recording, and the recording alone, against torch.export."""
    names = ("torch.export", "recording", "staticmem.export")
    found = interleaved({name: [python, CHILD[1], "export", name] for name in names}, rounds)
    base = found["torch.export"].reported("seconds")
    rows = [Row("torch.export, resnet50 to .pt2", ms(base), mib(found["torch.export"].rss))]
    for name in names[1:]:
        seconds = found[name].reported("seconds")
        row = Row(f"{name}, resnet50", ms(seconds), mib(found[name].rss), f"{seconds / base:.2f}x torch.export")
        if name == "staticmem.export":
            row.target, row.ok = f"<= {EXPORTED}x", seconds <= EXPORTED * base
        rows.append(row)
    return rows, list(found.values())


def growth(sizes: list[int], folder: Path, rounds: int) -> tuple[list[Row], list[Series]]:
    """Graphs of Conv, Relu and Add: time in a node, and memory in a node over that of the smallest graph."""
    commands = {}
    for size in sizes:
        path = folder / f"chain{size}.onnx"
        run([*GRAPHS, "chain", str(size), str(path)])
        commands[f"{size:,} nodes, Adam"] = [*CHILD, "once", str(path), "4"]
    largest = {name: commands.pop(name) for name in [*commands] if name.startswith("1,000,000")}
    floors = {f"floor {number}": [*CHILD, "floor", ONNX] for number in range(FLOORS)}
    measured = interleaved({**floors, **commands}, rounds)
    floor = {name: median(measured[each].seconds for each in floors) for name in commands}
    found = {name: measured[name] for name in commands}
    for name, command in largest.items():
        found[name], floor[name] = _alone(name, command)
    rows, reference = [], None
    base = next(iter(found.values())).rss
    for size, (name, series) in zip(sizes, found.items(), strict=True):
        per_node = series.reported("seconds") / size
        rows.append(_per_node(series, floor[name], size))
        if size == 10_000:
            reference = per_node
        if size >= 10_000:
            memory = (series.rss - base) / (size - sizes[0])
            rows.append(Row("  memory", "", "", f"{memory:.0f} B a node"))
        if size == 1_000_000:
            rows[-1].target, rows[-1].ok = f"<= {BYTES_PER_NODE} B", memory <= BYTES_PER_NODE
        if size > 10_000 and reference is not None:
            growth = per_node / reference
            rows.append(
                Row("  against 10,000 nodes", "", "", f"{growth:.2f}x a node", f"<= {GROWTH}x", growth <= GROWTH)
            )
    for name, command in largest.items():
        series, yardstick = _alone(name.replace("Adam", "analyze(path)"), [*command, "infer"])
        rows.append(_per_node(series, yardstick, 1_000_000))
        found[series.name] = series
    return rows, list(found.values())


def _alone(name: str, command: list[str]) -> tuple[Series, float]:
    """A command that takes minutes: once, without a round before; and the floor before and after it."""
    around = [run([*CHILD, "floor", ONNX]).seconds for _ in range(FLOORS)]
    found = Series(name, [run(command, MILLION)])
    around += [run([*CHILD, "floor", ONNX]).seconds for _ in range(FLOORS)]
    return found, median(around)


def _per_node(series: Series, floor: float, nodes: int) -> Row:
    """The row of a graph of so many nodes; a million of them have a target."""
    seconds = series.reported("seconds")
    per_node, most = seconds / nodes, PER_NODE / FLOOR * 1e6
    millionth = per_node / floor * 1e6
    told = f"{per_node * 1e6:.0f} us a node: {millionth:.0f} millionths of the floor"
    row = Row(series.name, f"{seconds:.2f} s", mib(series.rss), told)
    if nodes == 1_000_000:  # of fewer nodes all four meters are worked out
        row.target, row.ok = f"<= {most:.0f}", millionth <= most
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and nothing large")
    parser.add_argument("--json", metavar="FILE", help="writes the table and every sample")
    parser.add_argument("--million", action="store_true", help="a graph of 1,000,000 nodes too")
    parser.add_argument("--exports", metavar="FOLDER", type=Path, help="with the files of exports.py")
    parser.add_argument(
        "--peers", metavar="PYTHON", default="", help="an interpreter that has PyTorch: MemTracker, and exports"
    )
    parser.add_argument(
        "--onnxsim", metavar="PYTHON", default="", help="an interpreter that has onnxsim: its footprint beside"
    )
    parser.add_argument("--only", metavar="PART", help="cold, embedded, warm, growth, compare or export")
    arguments = parser.parse_args()
    quick = arguments.quick
    sizes = [1_000, 10_000, *([] if quick else [100_000]), *([1_000_000] if arguments.million else [])]
    rows: list[Row] = []
    series: list[Series] = []
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: list[tuple[str, Callable[[], tuple[list[Row], list[Series]]]]] = [
            ("cold", lambda: cold(3 if quick else 9)),
            ("embedded", lambda: embedded("resnet50", ONNX, folder, 5 if quick else 15)),
            *([] if quick else [("embedded", lambda: embedded("vgg19", VGG, folder, 15))]),
            ("warm", lambda: warm(1 if quick else 3, 11 if quick else 31)),
            ("compare", lambda: compare(arguments.exports, arguments.peers, ANALYZE, 1 if quick else 3)),
            *(
                [("compare", lambda: footprint(arguments.onnxsim, ANALYZE, folder, 1 if quick else 3))]
                if arguments.onnxsim
                else []
            ),
            *([("export", lambda: exported(arguments.peers, 1 if quick else 3))] if arguments.peers else []),
            ("growth", lambda: growth(sizes, folder, 1 if quick else 3)),
        ]
        parts = [part for part in parts if arguments.only in (None, part[0])]
        for number, (title, part) in enumerate(parts, 1):
            print(f"part {number} of {len(parts)}: {title}", file=sys.stderr)
            try:
                more_rows, more_series = part()
            except ChildError as error:
                print(error, file=sys.stderr)
                failed = True
                continue
            rows += more_rows
            series += more_series
    on = machine()
    print(", ".join(f"{key} {value}" for key, value in on.items()))
    print(table(rows))
    if arguments.json:
        data = {"machine": on, "rows": [asdict(r) for r in rows], "series": [asdict(s) for s in series]}
        Path(arguments.json).write_text(json.dumps(data, indent=1) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
