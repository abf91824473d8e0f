"""A module that is to be recorded with its example inputs, and the sizes that these have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# an input by keyword: its type, and each axis with its name, "" where it stays as it is
Sides = list[tuple[str, int]]


@dataclass
class Built:
    """A module with its example inputs; `axes` has the names of the sizes of each tensor, in order."""

    module: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    axes: list[dict[int, str]] = field(default_factory=list)
    loss: Callable[[Any], Any] | None = None
    of_mode: dict[str, bool] = field(default_factory=dict)  # as `Loop.inputs`
    begin: Callable[[bool], None] = lambda training: None  # as that of `Loop`
    uses_cache: bool = False  # in training
    packed: dict[str, int] = field(default_factory=dict)  # packed tensors, with the numbers that each holds
    stored: dict[str, Any] = field(default_factory=dict)  # `packed_layers.Stored`
    input_values: dict[str, Any] = field(default_factory=dict)  # of inputs that the code reads (`contents.Made`)
    repair: Callable[[BaseException], bool] = lambda error: False  # adds what the code asked for, if anything
    changes: int = 0  # of the inputs
    spread: float | None = None  # of what the network finds, where it is drawn
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)  # as `limits` of `recording_format`
    trained: str = ""  # the path of the one part that is trained
    leaves: dict[str, int] = field(default_factory=dict)  # of inputs that are lists: the tensors in them

    def add(self, name: str, dtype: Any, sizes: Sides) -> None:
        """A tensor by keyword; each axis with its name, "" where it stays as it is."""
        import torch

        self.changes += 1
        self.kwargs[name] = torch.zeros([n for _, n in sizes], dtype=dtype, device="meta")
        self.axes.append({axis: title for axis, (title, _) in enumerate(sizes) if title})

    def replace(self, name: str, sizes: Sides) -> None:
        """Another form of a tensor that is there."""
        at = len(self.args) + list(self.kwargs).index(name)
        self.add(name, self.kwargs[name].dtype, sizes)
        self.axes[at] = self.axes.pop()

    def say(self, name: str, value: Any) -> None:
        """What goes in by keyword and is no tensor."""
        self.kwargs[name] = value
        self.axes.append({})

    def add_each(self, name: str, parts: list[Any], axes: list[dict[int, str]]) -> None:
        """A list with a tensor, or a dictionary of some, for each sample, which goes in in training alone."""
        self.changes += 1
        self.kwargs[name] = parts
        self.axes += axes
        self.leaves[name] = len(axes)

    def of_all_modes(self) -> tuple[dict[str, Any], list[dict[int, str]]]:
        """The inputs by keyword, and the axes of all, without what goes in in training alone."""
        kwargs = {name: value for name, value in self.kwargs.items() if not self.of_mode.get(name)}
        axes, start = self.axes[: len(self.args)], len(self.args)
        for name in self.kwargs:
            end = start + self.leaves.get(name, 1)
            axes += self.axes[start:end] if name in kwargs else []
            start = end
        return kwargs, axes


class Example:
    """Sizes of the example inputs: those of the job, else of the options, else the usual ones."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.sizes, self.options = job["sizes"] or {}, job["options"]

    def of(self, name: str, usual: int) -> tuple[str, int]:
        option = {"height": "size", "width": "size"}.get(name, name)
        return name, int(self.sizes.get(name) or self.options.get(option) or usual)
