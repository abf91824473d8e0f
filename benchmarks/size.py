"""How long `staticmem size` takes over the whole catalogue: training ResNet-50 with Adam.

    python benchmarks/size.py                  # models/resnet50.onnx
    python benchmarks/size.py MODEL --against FOLDER
    python benchmarks/size.py --gpu t4 --gpu l4            # cards by name, with exact batches
    python benchmarks/size.py --jobs 1 --jobs 2            # by one process and by two: seconds on the clock

Seconds of processor time and on the clock of fresh processes, median of three. `--against` takes the source tree of
another version, which runs in turns with this one, and says whether the reports are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from measure import ROOT, Run, run

OF_TREE = "import sys; sys.path[0] = sys.argv.pop(1); from staticmem.cli.main import main; sys.exit(main())"
FLAGS = ["--optimizer", "adam", "-f", "json"]
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "models" / "resnet50.onnx"))
    parser.add_argument("--against", metavar="FOLDER", type=Path, help="the source tree of another version")
    parser.add_argument("--jobs", action="append", default=[], metavar="N", help="processes of this tree, in turns")
    parser.add_argument("--gpu", action="append", default=[], help="cards, in place of the whole catalogue")
    arguments = parser.parse_args()
    command = ["size", str(Path(arguments.model).resolve()), *FLAGS]
    command += [word for gpu in arguments.gpu for word in ("--gpu", gpu)]
    sides = [(f"{ROOT}, --jobs {jobs}", ROOT, ["-j", jobs]) for jobs in arguments.jobs] or [(str(ROOT), ROOT, [])]
    if arguments.against is not None:
        sides.append((str(arguments.against), arguments.against.resolve(), []))
    runs: dict[str, list[Run]] = {name: [] for name, _, _ in sides}
    for _ in range(ROUNDS):
        for name, tree, words in sides:
            runs[name].append(run([sys.executable, "-c", OF_TREE, str(tree), *command, *words]))
    for name, some in runs.items():
        clock, seconds = median(one.clock for one in some), median(one.seconds for one in some)
        print(f"{name}: {seconds:.1f} s, {clock:.1f} s on the clock")
    first, *others = runs.values()
    for name, some in zip(list(runs)[1:], others, strict=True):
        pairs = list(zip(first, some, strict=True))
        ratio, clock = median(a.seconds / b.seconds for a, b in pairs), median(a.clock / b.clock for a, b in pairs)
        is_same = {report_of(a.output) for a, _ in pairs} == {report_of(b.output) for _, b in pairs}
        print(
            f"{ratio:.2f} of the time of {name}, {clock:.2f} on the clock; reports: {'equal' if is_same else 'DIFFER'}"
        )


def report_of(output: str) -> str:
    """The report without its command line."""
    return json.dumps({**json.loads(output), "command": ""})


if __name__ == "__main__":
    main()
