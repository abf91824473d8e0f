"""What a child process of this package runs first: `python isolated.py MODULE WORD...` calls `MODULE.main(WORD...)`.

Python puts a folder first on the path of what it starts: the current one with `-m` and `-c`, that of the file with a
path. From the first a `json.py` in a model's folder would run, and this one has modules of common names. So the file
is started by its path (`staticmem.child`), takes its folder away before it imports anything, and finds its package by
its place: no folder that is named by nobody is looked into.
"""

import sys

if not getattr(sys.flags, "safe_path", False):  # -P and PYTHONSAFEPATH, from Python 3.11 on: there is no such entry
    del sys.path[0]

import importlib
import importlib.util
import os


def run(arguments: list[str]) -> int:
    """Calls the module that is named; the exit code."""
    package = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(package)
    if root not in sys.path:  # what stands beside the package, as pip install --target has it; last: it hides nothing
        sys.path.append(root)
    place = os.path.join(package, "__init__.py")
    spec = importlib.util.spec_from_file_location("staticmem", place, submodule_search_locations=[package])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["staticmem"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(importlib.import_module(arguments[0]).main(*arguments[1:]))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
