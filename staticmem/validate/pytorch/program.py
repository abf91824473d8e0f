"""A graph as PyTorch runs it: each op is called through `torch.ops`, values go after their last use.

Nothing of the file but its graph is used: no pickle is read, and parameters are random data of the right shapes. Only
ops that have a rule are called, which is also a list of what may be: aten has ops that open files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Op, Parameter, Ref, Value
from staticmem.ops import kinds_of, lookup
from staticmem.ops.size_arithmetic import SIZE_OPS

FORBIDDEN = ("aten::from_file",)  # opens or makes a file
_TENSOR: dict[str, Callable[..., int]] = {  # of SIZE_OPS, those that ask a tensor
    "aten::sym_size": lambda tensor, dim: int(tensor.shape[dim]),
    "aten::sym_size.int": lambda tensor, dim: int(tensor.shape[dim]),
    "aten::sym_stride.int": lambda tensor, dim: int(tensor.stride()[dim]),
    "aten::sym_numel": lambda tensor: int(tensor.numel()),
}


class NotRunnableError(Exception):
    """An op that PyTorch cannot be given, or that it refuses."""


class Program:
    """A graph on a device.

    `stand_ins` are called in place of ops, by their name without overload: what one returns is the result; where it is
    None, the op runs with the arguments, which may have been changed.

    Attributes:
        parameters: of the model, in the graph's order, each storage once.
        at: the index of the op that runs; -1 outside of them.
    """

    def __init__(self, graph: Graph, device: str, dtype: Any = None) -> None:
        self.graph, self.device, self.dtype = graph, device, dtype
        self.stand_ins: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {}
        self.placed: dict[str, Any] = {}
        self.parameters: list[Any] = []
        self.names: list[str] = []
        self.other: list[Any] = []  # buffers, constants and inputs
        self.at = -1
        self.functions = {op.target: _function(op) for op in graph.ops if not _is_scalar(op)}
        self.last: list[list[str]] = _last_uses(graph)
        self.read = {name for op in graph.ops for name in op.refs()}

    # -- the model -----------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Makes parameters, buffers, constants and inputs, in this order, as a prediction does."""
        by_name: dict[str, Any] = {}
        for p in self.graph.parameters:
            parameter = self._place_parameter(p, by_name)
            if p.alias_of is None:
                self.parameters.append(parameter)
                self.names.append(p.fqn)
            by_name[p.value.name] = self.placed[p.value.name] = parameter
        for p in self.graph.buffers:
            parameter = by_name.get(p.alias_of or "")
            if parameter is None:
                parameter = self._filled(p.value, self._contents(p.value.name), "var" in p.fqn.rpartition(".")[2])
                self.other.append(parameter)
            by_name[p.value.name] = self.placed[p.value.name] = parameter
        for value in self.graph.constant_values.values():
            self._keep(value, self._contents(value.name))
        for value in self.graph.inputs:
            self._keep(value, None)

    def _place_parameter(self, p: Parameter, by_name: dict[str, Any]) -> Any:
        if p.alias_of is not None and p.alias_of in by_name:
            return by_name[p.alias_of]
        return self._filled(p.value, None).requires_grad_(p.trainable and p.value.dtype.is_differentiable)

    def _contents(self, name: str) -> Any:
        return self.graph.constants.get(name)

    def _keep(self, value: Value, contents: Any) -> None:
        self.placed[value.name] = tensor = self._filled(value, contents)
        self.other.append(tensor)

    def _filled(self, value: Value, contents: Any, ones: bool = False) -> Any:
        """A tensor of the value's shape: its contents where they are known, else small random numbers or zeros."""
        dtype = torch_dtype(value.dtype)
        if self.dtype is not None and dtype.is_floating_point:
            dtype = self.dtype
        tensor = torch.empty(value.shape or (), dtype=dtype, device=self.device)
        with torch.no_grad():
            if contents is not None:
                tensor.copy_(torch.from_numpy(contents.copy()).reshape(tensor.shape))
            elif dtype.is_floating_point:
                tensor.fill_(1.0) if ones else tensor.uniform_(-0.05, 0.05)
            else:
                tensor.fill_(1) if dtype is torch.bool else tensor.zero_()
        return tensor

    # -- running -------------------------------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """The graph's outputs. Values go when the op that reads them last has run.

        Raises:
            NotRunnableError: PyTorch refuses an op.
        """
        env = dict(self.placed)
        for index, op in enumerate(self.graph.ops):
            self.at = index
            if "check" not in kinds_of(op.base):
                self._run(op, env)
            for name in self.last[index]:
                env.pop(name, None)
        self.at = -1
        return [env[name] for name in self.graph.outputs if isinstance(env.get(name), torch.Tensor)]

    def _run(self, op: Op, env: dict[str, Any]) -> None:
        args = [self._value(a, env) for a in op.args]
        if _is_scalar(op):
            function = _TENSOR.get(op.target) or SIZE_OPS.get(op.target) or SIZE_OPS[op.base]
            env[op.outputs[0]] = function(*args)
            return
        if op.base == "aten::slice" and _whole(args):
            env[op.outputs[0]] = args[0]  # Python indexing returns the tensor itself
            return
        kwargs = {k: self._value(v, env) for k, v in op.kwargs.items()}
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and op.grad):
                result = self._call(op, args, kwargs)
        except NotRunnableError:
            raise
        except MemoryError:
            raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if "allocate memory" in str(error):
                raise MemoryError(str(error)) from error
            raise NotRunnableError(f"op '{op.name}' ({op.target}): {_first(error)}") from error
        results = [result] if isinstance(result, torch.Tensor) else list(result or ())
        env.update((name, tensor) for name, tensor in zip(op.outputs, results, strict=False) if name)

    def _call(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
        stand_in = self.stand_ins.get(op.base)
        if stand_in is not None:
            result = stand_in(args, kwargs)
            if result is not None:
                return result
        function = self.functions[op.target]
        self._devices(function, args, kwargs)
        return function(*args, **kwargs)

    def _devices(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Devices of the file mean the device that everything is on; the rest of a factory's options has defaults."""
        schema = function._schema.arguments
        for position, argument in enumerate(schema):
            if argument.name == "device":
                if position < len(args):
                    args[position] = torch.device(self.device)
                else:
                    kwargs["device"] = torch.device(self.device)
        for name in ("layout", "pin_memory"):
            kwargs.pop(name, None)

    def _value(self, arg: Any, env: dict[str, Any]) -> Any:
        if isinstance(arg, Ref):
            if arg.name not in env:
                raise NotRunnableError(f"'{arg.name}' has no value when it is read")
            return env[arg.name]
        if isinstance(arg, tuple):
            return [self._value(a, env) for a in arg]
        if isinstance(arg, DType):
            return torch_dtype(arg)
        if isinstance(arg, str) and arg in ("contiguous_format", "channels_last", "channels_last_3d",
                                            "preserve_format"):  # fmt: skip
            return getattr(torch, arg)
        return arg


def torch_dtype(dtype: DType) -> Any:
    """PyTorch's type of the same name."""
    dtype_of_torch = getattr(torch, dtype.name, None)
    if not isinstance(dtype_of_torch, torch.dtype):
        raise NotRunnableError(f"this PyTorch has no {dtype.name}")
    return dtype_of_torch


def _is_scalar(op: Op) -> bool:
    return op.target in SIZE_OPS or op.base in SIZE_OPS


def _function(op: Op) -> Any:
    """The overload that a target names, if it is one that may be called."""
    namespace, _, name = op.base.partition("::")
    has_rule = lookup(op.target) is not None
    if namespace not in ("aten", "prims") or not has_rule or op.base in FORBIDDEN:
        raise NotRunnableError(f"op '{op.name}' is {op.target}, which is none of PyTorch's that are known here")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    overload = op.target.partition(".")[2] or "default"
    function = getattr(packet, overload, None) if packet is not None else None
    if function is None:
        raise NotRunnableError(f"this PyTorch has no {op.target}")
    return function


def _last_uses(graph: Graph) -> list[list[str]]:
    last: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        for name in (*op.outputs, *op.refs()):
            last[name] = index
    for name in graph.outputs:
        last.pop(name, None)
    uses: list[list[str]] = [[] for _ in graph.ops]
    for name, index in last.items():
        uses[index].append(name)
    return uses


def _whole(args: Sequence[Any]) -> bool:
    """A slice that takes everything: `x[:]`."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = (*args[1:], *defaults[len(args) - 1 :])
    return step == 1 and start in (None, 0) and (end is None or end >= args[0].shape[dim])


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
