"""Makes the tables of published classes: staticmem/training/module_names.json and staticmem/recover/inplace.json.

    python scripts/class_tables.py "VERSIONS" scripts/class_tables.txt

The last file has names of models; scripts/zoo.py chooses them. Each model is run once on meta tensors
(scripts/watch.py) in training mode, of which exports are made, and once in evaluation mode for what only that keeps.
Classes of the present tables that none of these models has stay as they are. VERSIONS names the packages whose classes
these are: "timm 1.0.31, torchvision 0.29.1".
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import inplace
import module_names
import zoo
from watch import observed

PACKAGE = Path(__file__).parents[1] / "staticmem"
SECONDS = 90


def write(path: Path, about: str, classes: dict[str, Any]) -> None:
    """One class a line, so that a change of the table can be read, and one class be found; what is not new is kept."""
    before = json.loads(path.read_text(encoding="utf-8"))["classes"]
    made = sorted({**{cls: entry for cls, entry in before.items() if _owner(cls) not in classes}, **classes}.items())
    lines = ",\n".join(f"{json.dumps(cls)}:{json.dumps(entry, separators=(',', ':'))}" for cls, entry in made)
    path.write_text(f'{{"about":{json.dumps(about)},"classes":{{\n{lines}\n}}}}\n', encoding="utf-8")


def _owner(key: str) -> str:
    """The class of an entry `Outer>Owner`."""
    return key.rpartition(">")[2]


def look(name: str, names: dict[str, module_names.Seen], places: inplace.Seen) -> None:
    """Adds what one published model shows; evaluation mode only where it has classes that were not seen before."""
    model, args, kwargs = zoo.build(name)
    before = set(names)
    seen = observed(model.train(), args, kwargs)
    module_names.collect(seen, names)
    inplace.collect(seen.graph, places)
    if set(names) - before:
        module_names.collect_caches(observed(model.eval(), args, kwargs), names)


def main(versions: str, models: Path) -> None:
    """Writes both tables; models that fail are named on standard error."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names: dict[str, module_names.Seen] = {}
    places: inplace.Seen = {}
    for name in models.read_text(encoding="utf-8").split():
        try:
            zoo.within(SECONDS, lambda name=name: look(name, names, places))
        except Exception as error:  # whatever a library raises for one of its models
            print(f"{name}: {type(error).__name__} {str(error)[:120]!r}", file=sys.stderr, flush=True)
    source = f"scripts/class_tables.py; {versions}"
    about = f"names that forward gives results; {source}"
    write(PACKAGE / "training" / "module_names.json", about, module_names.table(names))
    about = f"what classes run in place; {source}"
    write(PACKAGE / "recover" / "inplace.json", about, inplace.table(places))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
