"""What PyTorch's Python calls while a model runs: modules, `torch.utils.checkpoint`, custom autograd functions, `data`,
iteration over tensors, functions of TorchScript, the end of the outermost region of autocast.

Each is replaced where PyTorch itself looks it up by name at every call, so that it does not matter how a model
imported it.

Sources: torch/nn/modules/module.py (`__call__`, `__setattr__`), torch/utils/checkpoint.py (`checkpoint` calls
`_checkpoint_without_reentrant_generator` and `CheckpointFunction.apply`), torch/autograd/function.py
(`Function.apply` calls that of its base), torch/autograd/graph.py (`save_on_cpu` is a `saved_tensors_hooks`),
torch/_tensor.py (`__iter__`), torch/amp/autocast_mode.py (`autocast.__exit__` clears the cache of copies of weights).
`Tensor.data` is a property in C++ (torch/csrc/autograd/python_variable.cpp), which the class `torch.Tensor` inherits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from staticmem.frontends.recording_format import SAVED_HOOKS, SCRIPTED, SELECTIVE

# what `checkpoint` calls since PyTorch 2.15, with a tuple and a dict of arguments
GENERATOR_OF_215 = "_checkpoint_without_reentrant_generator_impl"
# of torch.jit.script and torch.jit.trace: functions, and methods of modules
SCRIPTS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)


class Watcher(Protocol):
    """Who is told."""

    def enter(self, module: torch.nn.Module, given: Any) -> None: ...
    def leave(self) -> None: ...
    def start_region(self, reentrant: bool, name: str, given: Any) -> int: ...
    def end_region(self, region: int) -> None: ...
    def get_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None: ...
    def set_data(self, tensor: torch.Tensor, data: torch.Tensor, assign: Callable[[], None]) -> None: ...
    def not_recorded(self, what: str) -> None: ...
    def autocast_cleared(self) -> None: ...
    def assigned(self, module: torch.nn.Module, name: str) -> None: ...
    def iterate(self, parts: Callable[[], Iterator[torch.Tensor]]) -> Iterator[torch.Tensor]: ...


@contextmanager
def watched_calls(watcher: Watcher, function: Callable[..., Any]) -> Iterator[None]:
    """Tells `watcher` of the calls within it. `function` is called in place of `Function.apply`: with that, the class
    and the arguments."""
    call = torch.nn.Module.__call__
    apply = torch._C._FunctionBase.__dict__["apply"]
    data: Any = torch._C.TensorBase.__dict__["data"]

    def call_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        watcher.enter(self, (args, kwargs))
        try:
            return call(self, *args, **kwargs)
        finally:
            watcher.leave()

    def without_reentry(region_of: Any, *options: Any, **kwargs: Any) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        region = watcher.start_region(False, _name(region_of), (_bound(region_of), options, kwargs))
        context_fn = kwargs.get("context_fn", options[1] if len(options) > 1 else checkpoint.noop_context_fn)
        if context_fn is not checkpoint.noop_context_fn:
            watcher.not_recorded(SELECTIVE)
        yield
        watcher.end_region(region)

    def without_reentry_of_215(region_of: Any, args: Any, kwargs: Any, **options: Any) -> Iterator[None]:
        context_fn = options.get("context_fn", checkpoint.noop_context_fn)
        return without_reentry(region_of, args, kwargs, context_fn=context_fn)

    def with_reentry(region_of: Any, preserve_rng_state: bool, *args: Any) -> Any:
        needs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if not torch.is_grad_enabled() or not needs:  # the outputs have no history
            with torch.no_grad():
                return region_of(*args)
        region = watcher.start_region(True, _name(region_of), (_bound(region_of), args))
        result = region_of(*args)
        watcher.end_region(region)
        return result

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return function(apply.__get__(None, cls), cls, args, kwargs)

    assign = torch.nn.Module.__setattr__

    def set_attribute(self: torch.nn.Module, name: str, value: Any) -> None:
        assign(self, name, value)
        watcher.assigned(self, name)

    def get_data(self: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = data.__get__(self)
        watcher.get_data(self, result)
        return result

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        watcher.set_data(self, value, lambda: data.__set__(self, value))

    parts_of = torch.Tensor.__iter__

    def iterate(self: torch.Tensor) -> Iterator[torch.Tensor]:
        return watcher.iterate(lambda: parts_of(self))

    enter_hooks = saved_tensors_hooks.__enter__

    def set_hooks(self: saved_tensors_hooks) -> None:
        if getattr(self.pack_hook, "__self__", None) is not watcher and not hasattr(self.pack_hook, "of_recorder"):
            watcher.not_recorded(SAVED_HOOKS)
        enter_hooks(self)

    clear_cache = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:  # called where the outermost region of autocast ends, and by code
        clear_cache()
        watcher.autocast_cleared()

    def scripted(call_script: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = call_script(self, *args, **kwargs)
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves(result)):
                watcher.not_recorded(SCRIPTED)
            return result

        return call_and_tell

    patches: tuple[Any, ...] = (
        *(mock.patch.object(cls, "__call__", scripted(cls.__call__)) for cls in SCRIPTS),
        mock.patch.object(saved_tensors_hooks, "__enter__", set_hooks),
        mock.patch.object(torch, "clear_autocast_cache", clear_autocast_cache),
        mock.patch.object(torch.Tensor, "__iter__", iterate),
        mock.patch.object(torch.nn.Module, "__call__", call_module),
        mock.patch.object(torch.nn.Module, "__setattr__", set_attribute),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", without_reentry),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", staticmethod(with_reentry)),
        mock.patch.object(torch.Tensor, "data", property(get_data, set_data), create=True),
        mock.patch.object(_class_of_apply(), "apply", classmethod(apply_function), create=True),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if hasattr(checkpoint, GENERATOR_OF_215):
            stack.enter_context(mock.patch.object(checkpoint, GENERATOR_OF_215, without_reentry_of_215))
        yield


def _class_of_apply() -> type:
    """The class whose `apply` runs a custom function. Up to PyTorch 2.14 `Function.apply` is a method in Python that
    calls that of its base, also as `swish = Swish.apply` that a module made when it was imported; in 2.15 it is the
    method of the C++ class itself."""
    function: type = torch.autograd.Function
    own = function.__dict__.get("apply")
    base: type = _SingleLevelFunction
    return base if own is None or isinstance(own, classmethod) else function


def _bound(function: Any) -> Any:
    """The arguments that a functools.partial has."""
    return (function.args, function.keywords) if isinstance(function, functools.partial) else ()


def _name(function: Any) -> str:
    """What a checkpoint is called in reports: the class of the module whose method it runs, or the function."""
    function = getattr(function, "func", function)  # functools.partial
    owner = getattr(function, "__self__", function)
    return type(owner).__name__ if isinstance(owner, torch.nn.Module) else getattr(function, "__qualname__", "function")
