"""The state of each optimizer, and the tensors that one `step()` makes, in order: data with sources.

Sources: torch/optim/{sgd,adam,adamw,rmsprop,adagrad,radam,nadam,adamax,adadelta,_adafactor,_muon}.py
(`_multi_tensor_*` is foreach, `_single_tensor_*` the for-loop), timm/optim/lion.py,
transformers/optimization.py (`Adafactor`), bitsandbytes/optim/optimizer.py (`Optimizer1State`, `Optimizer2State`),
torchao/optim/adam.py (`_AdamBase`) with subclass_8bit.py, subclass_4bit.py, subclass_fp8.py (`zeros`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from staticmem.eager.strides import numel
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.scenario.optimizers import BITSANDBYTES, TORCHAO
from staticmem.scenario.step import Scenario

Shape: TypeAlias = tuple[int, ...]
BLOCK = 256  # elements that share one absmax; bitsandbytes/optim/optimizer.py, `blocks = n // 256` (2,048 before 0.45)
MIN_8BIT = 4096  # elements; `min_8bit_size` there: smaller tensors keep float32 states
MIN_PAGED = 100_000  # elements; `get_state_buffer` there: smaller tensors are PyTorch's in a paged optimizer too


@record(frozen=True)
class Make:
    """A call that makes one tensor for each parameter. `name` is the local variable that holds them; "": none does.

    `shape` is a function of the parameter's; `shape` and `dtype` of None are the parameter's own. `frees` are variables
    that end with the call; an old value of `name` ends after it.
    """

    kernel: str
    name: str = ""
    frees: tuple[str, ...] = ()
    shape: Callable[[Shape], Shape] | None = None
    dtype: DType | None = None


@record(frozen=True)
class MakeAll:
    """A call that makes several tensors of one parameter, each with its variable."""

    kernel: str
    names: tuple[str, ...]
    shapes: tuple[Callable[[Shape], Shape], ...]
    dtype: DType


@record(frozen=True)
class Drop:
    """Variables that end: `del`, or a new assignment of something that is alive anyway."""

    names: tuple[str, ...]


@record(frozen=True)
class SecondName:
    """`name = of`: a second variable for the same tensors."""

    name: str
    of: str


Steps: TypeAlias = "tuple[Make | MakeAll | Drop | SecondName, ...]"


@record(frozen=True)
class State:
    """A tensor kept between steps. `shape` of None: the parameter's, in its layout; `dtype` of None: its dtype.
    `managed`: it is in CUDA's managed memory, of which PyTorch's allocator knows nothing."""

    name: str
    shape: Callable[[Shape], Shape] | None = None
    dtype: DType | None = None
    managed: bool = False


@record(frozen=True)
class OptimizerFacts:
    """`states` and the steps of one parameter's shape and dtype; `foreach` steps make lists over all parameters of a
    dtype.

    `foreach` is None where the default is the for-loop, `fused` says that fused kernels exist; `only_fused` that there
    is nothing else. `shared`: state that all parameters share.
    """

    states: Callable[[Shape, DType], tuple[State, ...]]
    loop: Callable[[Shape, DType], Steps]
    foreach: Callable[[Shape], Steps] | None = None
    fused: bool = False
    only_fused: bool = False
    fused_step: bool = False  # a `step` counter on the device for each parameter when fused
    shared: tuple[State, ...] = ()


def _states(*names: str) -> Callable[[Shape, DType], tuple[State, ...]]:
    states = tuple(State(name) for name in names)
    return lambda shape, dtype: states


def _simple(
    states: tuple[str, ...], foreach: Steps, loop: Steps, fused: bool = False, fused_step: bool = False
) -> OptimizerFacts:
    every = (Drop(("grad",)), *loop)  # the loop assigns `grad` first
    return OptimizerFacts(
        _states(*states), lambda shape, dtype: every, lambda shape: foreach, fused, fused_step=fused_step
    )


def _decay(s: Scenario) -> tuple[Steps, Steps]:
    """L2 weight decay adds to a copy of the gradients: the lists of foreach, and the tensor of the loop."""
    if not s.weight_decay:
        return (), ()
    return (Make("aten._foreach_add.List", "grads"),), (Make("aten.add.Tensor", "grad"),)


def _sgd(s: Scenario) -> OptimizerFacts:
    """Momentum updates its buffer in place; Nesterov adds to the gradients in place (foreach) or to a copy (loop)."""
    many, one = _decay(s)
    if s.nesterov:
        one = (*one, Make("aten.add.Tensor", "grad"))
    elif s.momentum:
        one = (*one, Drop(("grad",)))
    return _simple(("momentum_buffer",) if s.momentum else (), many, one, fused=True)


def _adam(s: Scenario) -> OptimizerFacts:
    """AdamW decays the parameters in place, Adam a copy of the gradients, which foreach deletes before the roots."""
    many, one = _decay(s) if s.optimizer == "adam" else ((), ())
    if many:
        many = (*many, Drop(("grads",)))
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if s.amsgrad:
        states = (*states, "max_exp_avg_sq")
    root = Make("aten._foreach_sqrt.default", "exp_avg_sq_sqrt")
    roots = (Make("aten.sqrt.default", "root"), Make("aten.div.Tensor", "denom", ("root",)))
    return _simple(states, (*many, root), (*one, *roots), fused=True, fused_step=True)


def _rmsprop(s: Scenario) -> OptimizerFacts:
    many, one = _decay(s)
    states = ("square_avg",) + ("momentum_buffer",) * bool(s.momentum) + ("grad_avg",) * s.centered
    if s.centered:
        average = Make("aten._foreach_addcmul.Scalar", "avg"), Make("aten.addcmul.default", "avg")
    else:
        average = Make("aten._foreach_sqrt.default", "avg"), Make("aten.sqrt.default", "avg")
    return _simple(states, (*many, average[0]), (*one, average[1]))


def _adagrad(s: Scenario) -> OptimizerFacts:
    many, one = _decay(s)
    lists = (*many, Make("aten._foreach_sqrt.default", "std"))
    if not many:
        lists = (*lists, Make("aten._foreach_mul.List", "numerator"))
    return _simple(("sum",), lists, (*one, Make("aten.sqrt.default", "std")), fused=True, fused_step=True)


def _radam(s: Scenario) -> OptimizerFacts:
    """The loop's rectified update is a chain of products, in which each factor dies with the next."""
    many, one = _decay(s)
    if many:
        many = (*many, Drop(("grads",)))
    chain = (
        Make("aten.div.Tensor", "bias_corrected_exp_avg"),
        Make("aten.mul.Tensor", "scaled"),
        Make("aten.sqrt.default", "root"),
        Make("aten.reciprocal.default", "inverse"),
        Make("aten.mul.Tensor", "adaptive", ("inverse", "root")),
        Make("aten.mul.Tensor", "product", ("scaled", "adaptive")),
        Make("aten.mul.Tensor", "", ("product",)),
    )
    root = Make("aten._foreach_sqrt.default", "buffer")
    return _simple(("exp_avg", "exp_avg_sq"), (*many, root), (*one, *chain))


def _nadam(s: Scenario) -> OptimizerFacts:
    many, one = _decay(s)
    roots = (Make("aten.div.Tensor", "corrected"), Make("aten.sqrt.default", "denom", ("corrected",)))
    root = Make("aten._foreach_sqrt.default", "exp_avg_sq_sqrt")
    return _simple(("exp_avg", "exp_avg_sq"), (*many, root), (*one, *roots))


def _adamax(s: Scenario) -> OptimizerFacts:
    """Absolute gradients are a list of their own, unless weight decay has made one already."""
    many, one = _decay(s)
    absolute = many or (Make("aten._foreach_abs.default", "grads"),)
    return _simple(("exp_avg", "exp_inf"), absolute, (*one, Make("aten.abs.default")))


def _adadelta(s: Scenario) -> OptimizerFacts:
    many, one = _decay(s)
    lists = (Make("aten._foreach_add.Scalar", "std"), Make("aten._foreach_add.Scalar", "deltas"))
    pair = (Make("aten.add.Tensor", "std"), Make("aten.add.Tensor", "delta"))
    return _simple(("square_avg", "acc_delta"), (*many, *lists), (*one, *pair))


def _lion(s: Scenario) -> OptimizerFacts:
    """timm's. Weight decay is decoupled, in place."""
    many, one = Make("aten._foreach_lerp.Scalar", "updates"), Make("aten.lerp.Scalar", "update")
    return _simple(("exp_avg",), (many,), (one,))


# -- Adafactor ---------------------------------------------------------------------------------------------------


def _row(shape: Shape) -> Shape:
    return (*shape[:-1], 1)


def _column(shape: Shape) -> Shape:
    return (*shape[:-2], 1, shape[-1])


def _corner(shape: Shape) -> Shape:
    return (*shape[:-2], 1, 1)


def _scalar(shape: Shape) -> Shape:
    return ()


_NORM = Make("aten.linalg_vector_norm.default", shape=_scalar)


def _adafactor(s: Scenario) -> OptimizerFacts:
    """torch.optim.Adafactor: a row and a column of factors for tensors of two or more dimensions."""

    def states(shape: Shape, dtype: DType) -> tuple[State, ...]:
        if len(shape) > 1:
            return State("row_var", _row), State("col_var", _column)
        return (State("variance"),)

    def loop(shape: Shape, dtype: DType) -> Steps:
        if len(shape) > 1:
            estimate: Steps = (
                Make("aten.linalg_vector_norm.default", "row_mean", shape=_row),
                Make("aten.linalg_vector_norm.default", "col_mean", shape=_column),
                Make("aten.matmul.default", "var_estimate"),
                Make("aten.mean.dim", shape=_corner),
            )
        else:
            estimate = Make("aten.mul.Tensor", "grad_squared"), Make("aten.clone.default", "var_estimate")
        return (_NORM, *estimate, SecondName("update", "var_estimate"), _NORM)

    return OptimizerFacts(states, loop)


def _adafactor_hf(s: Scenario) -> OptimizerFacts:
    """transformers' Adafactor: states and arithmetic in float32, factors without the dimension that they average."""

    def row(shape: Shape) -> Shape:
        return shape[:-1]

    def column(shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1])

    full = dtypes.float32

    def states(shape: Shape, dtype: DType) -> tuple[State, ...]:
        rms = State("RMS", _scalar, full)
        if len(shape) > 1:
            return State("exp_avg_sq_row", row, full), State("exp_avg_sq_col", column, full), rms
        return State("exp_avg_sq", None, full), rms

    def loop(shape: Shape, dtype: DType) -> Steps:
        casts: Steps = ()
        if dtype in dtypes.HALVES:  # each variable is the tensor itself first, then its cast
            casts = (
                Drop(("grad",)),
                Make("aten._to_copy.default", "grad", dtype=full),
                Drop(("p_data_fp32",)),
                Make("aten._to_copy.default", "p_data_fp32", dtype=full),
            )
        squared = (
            Make("aten.pow.Tensor_Scalar", "square", dtype=full),
            Make("aten.add.Tensor", "update", ("square",), dtype=full),
        )
        if len(shape) > 1:
            update: Steps = (
                Make("aten.mean.dim", shape=row, dtype=full),
                Make("aten.mean.dim", shape=column, dtype=full),
                Make("aten.mean.dim", "mean", shape=lambda s: (*s[:-2], 1), dtype=full),
                Make("aten.div.Tensor", "r_factor", ("mean",), shape=row, dtype=full),
                Make("aten.rsqrt.default", "c_factor", shape=_column, dtype=full),
                Make("aten.mul.Tensor", "update", ("r_factor", "c_factor"), dtype=full),
            )
        else:
            update = (Make("aten.rsqrt.default", "update", dtype=full),)
        last = (Make("aten.linalg_vector_norm.default", shape=_scalar), Make("aten.neg.default", dtype=full))
        return (*casts, *squared, *update, *last)

    return OptimizerFacts(states, loop)


# -- Muon --------------------------------------------------------------------------------------------------------


def _square(shape: Shape) -> Shape:
    return (min(shape), min(shape))


NEWTON_SCHULZ_STEPS = 5  # `DEFAULT_NS_STEPS`


def _muon(s: Scenario) -> OptimizerFacts:
    """torch.optim.Muon with its defaults, over matrices: momentum, and an update made orthogonal in bfloat16."""

    def loop(shape: Shape, dtype: DType) -> Steps:
        half = dtypes.bfloat16
        cast = Make("aten._to_copy.default", "ortho_grad", dtype=half)
        norm = Make("aten.linalg_vector_norm.default", "norm", shape=_scalar, dtype=half)
        iteration: Steps = (
            Make("aten.mm.default", "gram_matrix", shape=_square, dtype=half),
            Make("aten.addmm.default", "gram_update", shape=_square, dtype=half),
            Make("aten.addmm.default", "ortho_grad", dtype=half),
        )
        return (
            Make("aten.lerp.Scalar", "update"),
            SecondName("ortho_grad", "update") if dtype is half else cast,
            norm,
            Make("aten.clamp.default", frees=("norm",), shape=_scalar, dtype=half),
            *iteration * NEWTON_SCHULZ_STEPS,
            Drop(("gram_matrix", "gram_update")),
            SecondName("update", "ortho_grad"),
            Drop(("ortho_grad",)),
        )

    return OptimizerFacts(_states("momentum_buffer"), loop)


# -- bitsandbytes ------------------------------------------------------------------------------------------------


def _of_bitsandbytes(s: Scenario) -> OptimizerFacts:
    """Block-wise 8-bit states: a byte an element and a float32 maximum a block; two code books for all. Other states
    are float32 whatever the parameters are. Paged ones are in managed memory where they are large."""
    name = s.optimizer or ""
    count, eight, paged = 1 if "lion" in name else 2, name.endswith("-8bit"), name.startswith("paged-")

    def blocks(shape: Shape) -> Shape:
        return (-(-numel(shape) // BLOCK),)

    def states(shape: Shape, dtype: DType) -> tuple[State, ...]:
        numbers, managed = range(1, count + 1), paged and numel(shape) >= MIN_PAGED
        if not eight or numel(shape) < MIN_8BIT:
            return tuple(State(f"state{k}", None, dtypes.float32, managed) for k in numbers)
        full = tuple(State(f"state{k}", None, dtypes.uint8, managed) for k in numbers)
        return (*full, *(State(f"absmax{k}", blocks, dtypes.float32) for k in numbers))

    maps = tuple(State(f"qmap{k}", lambda shape: (256,), dtypes.float32) for k in range(1, count + 1))
    return OptimizerFacts(states, lambda shape, dtype: (), fused=True, only_fused=True, shared=maps if eight else ())


# -- torchao -----------------------------------------------------------------------------------------------------

# class: elements that share a scale (defaults of AdamW8bit, AdamW4bit, AdamWFp8), type of the codes, elements of a code
# book, elements in a code
_OF_TORCHAO = {
    "torchao-adamw-8bit": (256, dtypes.uint8, 256, 1),
    "torchao-adamw-4bit": (128, dtypes.uint8, 16, 2),
    "torchao-adamw-fp8": (256, dtypes.float8_e4m3fn, 0, 1),
}


def _torchao(s: Scenario) -> OptimizerFacts:
    """Codes, float32 scales and a code book for each state (`_new_buffer`: from 4,096 elements on that fill blocks; the
    others are as the parameter). `step()` compiles the update of each parameter by itself, whatever is asked.

    Temporaries are what the wrapper code of Inductor in PyTorch 2.14 allocates for torchao 0.18: the maxima of the
    blocks, unless each block is whole dimensions of the tensor; the scaled states in float32, but for 8 bits where
    blocks lie within rows; and for 4 bits the codes in int64, which the packing reads in two halves.
    """
    block, dtype, book, packed = _OF_TORCHAO[s.optimizer or ""]

    def quantized(shape: Shape) -> bool:
        return numel(shape) >= MIN_8BIT and numel(shape) % block == 0

    def codes(shape: Shape) -> Shape:
        return shape if packed == 1 else (numel(shape) // packed,)

    def scales(shape: Shape) -> Shape:
        return (numel(shape) // block,)

    def state(name: str) -> tuple[State, ...]:
        parts = State(f"{name}_codes", codes, dtype), State(f"{name}_scale", scales, dtypes.float32)
        return (*parts, State(f"{name}_qmap", lambda shape: (book,), dtypes.float32)) if book else parts

    def states(shape: Shape, of: DType) -> tuple[State, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return tuple(s for name in names for s in state(name)) if quantized(shape) else _states(*names)(shape, of)

    def twice(name: str, shape: Callable[[Shape], Shape] | None, dtype: DType) -> Steps:
        return tuple(Make("triton: single_param_adam", f"{name}{k}", shape=shape, dtype=dtype) for k in (1, 2))

    def loop(shape: Shape, _: DType) -> Steps:
        if not quantized(shape):
            return ()
        full, of_bits = dtypes.float32, packed == 2 or book > 0
        within_rows = next((size for size in reversed(shape) if size != 1), 1) % block == 0
        if packed == 1 and book and within_rows:
            return ()
        whole = any(numel(shape[k:]) == block for k in range(len(shape)))
        maxima = () if of_bits and whole else twice("amax", scales, full)
        scaled = twice("div", None, full) if of_bits else ()
        wide = twice("codes", None, dtypes.int64) if packed == 2 else ()
        return (*maxima, *scaled, *wide, Drop(tuple(f"{name}{k}" for name in ("amax", "div", "codes") for k in (1, 2))))

    return OptimizerFacts(states, loop)


FACTS: dict[str, Callable[[Scenario], OptimizerFacts]] = {
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "radam": _radam,
    "nadam": _nadam,
    "adamax": _adamax,
    "adadelta": _adadelta,
    "adafactor": _adafactor,
    "lion": _lion,
    "adafactor-hf": _adafactor_hf,
    **dict.fromkeys(("adam", "adamw"), _adam),
    "muon": _muon,
    **dict.fromkeys(BITSANDBYTES, _of_bitsandbytes),
    **dict.fromkeys(TORCHAO, _torchao),
}
