"""Counts what one analysis runs: files, functions and changes of package. A measure of structure, not of time.

    python benchmarks/walk.py                                       # models/resnet50.onnx, --optimizer adam
    python benchmarks/walk.py models/seed.pt2 --mode infer --packages
    python benchmarks/walk.py --functions allocators                # names of the functions that ran there

Run it in a fresh process, as the command line is: what an import runs counts once. A file counts if any code of it ran,
its module body included. A function is a code object that ran, classes' bodies, lambdas and (before Python 3.12)
comprehensions included, module bodies apart. Functions in the order of their first call change the package this often:
the switches. Packages are the folders of staticmem/.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODEL, WORDS = ROOT / "models" / "resnet50.onnx", ("--optimizer", "adam")


class Ran(NamedTuple):
    """A code object that ran: its file from the package on, its name, its line."""

    path: Path
    name: str
    line: int


def executed(model: str, words: list[str]) -> list[Ran]:
    """What `analyze` runs of the package, in the order of the first calls."""
    sys.path.insert(0, str(ROOT))
    package = ROOT / "staticmem"
    seen: dict[tuple[str, str, int], None] = {}  # code objects of two files may be equal: they are no keys

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            # without co_qualname, before Python 3.11, the line tells functions of one name apart
            seen.setdefault((code.co_filename, getattr(code, "co_qualname", code.co_name), code.co_firstlineno))

    sys.setprofile(profile)
    try:
        from staticmem.cli.main import main

        with contextlib.redirect_stdout(io.StringIO()):
            exit_code = main(["analyze", model, *words])
    finally:
        sys.setprofile(None)
    if exit_code:
        raise SystemExit(exit_code)
    inside = [(Path(file), name, line) for file, name, line in seen if file.startswith(f"{package}{os.sep}")]
    return [Ran(file.relative_to(package), name, line) for file, name, line in inside]


def lines(ran: list[Ran], packages: bool, listed: str | None) -> Iterator[str]:
    """The figures; a row for each package; the functions of those files whose paths begin with `listed`."""
    files = {code.path for code in ran}
    functions = [code for code in ran if code.name != "<module>"]
    order = [code.path.parts[0] for code in functions]
    switches = sum(before != after for before, after in pairwise(order))
    yield f"{len(files)} files {len(functions)} functions {switches} switches"
    if packages:
        yield f"{'package':16} {'files':>6} {'functions':>10}"
        of_package, in_package = Counter(path.parts[0] for path in files), Counter(order)
        for name, count in of_package.most_common():
            yield f"{name:16} {count:6} {in_package[name]:10}"
    if listed is not None:
        for path in sorted(files):
            if path.as_posix().startswith(listed):
                yield f"{path.as_posix()}: {' '.join(code.name for code in functions if code.path == path)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--packages", action="store_true", help="a row for each package")
    parser.add_argument("--functions", metavar="PATH", help="list the functions of files whose paths begin so")
    given, words = parser.parse_known_args()
    ran = executed(given.model, words or ([] if given.model != str(MODEL) else list(WORDS)))
    print(*lines(ran, given.packages, given.functions), sep="\n")


if __name__ == "__main__":
    main()
