"""Exports the example networks to `.pt2` and `.onnx` without weights, and writes `manifest.json`.

    pip install -e . torch==2.13.0 onnx onnxscript
    python models/export.py              # all of them, into the folder of this script
    python models/export.py --out elsewhere resnet50

Every network is built on the meta device, so no weight is ever made. It is exported in training mode: batch
normalisation uses the statistics of the batch and dropout stays. The batch is symbolic; the `_hw` variants have a
symbolic height and width too.

- `.pt2` is `torch.export.save` as it is, compressed, less the source lines in its graph, which name files of whoever
  ran this. It carries a recording of the code, as what `staticmem export` writes does, with batch, height and width
  open even where the graph opens the batch alone. `.onnx` has none: files without one have to be read too.
- `.onnx` is the dynamo exporter without its optimiser (which would fold batch normalisation into convolutions). Weights
  are external data without a data file: names, shapes and types are there, bytes are not. Read it with
  `onnx.load(path, load_external_data=False)`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir
import onnxscript
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from staticmem.recording.record import record
from staticmem.recording.told import with_recording

HERE = Path(__file__).resolve().parent
EXTERNAL = "weights-not-included.bin"  # named by every initializer, and never written
LOW, HIGH = 64, 4096  # bounds of a symbolic height or width: five halvings must leave at least one pixel
ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes at every export


@dataclass(frozen=True)
class Job:
    """One export: a network, the sizes it is traced at, and which axes of the input stay symbolic."""

    name: str
    network: str
    shape: tuple[int, int, int, int] = (2, 3, 224, 224)  # a batch of 1 would be taken for a constant
    symbolic: tuple[tuple[int, str], ...] = ((0, "batch"),)
    formats: tuple[str, ...] = ("pt2", "onnx")


SIZES = ((0, "batch"), (2, "height"), (3, "width"))
JOBS = (
    Job("seed", "seed", (2, 3, 682, 700)),
    Job("resnet18", "resnet18"),
    Job("resnet50", "resnet50"),
    Job("resnet50_hw", "resnet50", symbolic=SIZES),
    Job("mobilenet_v2", "mobilenet_v2"),
    Job("vgg16", "vgg16"),
    # The ONNX exporter writes the pooling to 7x7 as a kernel of fixed size, which is wrong at every other resolution.
    Job("vgg16_hw", "vgg16", symbolic=SIZES, formats=("pt2",)),
    Job("vgg19", "vgg19"),
)


def network(job: Job) -> tuple[nn.Module, Tensor]:
    """The network of `job` in training mode and an image, both on the meta device."""
    with torch.device("meta"):
        return ARCHITECTURES[job.network]().train(), torch.empty(job.shape)


def program(job: Job) -> ExportedProgram:
    """The network of `job`, traced."""
    model, image = network(job)
    dims = {axis: Dim(name) if axis == 0 else Dim(name, min=LOW, max=HIGH) for axis, name in job.symbolic}
    exported = torch.export.export(model, (image,), dynamic_shapes=(dims,), strict=False)
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)
    return exported


def write_pt2(exported: ExportedProgram, job: Job, path: Path) -> None:
    """Saves the program, packs the archive again, compressed and with a recording, and proves that PyTorch loads it."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / path.name
        torch.export.save(exported, raw)
        with zipfile.ZipFile(raw) as source, zipfile.ZipFile(path, "w") as target:
            for member in source.namelist():
                info = zipfile.ZipInfo(member, ZIP_DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                target.writestr(info, source.read(member), compresslevel=9)
    model, image = network(job)
    document = record(model, (image,), axes=[dict(SIZES)])
    path.write_bytes(with_recording(path.read_bytes(), ".pt2", document))
    torch.export.load(path)


def write_onnx(exported: ExportedProgram, job: Job, path: Path) -> None:
    """Translates the program, unoptimised, and saves it with every weight as external data that is not there."""
    dims = dict(job.symbolic)  # strings here are what gives the dimensions these names in the file
    made = torch.onnx.export(exported, dynamo=True, optimize=False, verify=False, verbose=False, dynamic_shapes=(dims,))
    assert made is not None
    model = made.model
    for node in model.graph:
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        value.const_value = onnx_ir.ExternalTensor(
            EXTERNAL, None, None, value.const_value.dtype, shape=value.const_value.shape, name=name
        )
    path.write_bytes(onnx_ir.to_proto(model).SerializeToString(deterministic=True))
    onnx.load(path, load_external_data=False)


def describe(path: Path, job: Job, exported: ExportedProgram) -> dict[str, object]:
    """The entry of one file in the manifest."""
    names = dict(job.symbolic)
    model: nn.Module = exported.module()
    return {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "bytes": path.stat().st_size,
        "format": path.suffix[1:],
        "network": job.network,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_tensors": sum(1 for _ in model.parameters()),
        "inputs": [
            {
                "name": exported.graph_signature.user_inputs[0],
                "dtype": "float32",
                "shape": [names.get(axis, size) for axis, size in enumerate(job.shape)],
            }
        ],
        "training": True,
        "made_by": f"python models/export.py {job.name}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Export the example networks without weights.")
    parser.add_argument("names", nargs="*", help="which ones (default: all; only then the manifest is written)")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # the exporter says once a run that torchvision is not there
    entries = []
    for job in JOBS:
        if given.names and job.name not in given.names:
            continue
        exported = program(job)
        for kind in job.formats:
            path = given.out / f"{job.name}.{kind}"
            if kind == "pt2":
                write_pt2(exported, job, path)
            else:
                write_onnx(exported, job, path)
            entries.append(describe(path, job, exported))
            print(f"{path.name}: {path.stat().st_size:,} bytes")
    if not given.names:
        manifest = {
            "about": "Weightless exports of the networks in architectures.py, in training mode, made by export.py.",
            "producers": {
                "torch": torch.__version__,
                "onnx": onnx.__version__,
                "onnx_ir": onnx_ir.__version__,
                "onnxscript": onnxscript.__version__,
            },
            "files": entries,
        }
        (given.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
