"""Histories of custom functions whose backward no file has, within bounds (`passes.restoring.custom_functions`).

What `generate` of transformers runs beside the model, where no single ATen call of fixed sizes says it.

The sizes of a cache follow from the keys that it takes, which only a run of the graph knows: these calls stand for the
ATen calls that they name as their kernels. Source: transformers 5.23, `cache_utils.py` and `generation/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.eager.context import Eager
from staticmem.eager.tensor import Formula, Grads, Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import grad_of, written_once, zeros
from staticmem.ops.registry import rule


@rule("staticmem::own_backward")
def own_backward(
    e: Eager, result: Tensor, inputs: Sequence[Tensor], saved: Sequence[Tensor], temporaries: int
) -> Tensor:
    """`result` with a node that saves `saved`, and makes as many buffers of its size in backward as `temporaries`, and
    a gradient for each input; without temporaries it passes the incoming one on where it fits (a straight-through
    estimator)."""
    named = Tensor(result.storage, result.shape, result.strides, result.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("backward of a custom function")
        incoming = grads[0]
        for _ in range(temporaries):
            e.empty_like(result)
        passed = incoming if temporaries == 0 else None
        of_inputs: list[Tensor | None] = []
        for tensor, wanted in zip(inputs, need, strict=True):
            if not wanted:
                of_inputs.append(None)
            elif passed is not None and passed.shape == tensor.shape:
                of_inputs.append(passed)
            else:
                of_inputs.append(e.empty_like(tensor))
        return of_inputs

    formula = Formula(tuple(range(len(inputs))), gradients)
    return e.record("backward of a custom function", named, list(inputs), [formula], [*saved])


@rule("staticmem::cache")
def cache(e: Eager, like: Tensor, length: int, kernel: str) -> Tensor:
    """A cache of `length` tokens for keys or values `like` [batch, heads, tokens, size], which `kernel` makes."""
    return e.empty((*like.shape[:-2], length, like.shape[-1]), like.dtype, kernel=kernel)


@rule("staticmem::packed_queries")
def packed_queries(e: Eager, query: Tensor, key: Tensor) -> Tensor:
    """Queries of one token with those of a group side by side: a view [batch, heads of the keys, group, size]
    (`pack_gqa` of integrations/sdpa_attention.py)."""
    batch, heads, _, size = query.shape
    groups = key.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} heads of queries do not share {groups} heads of keys")
    return e.alias(query, (batch, groups, heads // groups, size), (heads * size, heads // groups * size, size, 1))


@rule("staticmem::next_token_logits")
def next_token_logits(e: Eager, logits: Tensor) -> Tensor:
    """A copy in float32: `outputs.logits[:, -1].to(copy=True, dtype=torch.float32)`."""
    return e.empty(logits.shape, dtypes.float32, kernel="aten._to_copy.default")


def _define_gradient(
    name: str, node: str, first: bool = True, again: Callable[[Any, Any, Any, Any], Any] | None = None
) -> None:
    """Registers the rule of a gradient, which code may differentiate again (`create_graph=True`): by `again`, of
    (calls, incoming gradient, first gradient, saved tensor); zeros without it. `first`: as in `fused`."""

    def run(e: Eager, gradient: Tensor, saved: Tensor) -> Tensor:
        return e.pointwise(f"aten.{name}.default", *((saved, gradient) if first else (gradient, saved)))

    def gradient(e: Eager, grad_output: Tensor, saved: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = run(e, grad_output, saved)
        formulas = [
            Formula((0,), lambda e, grads, need: run(e, grad_of(grads), saved)),
            Formula((1,), zeros if again is None else written_once(again, grad_output, saved)),
        ]
        kept = None if again is None else grad_output
        e.record(node, out, [grad_output, saved], formulas, [saved, kept])
        return out

    gradient.__doc__ = f"Saves its second operand{', and the first' if again else ''}; backward runs {name}, and "
    gradient.__doc__ += "products of both." if again else "zeros of the same size."
    rule(name)(gradient)


_define_gradient("threshold_backward", "ThresholdBackwardBackward0")
_define_gradient("leaky_relu_backward", "LeakyReluBackwardBackward0")
_define_gradient("hardtanh_backward", "HardtanhBackwardBackward0")
_define_gradient("tanh_backward", "TanhBackwardBackward0", False,
                 lambda c, g, grad, out: c.mul(g, c.mul(c.scale(out, -2), grad)))  # fmt: skip
_define_gradient("sigmoid_backward", "SigmoidBackwardBackward0", False,
                 lambda c, g, grad, out: c.mul(c.mul(g, grad), c.plus(c.scale(out, -2), 1)))  # fmt: skip
