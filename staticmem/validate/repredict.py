"""Today's prediction for a record of yesterday: the model is found by its hash, the reading stays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from staticmem.errors import UsageError
from staticmem.report.load import build
from staticmem.scenario.request import OPTIONS, Request
from staticmem.validate.pytorch import reconcile
from staticmem.validate.pytorch.prediction import device_meters, predicted
from staticmem.validate.records import Record, sha256

_SUFFIXES = (".pt2", ".onnx")
_FILES = ("profile", "gpus_file")  # words that are paths: of the machine that made the record


def models_in(folders: Iterable[str]) -> dict[str, str]:
    """Paths of the models in some folders, by SHA-256.

    Raises:
        UsageError: what is no folder.
    """
    paths: dict[str, str] = {}
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is not a folder", "--models names folders with models.", code="SM101")
        for name in sorted(os.listdir(folder)):
            if name.endswith(_SUFFIXES):
                path = os.path.join(folder, name)
                paths[sha256(path)] = path
    return paths


def repredicted(record: Record, path: str) -> Record:
    """The record with the meters of its model as this version predicts them; those of other runtimes stay.

    Raises:
        UsageError: the record's request has a word that this version does not know, of another type, or that is a
            path (SM231).
        StaticmemError: the model cannot be analysed under it.
    """
    options = record.scenario.get("request")
    if record.runtime.get("name") != "torch" or not isinstance(options, dict):
        return record
    _check(options)
    kind = str(record.device.get("kind"))
    prediction = predicted(path, options, kind)
    if kind == "cpu":
        bands = reconcile.cpu_bands(prediction)
    else:
        total, version = record.device.get("memory") or 0, str(record.runtime.get("version", ""))
        bands = reconcile.cuda_bands(device_meters(prediction, str(record.device.get("name")), total, version))
    meters = []
    for meter in record.meters:
        low, high = bands.get(meter.name, (meter.low, meter.high))
        meters.append(replace(meter, low=low, high=high))
    return replace(record, meters=tuple(meters))


def _check(options: Mapping[str, Any]) -> None:
    """The request is of another machine: nothing of it is taken on trust."""
    strange = sorted(set(map(str, options)) - set(OPTIONS))
    paths = [name for name in _FILES if options.get(name) is not None]
    try:
        if not strange and not paths:
            build(Request, options, "scenario.request")
            return
        why = f"This version does not know {', '.join(strange[:3])[:80]}" if strange else f"It names a file: {paths[0]}"
    except UsageError as error:
        why = error.why.rstrip(".")
    hint = "Leave --models away, or the record out."
    raise UsageError("the request of a record cannot be predicted again", f"{why}.", hint, "SM231")
