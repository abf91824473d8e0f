"""Today's prediction for a record of yesterday: the model is found by its hash, the reading stays."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from staticmem.errors import UsageError
from staticmem.validate import torch_reconcile
from staticmem.validate.record import Record, sha256
from staticmem.validate.torch_predict import predicted
from staticmem.validate.torch_validate import device_meters

_SUFFIXES = (".pt2", ".onnx")


def models_in(folders: Iterable[str]) -> dict[str, str]:
    """Paths of the models in some folders, by SHA-256.

    Raises:
        UsageError: what is no folder.
    """
    found: dict[str, str] = {}
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is not a folder", "--models names folders with models.", code="SM101")
        for name in sorted(os.listdir(folder)):
            if name.endswith(_SUFFIXES):
                path = os.path.join(folder, name)
                found[sha256(path)] = path
    return found


def again(record: Record, path: str) -> Record:
    """The record with the meters of its model as this version predicts them; those of other runtimes stay.

    Raises:
        StaticmemError: the model cannot be analysed under the record's request.
    """
    words = record.scenario.get("request")
    if record.runtime.get("name") != "torch" or not isinstance(words, dict):
        return record
    kind = str(record.device.get("kind"))
    found = predicted(path, words, kind)
    if kind == "cpu":
        bands = torch_reconcile.cpu_bands(found)
    else:
        total, version = int(record.device.get("memory", 0) or 0), str(record.runtime.get("version", ""))
        bands = torch_reconcile.cuda_bands(device_meters(found, str(record.device.get("name")), total, version))
    meters = []
    for meter in record.meters:
        low, high = bands.get(meter.name, (meter.low, meter.high))
        meters.append(replace(meter, low=low, high=high))
    return replace(record, meters=tuple(meters))
