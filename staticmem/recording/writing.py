"""Writes a traced program to `.pt2` or `.onnx` without weights: what `staticmem export` does.

`.pt2` is `torch.export.save` of the program with its weights on the meta device. `.onnx` is the dynamo exporter without
its optimiser, which would fold batch normalisation into convolutions, or the TorchScript exporter; weights become
external data that is not there.
"""

from __future__ import annotations

import inspect
import io
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

from staticmem.errors import UsageError
from staticmem.frontends.export_program import TIED, tied_tensors
from staticmem.recording.objects import without_weights
from staticmem.recording.tracing import Axes, doubled, failed, quiet

EXTERNAL = "weights-not-included.bin"  # named by every initializer, and never written
EXTERNAL_LOCATION = 1  # TensorProto.EXTERNAL
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
        with _without_check():
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
        exported = torch.onnx.export(program, dynamo=True, optimize=False, verify=False, verbose=False)
    assert exported is not None
    model, weights = exported.model, set(program.state_dict)
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
    data: bytes = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    return data


def torchscript_bytes(
    module: Any, args: tuple[Any, ...], axes: Sequence[Axes], *, train: bool, extra: Mapping[str, str] | None = None
) -> bytes:
    """The ModelProto of the TorchScript exporter, which runs the module once: on the meta device that costs nothing, on
    others one forward. `axes` are those that stay open.

    Raises:
        ModelFileError: it cannot be exported; the message is PyTorch's.
    """
    import onnx
    import torch
    from torch.utils import _pytree as pytree

    args, _ = doubled(args, {}, axes)
    names = _input_names(module, args)
    opened = {name: dict(a) for name, a in zip(names, axes, strict=True) if name and a}
    mode = torch.onnx.TrainingMode.TRAINING if train else torch.onnx.TrainingMode.EVAL
    file = io.BytesIO()
    try:
        leaves = pytree.tree_leaves((args, list(module.parameters()), list(module.buffers())))
        on_meta = any(getattr(leaf, "is_meta", False) for leaf in leaves)
        with quiet(), _traced_convolutions(module) if on_meta else nullcontext():
            # Without initializers: their bytes would be asked for. What the graph reads comes as further inputs.
            torch.onnx.export(
                module, args, file, dynamo=False, training=mode, do_constant_folding=False, export_params=False,
                keep_initializers_as_inputs=True, input_names=[n for n in names if n], dynamic_axes=opened,
            )  # fmt: skip
    except Exception as error:
        raise failed(module, error, "torch.onnx.export(dynamo=False)") from error
    model = onnx.load_from_string(file.getvalue())
    weights = [value for value in model.graph.input if value.name not in opened and value.name not in names]
    for value in weights:
        model.graph.input.remove(value)
        kind = value.type.tensor_type
        tensor = model.graph.initializer.add(name=value.name, data_type=kind.elem_type, data_location=EXTERNAL_LOCATION)
        tensor.dims.extend(dim.dim_value for dim in kind.shape.dim)
        tensor.external_data.add(key="location", value=EXTERNAL)
    for key, text in (extra or {}).items():
        model.metadata_props.add(key=key, value=text)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


@contextmanager
def _traced_convolutions(module: Any) -> Iterator[None]:
    """The tracer records `aten::_convolution`, which `aten::convolution` calls on every device but meta: in a forward
    on meta it is called in its place."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    plain = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
    transposed = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}

    def sizes(value: Any, rank: int) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * rank if len(values) == 1 else values

    def forward(rank: int, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
                groups: int = 1) -> Any:  # fmt: skip
        three = (sizes(value, rank) for value in (stride, padding, dilation))
        return called(x, weight, bias, *three, False, [0] * rank, groups)

    def backward(rank: int, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                 output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Any:  # fmt: skip
        three = (sizes(value, rank) for value in (stride, padding, dilation))
        return called(x, weight, bias, *three, True, sizes(output_padding, rank), groups)

    def called(*args: Any) -> Any:  # benchmark, deterministic, cudnn_enabled, allow_tf32: ONNX has none of them
        return torch._convolution(*args, False, False, True, True)

    class Calls(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and getattr(args[0], "is_meta", False):
                padding = (kwargs or {}).get("padding", args[4] if len(args) > 4 else 0)
                if func in plain and not isinstance(padding, str):  # for "same" `aten::_convolution_mode` is recorded
                    return forward(plain[func], *args, **(kwargs or {}))
                if func in transposed:
                    return backward(transposed[func], *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    class Kernels(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._convolution.default and args[0].is_meta:
                return torch.ops.aten.convolution.default(*args[:9])
            return func(*args, **(kwargs or {}))

    modes = ExitStack()

    def enter(*_: Any) -> None:
        modes.enter_context(Kernels())
        modes.enter_context(Calls())

    hooks = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(lambda *_: modes.close(), always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _input_names(module: Any, args: tuple[Any, ...]) -> list[str]:
    """A name for each leaf of the inputs, "" for what is no tensor: the parameter of `forward` that it belongs to."""
    import torch
    from torch.utils import _pytree as pytree

    parameters = list(inspect.signature(module.forward).parameters.values())
    names: list[str] = []
    for at, arg in enumerate(args):
        parameter = parameters[min(at, len(parameters) - 1)]
        name = f"{parameter.name}_{at}" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name
        leaves = pytree.tree_leaves(arg)
        for index, leaf in enumerate(leaves):
            of_leaf = name if len(leaves) == 1 else f"{name}_{index}"
            names.append(of_leaf if isinstance(leaf, torch.Tensor) else "")
    return names


@contextmanager
def _without_check() -> Iterator[None]:
    """While a program is saved, PyTorch tries whether its text has a canonical form, and drops the result: most of the
    time for a large graph (torch/_export/serde/serialize.py, `ExportedProgramSerializer.serialize`)."""
    from torch._export.serde import serialize

    def unchecked(program: Any, *_: Any) -> Any:
        return program

    with mock.patch.object(serialize, "canonicalize", unchecked):
        yield


def _strip(program: Any) -> None:
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
