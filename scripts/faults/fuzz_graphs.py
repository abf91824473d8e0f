"""Random ONNX graphs of any operators through five verbs: valid ones, and ones damaged on purpose.

    python scripts/faults/fuzz_graphs.py --count 1000                    # of both kinds
    python scripts/faults/fuzz_graphs.py --kind valid --seed 3 --count 20000 --seconds 7200
    python scripts/faults/fuzz_graphs.py --replay valid-3-17             # makes the file again and shows what is wrong
    python scripts/faults/fuzz_graphs.py --seed 1000 --count 110 --write tests/data/random_graphs.zip

`random_graphs.py` and `random_damage.py` make the files, `fuzz_verbs.py` says what each has to stand, `fuzz_workers.py`
runs them in processes of their own. Findings are grouped by cause; some files of each are kept in --out. Exit code 1
where there are findings.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import fuzz_verbs  # noqa: E402 - beside this file
import fuzz_workers  # noqa: E402
import random_damage  # noqa: E402
import random_graphs  # noqa: E402
from fuzz import attempt  # noqa: E402

KINDS = {"valid": fuzz_verbs.valid_graph, "damaged": fuzz_verbs.damaged_graph}


def made(kind: str, seed: int, number: int) -> bytes:
    """The file of this name, the same every time for one release of onnx."""
    rng = random.Random(f"{kind} {seed} {number}")
    proto = random_graphs.valid(rng).proto if kind == "valid" else random_damage.damaged(rng)
    data: bytes = proto.SerializeToString()
    return data


def one(kind: str, seed: int, number: int, out: Path, limit: float) -> str | None:
    """Makes a file and reads it; what is wrong."""
    return tried(made(kind, seed, number), out / f"{kind}-{seed}-{number}.onnx", limit)


def tried(data: bytes, path: Path, limit: float) -> str | None:
    """Writes a file, whose name says what it is, and reads it; what is wrong."""
    kind, _, number = path.stem.split("-")
    path.write_bytes(data)
    found = attempt(KINDS[kind], path, random.Random(int(number)), limit)
    if found is None:
        path.unlink()
    return found


def write(archive: Path, kinds: list[str], seed: int, numbers: range) -> None:
    """The files in an archive, the same bytes for the same files."""
    with zipfile.ZipFile(archive, "w") as target:
        for kind, number in itertools.product(kinds, numbers):
            member = zipfile.ZipInfo(f"{kind}-{seed}-{number}.onnx")
            target.writestr(member, made(kind, seed, number), zipfile.ZIP_DEFLATED)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random graphs for the verbs.")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first number")
    parser.add_argument("--count", type=int, default=1000, help="files of each kind")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--limit", type=float, default=100, help="seconds for a file; each verb has 30")
    parser.add_argument("--memory", type=float, default=4, help="GiB of address space")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--dear", type=float, default=1, help="the part of files for size and -f html, which take longest"
    )
    parser.add_argument("--out", type=Path, default=Path("findings"))
    parser.add_argument("--replay", help="KIND-SEED-NUMBER")
    parser.add_argument("--write", type=Path, help="an archive for the files, which are not read then")
    given = parser.parse_args()
    if given.write is not None:
        write(given.write, given.kind or list(KINDS), given.seed, range(given.start, given.start + given.count))
        return 0
    given.out.mkdir(exist_ok=True)
    fuzz_verbs.dear = given.dear
    if given.replay is not None:
        kind, seed, number = given.replay.split("-")
        found = one(kind, int(seed), int(number), given.out, given.limit)
        print(found or "answered")
        return bool(found)
    started, total = time.monotonic(), 0
    for kind in given.kind or KINDS:
        causes: dict[str, list[int]] = collections.defaultdict(list)
        texts: dict[str, str] = {}
        done = 0

        def numbers() -> itertools.takewhile[int]:
            every = range(given.start, given.start + given.count)
            return itertools.takewhile(lambda _: time.monotonic() - started < given.seconds, every)

        def make(number: int, kind: str = kind) -> bytes:
            return made(kind, given.seed, number)

        def task(number: int, data: bytes, kind: str = kind) -> str | None:
            return tried(data, given.out / f"{kind}-{given.seed}-{number}.onnx", given.limit)

        memory = int(given.memory * 2**30)
        for number, found in fuzz_workers.run(make, task, numbers(), given.workers, memory, given.limit):
            done += 1
            if found is None:
                continue
            cause = fuzz_workers.cause_of(found)
            causes[cause].append(number)
            path = given.out / f"{kind}-{given.seed}-{number}.onnx"
            if len(causes[cause]) == 1:
                texts[cause] = found
                (given.out / f"{path.stem}.txt").write_text(found)
            elif len(causes[cause]) > 3:
                path.unlink(missing_ok=True)
        total += len(causes)
        print(f"{kind}, seed {given.seed}: {done:,} files, {sum(map(len, causes.values())):,} findings")
        for cause, which in sorted(causes.items(), key=lambda item: -len(item[1])):
            print(f"  {len(which):5}  {cause}  [{', '.join(map(str, which[:4]))}]", flush=True)
    return total > 0


if __name__ == "__main__":
    raise SystemExit(main())
