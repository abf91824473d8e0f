"""What decides a recording beside its job: variables of the environment, installed packages and files of code.

Packages read variables when they are imported and when they build a model (`TIMM_FUSED_ATTN`), which nobody else knows.
So the process that records notes what it reads (`noted_reads`, `facts_of_process`), and what was kept is the answer
only where all of it is as it was (`digest`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
# Set for the process whatever the user has; PYTHONPATH is told apart by `known_before`
_SET = frozenset({*OFFLINE, "PYTHONHASHSEED", "PYTHONPATH", "PYTHONSAFEPATH"})
_OF_TORCH = ("TORCH", "PYTORCH", "ATEN")  # C++ reads such variables, and nothing notes it
_HELPERS = ("os", "collections.abc")  # modules through which code reads `os.environ`
_INSTALLED = (".dist-info", ".egg-info")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# By folder: names of files
Files = Mapping[str, Sequence[str]]


def known_before(package: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What decides and is known before the package runs: where code comes from, all that is installed beside it
    (packages ask what there is), and variables of torch and of the package, read or not."""
    prefixes = (*_OF_TORCH, package.upper())
    variables = {n: v for n, v in environment.items() if n.upper().startswith(prefixes) and n not in _SET}
    return {
        "python": sys.version, "staticmem": _ROOT, "path": environment.get("PYTHONPATH", ""),
        "installed": _installed(), "variables": variables,
    }  # fmt: skip


def digest(names: Sequence[str], files: Files, environment: Mapping[str, str]) -> str:
    """Of the values of variables, and of sizes and times of files. No value is kept: some are secret.

    Raises:
        OSError: a file is not there.
    """
    values = [environment.get(name) for name in names]
    stamps = [(s.st_size, s.st_mtime_ns) for s in map(os.stat, _paths(files))]
    return hashlib.sha256(json.dumps([list(names), values, stamps]).encode()).hexdigest()


def _paths(files: Files) -> list[str]:
    return [os.path.join(folder, name) for folder, names in files.items() for name in names]


def _installed() -> dict[str, list[tuple[str, int]]]:
    """By folder of the path: its distributions with their versions, and when they were installed: a version that is
    under development stays the same."""
    installed = {}
    for folder in dict.fromkeys(map(os.path.abspath, filter(None, sys.path))):
        try:
            with os.scandir(folder) as entries:
                names = [(e.name, e.stat().st_mtime_ns) for e in entries if e.name.endswith(_INSTALLED)]
        except OSError:  # an archive, or nothing
            continue
        if names:
            installed[folder] = sorted(names)
    return installed


# -- in the process that records ---------------------------------------------------------------------------------------


@contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Within it the names of variables that code reads are added to the set, but for those that Python's own library
    reads for itself."""
    names: set[str] = set()
    kind = type(os.environ)
    read = kind.__getitem__  # `get` and `in` come here, too

    def noting(self: Any, key: Any) -> Any:
        if _asks_by_name(sys._getframe(1)):
            names.add(os.fsdecode(key))
        return read(self, key)

    with mock.patch.object(kind, "__getitem__", noting):
        yield names


def _asks_by_name(frame: FrameType | None) -> bool:
    """Whether code that is not Python's own asks for one variable. tqdm and networkx go through all of them and look
    for their names, and a copy of all is for a process that is started."""
    while frame is not None and frame.f_globals.get("__name__") in _HELPERS:
        if frame.f_code.co_name in ("__iter__", "copy"):
            return False
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in sys.stdlib_module_names


def facts_of_process(
    package: str, names: set[str], environment: Mapping[str, str], started: int
) -> dict[str, Any] | None:
    """What the process has read, as `digest` takes it, with its digest. `environment` is that at its start, `started`
    when that was, in nanoseconds; None where a file of code was changed since: which of both ran is not known."""
    read, files = sorted(names - _SET), _files_of_code(package)
    try:
        changed = max((os.stat(path).st_mtime_ns for path in _paths(files)), default=0)
        content = digest(read, files, environment)
    except OSError:
        return None
    return {"variables": read, "files": files, "digest": content} if changed < started else None


def _files_of_code(package: str) -> dict[str, list[str]]:
    """Files of the modules that were imported: those of this package and of the one that builds the model, and all
    that are not installed. Of the others it is enough which version is."""
    installed = _installed().items()
    roots = [folder for folder, names in installed if any(name.endswith(_INSTALLED[0]) for name, _ in names)]
    versioned = tuple(os.path.join(root, "") for root in (os.path.dirname(os.__file__), *roots))
    files: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__")  # some import when they are asked for an attribute
        if not isinstance(path, str) or not os.path.isfile(path):
            continue
        folder, file = os.path.split(os.path.abspath(path))
        if name.partition(".")[0] in ("staticmem", package) or not os.path.join(folder, file).startswith(versioned):
            files.setdefault(folder, set()).add(file)
    return {folder: sorted(files[folder]) for folder in sorted(files)}
