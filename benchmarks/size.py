"""How long `staticmem size` takes over the whole catalogue: training ResNet-50 with Adam.

    python benchmarks/size.py                  # models/resnet50.onnx
    python benchmarks/size.py MODEL --against FOLDER
    python benchmarks/size.py --gpu t4 --gpu l4            # cards by name, with exact batches

Seconds of processor time of fresh processes, median of three. `--against` takes the source tree of another version,
which runs in turns with this one, and says whether the reports are equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from measure import ROOT, run

OF_TREE = "import sys; sys.path[0] = sys.argv.pop(1); from staticmem.cli.main import main; sys.exit(main())"
FLAGS = ["--optimizer", "adam", "-f", "json"]
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "models" / "resnet50.onnx"))
    parser.add_argument("--against", metavar="FOLDER", type=Path, help="the source tree of another version")
    parser.add_argument("--gpu", action="append", default=[], help="cards, in place of the whole catalogue")
    arguments = parser.parse_args()
    command = ["size", str(Path(arguments.model).resolve()), *FLAGS]
    command += [word for gpu in arguments.gpu for word in ("--gpu", gpu)]
    trees = [ROOT, *([arguments.against.resolve()] if arguments.against is not None else [])]
    seconds: dict[Path, list[float]] = {tree: [] for tree in trees}
    reports: dict[Path, str] = {}
    for _ in range(ROUNDS):
        for tree in trees:
            child = run([sys.executable, "-c", OF_TREE, str(tree), *command])
            seconds[tree].append(child.seconds)
            reports[tree] = child.output
    for tree in trees:
        print(f"{tree}: {median(seconds[tree]):.1f} s")
    if len(trees) > 1:
        ratio = median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(f"{ratio:.2f} of its time; the reports are {'equal' if len(set(reports.values())) == 1 else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
