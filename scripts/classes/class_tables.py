"""Makes the table of published classes, staticmem/passes/frames/published_names.json.

    python scripts/classes/class_tables.py "VERSIONS" scripts/classes/class_tables.txt [--state FILE]

The file has names of models; class_models.py chooses them. Each model is run once on meta tensors (class_watch.py) in
training mode, of which exports are made, and once in evaluation mode for what only that keeps.
Classes of the present table that none of these models has stay as they are. VERSIONS names the packages whose classes
these are: "timm 1.0.31, torchvision 0.29.1". With `--state` what was seen is kept in FILE after each model: a run of up
to an hour that was stopped goes on behind the model that it was at.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import class_models
import class_names
from class_watch import observed

PACKAGE = Path(__file__).parents[2] / "staticmem"
SECONDS = 90


@dataclass
class State:
    """What the models so far have shown. `tried` also has the one that a stopped run was at: it may have stopped it."""

    names: dict[str, class_names.Seen] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)

    def save(self, path: Path | None) -> None:
        """Written beside the file and moved, so that a stop leaves a whole one."""
        if path is not None:
            beside = path.with_name(f"{path.name}.new")
            beside.write_bytes(pickle.dumps(self))
            os.replace(beside, path)


def write(path: Path, about: str, classes: dict[str, Any]) -> None:
    """One class a line, so that a change of the table can be read, and one class be found; what is not new is kept."""
    before = json.loads(path.read_text(encoding="utf-8"))["classes"]
    made = sorted({**before, **classes}.items())
    lines = ",\n".join(f"{json.dumps(cls)}:{json.dumps(entry, separators=(',', ':'))}" for cls, entry in made)
    path.write_text(f'{{"about":{json.dumps(about)},"classes":{{\n{lines}\n}}}}\n', encoding="utf-8")


def look(name: str, names: dict[str, class_names.Seen]) -> None:
    """Adds what one published model shows; evaluation mode only where it has classes that were not seen before."""
    model, args, kwargs = class_models.build(name)
    before = set(names)
    seen = observed(model.train(), args, kwargs)
    class_names.collect(seen, names)
    if set(names) - before:
        class_names.collect_caches(observed(model.eval(), args, kwargs), names)


def main(versions: str, models: Path, path: Path | None) -> None:
    """Writes the table; models that fail are named on standard error, and how long each took."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    state = State() if path is None or not path.exists() else pickle.loads(path.read_bytes())
    for name in models.read_text(encoding="utf-8").split():
        if name in state.tried:
            continue
        state.tried.append(name)
        state.save(path)
        began = time.monotonic()
        outcome = "seen"
        try:
            class_models.within(SECONDS, lambda name=name: look(name, state.names))
        except Exception as error:  # whatever a library raises for one of its models
            outcome = f"{type(error).__name__} {str(error)[:120]!r}"
        print(f"{name}: {outcome}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    state.save(path)
    about = f"names that forward gives results; scripts/classes/class_tables.py; {versions}"
    write(PACKAGE / "passes" / "frames" / "published_names.json", about, class_names.table(state.names))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions")
    parser.add_argument("models", type=Path)
    parser.add_argument("--state", type=Path, help="file that keeps what was seen, for a run that is stopped")
    given = parser.parse_args()
    main(given.versions, given.models, given.state)
