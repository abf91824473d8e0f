"""What tensors hold while code is recorded, for code that asks: `if torch.all(mask == 1)`, `int(lengths.max())`.

A recording has fake tensors, which hold nothing. A mode that is told what some of them hold computes beside the
recording, on the CPU, what follows from that, and answers what the code reads. It is told in three cases:

- Code that cannot be recorded without is recorded again as it runs on the example inputs (`Contents.follows`), with the
  weights where there are few. Sizes that come out of tensors stay open, as in any recording, unless the code makes them
  integers. What the code reads is that of the example, also of a batch of 1 that is recorded as 2.
- Code that picks boxes by what a network found is recorded with findings that are drawn at random (`Contents.spread`):
  the results of its products and convolutions. What the code makes of them is computed.
- Some inputs are known, as grids of images and the tokens that stand for them (`Contents.reads`). Small tensors alone
  are computed, and numbers that the code reads are those of the recording, which holds at the sizes recorded that they
  depend on (`Contents.fixed`).

PyTorch asks its `ShapeEnv`, which takes the values of such a run for what it does not know
(torch/fx/experimental/symbolic_shapes.py, `evaluate_expr`, `real_tensor_prop_unbacked_vals`).
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from staticmem.ops.tags import FOUND
from staticmem.recording.holders import Line

MOST_WEIGHTS = 1 << 24  # elements: 64 MiB in float32, which a run on the CPU takes a second or two for
MOST_HELD = 2 << 30  # bytes of contents that are alive at a time
LARGEST = 1 << 23  # elements of a tensor whose contents are computed where some inputs are known
LARGEST_MADE = 1 << 16  # of one that is made of numbers alone, and of constants
_SPREAD = 0.02  # of weights that have no bytes, as most code draws them
_CONTENT = "_staticmem_content"  # the attribute of a fake tensor: the real one, and the sizes that it depends on
_KNOWN, _SIZES, _SAID = "real_tensor_prop_unbacked_vals", "backed_var_to_val", "_log_real_tensor_propagation"
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
MOST_DRAWN = 1 << 20  # elements for each sample: what a network finds in an image of 1,333 x 800 has 801,600
_PATTERN = (1 << 20) - 3  # a prime: numbers that are drawn, and repeated
# masks of transformers 5 look tokens up in it, under vmap
_INDEXING, _MOD_INDEX = "torch._dynamo._trace_wrapped_higher_order_op", "mod_index"

# what makes the contents of an input, by its sizes
Made = Callable[[tuple[int, ...]], torch.Tensor]


class _UnknownError(Exception):
    """What an op takes is not known."""


def can_follow() -> bool:
    """Whether the installed PyTorch takes the values of a run for what it does not know."""
    return all(hasattr(ShapeEnv(), name) for name in (_KNOWN, _SIZES, _SAID))


class Contents:
    """What the tensors of one recording hold, as far as it is known."""

    def __init__(self, mode: KnownContents, follows: bool, reads: bool, spread: float | None = None) -> None:
        self.mode, self.env, self.follows, self.reads = mode, mode.shape_env, follows, reads
        self.spread = spread  # the standard deviation of what is drawn
        self.pattern: torch.Tensor | None = None
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []  # what is told: of a fake tensor, and never written to
        self.fixed: set[Any] = set()
        self.answers: dict[Line, dict[str, None]] = {}  # in the order in which a line had them
        self.place: Callable[[], Line | None] = lambda: None
        self.stale: set[int] = set()  # storages of fake tensors to which something unknown was written
        self.constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of the code, with copies
        self.held = 0
        self.busy = False  # within an op that is computed
        self.random = torch.Generator().manual_seed(0)
        if follows:
            setattr(self.env, _SAID, lambda asked, answer: self.note(answer))

    # -- what is told --------------------------------------------------------------------------------------------

    def give(self, fake: torch.Tensor, given: torch.Tensor) -> None:
        """An input or a weight with what it holds: numbers of its own where it has no bytes. An input has the sizes of
        the example."""
        if given.numel() * given.element_size() > MOST_HELD:
            return
        if isinstance(given, FakeTensor) or given.is_meta:
            real = torch.zeros(given.shape, dtype=_wide(given.dtype))
            if given.is_floating_point():
                real.normal_(0, _SPREAD, generator=self.random)
        else:
            real = given.detach().to("cpu", _wide(given.dtype))
        self.given.append((fake, real))
        for size, n in zip(fake.shape, given.shape, strict=True):
            if isinstance(size, torch.SymInt) and not self.reads:
                getattr(self.env, _KNOWN)[size.node.expr] = _sympified(int(n))

    def know(self, fake: Any, contents: torch.Tensor) -> None:
        """The contents of an input, of the sizes that are recorded."""
        if contents.numel() <= LARGEST:
            self.given = [row for row in self.given if row[0] is not fake]
            self.given.append((fake, contents))

    def start(self) -> None:
        """Before the first call of a mode, or each where findings are drawn: all holds what it held at first."""
        self.stale.clear()
        self.constants.clear()
        torch.default_generator.manual_seed(0)
        for fake, given in self.given:
            with _disable_current_modes(), no_dispatch():
                real = given.clone()
            self._keep(fake, real, frozenset())

    @property
    def changed(self) -> bool:
        """Whether something that was told has been written to."""
        return any(getattr(fake, _CONTENT)[0]._version for fake, _ in self.given if hasattr(fake, _CONTENT))

    # -- what is read --------------------------------------------------------------------------------------------

    def note(self, answer: Any) -> None:
        place = self.place()
        if place is not None:
            self.answers.setdefault(place, {})[str(answer)] = None

    def rows(self) -> dict[str, Any]:
        """As a recording has them: file, line, function and answers; or places alone, where some inputs are known."""
        if self.reads:
            read = [f"{file.rpartition('/')[2]}:{line} in {function}" for file, line, function in self.answers]
            key = "read_values" if self.spread is None else "drawn_values"
            return {key: read[:20]} if read else {}
        return {"decided": [[*place, ", then ".join(answers)] for place, answers in self.answers.items()]}

    # -- what is computed ----------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """The result of an op, which `make` has of fake tensors, with what it holds."""
        is_read = any(tag in func.tags for tag in _READS) or func.name() in FOUND
        if self.busy and not is_read:
            return make()
        if self.spread is not None and _is_of_network(func):
            return self._drawn(self._make_alone(make))
        symbols: set[Any] = set()
        try:
            own = tree_map(partial(self._real, symbols=symbols), (list(args), dict(kwargs)))
            real = self._computed(func, own) if is_read else None
        except _UnknownError:
            self._forget(func, args, kwargs)
            return self._renewed(func, self._make_alone(make))
        if is_read:
            return self._answered(real, frozenset(symbols), make, _device_of(args))
        result = self._renewed(func, self._make_alone(make))
        try:
            self._check_size(result, any(isinstance(x, torch.Tensor) for x in tree_leaves(own)))
            self._keep(result, self._computed(func, own), frozenset(symbols))
        except _UnknownError:
            self._forget(func, args, kwargs)
        return result

    def _renewed(self, func: Any, result: Any) -> Any:
        """The result, whose storage, where it is a new one, is not the one that had its address."""
        if not any(value.alias_info for value in func._schema.returns):
            self.stale -= {_storage(x) for x in tree_leaves(result) if isinstance(x, FakeTensor)}
        return result

    def _drawn(self, result: Any) -> Any:
        """The result with numbers that are drawn, where it is not one of the large ones between layers."""
        for tensor in tree_leaves(result):
            if not isinstance(tensor, FakeTensor) or not tensor.dim():
                continue
            self.stale.discard(_storage(tensor))
            shape = [int(self._number(size)) for size in tensor.shape]
            count = math.prod(shape)
            if not 0 < count <= MOST_DRAWN * shape[0] or self.held + 4 * count > MOST_HELD:
                continue
            with _disable_current_modes(), no_dispatch():
                if self.pattern is None:
                    self.pattern = torch.empty(_PATTERN).normal_(0, self.spread, generator=self.random)
                real = self.pattern.repeat(-(-count // _PATTERN))[:count].view(shape).to(_wide(tensor.dtype))
            self._keep(tensor, real, frozenset())
        return result

    def _answered(self, real: Any, symbols: frozenset[Any], make: Callable[[], Any], device: Any) -> Any:
        """The result of an op that has a number, or as many elements, as tensors hold."""
        if self.reads:
            self.fixed |= symbols
        if self.reads or type(real) is bool:  # any other is noted when the code makes an integer of it
            self.note(real)
        if type(real) is bool or (self.reads and isinstance(real, (int, float))):
            return real
        if self.reads:
            with self.mode:
                result = tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), real)
        else:
            result = self._make_alone(make)
        self._keep(result, real, symbols)
        return result

    def _make_alone(self, make: Callable[[], Any]) -> Any:
        """What an op gives of fake tensors: what it does within itself, such as a result that it makes empty, is none
        of the code's."""
        busy, self.busy = self.busy, True
        try:
            return make()
        finally:
            self.busy = busy

    def _computed(self, func: Any, own: Any) -> Any:
        args, kwargs = own
        if "_unsafe_index" in func.name():  # it looks at no bounds, and a wrong index ends the process
            raise _UnknownError
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        if takes_device and not any(isinstance(x, torch.Tensor) for x in tree_leaves(own)):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            with _disable_current_modes(), no_dispatch(), no_python_dispatcher(), torch.no_grad():
                real = func(*args, **kwargs)
                return real.zero_() if "empty" in func.name() else real  # whoever reads it reads the same
        except Exception as error:  # an op that the CPU does not run
            raise _UnknownError from error

    def _check_size(self, result: Any, of_tensors: bool) -> None:
        """Computes nothing that is too large."""
        most = LARGEST if of_tensors else LARGEST_MADE
        size = 0
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                elements = int(self._number(tensor.numel()))
                size += elements * _wide(tensor.dtype).itemsize
                if elements > most and not self.follows and self.spread is None:
                    raise _UnknownError
        if self.held + size > MOST_HELD:
            raise _UnknownError

    def _real(self, value: Any, symbols: set[Any]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._content(value, symbols)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            symbols |= value.node.expr.free_symbols
            return self._number(value)
        if isinstance(value, torch.dtype):
            return _wide(value) if self.follows else value
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def counted(self, size: Any, most: Any) -> list[int] | None:
        """How many elements an op found in the example, and the most that it can; None where that is not known."""
        try:
            return [int(self._number(size)), int(self._number(most))]
        except _UnknownError:
            return None

    def _number(self, value: Any) -> Any:
        """A size of the example, or what was read in its place."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        sizes = getattr(self.env, _SIZES, None) or self.env.var_to_val
        number = value.node.expr.xreplace(getattr(self.env, _KNOWN, {})).xreplace(sizes)
        if number.free_symbols:
            raise _UnknownError
        return value.node.pytype(number)

    def _content(self, tensor: torch.Tensor, symbols: set[Any]) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return self._constant(tensor)
        if not hasattr(tensor, _CONTENT) and tensor.constant is not None:
            setattr(tensor, _CONTENT, (tensor.constant.clone(), frozenset()))
        if not hasattr(tensor, _CONTENT) or _storage(tensor) in self.stale:
            raise _UnknownError
        real: torch.Tensor
        real, of_sizes = getattr(tensor, _CONTENT)
        symbols |= of_sizes
        for size in tensor.shape:
            if isinstance(size, torch.SymInt):
                symbols |= size.node.expr.free_symbols
        return real

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor that the code has from elsewhere."""
        if tensor.is_meta or tensor.numel() > LARGEST_MADE:
            raise _UnknownError
        if id(tensor) not in self.constants:
            with _disable_current_modes(), no_dispatch():
                self.constants[id(tensor)] = tensor, tensor.detach().cpu().clone()
        return self.constants[id(tensor)][1]

    def _forget(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """What is written to tensors is not known."""
        named = {argument.name for argument in func._schema.arguments if argument.is_write}
        places = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in places if argument.is_write]
        written += [value for name, value in kwargs.items() if name in named]
        self.stale |= {_storage(x) for x in tree_leaves(written) if isinstance(x, FakeTensor)}

    def _keep(self, result: Any, real: Any, symbols: frozenset[Any]) -> None:
        if isinstance(result, (list, tuple)):
            for one, content in zip(result, real, strict=True):
                self._keep(one, content, symbols)
        elif isinstance(result, FakeTensor) and isinstance(real, torch.Tensor):
            for size, n in zip(result.shape, real.shape, strict=True):
                self._keep(size, n, symbols)
            if [self._number(size) for size in result.shape] == list(real.shape):
                self._hold(real)
                setattr(result, _CONTENT, (real, symbols))
        elif isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)) and self.follows:
            for symbol in result.node.expr.free_symbols - getattr(self.env, _SIZES).keys():
                getattr(self.env, _KNOWN).setdefault(symbol, _sympified(real))

    def _hold(self, real: torch.Tensor) -> None:
        """Counts the bytes of a storage while it is alive."""
        storage = real.untyped_storage()
        if not hasattr(storage, _CONTENT):
            setattr(storage, _CONTENT, True)
            self.held += storage.nbytes()
            weakref.finalize(storage, self._let_go, storage.nbytes())

    def _let_go(self, nbytes: int) -> None:
        self.held -= nbytes


def _device_of(args: Any) -> torch.device:
    """Of what an op reads."""
    return next((x.device for x in tree_leaves(args) if isinstance(x, torch.Tensor)), torch.device("meta"))


class KnownContents(FakeTensorMode):  # type: ignore[misc]
    """A FakeTensorMode beside which contents are computed, where it has some."""

    contents: Contents | None = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        make = partial(super().dispatch, func, types, args, kwargs or {})
        return make() if self.contents is None else self.contents.run(func, args, kwargs or {}, make)


def _is_of_network(func: Any) -> bool:
    """Whether an op is one that PyTorch counts operations of, or that reads features at boxes: on the CPU torchvision's
    kernels read where a box says, without looking whether it is there."""
    return func._overloadpacket in flop_registry or (func.namespace == "torchvision" and func.name() not in FOUND)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which contents are computed: the CPU is slow in 16 bits, and autocast runs ops in other types."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


def _sympified(value: Any) -> Any:
    import sympy

    return sympy.sympify(int(value) if isinstance(value, bool) else value)


@contextmanager
def known_literals(mode: KnownContents) -> Iterator[None]:
    """Within it tensors that the code makes of numbers are known to the mode."""
    if mode.contents is None:
        yield
        return
    contents, make = mode.contents, torch.tensor

    def number(leaf: Any) -> Any:
        return leaf.item() if type(leaf) is FakeTensor and not leaf.dim() and hasattr(leaf, _CONTENT) else leaf

    def with_contents(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list | tuple) and contents.reads:
            data = tree_map(number, data)
        result = make(data, *args, **kwargs)
        if type(result) is FakeTensor and not hasattr(result, _CONTENT):
            leaves = tree_flatten(data)[0]
            if len(leaves) <= LARGEST_MADE and all(type(leaf) in (int, float, bool) for leaf in leaves):
                with no_dispatch():
                    real = make(data, dtype=_wide(result.dtype) if contents.follows else result.dtype, device="cpu")
                contents._keep(result, real, frozenset())
        return result

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "tensor", with_contents))
        if contents.reads:
            for of in (torch, torch.Tensor):
                stack.enter_context(mock.patch.object(of, "repeat_interleave", _sized_repeats(of.repeat_interleave)))
        indexing = sys.modules.get(_INDEXING)
        if hasattr(indexing, _MOD_INDEX):  # a function of autograd for a lookup of integers, which needs no gradient
            stack.enter_context(mock.patch.object(indexing, _MOD_INDEX, _look_up))
        yield


def _sized_repeats(repeat: Any) -> Any:
    """`repeat_interleave` that says how long its result is, where it is known how often elements are repeated."""

    def repeated(x: Any, repeats: Any = None, *args: Any, **kwargs: Any) -> Any:
        counts = x if repeats is None else repeats
        if hasattr(counts, _CONTENT) and "output_size" not in kwargs and len(args) < 2:
            kwargs["output_size"] = int(counts.sum().item())
        return repeat(x, *(() if repeats is None else (repeats,)), *args, **kwargs)

    return repeated


def _look_up(x: torch.Tensor, indices: Any) -> Any:
    return torch.ops.aten.index(x, indices)
