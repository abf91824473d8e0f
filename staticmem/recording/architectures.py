"""The recording of an architecture that a package builds (`frontends.architectures`): made in a process of its own, and
kept for the next time.

Recordings are kept in the user's folder for caches under a digest of all that decides them: the config, the options,
the versions of the packages, and the code that records. The folder may be removed at any time; where it cannot be
written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from staticmem import child
from staticmem.child import Failure, RunError
from staticmem.errors import UsageError
from staticmem.files import read, temporary_folder
from staticmem.frontends import recording_format as written
from staticmem.frontends.architectures import Architecture, read_config
from staticmem.frontends.recorded import RecordedModel
from staticmem.ir.model_file import ModelFile
from staticmem.recording import no_graph, not_recorded
from staticmem.recording.attach import alone, with_recording
from staticmem.recording.told import both_lines, lines_of

TIMEOUT = 600.0  # seconds: the graph of 80 layers takes some 30 on a slow core, its recording as much
MEMORY = 12 << 30  # bytes that the process may have; one for 80 layers takes 1 GiB
MOST_KEPT = 64  # recordings; one has a few KiB
FAILURES: child.Failures = {
    "run": Failure(
        "the model cannot be built and recorded", "{message}.",
        "Check the config and the version of the package, or write a function that builds the model and its inputs: "
        "staticmem export file.py:FUNCTION -o model.pt2", "SM148",
    ),
    "graph": Failure(
        "the graph of the model cannot be exported", "{message}.",
        "An analysis records the code and needs no graph: give 'staticmem analyze' this name in place of a file.",
        "SM148",
    ),
    "refused": Failure("{name}: a model that is not built", "{message}.", "Check the config and the options.", "SM147"),
    "config": Failure(
        "{name} is no config that the installed transformers knows", "{message}.",
        "Install a version of transformers that has this model: pip install -U transformers", "SM145",
    ),
    "unknown": Failure("{name}: no such model", "{message}.", "Check the name.", "SM145"),
    "option": Failure("{name}: an option that does not apply", "{message}.", "Leave it out.", "SM149"),
    "memory": Failure(
        "not enough memory to record the model", "{message}.", "Check the sizes that the config has.", "SM148"
    ),
    "crash": Failure("the process that builds the model ended", "{message}.", "Check the config.", "SM148"),
    "timeout": Failure(
        "building the model took longer than {timeout} seconds", "The process was ended.",
        "Check the sizes that the config has.", "SM148",
    ),
}  # fmt: skip


class BuiltModel(RecordedModel):
    """The recording of an architecture, which is recorded again where its code takes another way."""

    def __init__(self, architecture: Architecture, document: Any, others: list[BuiltModel] | None = None) -> None:
        super().__init__(architecture.path, document, architecture.package)
        self.architecture = architecture
        self.others = [] if others is None else others  # of all recordings of this architecture, in order
        self.others.append(self)

    def at(self, asked: Mapping[str, int], training: bool) -> ModelFile:
        """The recording that holds at the sizes `asked` (the rest as in the example): this one, another, or a new one
        with them as its example."""
        sizes = {**self.sizes.example, **{name: size for name, size in asked.items() if name in self.symbols}}
        for one in (self, *self.others):
            if one.holds(sizes, training):
                return one
        return BuiltModel(self.architecture, _document(self.architecture, sizes), self.others)

    def holds(self, sizes: Mapping[str, int], training: bool) -> bool:
        """Whether the code takes the way that was recorded."""
        asked = (self.sizes, self.training_sizes) if training else (self.sizes,)
        return all(one.refusal(sizes) is None for one in asked)


def built_model(architecture: Architecture) -> BuiltModel:
    """The recorded model.

    Raises:
        ModelFileError: the config is none, or describes a model that is not built (SM145, SM147).
        UsageError: a package is not installed (SM146).
        RunError: the model cannot be built or recorded (SM145 to SM149).
    """
    return BuiltModel(architecture, _document(architecture, None))


def exported_file(architecture: Architecture, kind: str, train: bool) -> tuple[bytes, list[str]]:
    """The bytes of the export and lines for the user, as `recording.export.exported` gives them.

    The graph and the recording are made at the same time, each by a process that builds the model: of a large model
    both take long, and neither needs the other. The recording may be one that was kept.

    Raises as `built_model`.
    """
    with ThreadPoolExecutor(1) as beside, temporary_folder() as folder:
        recording = beside.submit(_document, architecture, None)
        path = os.path.join(folder, f"model{kind}")
        job = {**_job(architecture, None), "kind": kind, "train": train, "file": path}
        try:
            answer = _run(job, folder, architecture)
        except RunError as error:
            document = recording.result()
            return alone(document, kind, error), [*lines_of(document), no_graph(error)]
        with open(path, "rb") as file:
            data, lines = file.read(), [str(line) for line in answer["lines"]]
        try:
            document = recording.result()
        except RunError as error:
            return data, [*lines, not_recorded(error)]
    return with_recording(data, kind, document), both_lines(lines_of(document), lines)


def _document(architecture: Architecture, sizes: Mapping[str, int] | None) -> Any:
    job = _job(architecture, sizes)
    kept = _kept(job)
    if kept is not None and (document := _read(kept)) is not None:
        return document
    with temporary_folder() as folder:
        path = os.path.join(folder, "recording")
        _run({**job, "kind": "", "file": path}, folder, architecture)
        with open(path, "rb") as file:
            data = file.read()
    if kept is not None:
        _keep(kept, data)
    return written.unpack(data, architecture.path)


def _job(architecture: Architecture, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    package = architecture.package
    for needed in ("torch", package):
        if importlib.util.find_spec(needed) is None:
            wanted = "'staticmem[transformers]'" if package == "transformers" else f"torch {package}"
            why, hint = f"{architecture.given} is built with it.", f"pip install {wanted}"
            raise UsageError(f"{needed} is not installed", why, hint, "SM146")
    config = read_config(architecture.name) if package == "transformers" else None
    return {
        "package": package, "name": architecture.name, "config": config, "options": dict(architecture.options),
        "sizes": dict(sizes) if sizes is not None else None, "memory_limit": MEMORY,
    }  # fmt: skip


def _run(job: dict[str, Any], folder: str, architecture: Architecture) -> Any:
    job = {**job, "answer": os.path.join(folder, "answer.json")}
    name = os.path.basename(architecture.given.rstrip("/")) or architecture.given
    return child.run("staticmem.recording.architecture_child", job, folder, TIMEOUT, FAILURES, name=name)


# -- what is kept ------------------------------------------------------------------------------------------------


def cache_folder() -> str:
    """The user's folder for caches, by the conventions of the platform."""
    home = os.path.expanduser("~")
    if sys.platform == "darwin":
        return os.path.join(home, "Library", "Caches", "staticmem")
    if sys.platform == "win32":
        return os.path.join(os.environ.get("LOCALAPPDATA") or home, "staticmem", "Cache")
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home, ".cache"), "staticmem")


def _kept(job: Mapping[str, Any]) -> str | None:
    """The file in which the recording of a job is kept."""
    name = job["name"] if job["config"] is None else ""  # where a config lies changes nothing
    deciding = {**job, "name": name, "versions": _versions(str(job["package"])), "code": _digest_of_code()}
    digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:40]
    return os.path.join(cache_folder(), "recordings", digest)


def _versions(package: str) -> dict[str, str]:
    names = {"transformers": ("transformers",), "timm": ("timm",), "torchvision": ("torchvision",)}[package]
    versions = {"python": sys.version}
    for name in ("torch", *names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@functools.cache
def _digest_of_code() -> str:
    """Of the code that decides what is written down: of recordings, and of the ops that it knows."""
    root, digest = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), hashlib.sha256()
    for folder in ("recording", "ops", "frontends"):
        for name in sorted(os.listdir(os.path.join(root, folder))):
            if name.endswith(".py"):
                with open(os.path.join(root, folder, name), "rb") as file:
                    digest.update(file.read())
    return digest.hexdigest()


def _read(path: str) -> Any:
    """The document in a file; None where there is none that can be read, so that it is made again."""
    from staticmem.errors import ModelFileError

    try:
        document = written.unpack(read(path, written.MAX_PACKED), path)
        os.utime(path)
    except (OSError, ModelFileError):
        return None
    return document


def _keep(path: str, data: bytes) -> None:
    """Writes a recording, and removes those that were not read for the longest."""
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        part = f"{path}.{os.getpid()}"
        with open(part, "wb") as file:
            file.write(data)
        os.replace(part, path)
        files = [os.path.join(folder, name) for name in os.listdir(folder)]
        for old in sorted(files, key=os.path.getmtime, reverse=True)[MOST_KEPT:]:
            os.remove(old)
