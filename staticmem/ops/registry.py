"""The table of rules: ATen target -> function with the schema's signature, run over tensors without data.

A rule makes its outputs through `Eager`, records the backward node with what it saves, and states its backward
formulas. It does not read the scenario and does not sum bytes. Beside it stand the facts of the op that other stages
ask for: its kinds (`kinds_of("aten::split")` has "view"), the names of its arguments, and what autocast does with it:
`autocast` says what `torch.autocast("cuda")` does with floating-point inputs (lists of aten/src/ATen/autocast_mode.h).
The memory that kernels of the op take for themselves stands there as well (`workspace`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from staticmem.eager.strides import Form
from staticmem.eager.trace import Reduction
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.record import record
from staticmem.units import Band

Autocast = Literal["half", "float32", "float32_dtype", "promote", ""]
Kind = Literal[
    "alias",  # another name of an op (`one_name`)
    "activation",  # a function of torch.nn.functional with an argument `inplace`
    "arithmetic",  # one of + - * / with a number or a tensor
    "assignment",  # in place: what `x[i] = y` runs
    "batch_norm",  # any form of batch normalisation, the functional ones of exports too
    "cast",  # a copy in the dtype that an argument names
    "check",  # allocates nothing on the device: asserts and constraints of exports
    "commutative",  # of two operands, in either order
    "comparison",  # one of == != < <= > >=
    "convolution",  # any rank, transposed ones too
    "copy",  # the same numbers, contiguous or in memory of their own
    "data_sized",  # sizes of the result are in the data
    "dropout",
    "enlarging",  # makes images or volumes larger: decoders begin so
    "expanded",  # a view that has elements several times
    "factory",  # makes a tensor of given sizes, whose contents no tensor decides
    "has_in_place",  # there is a form that writes to the first argument, in the same family
    "keeps_on_ctx",  # a custom autograd function with tensors as attributes of `ctx`
    "head_loss",  # a loss that runs the last linear layer itself
    "integer",  # ONNX operators on integers, which ATen has not
    "lookup",  # takes elements by indices, which are a tensor
    "masking",  # has other numbers where a mask says so
    "norm",  # normalisation layers
    "part",  # a view of some elements
    "permuted",  # a view with its dimensions in another order
    "product",  # matrix product
    "running",  # sums or products, of integers in int64
    "scatter",  # writes numbers to places that an index names
    "recurrent",  # a whole layer over all steps
    "reshaped",  # a view of all elements in their order
    "softmax",
    "split",  # gives a list of views of its input
    "step",  # jumps, and its derivative is zero elsewhere
    "view",  # the memory of its input in another shape; `reshape` and its like rarely copy
]
RuleFn = TypeVar("RuleFn", bound=Callable[..., Any])
Shapes = Mapping[str, tuple[int, ...]]
Flops = Callable[[Op, Sequence[Arg], Shapes], int]  # of the op, its arguments, and sizes of values by name

# The files of this folder that register ops, the most common ones first. A family is imported when an op is looked up
# that none before it has, so that a network of few layers needs few of them. Overloads of an op stand in one family.
FAMILIES = (
    "arithmetic views linear convolution normalization activations pooling softmax reduction loss factories casts "
    "attention joining indexing comparison unary binary scattering rearranging sorting recurrent resample einsum "
    "quantized distances fourier detection own_backward head_losses packed_linear experts "
    "ring_attention"
).split()
RING_ATTENTION = "staticmem::ring_attention"  # stands for scaled_dot_product_attention of a divided sequence
# Sets that several stages name. What all of a family are is a kind.
JOINS = frozenset(("aten::cat", "aten::stack"))
FREE_PRODUCTS = frozenset(("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum"))  # neither factor is a weight
LINEARS = frozenset(("aten::linear", "aten::addmm", "aten::mm", "aten::matmul"))  # the second factor may be a weight
RESHAPES = frozenset(("aten::view", "aten::reshape", "aten::_unsafe_view"))
# What Python's operators between tensors run; an augmented assignment runs it in place: `x += y` is `add_`.
SIGNS = {"+": "add", "-": "sub", "*": "mul", "/": "div", "@": "matmul", "**": "pow", "%": "remainder"}
NO_DERIVATIVE = frozenset(("aten::detach", "aten::zeros_like", "aten::ones_like", "aten::empty_like"))
# Numbers that the engine and passes compute themselves
_SYMBOLIC = ("operator::", "torch::sym_", "aten::sym_size", "aten::sym_numel", "aten::sym_stride")


@record(frozen=True, slots=True)
class Rule:
    """`state` is "ruled", or "transparent" for what allocates nothing on the device (shape arithmetic, asserts)."""

    target: str
    function: Callable[..., Any]
    autocast: Autocast
    state: Literal["ruled", "transparent"]

    @property
    def facts(self) -> str:
        return " ".join((self.function.__doc__ or "").split())


RULES: dict[str, Rule] = {}  # of the families that are imported: `rules()` has all
_ALIASES: dict[str, str] = {}  # another name of an op -> the one that passes and features compare with
_KINDS: dict[str, frozenset[Kind]] = {}  # by target without overload, of all ops
_FLOPS: dict[str, Flops] = {}  # the same
_NO_KINDS: frozenset[Kind] = frozenset()
_WRITTEN: frozenset[Kind] = frozenset(("has_in_place",))
_imported = 0  # families


def rule(
    names: str,
    kinds: tuple[Kind, ...] = (),
    autocast: Autocast = "",
    transparent: bool = False,
    flops: Flops | None = None,
    aliases: str = "",
) -> Callable[[RuleFn], RuleFn]:
    """Registers a rule for ops, with or without an overload name: `"add.Tensor mylib::gate"`. Names without a namespace
    are those of ATen. A target can have only one rule. `aliases`: other names of the first op, which run it."""
    declare(names, kinds, flops)
    declare(aliases, (*kinds, "alias"), flops)
    _ALIASES.update(dict.fromkeys(_targets(aliases), _targets(names)[0]))

    def register(function: RuleFn) -> RuleFn:
        for target in _targets(f"{names} {aliases}"):
            if target in RULES:
                raise ValueError(f"two rules for {target}")
            RULES[target] = Rule(target, function, autocast, "transparent" if transparent else "ruled")
        return function

    return register


def _targets(names: str) -> list[str]:
    return [name if "::" in name else f"aten::{name}" for name in names.split()]


def declare(names: str, kinds: tuple[Kind, ...] = (), flops: Flops | None = None) -> None:
    """Facts of ops. Those without a rule are in exports only: passes replace them by ops that eager code calls."""
    for target in _targets(names):
        base = target.split(".", 1)[0]
        _KINDS[base] = _KINDS.get(base, _NO_KINDS).union(kinds)
        if base.endswith("_") and not base.endswith("__"):
            _KINDS[base[:-1]] = _KINDS.get(base[:-1], _NO_KINDS) | _WRITTEN
        if flops is not None:
            _FLOPS[base] = flops


def load_until(is_loaded: Callable[[], bool]) -> bool:
    """Imports families until one has what is asked; False where none has it."""
    global _imported
    while not is_loaded():
        position = _imported
        if position == len(FAMILIES):
            return False
        import_module(f"staticmem.ops.{FAMILIES[position]}")
        _imported = max(_imported, position + 1)  # another thread may have gone on
    return True


def rules() -> Mapping[str, Rule]:
    """The rules of all families."""
    load_until(lambda: False)
    return RULES


def _load(base: str) -> None:
    if base not in _KINDS and not base.startswith(_SYMBOLIC):
        load_until(lambda: base in _KINDS)


def lookup(target: str) -> Rule | None:
    """The rule for `aten::add.Tensor`, else for `aten::add`, else None (an unknown op)."""
    base = target.split(".", 1)[0]
    _load(base)
    return RULES.get(target) or RULES.get(base)


def rule_of(target: str) -> Rule:
    """The rule of an op that has one: composite ops call others by name."""
    rule = lookup(target)
    if rule is None:
        raise KeyError(target)
    return rule


def function_of(target: str) -> Callable[..., Any]:
    """The same, past the dispatcher: no autocast."""
    return rule_of(target).function


@lru_cache(maxsize=4096)
def kinds_of(base: str) -> frozenset[Kind]:
    """What an op is, by its target without overload: `"view" in kinds_of(op.base)`."""
    _load(base)
    return _KINDS.get(base, _NO_KINDS)


def flops(op: Op, shapes: Shapes) -> int:
    """Floating-point operations of an op's forward: 2 for each multiply-add of a product, convolution or attention.

    Element-wise ops, norms and pooling count as nothing, as in `torch.utils.flop_counter`, whose formulas these are
    (torch/utils/flop_counter.py: mm_flop, bmm_flop, conv_flop_count, sdpa_flop_count). Backward takes twice the
    forward's, where both factors of a product need a gradient. `shapes`: sizes of the op's inputs and results by name;
    what is not in it counts as nothing.
    """
    base = op.base
    _load(base)
    formula = _FLOPS.get(base)
    if formula is None or not op.outputs:
        return 0
    try:
        return formula(op, (*op.args, *op.kwargs.values()), shapes)
    except (KeyError, IndexError, TypeError, AttributeError):  # a shape that is not known, an argument of another kind
        return 0


def flop_formula(base: str) -> Flops | None:
    """The formula that `flops` applies, of an op whose family is imported."""
    return _FLOPS.get(base)


def size_of(arg: Arg, shapes: Shapes) -> tuple[int, ...]:
    """Sizes of a tensor argument, for formulas of FLOPs."""
    assert isinstance(arg, Ref)
    return shapes[arg.name]


def one_name(target: str) -> str:
    """The target with the name that stands for all names of its op, where its family is imported:
    `aten::divide.Tensor` is `aten::div.Tensor`."""
    base, point, overload = target.partition(".")
    return f"{_ALIASES.get(base, base)}{point}{overload}"


@lru_cache(maxsize=4096)
def in_place(base: str) -> bool:
    """Whether an op writes to its first argument: PyTorch's name ends in `_`, Python's `__and__` is another thing."""
    return base.endswith("_") and not base.endswith("__")


@lru_cache(maxsize=4096)
def parameters(target: str) -> tuple[str, ...]:
    """Names of an op's positional arguments, from the signature of its rule, which is that of the schema."""
    rule = lookup(target)
    if rule is None:
        return ()
    code = getattr(rule.function, "__wrapped__", rule.function).__code__
    return tuple(code.co_varnames[1 : code.co_argcount])


def argument(op: Op, name: str) -> Arg:
    """An argument of an op by the name of the schema; None where the op has or states none."""
    if name in op.kwargs:
        return op.kwargs[name]
    names = parameters(op.target)
    position = names.index(name) if name in names else len(op.args)
    return op.args[position] if position < len(op.args) else None


# -- memory that kernels take for themselves ---------------------------------------------------------------------------


@record(frozen=True, slots=True)
class KernelCall:
    """What the memory of a kernel may depend on: its call in the trace, with the sizes of the rank, and the card.

    Attributes:
        kernel: its name, where a function serves several.
        results: forms of what it makes; the last one's dtype is that of a sum that it runs.
        indices: elements of its index tensor, 0 where the rule of the op does not record it.
        forward: forms of the results of the op's forward kernel, which is this one unless it is of the backward.
    """

    kernel: str
    phase: str
    results: tuple[Form, ...]
    indices: int
    forward: tuple[Form, ...]
    multiprocessors: int
    torch: tuple[int, int]


class Temporary(NamedTuple):
    """Memory that a kernel takes behind its results, or in front of them (`first`). It is given back when the kernel
    ends, or, unless `held`, before the kernel takes the next."""

    band: Band
    what: str
    held: bool = True
    first: bool = False


# A `Reduction` stands for the buffer of a sum that the kernel runs, which is that of the card's reductions.
Workspace: TypeAlias = Callable[[KernelCall], Iterable[Temporary | Reduction]]
WorkspaceFn = TypeVar("WorkspaceFn", bound=Workspace)


@record(frozen=True, slots=True)
class WorkspaceRule:
    """`results`: a kernel that makes fewer on a rank is not asked. `by_card`: what it takes depends on the number of
    multiprocessors."""

    function: Workspace
    results: int
    by_card: bool


WORKSPACES: dict[str, WorkspaceRule] = {}  # of the families that are imported


def workspace(kernels: str, results: int = 1, by_card: bool = False) -> Callable[[WorkspaceFn], WorkspaceFn]:
    """Registers what kernels take for themselves, in the order in which they take it. Kernels have the names that the
    rules of the family give them in the trace: `"aten.sort.default"`."""

    def register(function: WorkspaceFn) -> WorkspaceFn:
        for kernel in kernels.split():
            if kernel in WORKSPACES:
                raise ValueError(f"two workspaces of {kernel}")
            WORKSPACES[kernel] = WorkspaceRule(function, results, by_card)
        return function

    return register


# what kernels are that PyTorch has in bfloat16 from compute capability 8.0 on alone, by their names in traces
FROM_AMPERE: dict[str, str] = {}  # of the families that are imported
# What is added to the reason of a choice where cards before compute capability 8.0 run another kernel, which takes
# other memory (sdp_utils.cpp: `check_flash_attention_hardware_support`, `minimum_gemm_alignment`). The
# memory-efficient kernel refuses heads that flash pads, in half precision from 7.0 on; in float32 it takes any there.
PADDED_HEADS = "; before compute capability 8.0 no kernel pads heads"
ANY_HEADS = "; before compute capability 8.0 efficient takes heads of any size"
EFFICIENT = "; before compute capability 8.0 efficient runs, with other memory"


def from_ampere(kernels: str, what: str) -> None:
    """Declares kernels whose bfloat16 begins with compute capability 8.0: before it PyTorch runs others."""
    FROM_AMPERE.update(dict.fromkeys(kernels.split(), what))
