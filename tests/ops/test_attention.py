"""Attention kernels: which one runs, what it saves; and casts as the dispatcher orders them.

Figures are derived from aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cpp and attention.cu.
"""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.eager import strides as strides_of
from staticmem.eager.autograd import run_backward
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType, bfloat16, bool_, float16, float32, float64
from staticmem.ir.graph import Value
from staticmem.ops import lookup
from staticmem.ops.attention import choose_kernel
from staticmem.ops.dispatch import call, fallback

B, H, L, D = 2, 3, 10, 16


class Bench:
    """Places tensors, runs one call, and lists what it allocated and saved."""

    def __init__(self, training: bool = True) -> None:
        self.e = Eager(training)
        self.owner = Owner(Reason.MODEL, "")

    def tensor(self, *shape: int, dtype: DType = float32, grad: bool = True) -> Tensor:
        tensor = self.e.empty(shape, dtype, kernel="model")
        tensor.requires_grad = grad
        self.e.hold(tensor, self.owner)
        return tensor

    def run(self, target: str, *args: Any, **kwargs: Any) -> Tensor:
        rule = lookup(f"aten::{target}")
        assert rule is not None
        self.start = len(self.e.trace.buffers)
        self.e.open_scope()
        out: Tensor = call(self.e, rule, args, kwargs)
        self.e.hold(out, self.owner)
        self.e.close_scope()
        return out

    @property
    def made(self) -> list[tuple[str, int]]:
        """(kernel, bytes) of the allocations of the last call."""
        trace = self.e.trace
        names = [trace.kernels[b.kernel].name for b in trace.buffers[self.start :]]
        return [(n, b.nbytes) for n, b in zip(names, trace.buffers[self.start :], strict=True)]

    def saved(self) -> list[int]:
        """Bytes of what backward nodes hold, in order."""
        return [self.e.trace.buffers[h.buffer].nbytes for h in self.e.trace.holds if h.kind is Reason.SAVED]


def attention(dtype: DType = float32, head: int = D, mask: Any = None, dropout: float = 0.0, sdpa: str = "auto",
              training: bool = True, causal: bool = False, kv: int = H) -> tuple[Bench, Tensor]:  # fmt: skip
    bench = Bench(training)
    bench.e.sdpa = sdpa
    q = bench.tensor(B, H, L, head, dtype=dtype)
    k, v = (bench.tensor(B, kv, L, head, dtype=dtype) for _ in range(2))
    made = None if mask is None else bench.tensor(*mask[1:], dtype=mask[0], grad=False)
    out = bench.run("scaled_dot_product_attention", q, k, v, made, dropout, causal, enable_gqa=kv != H)
    return bench, out


def chosen(bench: Bench) -> str:
    ((what, _),) = bench.e.choices
    return what.split()[-2]


@pytest.mark.parametrize(("dtype", "head", "mask", "dropout", "kernel"), [
    (float32, 16, False, 0.0, "efficient"), (float32, 16, True, 0.1, "efficient"), (float32, 6, False, 0.0, "math"),
    (float32, 12, False, 0.0, "efficient"), (float64, 16, False, 0.0, "math"), (bfloat16, 64, False, 0.0, "cudnn"),
    (float16, 64, True, 0.0, "cudnn"), (bfloat16, 64, False, 0.1, "flash"), (bfloat16, 64, True, 0.1, "efficient"),
    (bfloat16, 12, False, 0.0, "flash"), (bfloat16, 12, True, 0.0, "math"), (bfloat16, 264, False, 0.0, "efficient"),
    (bfloat16, 258, False, 0.0, "math"),
])  # fmt: skip
def test_the_table_of_kernels(dtype: DType, head: int, mask: bool, dropout: float, kernel: str) -> None:
    bench = Bench()
    q = bench.tensor(B, H, L, head, dtype=dtype)
    bias = bench.tensor(B, 1, L, L, dtype=dtype, grad=False) if mask else None
    assert choose_kernel(q, q, q, bias, dropout).kernel == kernel


def test_a_mask_that_learns_is_not_for_cudnn() -> None:
    bench = Bench()
    q, bias = bench.tensor(B, H, L, 16, dtype=bfloat16), bench.tensor(1, H, L, L, dtype=bfloat16)
    assert choose_kernel(q, q, q, bias, 0.0, mask_grad=True).kernel == "efficient"
    assert choose_kernel(q, q, q, bias, 0.0).kernel == "cudnn"


RECORDED: list[tuple[str, dict[str, Any], str, str]] = [
    ("plain", {}, "efficient", "cudnn"),
    ("the query is transposed", {"turned": "q"}, "math", "math"),
    ("the key is transposed", {"turned": "k"}, "math", "math"),
    ("the value is transposed", {"turned": "v", "dropout_p": 0.1}, "math", "math"),
    ("dropout of 1/4", {"dropout_p": 0.25}, "efficient", "cudnn"),
    ("dropout of 0.1", {"dropout_p": 0.1}, "efficient", "flash"),
    ("heads of 192", {"head": 192}, "efficient", "flash"),
    ("heads of 256", {"head": 256}, "efficient", "cudnn"),
    ("heads of 320", {"head": 320}, "efficient", "efficient"),
    ("heads of 60", {"head": 60}, "efficient", "flash"),
    ("heads of 4", {"head": 4}, "efficient", "flash"),
    ("heads of 1", {"head": 1}, "math", "flash"),
    ("values of 32", {"value": 32}, "efficient", "cudnn"),
    ("one query", {"length": 1}, "efficient", "cudnn"),
    ("one key", {"source": 1}, "efficient", "flash"),
    ("one query with dropout", {"length": 1, "dropout_p": 0.25}, "efficient", "flash"),
    ("a mask", {"mask": (2, 1, 16, 16)}, "efficient", "cudnn"),
    ("a mask and dropout of 0.1", {"mask": (2, 1, 16, 16), "dropout_p": 0.1}, "efficient", "efficient"),
    ("a mask and dropout of 1/4", {"mask": (2, 1, 1, 16), "dropout_p": 0.25}, "efficient", "cudnn"),
    ("a mask that learns", {"mask": (2, 1, 16, 16), "learns": True}, "efficient", "efficient"),
    ("a mask is transposed", {"mask": (2, 1, 16, 16), "turned": "mask"}, "math", "math"),
    ("a mask is expanded", {"mask": (2, 1, 1, 1), "to": (2, 1, 16, 16)}, "math", "math"),
    ("a mask of one column", {"mask": (2, 1, 16, 1), "source": 1}, "efficient", "efficient"),
    ("causal", {"causal": True}, "efficient", "cudnn"),
    ("causal, fewer keys, dropout", {"causal": True, "source": 8, "dropout_p": 0.1}, "efficient", "efficient"),
]


@pytest.mark.parametrize(("given", "single", "half"), [row[1:] for row in RECORDED], ids=[row[0] for row in RECORDED])
def test_the_kernels_that_pytorch_picked(given: dict[str, Any], single: str, half: str) -> None:
    """Recorded with PyTorch 2.15 on fake tensors of an sm_90 device, which its C++ dispatches as it does real ones."""
    row = {"turned": "", "to": None, "learns": False, "head": 64, "length": 16, "source": 16, "mask": None, **given}
    head, length, source, to = (row[name] for name in ("head", "length", "source", "to"))
    sizes = {"q": (2, 8, length, head), "k": (2, 8, source, head), "v": (2, 8, source, row.get("value", head))}
    for dtype, kernel in ((float32, single), (bfloat16, half)):
        bench = Bench()

        def made(name: str, shape: tuple[int, ...], bench: Bench = bench, dtype: DType = dtype) -> Tensor:
            whole = bench.tensor(*shape, dtype=dtype)
            strides = (*whole.strides[:2], 1, shape[2]) if name == row["turned"] else whole.strides
            if name == "mask" and to is not None:
                strides = tuple(0 if old == 1 != new else s for old, new, s in zip(shape, to, strides, strict=True))
                shape = to
            tensor = Tensor(whole.storage, shape, strides, dtype)
            tensor.requires_grad = name != "mask" or row["learns"]
            return tensor

        q, k, v = (made(name, shape) for name, shape in sizes.items())
        mask = made("mask", row["mask"]) if row["mask"] is not None else None
        learns = mask is not None and mask.requires_grad
        rest = (mask, row.get("dropout_p", 0.0), row.get("causal", False))
        choice = choose_kernel(q, k, v, *rest, grad=True, mask_grad=learns)
        assert choice.kernel == kernel, dtype.name


def test_other_ranks_are_math() -> None:
    bench = Bench()
    q = bench.tensor(H, L, 16)
    assert choose_kernel(q, q, q, None, 0.0).kernel == "math"


@pytest.mark.parametrize(("dtype", "kernel"), [(float32, "efficient"), (bfloat16, "cudnn")])
def test_grouped_queries_stay_with_the_fused_kernels(dtype: DType, kernel: str) -> None:
    """As PyTorch 2.15 dispatches Qwen2 and Gemma for sm_90."""
    assert chosen(attention(dtype, kv=1)[0]) == kernel


def test_dropout_is_of_training_only() -> None:
    assert chosen(attention(bfloat16, dropout=0.1, training=True)[0]) == "flash"
    assert chosen(attention(bfloat16, dropout=0.1, training=False)[0]) == "cudnn"


QKV, SEED = B * H * L * D, 8


def test_efficient_saves_a_padded_log_sum_exp() -> None:
    bench, out = attention()
    sums = B * H * 32 * 4  # L = 10 is rounded up to 32
    assert [n for _, n in bench.made] == [QKV * 4, sums, SEED, SEED]
    assert bench.saved() == [QKV * 4] * 4 + [sums, SEED, SEED]
    assert out.strides == (L * H * D, D, H * D, 1)  # memory order [B, L, H, D]


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_half_precision_saves_one_float_a_row(kernel: str) -> None:
    bench, _ = attention(bfloat16, sdpa=kernel)
    sums = B * H * L * 4
    assert [n for _, n in bench.made] == [QKV * 2, sums, SEED, SEED]
    assert bench.saved() == [QKV * 2] * 4 + [sums, SEED, SEED]


def test_nothing_of_size_l_squared_in_fused_kernels() -> None:
    for dtype in (float32, bfloat16):
        bench, _ = attention(dtype)
        assert max(n for _, n in bench.made) < QKV * 8


def test_flash_pads_the_head_outside_of_the_kernel() -> None:
    bench, out = attention(bfloat16, head=12)
    padded = B * H * L * 16 * 2
    assert [n for _, n in bench.made[:4]] == [padded] * 4  # query, key, value, result
    assert bench.saved()[:4] == [padded] * 4
    assert out.shape == (B, H, L, 12)
    assert out.strides[-2] == 16


def test_math_saves_the_weights() -> None:
    bench, out = attention(float64)
    weights = B * H * L * L * 8
    assert weights in bench.saved()
    assert out.shape == (B, H, L, D)


def test_math_in_half_precision_gives_that_back() -> None:
    """attention.cpp: `make_tuple(matmul(attn, v).to(origin_dtype), attn.to(origin_dtype))`, from the right."""
    bench, out = attention(bfloat16, head=258)
    assert out.dtype is bfloat16
    assert bench.made[-3:] == [
        ("aten._to_copy.default", B * H * L * L * 2),
        ("aten.bmm.default", B * H * L * 258 * 4),
        ("aten._to_copy.default", B * H * L * 258 * 2),
    ]


def test_math_repeats_grouped_keys_and_makes_a_triangle() -> None:
    bench, out = attention(float64, kv=1, causal=True)
    kernels = [name for name, _ in bench.made]
    assert ("aten.ones.default", L * L) in bench.made
    assert "aten.tril.default" in kernels
    assert out.shape == (B, H, L, D)


def test_a_boolean_mask_becomes_a_float_one() -> None:
    bench, _ = attention(mask=(bool_, B, 1, L, L))
    assert ("aten.where.self", B * L * L * 4) in bench.made


def test_a_bias_is_padded_to_eight() -> None:
    """attention.cpp, `pad_bias`: the last dimension, 10, becomes 16."""
    bench, _ = attention(mask=(float32, B, 1, L, L))
    assert B * L * 16 * 4 in [n for _, n in bench.made]
    aligned = Bench()
    q = aligned.tensor(B, H, 16, D)
    aligned.run("scaled_dot_product_attention", q, q, q, aligned.tensor(B, 1, 16, 16, grad=False))
    assert len(aligned.made) == 4


@pytest.mark.parametrize(
    ("shape", "strides", "padded"),
    [
        ((B, 1, 10, 10), (160, 160, 16, 1), None),  # rows of a longer mask: they begin at multiples of 8
        ((B, 1, 10, 10), (104, 104, 10, 1), 16),
        ((B, 1, 10, 10), (100, 100, 16, 1), 16),
        ((B, 1, 10, 16), (160, 160, 15, 1), 24),  # rows of 16 elements that overlap get 8 more
        ((B, 1, 10, 1), (10, 10, 1, 1), 8),  # the same for all keys: one column is expanded
        ((1, 1, 10, 10), (0, 0, 16, 1), None),
        ((10, 10), (10, 1), 16),
    ],
)
def test_a_bias_is_copied_where_its_rows_are_not_aligned(
    shape: tuple[int, ...], strides: tuple[int, ...], padded: int | None
) -> None:
    """attention.cpp, `aligned_tensor`: all strides but the last are multiples of 8."""
    bench = Bench()
    q = bench.tensor(B, H, L, D)
    mask = Tensor(bench.tensor(4096, grad=False).storage, shape, strides, float32)
    k = bench.tensor(B, H, max(shape[-1], L), D)
    out = bench.run("scaled_dot_product_attention", q, k, k, mask)
    copies = [made for made in bench.made if "efficient" not in made[0]]
    rows = strides_of.numel(shape[:-1])
    assert copies == ([] if padded is None else [("aten.constant_pad_nd.default", rows * padded * 4)])
    assert out.shape == (B, H, L, D)


def test_a_bias_that_learns_is_saved_and_gets_a_gradient() -> None:
    """Of every sample, in rows of 16 elements; then the sum over the samples."""
    bench = Bench()
    e, q = bench.e, bench.tensor(B, H, L, 2 * D, grad=False)
    bias = bench.tensor(1, H, L, L)
    out = bench.run("scaled_dot_product_attention", q, q, q, bias)
    assert H * L * 16 * 4 in bench.saved()
    start = len(e.trace.buffers)
    root = bench.tensor(*out.shape, grad=False)
    e.grad_enabled = False
    run_backward(e, out, root, {})
    made = [b.nbytes for b in e.trace.buffers[start:]]
    assert made.count(B * H * L * 16 * 4) == 1
    assert H * L * L * 4 in made


# -- dispatch ------------------------------------------------------------------------------------------------------


def autocast(target: str, *args: Any, grad: bool = True) -> Bench:
    bench = Bench()
    bench.e.autocast = bfloat16
    made = [bench.tensor(*a, grad=grad) if isinstance(a, tuple) else a for a in args]
    bench.run(target, *made)
    return bench


def test_casts_go_from_right_to_left() -> None:
    """The arguments of a C++ call are evaluated from the last one on."""
    bench = autocast("linear", (4, 5), (6, 5), (6,))
    casts = [n for name, n in bench.made if "_to_copy" in name]
    assert casts == [6 * 2, 6 * 5 * 2, 4 * 5 * 2]


def test_float32_leaves_are_cast_once() -> None:
    bench = Bench()
    bench.e.autocast = bfloat16
    x, w = bench.tensor(4, 5, grad=False), bench.tensor(6, 5)
    for casts in (2, 1):  # the weight's cast is kept; the input's, which needs no gradient, is not
        bench.run("linear", x, w)
        assert len([1 for name, _ in bench.made if "_to_copy" in name]) == casts


def test_ops_that_stay_in_float32_and_those_that_follow_their_input() -> None:
    bench = Bench()
    bench.e.autocast = bfloat16
    low, high = bench.tensor(4, 6, dtype=bfloat16), bench.tensor(4, 6)
    assert bench.run("relu", low).dtype is bfloat16
    assert bench.run("softmax.int", low, -1).dtype is float32
    assert bench.run("sum", low).dtype is float32
    assert bench.run("cat", (low, high)).dtype is float32
    assert bench.run("cat", (low, low)).dtype is bfloat16


def test_integers_and_doubles_are_not_cast() -> None:
    bench = Bench()
    bench.e.autocast = bfloat16
    a = bench.tensor(3, 3, dtype=float64, grad=False)
    assert bench.run("mm", a, a).dtype is float64
    assert len(bench.made) == 1


def test_an_op_without_rule_saves_what_goes_in_and_out() -> None:
    bench = Bench()
    x, y = bench.tensor(4, 4), bench.tensor(2, dtype=dtypes.int64, grad=False)
    (out,) = fallback(bench.e, "custom::op", [x, [y], 3], [Value("r", float32, (5, 5))])
    assert bench.saved() == [64, 16, 100]
    assert out.requires_grad
    assert fallback(bench.e, "custom::check", [x], []) == []


@pytest.mark.parametrize(
    ("sdpa", "dtype", "masked", "head", "kernel", "reason"),
    [
        ("flash", bfloat16, True, D, "cudnn", "flash was asked for, but takes no mask"),
        ("flash", float32, False, D, "efficient", "half precision only, not float32"),
        ("cudnn", bfloat16, False, 12, "flash", "heads of a multiple of 8, not 12"),
        ("efficient", float64, False, D, "math", "has no float64"),
        ("flash", bfloat16, False, D, "flash", "asked for"),
        ("math", float32, True, D, "math", "asked for"),
    ],
)
def test_a_kernel_that_pytorch_would_refuse_is_not_taken(
    sdpa: str, dtype: DType, masked: bool, head: int, kernel: str, reason: str
) -> None:
    """sdp_utils.cpp: flash has `check_for_attn_mask`; with that backend alone PyTorch says "No available kernel"."""
    bench, _ = attention(dtype, head, mask=(dtype, B, H, L, L) if masked else None, sdpa=sdpa)
    ((what, why),) = bench.e.choices
    assert (kernel in what, reason in why) == (True, True), (what, why)
