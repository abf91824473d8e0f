"""Runs real processes on this machine and writes down the most memory that each held (`docs/host.md`).

    python scripts/host/host_processes.py -o tests/data/host_processes.json

Memory of a process and its workers is read from /proc while it runs: anonymous and shared pages once, however many
processes map them, and the files that the main process maps. `VmHWM` is its own peak, which no reading misses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from host_case import CASES

PAUSE = 0.1  # seconds between readings


def tree(pid: int) -> list[int]:
    """A process and those that it started."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            waiting += map(int, task.read_text().split())
    return found


def pages(pid: int) -> dict[str, int]:
    """`/proc/PID/smaps_rollup` in KiB."""
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return {row[0].rstrip(":"): int(row[1]) for row in rows}


def held(pid: int) -> dict[str, int]:
    """KiB of a process and its workers: pages that several map count once, files as the main process maps them."""
    main = pages(pid)
    both = [main, *[pages(one) for one in tree(pid)[1:]]]
    anonymous = sum(one["Pss_Anon"] for one in both)
    files = main["Rss"] - main["Anonymous"] - main.get("Pss_Shmem", 0)
    return {"anonymous": anonymous, "shared": in_shared_memory(), "files": files, "processes": len(both)}


def in_shared_memory() -> int:
    """KiB in /dev/shm: batches that no process maps at the moment are there too."""
    filesystem = os.statvfs("/dev/shm")
    return (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize // 1024


def run(name: str, python: str) -> dict[str, Any]:
    """A case in a process of its own."""
    script = str(Path(__file__).with_name("host_case.py"))
    before, most = in_shared_memory(), {"kib": 0}
    with subprocess.Popen([python, script, name], stdout=subprocess.PIPE, text=True) as child:
        while child.poll() is None:
            with suppress(OSError, KeyError, IndexError, ValueError):
                now = held(child.pid)
                now["shared"] -= before
                total = now["anonymous"] + now["shared"] + now["files"]
                if now["processes"] > 1 and total > most["kib"]:
                    most = {"kib": total, **now}
            time.sleep(PAUSE)
        out = (child.stdout.read() if child.stdout else "").split()
    if child.returncode:
        raise SystemExit(f"{name}: failed")
    alone = {"case": name, "peak_resident_kib": int(out[-1])}
    return {**alone, **most} if "workers" in name and most["kib"] else alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", metavar="FILE")
    parser.add_argument("--python", default=sys.executable, help="another interpreter, with its own libraries")
    parser.add_argument("--case", action="append", help="only this one; repeatable")
    args = parser.parse_args()
    names = args.case or [name for name in CASES if not name.startswith("write-")]
    rows = []
    for name in names:
        rows.append(run(name, args.python))
        print(json.dumps(rows[-1]), flush=True)
    versions = {}
    for name in ("torch", "safetensors", "transformers"):
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        done = subprocess.run([args.python, "-c", code], capture_output=True, text=True)
        versions[name] = done.stdout.strip()
    machine = {"system": platform.system(), "kernel": platform.release(), "python": platform.python_version()}
    result = {"date": date.today().isoformat(), "machine": machine, "versions": versions, "rows": rows}
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
