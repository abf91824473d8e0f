"""Histories of custom functions whose backward no file has, within bounds (`passes.restoring.custom_functions`).

What `generate` of transformers runs beside the model, where no single ATen call of fixed sizes says it.

The sizes of a cache follow from the keys that it takes, which only a run of the graph knows: these calls stand for the
ATen calls that they name as their kernels. Source: transformers 5.23, `cache_utils.py` and `generation/utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.context import Eager
from staticmem.eager.tensor import Formula, Grads, Tensor
from staticmem.ir import dtypes
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
