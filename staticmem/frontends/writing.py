"""Writes a traced program to `.pt2` or `.onnx` without weights: what `staticmem export` does.

`.pt2` is `torch.export.save` of the program with its weights on the meta device. `.onnx` is the dynamo exporter without
its optimiser, which would fold batch normalisation into convolutions; weights become external data that is not there.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

from staticmem.errors import UsageError
from staticmem.frontends.export_storages import TIED, tied_tensors
from staticmem.frontends.objects import without_weights

EXTERNAL = "weights-not-included.bin"  # named by every initializer, and never written
SMALL = 1024  # elements
ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes at every export


def pt2_bytes(program: Any, *, stack_traces: bool, extra: Mapping[str, str] | None = None) -> bytes:
    """The archive, compressed, with the texts `extra`. `stack_traces` keeps the source lines of the model's code."""
    import torch

    if not stack_traces:
        _strip(program)
    raw, packed = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tied = tied_tensors(program.state_dict)  # which tensors on the meta device cannot say
        members = {**(extra or {}), **({TIED: json.dumps(tied)} if tied else {})}
        torch.export.save(without_weights(program), raw, extra_files=members)
    with zipfile.ZipFile(raw) as source, zipfile.ZipFile(packed, "w") as target:
        for member in source.namelist():
            info = zipfile.ZipInfo(member, ZIP_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, source.read(member), compresslevel=9)
    return packed.getvalue()


def onnx_bytes(program: Any, *, stack_traces: bool, extra: Mapping[str, str] | None = None) -> bytes:
    """The ModelProto with module paths and ATen calls in the metadata of its nodes, and `extra` in its own.

    Raises:
        UsageError: onnxscript is not installed.
    """
    try:
        import onnx_ir
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "onnxscript is not installed", "PyTorch's ONNX exporter needs it.", "pip install onnxscript", "SM172"
        ) from error
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            without_weights(program), dynamo=True, optimize=False, verify=False, verbose=False
        )  # fmt: skip
    assert made is not None
    model, weights = made.model, set(program.state_dict)
    model.metadata_props.update(extra or {})
    for value in model.graph.inputs:  # a size that the code fixed is written as a symbol with the name "3"
        shape = value.shape or ()
        value.shape = onnx_ir.Shape([int(str(n)) if str(n).isdecimal() else n for n in shape])
    if not stack_traces:
        for node in model.graph:
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        if name not in weights and tensor.size <= SMALL:
            continue  # constants of the code: their values may decide shapes
        value.const_value = onnx_ir.ExternalTensor(EXTERNAL, None, None, tensor.dtype, shape=tensor.shape, name=name)
    made_bytes: bytes = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    return made_bytes


def _strip(program: Any) -> None:
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
