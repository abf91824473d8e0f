"""The recording of an architecture that a package builds (`frontends.architectures`): made in a process of its own, and
kept for the next time (`recording.kept`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from staticmem import child
from staticmem.child import Failure, RunError
from staticmem.errors import ModelFileError, UsageError
from staticmem.files import temporary_folder
from staticmem.frontends import recording_format as written
from staticmem.frontends.architectures import OPTIONS, PIPELINES, Architecture, read_pipeline
from staticmem.frontends.recorded import RecordedModel
from staticmem.ir.graph import Note
from staticmem.ir.model_file import ModelFile
from staticmem.recording import hub, no_graph, not_recorded
from staticmem.recording.kept import Kept
from staticmem.recording.told import alone, both_lines, lines_of, with_recording

TIMEOUT = 600.0  # seconds: the graph of 80 layers takes some 30 on a slow core, its recording as much
MEMORY = 12 << 30  # bytes that the process may have; one for 80 layers takes 1 GiB
# transformers 5.24, quantizers: quantizer_finegrained_fp8.py and quantizer_mxfp4.py, `validate_environment`
NEEDED_CAPABILITY = {"fp8": (8, 9), "mxfp4": (7, 5)}
# the option of a step beside those of names: the part of a recording that has its mode
PART = "part"
FAILURES: child.Failures = {
    "run": Failure(
        "the model cannot be built and recorded", "{message}.",
        "Check the config and the version of the package, or write a function that builds the model and its inputs: "
        "staticmem export file.py:FUNCTION -o model.pt2", "SM148",
    ),
    "graph": Failure(
        "the graph of the model cannot be exported", "{message}.",
        "An analysis records the code and needs no graph: give 'staticmem analyze' this name instead of a file.",
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

    is_recorded_again = True

    def __init__(
        self,
        architecture: Architecture,
        by_step: Mapping[str, str],
        sizes: Mapping[str, int] | None = None,
        others: list[BuiltModel] | None = None,
    ) -> None:
        """`by_step` are options of the name by what the step is, beside those that were given."""
        self.described = _described(architecture)
        by_step, part = _applying(self.described, architecture, by_step), by_step.get(PART, written.ALL)
        allowed = {option: word for option, word in by_step.items() if architecture.package in OPTIONS[option].packages}
        self.asked = replace(architecture, options={**allowed, **architecture.options})
        described = self.described if "dequantize" not in by_step else _described(self.asked)
        document, notes = document_of(self.asked, sizes, described, part)
        self.packing = described.packing if described is not None else hub.NOT_PACKED
        self.given = architecture.given
        super().__init__(architecture.path, document, architecture.package)
        self.architecture, self.by_step, self.notes = architecture, by_step, [*self.notes, *notes]
        self.others = [] if others is None else others  # of all recordings of this architecture, in order
        self.others.append(self)

    def at(self, asked: Mapping[str, int], training: bool, by_step: Mapping[str, str]) -> ModelFile:
        """The recording that holds for a step and at the sizes `asked` (the rest as in the example): this one, another,
        or a new one with them as its example."""
        part = by_step.get(PART, written.ALL)
        options = _applying(self.described, self.architecture, by_step)
        named = {self.fixed_axes.get(name, name): size for name, size in asked.items()}
        sizes = {**self.sizes.example, **{name: size for name, size in named.items() if name in self.sizes.example}}
        alike = [one for one in (self, *self.others) if one.by_step == options and one.has(part)]
        if not alike:  # at the usual sizes first: that one holds for most, and may be kept
            alike = [BuiltModel(self.architecture, by_step, None, self.others)]
        holding = (one for one in alike if one.holds(sizes, training))
        return next(holding, None) or BuiltModel(self.architecture, by_step, sizes, self.others)

    def has(self, part: str) -> bool:
        """Whether a part was recorded."""
        return self.document.get("part", written.ALL) in (part, written.ALL)

    def holds(self, sizes: Mapping[str, int], training: bool) -> bool:
        """Whether the code takes the way that was recorded."""
        if any(sizes.get(name) != self.sizes.example.get(name) for name in (*self.fixed_axes.values(), *self.limits)):
            return False
        asked = (self.sizes, self.training_sizes) if training else (self.sizes,)
        return all(one.refusal(sizes) is None for one in asked)


def _applying(
    described: hub.Described | None, architecture: Architecture, by_step: Mapping[str, str]
) -> dict[str, str]:
    """Options by what the step is, without those that are for packed checkpoints where this is none. transformers
    loads weights whole on a card that has no kernel for them; `card` is its compute capability."""
    others = {option: word for option, word in by_step.items() if option != PART}
    card, dtype, dequantize = (others.pop(key, "") for key in ("card", "dtype", "dequantize"))
    if architecture.package != PIPELINES:  # whose examples cast frozen parts to the type of autocast
        others.pop("frozen", None)
    if described is None:
        return others
    packing = described.packing
    if dequantize and packing != hub.NOT_PACKED and "dequantize" not in architecture.options:
        return {**others, "dequantize": dequantize}
    if not packing.layers:
        return others
    needed = NEEDED_CAPABILITY.get(str(packing.layers["quant_method"]))
    if card and needed and tuple(map(int, card.split("."))) < needed:
        return {**others, "dequantize": "yes"}
    return {**others, "dtype": dtype} if dtype else others


def built_model(architecture: Architecture, by_step: Mapping[str, str]) -> BuiltModel:
    """The recorded model, with options of its name that the step decides (`by_step`).

    Raises:
        ModelFileError: the config is none, or describes a model that is not built (SM145, SM147).
        UsageError: a package is not installed (SM146).
        RunError: the model cannot be built or recorded (SM145 to SM149).
    """
    return BuiltModel(architecture, by_step)


def exported_file(architecture: Architecture, kind: str, train: bool) -> tuple[bytes, list[str]]:
    """The bytes of the export and lines for the user, as `recording.export.exported` gives them.

    The graph and the recording are made at the same time, each by a process that builds the model: of a large model
    both take long, and neither needs the other. The recording may be one that was kept.

    Raises as `built_model`.
    """
    described = _described(architecture)
    if described is not None and (described.packing.quantize or described.packing.layers):
        what, why = f"{architecture.given} has packed weights", "An exported graph has them whole."
        hint = "Add dequantize=yes to the name, and give --quantize to 'staticmem analyze'."
        raise ModelFileError(what, why, hint, "SM147")
    with ThreadPoolExecutor(1) as beside, temporary_folder() as folder:
        recording = beside.submit(document_of, architecture, None, described)
        path = os.path.join(folder, f"model{kind}")
        job = {**_job(architecture, None, described), "kind": kind, "train": train, "file": path}
        try:
            answer = _run(job, folder, architecture)
        except RunError as error:
            document, notes = recording.result()
            return alone(document, kind, error), [*lines_of(document), no_graph(error), *_lines(notes)]
        with open(path, "rb") as file:
            data, lines = file.read(), [str(line) for line in answer["lines"]]
        try:
            document, notes = recording.result()
        except RunError as error:
            return data, [*lines, not_recorded(error)]
    return with_recording(data, kind, document), [*both_lines(lines_of(document), lines), *_lines(notes)]


def _lines(notes: list[Note]) -> list[str]:
    return [f"{note.text[0].upper()}{note.text[1:]} ({note.code})" for note in notes]


def _described(architecture: Architecture) -> hub.Described | None:
    """The config and the checkpoint of a model of transformers, the configs of a pipeline; None of other packages."""
    _check_installed(architecture)
    if architecture.package == PIPELINES:
        return hub.Described(read_pipeline(architecture.name))
    return hub.describe(architecture) if architecture.package == "transformers" else None


def _check_installed(architecture: Architecture) -> None:
    package = architecture.package
    for needed in ("torch", *(["transformers"] if package == PIPELINES else []), package):
        if importlib.util.find_spec(needed) is None:
            extras = f"{package},hub" if architecture.revision else package
            wanted = f"'staticmem[{extras}]'" if package in ("transformers", PIPELINES) else f"torch {package}"
            why, hint = f"{architecture.given} is built with it.", f"pip install {wanted}"
            raise UsageError(f"{needed} is not installed", why, hint, "SM146")


def document_of(
    architecture: Architecture,
    sizes: Mapping[str, int] | None,
    described: hub.Described | None,
    part: str = written.ALL,
) -> tuple[Any, list[Note]]:
    """The document of the recording, a note where one that is kept was not believed, and those of its checkpoint."""
    job = _job(architecture, sizes, described)
    kept = Kept(job)
    document = kept.document()
    if document is None and part != written.ALL:
        job["part"] = part
        kept = Kept(job)
        document = kept.document()
    if document is None:
        with temporary_folder() as folder:
            path = os.path.join(folder, "recording")
            answer = _run({**job, "kind": "", "file": path}, folder, architecture)
            with open(path, "rb") as file:
                data = file.read()
        kept.keep(data, answer["facts"])
        document = written.unpack(data, architecture.path)
    notes = hub.notes_of(architecture, described, document) if described is not None else []
    if not kept.refusals:
        return document, notes
    text = f"kept recordings were not believed ({'; '.join(kept.refusals)}): the model was recorded again"
    return document, [*notes, Note("warning", "SM362", text)]


def _job(
    architecture: Architecture, sizes: Mapping[str, int] | None, described: hub.Described | None
) -> dict[str, Any]:
    config = described.config if described is not None else None
    options = {name: word for name, word in architecture.options.items() if name != "dequantize"}  # the config says it
    packing = {"packing": described.packing.layers} if described is not None and described.packing.layers else {}
    return {
        "package": architecture.package, "name": architecture.name, "config": config, "options": options, **packing,
        "sizes": dict(sizes) if sizes is not None else None, "memory_limit": MEMORY,
    }  # fmt: skip


def _run(job: dict[str, Any], folder: str, architecture: Architecture) -> Any:
    job = {**job, "answer": os.path.join(folder, "answer.json")}
    name = os.path.basename(architecture.given.rstrip("/")) or architecture.given
    return child.run("staticmem.recording.architecture_child", job, folder, TIMEOUT, FAILURES, name=name)
