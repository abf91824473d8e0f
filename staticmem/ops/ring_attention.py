"""Attention whose sequence is divided over ranks: PyTorch's ring attention (`passes.requested.expert_parallel`).

Each rank has its part of queries, keys and values. Keys and values of the other ranks come one part after the other;
each gives a partial result, which is merged with those before in float32. The head-tail load balancer gives a rank a
part from the beginning of the sequence and one from its end, so that with a causal mask a rank needs half of the keys
of the ranks before it, and the keys of the ranks behind it for half of its queries.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py of PyTorch 2.13
(`_templated_ring_attention`, `_SDPAMerger`, `_templated_ring_attention_backward`, `_AllGatherRotater`,
`_AllToAllRotater`). It runs beneath autograd, whose node saves what that of the fused kernel does, in the sizes of the
rank. A tensor that is sent lives until the collective is waited for (`stashed_for_allocator_safety_` of
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.errors import DimensionError, UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op
from staticmem.ops.attention import decide_kernel, kernel_gradients, kernel_results
from staticmem.ops.experts import ALL_TO_ALL
from staticmem.ops.pointwise import grad_of
from staticmem.ops.rearranging import pad
from staticmem.ops.registry import RING_ATTENTION, Shapes, rule, size_of
from staticmem.ops.views import slice_
from staticmem.scenario.strategies import ROTATES_AT_ONCE, ContextShare

GATHER = "_c10d_functional.all_gather_into_tensor.default"
_CAT, _COPY = "aten.cat.default", "aten.clone.default"
_KEEPS_FIRST = (2, 14)  # since then the seeds of the first turn are returned (`saved_rest`), before those of the last
ROWS = 32  # the efficient kernel's log-sum-exp has a multiple of that many rows (kAlignLSE of attention.cu)


def _flops(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
    """As those of attention, of the queries of a rank with all keys."""
    q, k, v = (size_of(arg, shapes) for arg in args[:3])
    ranks = args[3]
    assert isinstance(ranks, int)
    return 2 * prod(q[:-1]) * k[-2] * ranks * (q[-1] + v[-1])


@rule(RING_ATTENTION, kinds=("product",), autocast="half", flops=_flops)
def ring_attention(
    e: Eager, query: Tensor, key: Tensor, value: Tensor, ranks: int, rank: int, rotate: str, length: int,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Causal attention of one rank's part of the sequence, `length` tokens: saves q, k, v, the merged result and
    log-sum-exp, and two seeds; gradients of keys and values are added up in float32 on their way around the ring."""
    if {query.shape[-2], key.shape[-2]} != {length}:
        raise UsageError(
            "context parallelism does not apply to this model",
            f"It has attention of {query.shape[-2]:,} queries with {key.shape[-2]:,} keys, where a rank has {length:,} "
            "tokens of the sequence.",
            "Leave --context-parallel out.",
            code="SM243",
        )
    records = e.needs_grad(query, key, value)
    given = (query, key, value, None, dropout_p if e.training else 0.0, True, records, False)
    choice = decide_kernel(e.sdpa, given)
    kernel = choice.kernel
    _check(kernel, choice.reason, query.shape[-2], ranks)
    e.choices[f"scaled_dot_product_attention runs its {kernel} kernel", choice.reason] += 1
    ring = _Ring(kernel, ContextShare(ranks, rank, rotate))
    head = query.shape[-1]
    if kernel != "efficient" and head % 8:  # padded outside of the kernel, as for one device
        query, key, value = (pad(e, t, (0, 8 - head % 8)) for t in (query, key, value))
        return slice_(e, ring.attend(e, query, key, value), -1, 0, head)
    return ring.attend(e, query, key, value)


def _check(kernel: str, reason: str, length: int, ranks: int) -> None:
    if kernel == "math":
        raise UsageError(
            "context parallelism cannot divide this attention",
            f"PyTorch would run it by its math kernel ({reason}), and divides the fused ones alone.",
            "Use a type and sizes of heads that they take (--dtype bf16, --amp bf16), or leave --context-parallel out.",
            code="SM243",
        )
    if kernel == "efficient" and length % (2 * ROWS):
        raise DimensionError(
            f"a sequence of {length * ranks:,} tokens cannot be divided over {ranks} ranks",
            f"PyTorch merges results of its memory-efficient kernel for multiples of {2 * ROWS} tokens a rank alone: "
            "their log-sum-exp has padding that the results have not.",
            f"Choose a multiple of {2 * ROWS * ranks:,}, or --amp bf16, which runs another kernel.",
            code="SM243",
        )


class _Locals:
    """The variables of a Python function: what none of them refers to is freed at the end of a statement. `given` are
    its arguments, which its caller holds."""

    def __init__(self, e: Eager, *given: Tensor) -> None:
        self.e = e
        self.held: dict[str, Sequence[Tensor]] = {"given": given}

    def set(self, **values: Tensor | Sequence[Tensor] | None) -> None:
        for name, value in values.items():
            if value is None:
                self.held.pop(name, None)
            else:
                self.held[name] = (value,) if isinstance(value, Tensor) else value
        self.e.collect([tensor for tensors in self.held.values() for tensor in tensors])

    def __getitem__(self, name: str) -> Tensor:
        return self.held[name][0]


class _Ring:
    """Ring attention by a fused kernel."""

    def __init__(self, kernel: str, share: ContextShare) -> None:
        self.kernel, self.share = kernel, share

    def attend(self, e: Eager, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, extras = self._forward(e, query, key, value)

        def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
            return self._backward(e, grad_of(grads), query, key, value)

        name = f"ScaledDotProduct{self.kernel.title()}AttentionBackward0"
        formulas = [Formula((0, 1, 2), gradients)]
        return e.record(name, out, [query, key, value], formulas, [query, key, value, out, *extras])

    # -- what forward and backward have in common ----------------------------------------------------------------

    def _receive(self, e: Eager, own: _Locals, turn: int, parts: Tensor) -> None:
        """The next keys and values: a view of what was gathered, or what came around the ring."""
        if not turn:
            return
        arrived = own["gathered" if self.share.rotate == ROTATES_AT_ONCE else "received"]
        own.set(sent=None, arrived=arrived)
        own.set(key=_contiguous_view(e, arrived, own["key"].shape))
        own.set(value=_contiguous_view(e, arrived, own["value"].shape))

    def _send(self, e: Eager, own: _Locals, turn: int) -> None:
        """Keys and values for the other ranks. An all-gather sends them once; the copy is made each time."""
        if turn == self.share.ranks - 1:
            return
        total = own["key"].numel + own["value"].numel
        own.set(joined=e.empty((total,), own["key"].dtype, kernel=_CAT))
        if self.share.rotate != ROTATES_AT_ONCE:
            own.set(sent=own["joined"], received=e.empty((total,), own["key"].dtype, kernel=ALL_TO_ALL))
        elif not turn:
            gathered = e.empty((total * self.share.ranks,), own["key"].dtype, kernel=GATHER)
            own.set(sent=own["joined"], gathered=gathered)

    def _halves(self, turn: int) -> tuple[bool, bool]:
        """Whether a turn needs half of the queries, or half of the keys."""
        return turn > self.share.rank, 0 < turn <= self.share.rank

    # -- forward -------------------------------------------------------------------------------------------------

    def _forward(self, e: Eager, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[Tensor]]:
        own = _Locals(e, query, key, value)
        own.set(key=_contiguous(e, key))
        own.set(value=_contiguous(e, value))
        for turn in range(self.share.ranks):
            self._receive(e, own, turn, key)
            self._send(e, own, turn)
            own.set(joined=None)
            half_queries, half_keys = self._halves(turn)
            q = _half(e, query) if half_queries else query
            k, v = ((_half(e, t) if half_keys else t) for t in (own["key"], own["value"]))
            own.set(arguments=(k, v))
            out, extras = kernel_results(e, self.kernel, q, k, v)
            own.set(out=out, extras=extras)
            if not turn and e.torch >= _KEEPS_FIRST:
                own.set(seeds=extras[1:])
            self._merge(e, own, half_queries)
        merged = own["merged"]
        if merged.dtype is not query.dtype:
            own.set(result=e.empty_like(merged, query.dtype, "aten._to_copy.default"))
            merged = own["result"]
        return merged, [own["merged_sums"], *own.held.get("seeds", own.held["extras"][1:])]

    def _merge(self, e: Eager, own: _Locals, partial: bool) -> None:
        """`_SDPAMerger.step`: `merged - sigmoid(sums - merged sums) * (merged - out)`, and the same of the sums."""
        out, sums = own["out"], own.held["extras"][0]
        if sums.ndim < out.ndim:
            sums = e.alias(sums, (*sums.shape, 1), (*sums.strides, 1))
        if out.dtype is not dtypes.float32:
            own.set(block=e.empty_like(out, dtypes.float32, "aten._to_copy.default"))
            out = own["block"]
        if "merged" not in own.held:
            own.set(merged=out, merged_sums=sums, block=None)
            return
        merged, merged_sums = own["merged"], own["merged_sums"]
        if partial:
            merged, merged_sums = _half(e, merged), _half(e, merged_sums)
        own.set(difference=e.pointwise("aten.sub.Tensor", sums, merged_sums))
        own.set(share=e.empty_like(own["difference"], kernel="aten.sigmoid.default"), difference=None)
        own.set(difference=e.pointwise("aten.sub.Tensor", merged, out))
        own.set(change=e.pointwise("aten.mul.Tensor", own["share"], own["difference"]))
        own.set(share=None, difference=None)
        own.set(new=e.pointwise("aten.sub.Tensor", merged, own["change"]), change=None)
        own.set(difference=e.pointwise("aten.sub.Tensor", merged_sums, sums))
        own.set(change=e.empty_like(own["difference"], kernel="aten.log_sigmoid_forward.default"), difference=None)
        own.set(new_sums=e.pointwise("aten.sub.Tensor", merged_sums, own["change"]), change=None)
        if partial:
            own.set(merged_sums=e.empty(own["merged_sums"].shape, dtypes.float32, kernel=_CAT))
            own.set(merged=e.empty(own["merged"].shape, dtypes.float32, kernel=_CAT))
        else:
            own.set(merged_sums=own["new_sums"], merged=own["new"])
        own.set(new=None, new_sums=None, block=None)

    # -- backward ------------------------------------------------------------------------------------------------

    def _backward(self, e: Eager, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor | None]:
        own, zeros = _Locals(e, grad, query, key, value), "aten.zeros_like.default"
        own.set(grad_query=e.empty_like(query, dtypes.float32, zeros))
        own.set(grad_key=e.empty_like(key, dtypes.float32, zeros))
        own.set(grad_value=e.empty_like(value, dtypes.float32, zeros))
        own.set(key=_contiguous(e, key))
        own.set(value=_contiguous(e, value))
        for turn in range(self.share.ranks):
            self._receive(e, own, turn, key)
            self._send(e, own, turn)
            half_queries, half_keys = self._halves(turn)
            q = _half(e, query) if half_queries else query
            k, v = ((_half(e, t) if half_keys else t) for t in (own["key"], own["value"]))
            own.set(arguments=(k, v))
            if half_queries and prod(query.shape[:2]) > 1:  # half of log-sum-exp, made contiguous
                own.set(sums=e.empty(q.shape[:3], dtypes.float32, kernel=_COPY))
            else:
                own.set(sums=None)
            own.set(made=kernel_gradients(e, self.kernel, q, k, v, grad.dtype))
            self._add(e, own, turn, half_keys)
            if half_queries:
                own.set(grad_query=e.empty(query.shape, dtypes.float32, kernel=_CAT))
        if query.dtype is not dtypes.float32:
            own.set(grad_query=e.empty_like(own["grad_query"], query.dtype, "aten._to_copy.default"))
        joined = own["grads_received"]
        if query.dtype is not dtypes.float32:
            joined = e.empty_like(joined, query.dtype, "aten._to_copy.default")
        return own["grad_query"], _contiguous_view(e, joined, key.shape), _contiguous_view(e, joined, value.shape)

    def _add(self, e: Eager, own: _Locals, turn: int, half_keys: bool) -> None:
        """Adds the gradients of keys and values to those that come around the ring, and sends them on."""
        if turn:
            arrived = own["grads_received"]
            own.set(grads_sent=None, grads_joined=arrived)
            for name in ("grad_key", "grad_value"):
                own.set(**{name: _contiguous_view(e, arrived, own[name].shape)})
            if half_keys:
                for name in ("grad_key", "grad_value"):
                    own.set(**{name: e.empty(own[name].shape, dtypes.float32, kernel=_CAT)})
        flat = [_contiguous(e, own["grad_key"]), _contiguous(e, own["grad_value"])]
        total = sum(t.numel for t in flat)
        own.set(flat=flat, grads_joined=e.empty((total,), dtypes.float32, kernel=_CAT))
        own.set(flat=None)
        received = e.empty((total,), dtypes.float32, kernel=ALL_TO_ALL)
        own.set(grads_sent=own["grads_joined"], grads_received=received)


def _half(e: Eager, tensor: Tensor) -> Tensor:
    """One of two chunks along the sequence."""
    shape = tensor.shape
    return e.alias(tensor, (*shape[:2], shape[2] // 2, *shape[3:]), tensor.strides)


def _contiguous(e: Eager, tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous else e.empty(tensor.shape, tensor.dtype, kernel=_COPY)


def _contiguous_view(e: Eager, flat: Tensor, shape: layout.Shape) -> Tensor:
    return e.alias(flat, shape, layout.contiguous_strides(shape))
