"""Models in memory: an `nn.Module`, an FX `GraphModule`, an `ExportedProgram` or an ONNX `ModelProto`.

A module is recorded (`recording.record`): its code runs on fake tensors, no weight is read, copied or made. A program
of `torch.export` becomes the archive of a `.pt2` file, read by the same frontend; so does a module that cannot be
recorded.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from staticmem.errors import ModelFileError, UsageError
from staticmem.files import temporary_folder
from staticmem.frontends import traced_sizes
from staticmem.frontends.recorded import RecordedModel
from staticmem.ir.graph import Note
from staticmem.recording.tracing import failed, open_axes, trace

if TYPE_CHECKING:
    from staticmem.frontends.export_program import ExportedArchive
    from staticmem.ir.model_file import ModelFile, TracedSizes

CODE = "SM170"


def model_of(model: object, inputs: Sequence[Any] | None) -> tuple[ModelFile, int | None]:
    """The model of an object, and the batch of its example inputs where that is left open.

    `inputs` are example inputs for modules: tensors, on any device, also meta.

    Raises:
        UsageError: an object of another kind, or inputs that are missing or of no use.
        ModelFileError: torch.export cannot export the module.
    """
    if _is_a(model, "onnx", "ModelProto"):
        _no_inputs(model, inputs)
        return _open_proto(model), None
    if _is_a(model, "torch.export.exported_program", "ExportedProgram"):
        _no_inputs(model, inputs)
        return _open_program(model, "ExportedProgram"), None
    if _is_a(model, "torch.nn.modules.module", "Module"):
        args = _arguments(model, inputs)
        return _record_module(model, args), _common_batch(args)
    if isinstance(model, type):
        why, hint = "It is a class: a model is one of its objects.", f"Example: {model.__name__}(...)"
        raise UsageError(f"{model.__name__} is not a model", why, hint, code=CODE)
    raise UsageError(
        f"{type(model).__name__} is not a model",
        "It must be a path, an onnx.ModelProto, an ExportedProgram, an nn.Module or a GraphModule.",
        "Example: staticmem.analyze(model, (torch.empty(8, 3, 224, 224, device='meta'),), optimizer='adam')",
        code=CODE,
    )


def _arguments(module: Any, inputs: Any) -> tuple[Any, ...]:
    if inputs is None:
        return _recorded_inputs(module)
    args = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    _check_arguments(module, args)
    return args


def _check_arguments(module: Any, args: tuple[Any, ...]) -> None:
    """Refuses inputs that the forward of a module cannot be called with.

    Raises:
        UsageError: too many inputs, or too few.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a forward that is written in C has none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        count = f"{len(args)} input" + ("" if len(args) == 1 else "s")
        taken = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
        raise UsageError(
            f"{type(module).__name__} cannot be called with {count}: {error}",
            f"Its forward takes ({', '.join(taken)}).",
            "Give a tuple with one value for each of these, in this order.",
            code=CODE,
        ) from error


def _common_batch(args: Sequence[Any]) -> int | None:
    """The size of the axis that is left open as the batch, also of tensors in containers."""
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves((tuple(args), {}))
    batches = (int(x.shape[0]) for x, axes in zip(leaves, open_axes(args), strict=True) if axes.get(0) == "batch")
    return next(batches, None)


def _recorded_inputs(module: Any) -> tuple[Any, ...]:
    """The inputs that a traced GraphModule knows from shape propagation (`val`, `tensor_meta`)."""
    import torch

    graph = getattr(module, "graph", None)
    inputs = []
    for node in getattr(graph, "nodes", ()):
        if node.op != "placeholder":
            continue
        value, meta = node.meta.get("val"), node.meta.get("tensor_meta")
        if isinstance(value, torch.Tensor):
            inputs.append(torch.empty(tuple(int(n) for n in value.shape), dtype=value.dtype, device="meta"))
        elif meta is not None:
            inputs.append(torch.empty(tuple(meta.shape), dtype=meta.dtype, device="meta"))
        else:
            raise _inputs_missing(module)
    if not inputs:
        raise _inputs_missing(module)
    if next((p for p in module.parameters() if p.device.type != "meta"), None) is not None:
        inputs = [torch.empty_like(x, device="cpu") for x in inputs]  # a module and its inputs are on one device
    return tuple(inputs)


def _record_module(module: Any, args: tuple[Any, ...]) -> ModelFile:
    """A recording of the module; where its code cannot run on fake tensors, the graph of torch.export, with a note."""
    from staticmem.recording.device_answers import traced_on_gpu
    from staticmem.recording.gpu import UnrecordedGradientError
    from staticmem.recording.record import record

    try:
        document = record(module, args, as_given=True)
    except ModelFileError as error:
        try:
            with traced_on_gpu(args):
                traced = trace(module, args, as_given=True)
        except ModelFileError:
            if isinstance(error.__cause__, UnrecordedGradientError):
                raise error from error.__cause__  # which says what to do; that of the exporter does not
            raise
        archive = _open_program(
            traced.program,
            type(module).__name__,
            traced.named_sizes if traced_sizes.usable(traced.names) else traced.sizes,
        )
        text = f"the code could not be recorded, and the graph of torch.export was taken in its place. {error.why}"
        archive.notes = (Note("warning", "SM336", text),)
        return archive
    return ModuleModel(module, args, document)


class ModuleModel(RecordedModel):
    """The recording of a module in memory, which is recorded again at sizes at which its code takes another way."""

    is_recorded_again = True

    def __init__(
        self, module: Any, args: tuple[Any, ...], document: Any, others: list[ModuleModel] | None = None
    ) -> None:
        super().__init__(f"<{type(module).__name__}>", document, "pt2")
        self.module, self.args = module, args
        self.others = [] if others is None else others  # all recordings of this module, in order
        self.others.append(self)

    def at(self, asked: Mapping[str, int], training: bool, _: Mapping[str, str]) -> ModelFile:
        """The recording that holds at the sizes `asked` (of fixed axes by `input[axis]`; the rest as in the example):
        this one, another, or a new one. This one too, where the code does not run with those. No name has options."""
        import torch
        from torch.utils import _pytree as pytree

        from staticmem.recording.record import record

        leaves, spec = pytree.tree_flatten(self.args)
        tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shapes = []
        for one, at in zip(self.inputs, tensors, strict=True):
            names = [dim if isinstance(dim, str) else f"{one.name}[{axis}]" for axis, dim in enumerate(one.shape or ())]
            shapes.append([asked.get(n, int(own)) for n, own in zip(names, leaves[at].shape, strict=True)])
        for model in (self, *self.others):
            if model.holds(shapes, training):
                return model
        for at, shape in zip(tensors, shapes, strict=True):
            own = leaves[at]
            empty = torch.empty(shape, dtype=own.dtype, device="meta")
            leaves[at] = _resized(own, shape) if self.branches and not own.is_meta else empty
        args = pytree.tree_unflatten(leaves, spec)
        try:
            document = record(self.module, args, as_given=True)
        except ModelFileError:
            return self
        return ModuleModel(self.module, args, document, self.others)

    def holds(self, shapes: Sequence[Sequence[int]], training: bool) -> bool:
        """Whether the code takes the way that was recorded, with inputs of these shapes."""
        sizes: dict[str, int] = {}
        for spec, shape in zip(self.inputs, shapes, strict=True):
            for dim, size in zip(spec.shape or (), shape, strict=True):
                if size != (dim if isinstance(dim, int) else sizes.setdefault(dim, size)):
                    return False
        for name, size in sizes.items():
            bounds = self.symbols[name]
            if size < (bounds.low or 1) or size > (bounds.high or size):
                return False
        asked = (self.sizes, self.training_sizes) if training else (self.sizes,)
        return all(one.refusal(sizes) is None for one in asked)


def _open_program(program: Any, label: str, sizes: TracedSizes | None = None) -> ExportedArchive:
    import torch

    from staticmem.frontends.export_program import ExportedArchive, read_archive, tied_tensors

    with temporary_folder() as folder:
        path = os.path.join(folder, "model.pt2")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                extra = {traced_sizes.NAME: traced_sizes.write(sizes)} if sizes is not None else None
                torch.export.save(without_weights(program), path, extra_files=extra)
        except Exception as error:
            raise failed(label, error) from error
        archive = read_archive(path)
        assert isinstance(archive, ExportedArchive)  # it has no recording
    archive.path, archive.tied = f"<{label}>", tied_tensors(program.state_dict)
    return archive


def without_weights(program: Any) -> Any:
    """The same program with parameters and buffers on the meta device: shapes and types without bytes."""
    import torch

    light = copy.copy(program)
    light._state_dict = {name: _meta(value) for name, value in program.state_dict.items()}
    light._constants = {
        name: _meta(value) if isinstance(value, torch.Tensor) and value.numel() > 1024 else value
        for name, value in program.constants.items()
    }
    light._example_inputs = None
    return light


def _resized(tensor: Any, shape: Sequence[int]) -> Any:
    """An example at other sizes, for code that asks what it holds: along a longer axis from the start again."""
    import torch

    for axis, size in enumerate(shape):
        if size != tensor.shape[axis]:
            tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
    return tensor


def _meta(tensor: Any) -> Any:
    """A tensor of the same layout without memory; a parameter stays one."""
    import torch

    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else twin


def _open_proto(proto: Any) -> ModelFile:
    from staticmem.frontends.onnx import wire
    from staticmem.frontends.onnx.external import read_small
    from staticmem.frontends.onnx.model import OnnxModel
    from staticmem.frontends.onnx.reader import guarded, parse

    label = f"<{proto.graph.name or 'ModelProto'}>"
    try:
        data = proto.SerializeToString()
    except Exception as error:  # protobuf refuses messages of 2 GiB and more, with an exception of its own
        raise ModelFileError(
            f"{label} is too large", f"{str(error)[:200]}.", "Save it to a file and give its path.", code=CODE
        ) from error
    with guarded(label):
        proto = parse(wire.strip(memoryview(data)), label)
        return OnnxModel(label, proto, unread=read_small(proto, None)[1])


def _is_a(model: object, module: str, name: str) -> bool:
    """Whether an object is of a class, without importing what it would come from."""
    return any(cls.__name__ == name and cls.__module__.startswith(module.split(".")[0]) for cls in type(model).__mro__)


def _no_inputs(model: object, inputs: object) -> None:
    if inputs is not None:
        raise UsageError(
            f"inputs do not apply to {type(model).__name__}", "It has its own: a graph of known shapes.",
            "Leave them out; batch, resolution and dims change sizes.", code=CODE,
        )  # fmt: skip


def _inputs_missing(module: object) -> UsageError:
    return UsageError(
        f"{type(module).__name__} is given without inputs",
        "A module does not tell the shapes of its inputs.",
        "Give examples: staticmem.analyze(model, (torch.empty(8, 3, 224, 224, device='meta'),))",
        code=CODE,
    )
