"""Results of calls that repeat, without arithmetic of symbolic sizes.

PyTorch's FakeTensorMode keeps what an op gave for equal arguments. It makes the result of a call that repeats from the
sizes of the first, and works the bytes of its storage, its layout and whether it is contiguous out again: some 30 calls
of Python for each tensor that has symbolic sizes, and as many for the key of the arguments. Here a result gets sizes
and bytes as they are known, and a recording knows a call by the expressions of its sizes.

What a call gives is decided by PyTorch's mode: it has to have answered an equal call from its own cache before.
`aten::_unsafe_view` is the exception, which PyTorch leaves out of its cache because the result has the storage of its
input; so it has here.

Source: torch/_subclasses/fake_tensor.py (`_cached_dispatch_impl`, `_cache_key`,
`_get_output_tensor_from_cache_entry`), torch/csrc/autograd/python_variable.cpp (`make_tensor_for_subclass_helper`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

from staticmem.recording.contents import KnownContents

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_GUARD = "_guard_or"
_EXAMPLE_HELD = "_staticmem_example_held"
# what depends on its two operands alone; the rest of a division looks at the ranges of sizes too
_ARITHMETIC = [f"_{name}" for name in ("add", "sub", "mul", "int_floordiv", "sym_max", "sym_min",
                                       "eq", "ne", "lt", "le", "gt", "ge")]  # fmt: skip
_MADE = "_get_output_tensor_from_cache_entry"
_NEEDED = (
    (torch, "_functionalize_unsafe_set"),
    (torch._C, "_AutoDispatchBelowADInplaceOrView"),
    (fake_tensor, "in_kernel_invocation_manager"),
    (fake_tensor, "_SymIntOutputStub"),
    (symbolic_shapes, "bound_sympy"),
    (FakeTensorMode, "_cached_dispatch_impl"),
    (FakeTensorMode, "_output_from_cache_entry"),
    (FakeTensorMode, "_make_cache_entry"),
    (FakeTensorMode, _MADE),
)
AVAILABLE = all(hasattr(of, name) for of, name in _NEEDED)  # the installed PyTorch has what this is made of


def fake_mode(**options: Any) -> FakeTensorMode:
    """The FakeTensorMode of a recording."""
    return (_RepeatedCalls if AVAILABLE else KnownContents)(**options)


@contextmanager
def known_sizes() -> Iterator[None]:
    """Within it any FakeTensorMode makes results of calls that repeat from the sizes and bytes that it has kept."""
    if not AVAILABLE:
        yield
        return
    original, stub = getattr(FakeTensorMode, _MADE), fake_tensor._SymIntOutputStub
    known_bytes: dict[int, tuple[Any, Any]] = {}  # entry -> itself, and the bytes of the storage that it gives

    def from_sizes(mode: Any, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        metadata = entry.metadata
        if (
            entry.inplace_idx is not None or metadata is None or metadata.layout is not torch.strided
            or metadata.storage_bytes is None or metadata.requires_grad or metadata.is_conj or metadata.is_neg
            or metadata.is_quantized or torch.is_inference_mode_enabled()
        ):  # fmt: skip
            return original(mode, state, entry, key, func, args)
        view = entry.view_idx is not None and func.is_view
        if not view and (type(metadata.storage_offset) is not int or metadata.storage_offset):
            return original(mode, state, entry, key, func, args)

        def size(value: Any) -> Any:
            return value.extract(key, state.shape_env) if isinstance(value, stub) else value

        if not view and id(entry) not in known_bytes:  # they may be fewer than the first result had
            result = original(mode, state, entry, key, func, args)
            nbytes = result.untyped_storage().nbytes()
            known_bytes[id(entry)] = entry, stub(nbytes, None) if isinstance(nbytes, torch.SymInt) else nbytes
            return result
        nbytes = 0 if view else size(known_bytes[id(entry)][1])
        shape, strides = tuple(map(size, metadata.shape)), tuple(map(size, metadata.stride))
        with _enter_kernel(mode):
            sizes = _sizes(shape, strides, size(metadata.storage_offset), metadata.dtype, nbytes)
            if view:  # a size that is asked for later would become a node of a trace: PyTorch has asked for these two
                with state.shape_env.suppress_guards() if state.shape_env is not None else nullcontext():
                    sizes.numel(), sizes.is_contiguous()
            return _fake(mode, sizes, metadata.device, args[entry.view_idx] if view else None)

    with mock.patch.object(FakeTensorMode, _MADE, from_sizes), _answered_by_example(), _bounds_once():
        yield


@contextmanager
def _answered_by_example() -> Iterator[None]:
    """Within it PyTorch proves no statement of which the sizes of the example are a counterexample.

    `guard_or_false` asks whether a statement holds for all sizes, and takes False where that is not known;
    `guard_or_true` the other way round. Where the example gives the answer that is taken, the proof changes nothing.
    Sizes that PyTorch takes for larger than they are (1 as 2) are no example of what it says.

    Source: torch/fx/experimental/symbolic_shapes.py (`_guard_or`, `_sym_node_hint_disproves`).
    """
    prove = getattr(symbolic_shapes, _GUARD, None)
    if prove is None:
        yield
        return

    def guard_or(asked: Any, default: bool) -> bool:
        example: bool | None = asked.node._hint if isinstance(asked, torch.SymBool) else None
        if example is default and _holds_example(asked.node.shape_env):
            return default
        return bool(prove(asked, default))

    with mock.patch.object(symbolic_shapes, _GUARD, guard_or):
        yield


@contextmanager
def _bounds_once() -> Iterator[None]:
    """Within it the bounds of an expression are worked out once for each range of its symbols. PyTorch forgets what it
    has simplified with each new condition on sizes, and works out the bounds again; those are what takes long.

    Source: torch/utils/_sympy/value_ranges.py (`bound_sympy`, which reads the ranges of the running trace besides).
    """
    own: Any = symbolic_shapes.bound_sympy
    kept: dict[Any, Any] = {}

    def bound(expr: Any, ranges: Any = None) -> Any:
        context = torch._guards.TracingContext.try_get()
        env = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
        every = {**(env.var_to_range if env is not None else {}), **(ranges or {})}
        key = expr, frozenset((symbol, every.get(symbol)) for symbol in expr.free_symbols)
        if key not in kept:
            kept[key] = own(expr, ranges)
        return kept[key]

    with mock.patch.object(symbolic_shapes, "bound_sympy", bound):
        yield


def _holds_example(env: Any) -> bool:
    """Whether the example has no size of 0 or 1, which are the ones that ranges of sizes may leave out."""
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    count, holds = getattr(env, _EXAMPLE_HELD, (0, True))
    if count != len(values):  # sizes are added, and none is changed
        holds = all(int(n) > 1 for n in values.values())
        setattr(env, _EXAMPLE_HELD, (len(values), holds))
    return bool(holds)


@contextmanager
def known_arithmetic() -> Iterator[None]:
    """Within it a sum, product or comparison of symbolic sizes that repeats is the node of the first one.

    A recording writes expressions down; a trace of proxies has to tell the nodes apart.
    """
    kept: dict[Any, Any] = {}

    def repeated(name: str, compute: Any) -> Any:
        def of_two(one: Any, other: Any) -> Any:
            if get_proxy_mode() is not None or type(one) is not SymNode or type(other) is not SymNode:
                return compute(one, other)
            key = (
                name, id(one.shape_env), one.expr, other.expr, one.pytype, other.pytype, one._hint, other._hint,
                one._optimized_summation, other._optimized_summation,
            )  # fmt: skip
            if key not in kept:
                kept[key] = compute(one, other), one.shape_env  # which keeps its address
            return kept[key][0]

        return of_two

    with ExitStack() as stack:
        for name in _ARITHMETIC:
            if AVAILABLE and hasattr(SymNode, name) and hasattr(SymNode, "_optimized_summation"):
                stack.enter_context(mock.patch.object(SymNode, name, repeated(name, getattr(SymNode, name))))
        yield


class _Sizes(torch.Tensor):  # type: ignore[misc]
    """A tensor on the meta device that is given its sizes and the bytes of its storage."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@contextmanager
def _enter_kernel(mode: FakeTensorMode) -> Iterator[None]:
    """Within it tensors are made, each with a version of its own."""
    with fake_tensor.in_kernel_invocation_manager(mode), torch._C._AutoDispatchBelowADInplaceOrView():
        yield


def _sizes(shape: Any, strides: Any, offset: Any, dtype: torch.dtype, nbytes: Any) -> torch.Tensor:
    """A tensor with a storage of so many bytes, for which nothing is worked out."""
    tensor: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _Sizes, shape, strides, offset, dtype=dtype, device="meta", storage_size=nbytes
    )
    return tensor


def _fake(mode: FakeTensorMode, sizes: torch.Tensor, device: torch.device, view_of: torch.Tensor | None) -> FakeTensor:
    """A fake tensor with the sizes of another, and with its storage or that of the one that it is a view of."""
    result = FakeTensor(mode, sizes, device)
    if view_of is not None:
        torch._functionalize_unsafe_set(result, view_of)
    return result


@dataclass(frozen=True)
class _Result:
    """A result: how it is made again."""

    argument: int = -1  # the argument that it is or is a view of
    device: torch.device | None = None
    pattern: torch.Tensor | None = None  # of a view: it has its sizes
    form: tuple[Any, ...] | None = None  # of a tensor with a storage of its own: arguments of `_sizes`


class _OtherError(Exception):
    """A call that is left to PyTorch's mode."""


class _RepeatedCalls(KnownContents):
    """A FakeTensorMode that knows a call by the expressions of its sizes. Symbolic sizes of its results are those of
    the first such call, which a trace of proxies has to tell apart, and a recording does not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept: dict[Any, tuple[bool, list[_Result]]] = {}  # key -> whether it is a tuple, and the results
        self._answered: Any = None  # the arguments of the last call that PyTorch's cache answered

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            key = self._make_key(func, args, kwargs)
        except _OtherError:
            key = None
        if key in self._kept:
            is_tuple, kept = self._kept[key]
            results = [self._again(one, args) for one in kept]
            return tuple(results) if is_tuple else results[0]
        self._answered = None
        result = super()._cached_dispatch_impl(func, types, args, kwargs)
        answered, self._answered = self._answered, None
        if key is not None and (answered is args or func is _UNSAFE_VIEW):
            self._learn(key, func, args, result)
        return result

    def _output_from_cache_entry(self, *given: Any) -> Any:
        self._answered = given[-1]
        return super()._output_from_cache_entry(*given)

    def _make_cache_entry(self, *given: Any) -> Any:
        entry = super()._make_cache_entry(*given)  # raises for what PyTorch does not keep
        self._answered = given[3]  # after it: it makes a result to try the entry
        return entry

    # -- arguments -----------------------------------------------------------------------------------------------

    def _make_key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Equal for calls with equal results: it has all that PyTorch's key has, and the state of the sizes."""
        if torch.is_inference_mode_enabled() or self.shape_env is None:
            raise _OtherError
        key: list[Any] = [func, torch.get_default_dtype(), torch._C._get_default_device(), self.epoch]
        key.append(self.shape_env._version_counter)
        self._add(key, args)
        if kwargs:
            key.extend(kwargs)
            self._add(key, kwargs.values())
        return tuple(key)

    def _add(self, key: list[Any], values: Any) -> None:
        key.append(len(values))
        for value in values:
            if isinstance(value, FakeTensor):
                self._add_tensor(key, value)
            elif isinstance(value, torch.SymInt):
                key.append(value.node._expr)
            elif isinstance(value, (list, tuple)):
                self._add(key, value)
            elif isinstance(value, _PLAIN):
                key += (type(value), value)
            else:
                raise _OtherError

    def _add_tensor(self, key: list[Any], tensor: FakeTensor) -> None:
        if (
            type(tensor) is not FakeTensor or tensor.fake_mode is not self or tensor.constant is not None
            or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference()
        ):  # fmt: skip
            raise _OtherError
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        # not whether it requires a gradient: below autograd training has the results of inference
        key += (len(sizes), tensor.dtype, tensor.fake_device, tensor.is_conj(), tensor.is_neg())
        key += [size.node._expr if isinstance(size, torch.SymInt) else size for size in sizes]

    # -- results -------------------------------------------------------------------------------------------------

    def _learn(self, key: Any, func: Any, args: Any, result: Any) -> None:
        is_tuple = isinstance(result, tuple)
        kept = [self._keep_result(func, args, one) for one in (result if is_tuple else (result,))]
        if all(one is not None for one in kept):
            self._kept[key] = is_tuple, kept  # type: ignore[assignment]

    def _keep_result(self, func: Any, args: Any, result: Any) -> _Result | None:
        if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
            return None
        for index, arg in enumerate(args):
            if arg is result:
                return _Result(index)
        if result.requires_grad or result.is_conj() or result.is_neg() or result.is_inference():
            return None
        storage, argument = result.untyped_storage(), -1
        if func.is_view or func is _UNSAFE_VIEW:
            tensors = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
            if len(tensors) != 1 or args[tensors[0]].untyped_storage()._cdata != storage._cdata:
                return None
            argument = tensors[0]
        shape, strides, offset = tuple(result.shape), result.stride(), result.storage_offset()
        if argument < 0:
            return _Result(-1, result.fake_device, form=(shape, strides, offset, result.dtype, storage.nbytes()))
        with _enter_kernel(self), self.shape_env.suppress_guards():
            pattern = _sizes(shape, strides, offset, result.dtype, 0)
            pattern.numel(), pattern.is_contiguous()
        return _Result(argument, result.fake_device, pattern)

    def _again(self, result: _Result, args: Any) -> Any:
        if result.device is None:
            return args[result.argument]
        with _enter_kernel(self):
            if result.pattern is not None:
                return _fake(self, result.pattern, result.device, args[result.argument])
            assert result.form is not None
            return _fake(self, _sizes(*result.form), result.device, None)
