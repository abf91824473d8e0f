"""What a release of PyTorch changes of the facts that predictions stand on, and the rooms that it touches.

    python scripts/releases/release_changes.py PYTHON [--reference PYTHON]    # two Pythons with torch installed

The reference is that of this Python if none is named. Of ops, derivatives, autocast and decompositions those count that
have a rule, of settings those that `staticmem/compiler/` names; the others are counted at the end of a section.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from staticmem.ops.registry import rules
from staticmem.ops.traces.registry import lookup as lookup_trace

FACTS = Path(__file__).with_name("release_facts.py")
COMPILER = Path(__file__).resolve().parents[2] / "staticmem" / "compiler"
ROOMS = {"optimizers": "engine/optimizer_steps.py", "settings": "compiler/"}
Facts = Mapping[str, Mapping[str, str]]


def read_facts(python: str) -> Facts:
    """The facts of the PyTorch that a Python has."""
    done = subprocess.run([python, "-I", str(FACTS)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} cannot tell of its PyTorch: {done.stderr.strip().splitlines()[-1]}")
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts


def rooms_of_op(name: str) -> list[str]:
    """The files that have the rule and the trace of an op; none where it has no rule."""
    base = name.partition(".")[0]
    found = [function for target, function in rules().items() if target.partition(".")[0] == base]
    if not found:
        return []
    files = {file_of(rule.function) for rule in found}
    trace = lookup_trace(base)
    if trace is not None:
        files.add(file_of(trace))
    return sorted(files)


def file_of(function: Callable[..., object]) -> str:
    return function.__module__.removeprefix("staticmem.").replace(".", "/") + ".py"


def names_of_settings() -> set[str]:
    """Words of the compiler's sources: a setting that it relies on is named in one."""
    return {word for path in COMPILER.rglob("*.py") for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


def compare(section: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """A line for each fact that differs and counts, then how many do not."""
    words = names_of_settings() if section == "settings" else set()
    others = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if section in ROOMS:
            rooms = [ROOMS[section]] if section == "optimizers" or name.rpartition(".")[2] in words else []
        else:
            rooms = rooms_of_op(name)
        if not rooms:
            others += 1
            continue
        yield f"  {name}  ({', '.join(rooms)})"
        yield from (f"    {sign} {fact}" for sign, fact in (("-", old), ("+", new)) if fact is not None)
    if others:
        yield f"  and {others} that nothing here relies on"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python that has the release")
    parser.add_argument("--reference", default=sys.executable, help="the Python that has the reference")
    given = parser.parse_args()
    before, after = read_facts(given.reference), read_facts(given.python)
    print(f"From PyTorch {before['release']['torch']} to {after['release']['torch']}")
    for section in before:
        if section != "release":
            lines = list(compare(section, before[section], after[section]))
            print(f"\n{section}: {'no change' if not lines else ''}".rstrip())
            print(*lines, sep="\n")


if __name__ == "__main__":
    main()
