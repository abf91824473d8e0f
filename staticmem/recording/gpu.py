"""The meta device stands for the GPU while a model is recorded.

Meta tensors need no library of CUDA, and CPU tensors of the code stay CPU tensors, which take no memory of the GPU.
What the code may ask of a device is answered as for a CUDA device: fast paths of `nn.MultiheadAttention`, and
`torch.autocast`, of which the meta device has none. The casts of autocast are made here, from the lists of
`staticmem.ops`. Convolutions have the layout that cuDNN gives them. `Tensor.contiguous` is an op at every call: Python
leaves it out where nothing is to do, which may differ at other sizes.

Sources: aten/src/ATen/native/ConvUtils.h (`cudnn_conv_suggest_memory_format`), tools/autograd/templates/
python_variable_methods.cpp (`THPVariable_contiguous`), torch/nn/modules/activation.py and transformer.py
(`_privateuse1_backend_name` in the lists of devices that have the fast path), torch/amp/autocast_mode.py
(`autocast.__init__`, `is_autocast_available`), aten/src/ATen/native/GroupedMMUtils.h (`_grouped_mm_validate_inputs`,
`create_grouped_gemm_output_tensor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import _prims_common as utils
from torch._decomp import decomposition_table
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

from staticmem.ops import lookup
from staticmem.ops.experts import padded_strides
from staticmem.ops.registry import kinds_of

DEVICE = "meta"
_STANDS_FOR = "cuda"
# torch/csrc/jit/passes/autocast.cpp puts them into scripted functions; they cast tensors of CUDA and of the CPU
CASTS_OF_SCRIPTS = frozenset(("aten::_autocast_to_full_precision", "aten::_autocast_to_reduced_precision"))


class UnrecordedGradientError(NotImplementedError):
    """A way to take gradients that no recording has."""


@contextmanager
def meta_as_gpu() -> Iterator[None]:
    """Within it, code that asks what the meta device can do gets the answers of a CUDA device."""
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__init__
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def as_cuda(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(self, _STANDS_FOR if device_type == DEVICE else device_type, *args, **kwargs)

    def is_enabled(*args: Any) -> bool:
        return bool(enabled(*[_STANDS_FOR if a == DEVICE else a for a in args]))

    def dtype_of_region(device_type: str) -> torch.dtype:
        return dtype_of(_STANDS_FOR if device_type == DEVICE else device_type)

    patches = (
        mock.patch.object(backend_registration, "_privateuse1_backend_name", DEVICE),
        mock.patch.object(autocast, "__init__", as_cuda),
        mock.patch.object(torch, "is_autocast_enabled", is_enabled),
        mock.patch.object(torch, "get_autocast_dtype", dtype_of_region),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(torch._C, "_conv_determine_backend_memory_format", _convolution_format),
        mock.patch.object(torch.Tensor, "contiguous", _contiguous),
        mock.patch.object(torch.Tensor, "type", _type),
        mock.patch.dict(decomposition_table, known_results()),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _convolution_format(input: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    prefers = (utils.suggest_memory_format(t) is torch.channels_last for t in (input, weight))
    return torch.channels_last if weight.dim() == 4 and any(prefers) else torch.contiguous_format


def _batch_norm(input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """The results of a batch normalisation. PyTorch's own decomposition runs 20 ops of symbolic shapes for them."""
    stats = utils.get_computation_dtype(input.dtype)
    mean, rstd = (input.new_empty((input.shape[1],), dtype=stats) for _ in range(2))
    return torch.empty_like(input), mean, rstd


def _grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of routed experts' products. CUDA multiplies float32 too, and pads rows to 16 bytes; PyTorch's own
    function for tensors without data does neither in a CPU build."""
    if self.dim() == mat2.dim():
        groups = offs.shape[0] if offs is not None and self.dim() == 2 else self.shape[0]
        shape = [groups, self.shape[-2], mat2.shape[-1]]
    else:
        shape = [self.shape[-2], mat2.shape[-1]]
    dtype = out_dtype or self.dtype
    return self.new_empty_strided(shape, padded_strides(shape, dtype.itemsize), dtype=dtype)


@cache
def known_results() -> Mapping[Any, Callable[..., Any]]:
    """Functions for results that are known from the first argument, in place of PyTorch's decompositions, which run
    some ten ops of symbolic sizes for a `hardswish`: of batch norms, and of functions of one floating-point tensor."""
    alike = {
        op: _like_first(own, op._schema.is_mutable) for op, own in decomposition_table.items() if _is_of_one_tensor(op)
    }
    return {**alike, **_BATCH_NORMS}


def _is_of_one_tensor(op: Any) -> bool:
    """Whether an op gives each element of its only tensor another number, and the result has its type."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or len(op._schema.returns) != 1:
        return False
    tensors = ["Tensor" in str(argument.type) for argument in op._schema.arguments]
    if not tensors[0] or sum(tensors) > 1:
        return False
    kinds = kinds_of(op._schema.name)
    return "activation" in kinds or (torch.Tag.pointwise in op.tags and "has_in_place" in kinds)


def _like_first(own: Callable[..., Any], in_place: bool) -> Callable[..., Any]:
    """A decomposition that runs once for each type and other arguments: it may refuse them, or give another type."""
    accepted = set()

    def result(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = *args, *kwargs.values()
        key = tensor.dtype, tuple(kwargs), numbers, tuple(map(type, numbers))
        is_plain = all(isinstance(number, (int, float, str, type(None))) for number in numbers)
        if is_plain and key in accepted:
            return tensor if in_place else torch.empty_like(tensor)
        value = own(tensor, *args, **kwargs)
        if is_plain and value.dtype is tensor.dtype:
            accepted.add(key)
        return value

    return result


_ATEN = torch.ops.aten
_BATCH_NORMS = dict.fromkeys(
    (
        _ATEN._native_batch_norm_legit.default,
        _ATEN._native_batch_norm_legit.no_stats,
        _ATEN._native_batch_norm_legit_no_training.default,
    ),
    _batch_norm,
)
# ops whose function for tensors without data is not that of CUDA
RESULTS: Mapping[str, Any] = {"aten::_grouped_mm": _grouped_mm}


def _contiguous(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.contiguous.default(self, memory_format=memory_format)
    return result


_type_of = torch.Tensor.type
# torch/csrc/tensor/python_tensor.cpp (`get_name`)
_TYPES = {
    torch.float32: "FloatTensor", torch.float64: "DoubleTensor", torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor", torch.uint8: "ByteTensor", torch.int8: "CharTensor", torch.int16: "ShortTensor",
    torch.int32: "IntTensor", torch.int64: "LongTensor", torch.bool: "BoolTensor",
}  # fmt: skip


def _type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """`Tensor.type` with the names of a GPU's types, which the meta device has none of."""
    if self.device.type != DEVICE:
        return _type_of(self, dtype, non_blocking, **kwargs)
    if dtype is None:
        return f"torch.{_STANDS_FOR}.{_TYPES[self.dtype]}"
    named = {f"torch.{_STANDS_FOR}.{name}": original for original, name in _TYPES.items()}
    return self.to(named.get(dtype, dtype), non_blocking=non_blocking)


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """The state of `torch.autocast("cuda", dtype)`, also where PyTorch has no CUDA."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(_STANDS_FOR), torch.get_autocast_dtype(_STANDS_FOR)
    torch.set_autocast_enabled(_STANDS_FOR, True)
    torch.set_autocast_dtype(_STANDS_FOR, dtype)
    torch.autocast_increment_nesting()  # regions of the code are within it: they keep copies of weights as they end
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(_STANDS_FOR, before[0])
        torch.set_autocast_dtype(_STANDS_FOR, before[1])


@contextmanager
def without_autocast() -> Iterator[None]:
    """The state outside of any region of autocast."""
    before = torch.is_autocast_enabled(_STANDS_FOR)
    torch.set_autocast_enabled(_STANDS_FOR, False)
    around = 0
    while torch.autocast_decrement_nesting() >= 0:
        around += 1
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        for _ in range(around):
            torch.autocast_increment_nesting()
        torch.set_autocast_enabled(_STANDS_FOR, before)


def autocast_dtype() -> torch.dtype | None:
    """The dtype of the running autocast region; None outside of one."""
    return torch.get_autocast_dtype(_STANDS_FOR) if torch.is_autocast_enabled(_STANDS_FOR) else None


def cast(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], half: torch.dtype, copy: Any = torch.Tensor.to
) -> tuple[Any, Any]:
    """The arguments of an op as autocast makes them (`staticmem.ops.dispatch.cast_arguments` for real tensors)."""
    rule = lookup(target)
    kind = rule.autocast if rule is not None else ""
    if not kind:
        return args, kwargs
    tensors: list[torch.Tensor] = []
    tree_map(lambda t: tensors.append(t) if isinstance(t, torch.Tensor) else None, (args, kwargs))
    floating = [
        t for t in tensors if t.is_floating_point() and t.dtype is not torch.float64 and t.device.type == DEVICE
    ]
    if not floating:
        return args, kwargs
    if kind == "float32_dtype":
        has_dtype = any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
        if floating[0].dtype in (torch.float16, torch.bfloat16) and not has_dtype:
            kwargs = {**kwargs, "dtype": torch.float32}
        return args, kwargs
    if kind == "promote":
        dtype = torch.float32 if any(t.dtype is torch.float32 for t in floating) else half
    else:
        dtype = half if kind == "half" else torch.float32
    ids = {id(t) for t in floating if t.dtype is not dtype}
    change = lambda t: copy(t, dtype) if id(t) in ids else t  # noqa: E731
    return tree_map(change, args), tree_map(change, kwargs)


def cast_of_script(target: str, tensor: torch.Tensor, on_gpu: bool, on_cpu: bool, *dtypes: torch.dtype) -> torch.Tensor:
    """What these ops do with a tensor on the GPU (aten/src/ATen/native/TensorConversions.cpp)."""
    halves = (torch.float16, torch.bfloat16)
    if on_gpu and not dtypes and tensor.dtype in halves:
        return tensor.to(torch.float32)
    if on_gpu and dtypes and tensor.dtype is torch.float32:
        return tensor.to(dtypes[0])
    return tensor
