"""Coverage-guided fuzzing of every reader: inputs that reach new code are kept, and changed further.

    python -m venv fuzz && fuzz/bin/pip install . atheris
    fuzz/bin/python scripts/faults/fuzz_coverage.py --seconds 120                 # for each target
    fuzz/bin/python scripts/faults/fuzz_coverage.py --target pt2 --seconds 3600
    fuzz/bin/python scripts/faults/fuzz_coverage.py --replay findings/pt2-1a2b3c.pt2
    fuzz/bin/python scripts/faults/fuzz_coverage.py --count-only                  # lines that the kept inputs reach

atheris (libFuzzer for Python) counts branches and looks at comparisons; what it changes is a structure, not only bytes:
`fuzz_mutators.py`. Inputs begin as the small sound files of `fuzz_targets.py`.

A file may be analysed, or refused with a StaticmemError. A finding is any other exception, more than --limit seconds,
more than --memory GiB, a file opened that nobody named, a file written or removed, a process, a socket. One file for
each place is kept in --out. Exit code 1 where there are findings.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import pkgutil
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import fuzz_mutators as mutators  # noqa: E402 - beside this file
from fuzz import attempt  # noqa: E402
from fuzz_targets import TARGETS, Target, check_modules  # noqa: E402

LARGEST = 100_000  # bytes of an input, but for DEEP of the mutators
# os.fork is how onnx is asked in a process of its own
REFUSED = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "pickle.find_class",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "shutil.rmtree",
)  # fmt: skip


class Watch:
    """Notes what no reader may do, while an input is read: a hook that Python calls for each open, process, socket."""

    def __init__(self, allowed: str) -> None:
        paths = sysconfig.get_paths()
        roots = (
            sys.prefix,
            sys.base_prefix,
            paths["stdlib"],
            str(ROOT),
            "/usr/share/zoneinfo",
            "/usr/lib",
            "/proc/self",
        )
        self.allowed, self.readable = allowed, tuple(os.path.realpath(root) for root in roots)
        self.active, self.seen = False, list[str]()
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in REFUSED:
            path = arguments[0] if arguments else ""
            of_folder = event == "os.remove" and arguments[1] not in (None, -1)  # shutil.rmtree of a temporary folder
            if not of_folder and not (isinstance(path, str) and path.startswith(os.path.dirname(self.allowed))):
                self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = os.fsdecode(arguments[0]), arguments[1], arguments[2]
            inside = os.path.dirname(self.allowed)
            if os.path.realpath(path).startswith(os.path.realpath(inside)):
                return  # the input, and temporary files, whose folder it is
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT
            )
            if writes or not os.path.realpath(path).startswith(self.readable):
                self.seen.append(f"open {path[:200]} {mode} {flags}")


def feed(target: Target, data: bytes, path: Path, limit: float, watch: Watch | None) -> str | None:
    """Writes the file and reads it; what went wrong."""
    path.write_bytes(target.pack(data))
    if watch is not None:
        watch.seen.clear()
        watch.active = True
    try:
        found = attempt(target.run, path, random.Random(crc32(data)), limit)
    finally:
        if watch is not None:
            watch.active = False
    if found is None and watch is not None and watch.seen:
        return "it did what no reader may do:\n" + "\n".join(watch.seen[:5])
    return found


def place_of(found: str) -> str:
    """The same for findings of one cause: the kind of exception and the innermost lines of ours."""
    lines = re.findall(r'File "[^"]*staticmem/([^"]+)", line (\d+)', found)
    last = found.strip().splitlines()[-1] if lines else re.sub(r"\d+", "N", found)[:300]
    return " ".join([*(f"{name}:{line}" for name, line in lines[-2:]), last.split(":")[0] if lines else last])


# -- the fuzzer: a process for each target -----------------------------------------------------------------------------


def child(name: str, corpus: Path, out: Path, seconds: int, limit: float, memory: float, seed: int) -> None:
    """Runs libFuzzer, which ends the process."""
    import atheris

    target = TARGETS[name]
    with atheris.instrument_imports(include=["staticmem"]):
        load_all()
    if target.shape == "yaml" or name == "toml":
        with atheris.instrument_imports(include=["tomllib"]):
            importlib.import_module("tomllib")
    words = mutators.words_of(sources(target))
    most = int(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    folder = tempfile.mkdtemp(prefix="fuzz-")
    tempfile.tempdir = folder
    path = Path(folder) / f"input.{target.suffix}"
    watch = Watch(str(path))
    places: set[str] = set()

    def one(data: bytes) -> None:
        found = feed(target, data, path, limit, watch)
        if found is not None and (place := place_of(found)) not in places:
            places.add(place)
            keep(name, target, data, found, out)

    def change(data: bytes, most: int, number: int) -> bytes:
        return changed(target, data, None, random.Random(number), words, lambda text: atheris.Mutate(text, most))[:most]

    def cross(data: bytes, other: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        return changed(target, data, other, rng, words, lambda text: atheris.Mutate(text, most))[:most]

    given = [
        sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-max_len={LARGEST}", f"-seed={seed or 1}",
        f"-artifact_prefix={out}/{name}-", "-timeout=0", "-rss_limit_mb=0", "-len_control=0", "-print_final_stats=1",
    ]  # fmt: skip
    hooks = {} if target.shape == "bytes" else {"custom_mutator": change, "custom_crossover": cross}
    atheris.Setup(given, one, **hooks)
    atheris.Fuzz()


def changed(
    target: Target, data: bytes, other: bytes | None, rng: random.Random, words: list[str], blind: mutators.Blind
) -> bytes:
    made: bytes = mutators.SHAPES[target.shape](data, rng, words, lambda text: bytes(blind(text)), other)
    return made if len(made) <= LARGEST else data


def keep(name: str, target: Target, data: bytes, found: str, out: Path) -> None:
    file = out / f"{name}-{hashlib.sha256(place_of(found).encode()).hexdigest()[:8]}.{target.suffix}"
    if file.exists():
        return
    file.write_bytes(target.pack(data))
    file.with_suffix(".txt").write_text(f"seed {crc32(data)}\n{found}\n", encoding="utf-8", errors="backslashreplace")
    print(f"FINDING {file}\n{found}\n", flush=True)


def load_all() -> None:
    """Every module of the package that can be imported here."""
    package = importlib.import_module("staticmem")
    for module in pkgutil.walk_packages(package.__path__, "staticmem."):
        if not module.name.endswith(("__main__", "_child", "pytest_plugin")):
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue


def sources(target: Target) -> list[Path]:
    files = sorted((ROOT / "staticmem").rglob("*.py"))
    return [f for f in files if f.relative_to(ROOT / "staticmem").as_posix().startswith(target.modules)]


# -- what the kept inputs reach ----------------------------------------------------------------------------------------


def reached(name: str, corpus: Path, limit: float) -> tuple[int, int]:
    """Lines in functions of the target's modules that its inputs run, and all of them."""
    target = TARGETS[name]
    load_all()
    files = {str(path): set[int]() for path in sources(target)}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            files[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename in files else None

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"input.{target.suffix}"
        for file in sorted(corpus.iterdir()):
            sys.settrace(enter)
            try:
                feed(target, file.read_bytes(), path, 10 * limit, None)
            finally:
                sys.settrace(None)
    lines = {path: set(_lines(compile(Path(path).read_bytes(), path, "exec"))) for path in files}
    return sum(len(files[path] & lines[path]) for path in files), sum(len(found) for found in lines.values())


def _lines(code: CodeType, inner: bool = False) -> Iterator[int]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines(constant, inner or bool(constant.co_flags & 2))  # CO_NEWLOCALS: a function, not a class
    if inner:
        yield from (line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno)


# -- the command -------------------------------------------------------------------------------------------------------


def fuzz(name: str, given: argparse.Namespace) -> tuple[int, float]:
    """Runs a target in processes of its own until its time is over; inputs and seconds."""
    target, corpus = TARGETS[name], given.corpus / name
    corpus.mkdir(parents=True, exist_ok=True)
    for data in target.seeds():
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    started, done, restarts = time.monotonic(), 0, 0
    while (left := given.seconds - (time.monotonic() - started)) > 2 and restarts < 20:
        words = [f"--{key}={getattr(given, key)}" for key in ("corpus", "out", "limit", "memory")]
        command = [
            sys.executable,
            __file__,
            "--child",
            name,
            *words,
            f"--seconds={left:.0f}",
            f"--seed={given.seed + restarts}",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as process:
            assert process.stdout is not None
            for raw in process.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                if line.startswith("stat::number_of_executed_units:"):
                    done += int(line.split()[-1])
                elif not line.startswith(("INFO", "#", "stat::", "\tNEW_FUNC", "Done ")) or given.verbose:
                    print(line, flush=True)
        restarts += 1
        if process.returncode == 0:
            break
        print(f"{name}: the process ended with {process.returncode}", flush=True)
    return done, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of the readers.")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all, one after the other")
    parser.add_argument("--seconds", type=float, default=120, help="for each target")
    parser.add_argument("--limit", type=float, default=10, help="seconds for one input")
    parser.add_argument("--memory", type=float, default=6, help="GiB of address space")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=Path("corpus"), help="inputs that reached new code; kept")
    parser.add_argument("--out", type=Path, default=Path("findings"))
    parser.add_argument("--replay", type=Path, help="a file of --out")
    parser.add_argument("--count-only", action="store_true", help="only count the lines that the kept inputs reach")
    parser.add_argument("-v", "--verbose", action="store_true", help="with libFuzzer's own words")
    parser.add_argument("--child", choices=TARGETS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    check_modules()
    given.corpus, given.out = given.corpus.resolve(), given.out.resolve()
    if given.replay is not None:
        target = TARGETS[given.replay.name.rsplit("-", 1)[0]]
        said = given.replay.with_suffix(".txt")
        seed = int(said.read_text().split()[1]) if said.exists() else 0
        found = attempt(target.run, given.replay, random.Random(seed), given.limit)
        print(found or "a clear error, or analysed")
        return bool(found)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.child is not None:
        child(
            given.child,
            given.corpus / given.child,
            given.out,
            int(given.seconds),
            given.limit,
            given.memory,
            given.seed,
        )
        return 0  # not reached
    before = set(given.out.iterdir())
    for name in given.target or TARGETS:
        done, seconds = (0, 0.0) if given.count_only else fuzz(name, given)
        hit, lines = reached(name, given.corpus / name, given.limit)
        kept = len(list((given.corpus / name).iterdir()))
        print(f"{name}: {done:,} inputs in {seconds:.0f} s, {kept:,} kept, {hit:,} of {lines:,} lines", flush=True)
    findings = [path for path in set(given.out.iterdir()) - before if path.suffix != ".txt"]
    print(f"{len(findings)} findings")
    return bool(findings)


if __name__ == "__main__":
    raise SystemExit(main())
