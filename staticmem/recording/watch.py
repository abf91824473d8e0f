"""Sees every op of a forward above autograd, and when Python lets go of each result.

`Watch` is a dispatch mode at the level at which torch.export records ops: composite ops such as `aten::linear` are one
call, as the rules of `staticmem.ops` have them. Autograd runs below it and takes its own decisions, but it holds no
tensor: hooks take what it would save. So a storage dies when the last Python name, container or frame lets go of it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from staticmem.frontends import recording_format as written
from staticmem.ops import lookup
from staticmem.ops.tags import DATA_SIZED, FOUND
from staticmem.recording import gpu
from staticmem.recording.attempts import check_time
from staticmem.recording.contents import Contents
from staticmem.recording.device_answers import on_meta
from staticmem.recording.holders import Holder, Holders
from staticmem.recording.sizes import Sizes, number

_MEMORY_FORMATS = {torch.preserve_format: "preserve_format", torch.contiguous_format: "contiguous_format",
                   torch.channels_last: "channels_last", torch.channels_last_3d: "channels_last_3d"}  # fmt: skip
_FLAGS = {None: 0} | {getattr(torch, name): flag for flag, name in written.AUTOCAST.items()}
# whose result has a size that is in the data, as targets of calls here: `size` of the call says it
_POSITIONS = "aten::nonzero_numpy"
_DATA_SIZED = DATA_SIZED - {"aten::index"} | {"aten::index.Tensor"} | FOUND
_WATCHES = itertools.count()
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Program:
    """The ops of one forward, or of the backward of a custom function. `recording.rows` writes it."""

    def __init__(self) -> None:
        self.ops: list[list[Any]] = []
        self.shapes: list[list[Any]] = []  # of the results of each op, as PyTorch has them
        self.released: list[list[int]] = []  # after each op
        self.regions: list[list[Any]] = []
        self.given_to_regions: list[list[int]] = []  # values of their arguments
        self.last_reads: dict[int, int] = {}  # value -> the last op that reads it
        # tensors that a call is given, and none of its ops reads: [module call or checkpoint, values]
        self.unread_of_calls: list[tuple[int, list[int]]] = []
        self.unread_of_regions: list[tuple[int, list[int]]] = []
        self.functions: list[dict[str, Any]] = []
        self.kept: list[list[Any]] = []  # values from the call before: [value, dtype, shape, base]
        self.lasting: list[int] = []
        self.lasting_shapes: list[list[Any]] = []
        self.released_before: list[int] = []  # those of them that Python lets go of before the first op
        self.outputs: list[int] = []
        self.output_shapes: list[list[Any]] = []
        self.output_names: list[str] = []  # what they are called in what the model returns
        self.dtypes: dict[int, str] = {}  # of values
        self.unused: dict[int, tuple[int, list[Holder]]] = {}  # value -> the op at which only these hold it
        self.other_call: Program | None = None  # of a later call, where calls differ

    def let_go(self, values: Sequence[int]) -> None:
        """Python has just let go of these values."""
        (self.released[-1] if self.ops else self.released_before).extend(values)

    def unread(self, given: Sequence[int], start: int) -> list[int]:
        """Those of the values that no op from `start` on has read."""
        return [value for value in given if self.last_reads.get(value, -1) < start]


class Watch(SchemaCheckMode):  # type: ignore[misc]
    """A SchemaCheckMode by name only: PyTorch lets no others in at that level."""

    def __init__(self, root: torch.nn.Module, owned: Sequence[torch.Tensor], sizes: Sizes) -> None:
        """`owned` are the inputs, parameters and buffers: values 0, 1, ... in this order."""
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.root, self.sizes = root, sizes
        self.tag = f"_staticmem_value_{next(_WATCHES)}"  # a tensor that the module keeps has those of other modes too
        self.program = Program()
        self.stacks: dict[tuple[int, str, str, int], int] = {}
        self.targets: dict[str, int] = {}
        self.holders = Holders(root)
        self.contents: Contents | None = None  # what tensors hold, of code that asks for it
        self.values = 0
        self.layouts: dict[int, tuple[Any, ...]] = {}  # of values: shape, strides, offset
        self.dtypes: dict[int, str] = {}
        self.by_storage: dict[int, list[int]] = {}  # storage -> values
        self.watched: dict[int, Any] = {}  # storage -> weak reference
        self.watched_objects: dict[int, Any] = {}  # value -> weak reference to the tensor
        self.unpacked: dict[int, int] = {}  # storages that stand for saved tensors -> their values
        self.views: dict[int, tuple[Any, ...]] = {}  # or, of views, values that have a name, each with its layout
        self.owned: set[int] = set()  # storages that live through the step
        self.stack = -1
        self.paused = self.in_backward = self.iterates = False
        self.unnamed: list[tuple[list[Any], torch.Tensor]] = []  # what the op that runs has saved of its results
        self.copies: dict[int, torch.Tensor] | None = None  # those of weights, where casts of autocast are ops
        self.reads_casts = False  # a backward that is recorded reads what autocast has cast
        self.after_op: Callable[[], None] | None = None  # what is written when the op that runs has been
        self._running: list[tuple[torch.nn.Module, str, int, list[int], int]] = []
        self._calls: dict[str, int] = {}
        self._paths: dict[int, dict[int, str]] = {}
        self.tensors = owned
        self.owned_values = range(len(owned))
        self.leaves: set[int] = set()  # values that the code has made leaves that need a gradient
        # of parameters: whether they need a gradient, as the program says so far. The code may switch it
        self.needs = {v: t.requires_grad for v, t in enumerate(owned) if isinstance(t, torch.nn.Parameter)}
        for value in self.owned_values:  # no variable has a tensor: its references are counted
            self.owned.add(_storage(owned[value]))
            self.name(owned[value])
        # buffers: value -> how many of the references to the tensor are not those of modules
        self.buffers = {value: self.references(value) - n for value, n in self.registered(range(len(owned))).items()}
        self.hooks: list[Any] = []  # of gradients, which run in the backward (`gradient_hooks.Hook`)
        self._needed_at_first = dict(self.needs)
        self.replaced: set[int] = set()  # buffers in whose place modules have other tensors

    # -- programs ------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it ops are recorded, and autograd saves nothing."""
        with saved_tensors_hooks(self.pack, self.unpack), self:
            yield

    def start(self) -> None:
        """Begins another program. What the last one made and is alive was kept by the module."""
        self.program = Program()
        self._calls.clear()
        self.leaves.clear()
        self.hooks.clear()
        self.needs = dict(self._needed_at_first)
        self.replaced |= self.buffers.keys() - self.registered(self.buffers).keys()
        self.program.let_go(sorted(self.replaced))
        for value, tensor in enumerate(self.tensors):  # a buffer that was changed in place has another name
            setattr(tensor, self.tag, value)
        for storage, values in self.by_storage.items():
            if storage in self.owned:  # views of them that the module keeps are made again
                for value in values:
                    if value >= len(self.tensors):
                        self.layouts.pop(value, None)
                values[:] = [value for value in values if value < len(self.tensors)]
            else:
                first, *others = self.current(values) or [-1]
                for value, base in ((first, -1), *((other, first) for other in others)):
                    if value >= 0:
                        shape = self.sizes.shape(self.layouts[value][0])
                        self.program.kept.append([value, self.dtypes[value], shape, base])

    def keeps_values(self) -> bool:
        """Whether something that the call made is alive after it, or it has replaced what the module owns, or left
        other parameters to train."""
        alive = any(self.current(values) for storage, values in self.by_storage.items() if storage not in self.owned)
        switched = self.needs != self._needed_at_first
        return alive or switched or bool(self.replaced) or self.buffers.keys() != self.registered(self.buffers).keys()

    def end_call(self, program: Program) -> None:
        """The caller has dropped the results of a call: what is alive is kept by the module."""
        for storage, values in self.by_storage.items():
            if storage not in self.owned:
                program.lasting += self.current(values)
        program.lasting_shapes = [
            self.sizes.shape(self.layouts[value][0]) for value in program.lasting if value in self.layouts
        ]
        program.dtypes = self.dtypes

    def memory_of(self, program: Program) -> tuple[Any, ...]:
        """What decides the memory of a call: its ops with the shapes of their results, and what the module keeps; in
        training also which parameters are switched on and off."""
        switches = [self.targets.get(target) for target in (written.REQUIRES_GRAD, written.REQUIRES_NO_GRAD)]
        ops = [
            (target, flags, [self.sizes.shape(shape) for shape in shapes])
            for (target, _, flags, *_), shapes in zip(program.ops, program.shapes, strict=True)
            if torch.is_grad_enabled() or target not in switches
        ]
        return ops, program.lasting_shapes

    def current(self, values: Sequence[int]) -> list[int]:
        """Those of the values that tensors are now: an op that returns its argument, as `type_as` where nothing is to
        do, gives a tensor another value."""
        tensors = {value: self.watched_objects[value]() for value in values if value in self.watched_objects}
        return [value for value in values if value not in tensors or getattr(tensors[value], self.tag, value) == value]

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd gets in place of a tensor that it saves."""
        packed = [self.known_value(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, None]
        if packed[0] is None and not self.paused:
            self.unnamed.append((packed, tensor))
        return packed

    def named_saved(self) -> None:
        """What the op that has run saves of its results, and views of other values that it has made within itself."""
        while self.unnamed:
            packed, tensor = self.unnamed.pop()
            packed[0] = self.known_value(tensor)
            values = self.by_storage.get(_storage(tensor), ())
            packed[5] = next(((v, *self.layouts[v]) for v in values if v in self.layouts), None)

    def unpack(self, saved: Any) -> torch.Tensor:
        value, shape, strides, dtype, device, base = saved
        paused, self.paused = self.paused, True
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        self.paused = paused
        self.watch_storage(tensor)
        if value is not None:
            self.unpacked[_storage(tensor)] = value
        elif base is not None:
            self.views[_storage(tensor)] = base
        elif not self.paused:
            self.reads_casts = True
            if self.copies is not None:  # casts have names: it is a tensor that an op has made for itself
                self.not_recorded(written.INNER)
        return tensor

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A cast of autocast as an op. The copy of a weight in the region's dtype is kept until the region ends, but
        none that is made under `inference_mode` (aten/src/ATen/autocast_mode.cpp, `cached_cast`; seen with 2.13)."""
        is_weight = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if self.copies is None or torch.is_inference_mode_enabled() or not is_weight or dtype is torch.float32:
            return tensor.to(dtype)
        if id(tensor) not in self.copies:
            with torch.enable_grad():
                self.copies[id(tensor)] = tensor.to(dtype)
        return self.copies[id(tensor)]

    # -- ops -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrapper = next((cls for cls in types if is_traceable_wrapper_subclass_type(cls)), None)
        if wrapper is not None and not (self.paused or torch.is_grad_enabled()):
            with self:  # the class says which ops run on what it wraps, and sees none that is made of others
                if func.has_kernel_for_dispatch_key(_COMPOSITE):
                    return func.decompose(*args, **(kwargs or {}))
                return wrapper.__torch_dispatch__(func, types, args, kwargs)
        check_time()
        args, kwargs = on_meta(args, kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        if self.replaced:
            self.let_go_of_replaced()
        if torch._C._functorch.peek_interpreter_stack() is not None:
            _refuse_transforms(args, kwargs)
        overload = "" if func._overloadname == "default" else f".{func._overloadname}"
        target = f"{func._schema.name}{overload}"
        if self.iterates and target == "aten::unbind.int":
            target = written.ITERATED
        if target in gpu.CASTS_OF_SCRIPTS:
            with self:  # TorchScript's own autocast
                return gpu.cast_of_script(target, *args)
        if not lookup(target) and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:  # no rule says what it does, and it is made of others
                return func.decompose(*args, **kwargs)
        half = gpu.autocast_dtype()
        if half is not None and (self.copies is not None or torch.is_inference_mode_enabled()):
            with self:  # the casts are ops of their own
                args, kwargs = gpu.cast(target, args, kwargs, half, self.copy)
            half = None
        run_args, run_kwargs = (args, kwargs) if half is None else gpu.cast(target, args, kwargs, half)
        if target == "aten::slice.Tensor":
            run_args = _bounded_slice(*run_args)
        run = partial(self.run, target, func, run_args, run_kwargs)
        result = run() if self.contents is None else self.contents.run(func, args, kwargs, run)
        results = result if isinstance(result, (list, tuple)) else (result,)
        if any(_is_on_gpu(t) for t in tree_leaves(results)):
            self.add(target, args, kwargs, results, half)
        if self.unnamed:
            self.named_saved()
        if self.after_op is not None:
            write, self.after_op = self.after_op, None
            with self:
                write()
        return result

    def run(self, target: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op: its sizes, layout and history."""
        if target in gpu.RESULTS:
            return gpu.RESULTS[target](*args, **kwargs)
        if target == "aten::linear":  # PyTorch's C++ does it with few ops of symbolic sizes, its Python with many
            with no_python_dispatcher():
                return func(*args, **kwargs)
        if target == "aten::scaled_dot_product_attention" and _is_attention_of_heads(*args, **kwargs):
            return self.attention(*args[:3])
        return func(*args, **kwargs)

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The result of attention without a mask, in the layout of the kernel that the meta device would take (math),
        by two ops in place of some twenty. None of them is written down."""
        paused, self.paused = self.paused, True
        try:
            result = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, False)[0]
            contiguous: torch.Tensor = result.clone(memory_format=torch.contiguous_format)
            return contiguous
        finally:
            self.paused = paused

    def add(self, target: str, args: Any, kwargs: Any, results: Sequence[Any], half: Any) -> None:
        """Writes down one op."""
        if target == "aten::where" and len(args) == 1:  # of a condition alone: where it holds
            target = _POSITIONS
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.device.type != gpu.DEVICE for t in read) and not any(map(_is_on_gpu, read)):
            for tensor in results:  # what it reads is not on the GPU: it comes from outside
                if isinstance(tensor, torch.Tensor):
                    self.factory(tensor)
            return
        for tensor in read:
            if not tensor.is_leaf:
                continue
            if isinstance(tensor, torch.nn.Parameter):
                self.switched(tensor)
            elif tensor.requires_grad:
                self.leaf(tensor)
        given = [self.arg(a) for a in args]
        named = {k: self.arg(v) for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "generator")}
        has_history = torch.is_grad_enabled() and self.after_op is None
        flags = _FLAGS[half] | (0 if has_history else written.NO_GRAD)
        listed = len(results) == 1 and isinstance(results[0], (list, tuple))
        flat = list(results[0] if listed else results)
        outputs = [self.name(t) if isinstance(t, torch.Tensor) else -1 for t in flat]
        if target in _DATA_SIZED:
            named |= self.data_size(flat[0], args, target)
        self.write(target, given, named, outputs, flags)
        if written.needs_shapes(target) or not lookup(target):
            forms = [[_dtype(t), self.sizes.shape(t.shape)] for t in flat if isinstance(t, torch.Tensor)]
            self.program.ops[-1].append(forms)

    def leaf(self, tensor: torch.Tensor) -> None:
        """Writes down that a tensor needs a gradient, if the code has made it so."""
        if _is_on_gpu(tensor) and (value := self.value(tensor)) not in self.leaves:
            self.leaves.add(value)
            self.write(written.REQUIRES_GRAD, [f"{written.REF}{value}"], {}, [], written.NO_GRAD)

    def switched(self, parameter: torch.nn.Parameter) -> None:
        """Writes down that the code has switched whether a parameter needs a gradient, if it has."""
        value = getattr(parameter, self.tag, -1)
        if self.needs.get(value, parameter.requires_grad) is not parameter.requires_grad:
            self.needs[value] = parameter.requires_grad
            target = written.REQUIRES_GRAD if parameter.requires_grad else written.REQUIRES_NO_GRAD
            self.write(target, [f"{written.REF}{value}"], {}, [], written.NO_GRAD)

    def end_forward(self) -> None:
        """The forward has returned: what it has left switched is so in the backward."""
        for value in self.needs:
            self.switched(self.tensors[value])

    def stand_in(self, target: str, args: Any, kwargs: Any, result: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Writes down an op that PyTorch cannot run with these arguments. `result` makes its result by others."""
        paused, self.paused = self.paused, True
        try:
            tensor = result()
        finally:
            self.paused = paused
        if not paused and _is_on_gpu(tensor):
            self.add(target, args, kwargs, (tensor,), gpu.autocast_dtype())
        return tensor

    def data_size(self, result: torch.Tensor, args: Any, target: str) -> dict[str, Any]:
        """The argument `size` of an op whose result has a size that is in the data, which is noted with its bound."""
        masks = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8)]
        source = masks[0] if target.startswith("aten::index") and masks else args[0]
        self.sizes.bound(result.shape, source.shape, target.partition("::")[2].partition(".")[0])
        own = [n for n in self.sizes.shape(result.shape) if n in self.sizes.bounds]
        if own and self.contents is not None:
            rows = result.shape[self.sizes.shape(result.shape).index(own[0])]
            if (counted := self.contents.counted(rows, source.numel())) is not None:
                self.sizes.counted.setdefault(str(own[0]), counted)
        if own:
            return {"size": _size(own[0])}
        if target.startswith("aten::index") and not masks:
            return {}
        at = next(i for i, index in enumerate(args[1]) if index is not None) if target.startswith("aten::index") else 0
        return {"size": _size(self.sizes.of(result.shape[at]))}

    def write(self, target: str, args: list[Any], kwargs: dict[str, Any], outputs: list[int], flags: int) -> None:
        number_of = self.targets.setdefault(target, len(self.targets))
        self.program.ops.append([number_of, self.stack, flags, args, kwargs, outputs])
        self.program.shapes.append([self.layouts[value][0] for value in outputs if value in self.layouts])
        self.program.released.append([])
        if not self.in_backward:
            self.note_holders(len(self.program.ops) - 1, outputs)

    def note_holders(self, now: int, results: Sequence[int] = ()) -> None:
        """Notes who holds the values that no op from `now` on has read or made: `results` are those of this op."""
        program = self.program
        reads = program.last_reads
        tensors = {v: of() for v, of in self.watched_objects.items() if v not in results and reads.get(v, -1) < now}
        free = self.holders.look(tensors)
        for value in [v for v in program.unused if reads.get(v) == now or (v in tensors and v not in free)]:
            del program.unused[value]
        for value, holders in free.items():
            program.unused.setdefault(value, (now, holders))

    def factory(self, tensor: torch.Tensor) -> int:
        """A tensor that code made where no op is seen (a copy from the CPU, functorch): an allocation at this point."""
        shape = self.sizes.shape(tensor.shape)
        value = self.name(tensor)
        kwargs = {"dtype": f"{written.DTYPE}{_dtype(tensor)}"}
        self.write("aten::empty.memory_format", [[_size(n) for n in shape]], kwargs, [value], written.NO_GRAD)
        return value

    def get_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """`data` is `tensor.data`: another tensor with its storage and without its history."""
        if not self.paused and _is_on_gpu(tensor):
            value = self.name(data)
            self.write("aten::detach", [self.arg(tensor)], {}, [value], written.NO_GRAD)
            storage = _storage(data)
            self.watched_objects[value] = weakref.ref(data, lambda _: self.object_died(value, storage))

    def set_data(self, tensor: torch.Tensor, data: torch.Tensor, assign: Callable[[], None]) -> None:
        """`assign` is `tensor.data = data`: the tensor stays the same, with another storage."""
        if self.paused or not (_is_on_gpu(tensor) and _is_on_gpu(data)):
            assign()
            return
        value, before = self.value(tensor), _storage(tensor)
        self.write(written.SET_DATA, [self.arg(tensor), self.arg(data)], {}, [], written.NO_GRAD)
        self.by_storage[before].remove(value)
        if before in self.owned and not self.has_owned(self.by_storage[before]):
            self.disown(tensor)
        assign()
        self.watch_storage(tensor).append(value)
        self.layouts[value], self.dtypes[value] = _layout(tensor), _dtype(tensor)
        storage = _storage(tensor)
        if value in self.owned_values:
            self.owned.add(storage)
        else:
            self.watched_objects[value] = weakref.ref(tensor, lambda _: self.object_died(value, storage))

    def iterate(self, parts: Callable[[], Iterator[torch.Tensor]]) -> Iterator[torch.Tensor]:
        """`parts` makes the iterator over a tensor by one unbind, which is written down as an iteration."""
        self.iterates = True
        try:
            return parts()
        finally:
            self.iterates = False

    def not_recorded(self, what: str) -> None:
        """The code does something to autograd that is not recorded."""
        if not self.paused and torch.is_grad_enabled():
            self.write(written.NOT_RECORDED, [f"{written.TEXT}{what}"], {}, [], 0)

    def autocast_cleared(self) -> None:
        """The copies of weights that autocast keeps have been dropped."""
        if self.copies:
            self.copies.clear()
        if not self.paused and self.program.ops:
            self.program.ops[-1][2] |= written.CLEARS_AUTOCAST

    def assigned(self, module: torch.nn.Module, name: str) -> None:
        """`module.name = ...`, which may have replaced a buffer."""
        if not self.paused:
            self.holders.assigned(module, name)
        if name in module._buffers and not self.paused:
            self.replaced |= self.buffers.keys() - self.registered(self.buffers).keys()
            self.let_go_of_replaced()

    def registered(self, values: Iterable[int]) -> Counter[int]:
        """Those of the values that are buffers of the module, and how often each."""
        names = Counter(id(b) for m in self.root.modules() for b in m._buffers.values() if b is not None)
        return Counter({v: names[id(self.tensors[v])] for v in values if id(self.tensors[v]) in names})

    def references(self, value: int) -> int:
        return sys.getrefcount(self.tensors[value])

    def let_go_of_replaced(self) -> None:
        """A buffer that modules have replaced lives on while the code has it in a variable."""
        for value in sorted(self.replaced):
            storage = _storage(self.tensors[value])
            if storage in self.owned and self.references(value) <= self.buffers[value]:
                self.by_storage[storage].remove(value)
                self.program.let_go((value,))
                if not self.has_owned(self.by_storage[storage]):
                    self.disown(self.tensors[value])

    def has_owned(self, values: Iterable[int]) -> bool:
        return any(value in self.owned_values for value in values)

    def disown(self, tensor: torch.Tensor) -> None:
        """The model has no longer the storage of a tensor: it lives as long as those that the code holds."""
        storage = _storage(tensor)
        self.owned.discard(storage)
        values = self.by_storage[storage]
        self.program.let_go([value for value in values if value not in self.watched_objects])  # views of a moment
        values[:] = [value for value in values if value in self.watched_objects]
        if values:
            self.watched[storage] = weakref.ref(tensor.untyped_storage(), lambda _: self.died(storage))
        else:
            del self.by_storage[storage]

    def on_cpu(self, tensor: torch.Tensor) -> int:
        """A tensor on the CPU as a value, for the op that reads it."""
        value, self.values = self.values, self.values + 1
        kwargs = {"dtype": f"{written.DTYPE}{_dtype(tensor)}"}
        shape = [_size(n) for n in self.sizes.shape(tensor.shape)]
        self.write(written.CPU_TENSOR, [shape], kwargs, [value], written.NO_GRAD)
        return value

    # -- values --------------------------------------------------------------------------------------------------

    def name(self, tensor: torch.Tensor) -> int:
        """A new value: the result of an op, or what the model owns."""
        value, self.values = self.values, self.values + 1
        setattr(tensor, self.tag, value)
        self.watch_storage(tensor).append(value)
        storage = _storage(tensor)
        if storage not in self.owned:
            self.watched_objects[value] = weakref.ref(tensor, lambda _: self.object_died(value, storage))
        self.layouts[value], self.dtypes[value] = _layout(tensor), _dtype(tensor)
        return value

    def watch_storage(self, tensor: torch.Tensor) -> list[int]:
        """The values of a tensor's storage, whose end is noted."""
        storage = _storage(tensor)
        if storage not in self.by_storage:
            self.by_storage[storage] = []
            if storage not in self.owned:
                self.watched[storage] = weakref.ref(tensor.untyped_storage(), lambda _: self.died(storage))
        return self.by_storage[storage]

    def object_died(self, value: int, storage: int) -> None:
        """A tensor has gone. Where another one has its storage, it goes alone: its history may hold other tensors."""
        del self.watched_objects[value]
        values = self.by_storage.get(storage, [])
        others = any(v in self.watched_objects for v in values) or self.has_owned(values)
        if value in values and others:
            values.remove(value)
            self.program.let_go((value,))

    def died(self, storage: int) -> None:
        """Python has let go of a storage."""
        self.watched.pop(storage, None)
        self.unpacked.pop(storage, None)
        self.views.pop(storage, None)
        values = self.by_storage.pop(storage, ())
        self.program.let_go(values)
        for value in values:
            self.layouts.pop(value, None)

    def known_value(self, tensor: torch.Tensor) -> int | None:
        """The value that a tensor is, where an op made it."""
        value: int | None = getattr(tensor, self.tag, None)
        if value not in self.layouts:
            value = None
        if value is None and (storage := _storage(tensor)) in self.unpacked:
            value = self.unpacked[storage]
        if value is None:
            layout = str(_layout(tensor))  # autograd gives other objects for some tensors
            values = self.by_storage.get(_storage(tensor), ())
            value = next((v for v in reversed(values) if str(self.layouts.get(v)) == layout), None)
        return value

    def value(self, tensor: torch.Tensor) -> int:
        """The value that a tensor is; one from where no op is seen is an allocation of its own."""
        value = self.known_value(tensor)
        if value is not None:
            self.program.last_reads[value] = len(self.program.ops)
            return value
        values, base = self.by_storage.get(_storage(tensor)) or [-1], self.views.get(_storage(tensor))
        of = base[0] if base is not None else values[0]
        if of < 0:
            return self.factory(tensor)
        value = self.name(tensor)  # another view of a storage, which no op made
        flags = 0 if tensor.requires_grad else written.NO_GRAD
        if base is not None and _layout(tensor) == (base[1][::-1], base[2][::-1], base[3]):
            self.write("aten::t", [f"{written.REF}{of}"], {}, [value], flags)
            return value
        shape = [_size(n) for n in self.sizes.shape(tensor.shape)]
        strides = [_size(n) for n in self.sizes.shape(tensor.stride())]
        self.write("aten::as_strided", [f"{written.REF}{of}", shape, strides], {}, [value], flags)
        return value

    def arg(self, arg: Any) -> Any:
        """An argument as it is written."""
        if isinstance(arg, torch.Tensor):
            if arg.device.type != gpu.DEVICE:
                if arg.dim():
                    return f"{written.REF}{self.on_cpu(arg)}"
                return 1.0 if arg.is_floating_point() else 1
            return f"{written.REF}{self.value(arg)}"
        if isinstance(arg, (list, tuple)):
            return [self.arg(a) for a in arg]
        if isinstance(arg, torch.SymInt):
            return _size(self.sizes.of(arg))
        if isinstance(arg, (torch.SymFloat, torch.SymBool)):
            return number(arg)
        if isinstance(arg, torch.dtype):
            return f"{written.DTYPE}{str(arg).removeprefix('torch.')}"
        if isinstance(arg, torch.memory_format):
            return f"{written.TEXT}{_MEMORY_FORMATS[arg]}"
        if isinstance(arg, str):
            return f"{written.TEXT}{arg}"
        if isinstance(arg, complex):
            return arg.real
        return arg if arg is None or isinstance(arg, (bool, int, float)) else None

    # -- what `patched` tells ------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, given: Any) -> None:
        path = self._path(module)
        call = self._calls[path] = self._calls.get(path, -1) + 1
        cls = type(module)
        self._running.append((module, path, self.stack, self.made_by_ops(given), len(self.program.ops)))
        key = (self.stack, path, f"{cls.__module__}.{cls.__qualname__}", call)
        self.stack = self.stacks.setdefault(key, len(self.stacks))

    def leave(self) -> None:
        _, _, around, given, start = self._running.pop()
        if unread := self.program.unread(given, start):
            self.program.unread_of_calls.append((self.stack, unread))
        self.stack = around

    def start_region(self, reentrant: bool, name: str, given: Any) -> int:
        # a function may call checkpoints within each other without a module between them
        around = len(self._running) + sum(end < 0 for _, end, *_ in self.program.regions)
        self.program.regions.append([len(self.program.ops), -1, around, reentrant, name])
        self.program.given_to_regions.append(self.made_by_ops(given))
        return len(self.program.regions) - 1

    def end_region(self, region: int) -> None:
        program = self.program
        program.regions[region][1] = len(program.ops)
        if unread := program.unread(program.given_to_regions[region], program.regions[region][0]):
            program.unread_of_regions.append((region, unread))

    def made_by_ops(self, given: Any) -> list[int]:
        """The values that tensors among the arguments of a call are, but for what the model owns, which outlives it."""
        values = [self.known_value(tensor) for tensor in _tensors_on_gpu(given)]
        return list(dict.fromkeys(v for v in values if v is not None and v not in self.owned_values))

    def _path(self, module: torch.nn.Module) -> str:
        """As torch.export has it: the way from the calling module, if there is one."""
        if self._running:
            parent, path, *_ = self._running[-1]
            ways = self._paths.get(id(parent))
            if ways is None:
                ways = self._paths[id(parent)] = {}
                for way, child in parent.named_modules(remove_duplicate=False):
                    ways.setdefault(id(child), way)
            if id(module) in ways:
                way = ways[id(module)]
                return f"{path}.{way}" if path and way else path or way
        return next((path for path, child in self.root.named_modules() if child is module), "")


def _is_attention_of_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, enable_gqa: bool = False, **named: Any
) -> bool:
    """Whether it is [batch, heads, length, size] throughout, without a mask and with nothing that broadcasts."""
    if not all(t.dim() == 4 and _is_on_gpu(t) for t in (query, key, value)):
        return False
    masked = any(isinstance(x, torch.Tensor) for x in (*more, *named.values()))
    heads = enable_gqa or str(query.shape[1]) == str(key.shape[1]) == str(value.shape[1])
    return not masked and heads and str(query.shape[0]) == str(key.shape[0]) == str(value.shape[0])


def _refuse_transforms(args: Any, kwargs: Any) -> None:
    """Under a transform of torch.func an op has tensors of other sizes than those that exist. Masks that are made so
    (transformers/masking_utils.py) are small; with floating-point numbers it is the model's own computation.

    Raises:
        UnrecordedGradientError: it is.
    """
    for tensor in tree_leaves((args, kwargs)):
        wrapped = isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if wrapped and tensor.is_floating_point():
            raise gpu.UnrecordedGradientError("it runs a transform of torch.func (vmap, grad, vjp, jvp, jacrev)")


def _bounded_slice(x: torch.Tensor, axis: int = 0, *bounds: Any) -> tuple[Any, ...]:
    """The arguments of a slice with bounds within the axis, as at the sizes of the example, which becomes a condition.
    Otherwise PyTorch takes the size of the result for one that is in the data."""
    size = x.shape[axis]

    def bounded(bound: Any) -> Any:
        if not isinstance(bound, torch.SymInt):
            return bound
        if bound < 0:
            bound = bound + size
        if bound < 0:
            return 0
        return size if bound > size else bound

    return (x, axis, *map(bounded, bounds[:2]), *bounds[2:])


def _is_on_gpu(tensor: Any) -> bool:
    """Whether it is a tensor of the model's device; those within `vmap` are not: what it returns is seen again."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == gpu.DEVICE
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _tensors_on_gpu(given: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments, also in lists and dictionaries. Other containers have a state of their own (caches)."""
    if isinstance(given, (list, tuple, dict)):
        for item in given.values() if isinstance(given, dict) else given:
            yield from _tensors_on_gpu(item)
    elif _is_on_gpu(given):
        yield given


def _size(size: int | str) -> Any:
    return size if isinstance(size, int) else f"{written.SIZE}{size}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
