"""What the partitioner knows of an op: whether it may be computed again, whether it fuses, whether it is a view.

Source: `get_default_op_list` of torch/_functorch/partitioners.py (2.15; 2.13 has the same lists), which adds every ATen
op with an overload that is tagged `pointwise` (aten/src/ATen/native/tags.yaml). Those in place are left out: the graphs
are functional. `tests/compiler/partition/test_partition_op_types.py` compares the lists with an installed PyTorch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from staticmem.compiler.nodes import GETITEM


def _names(namespace: str, names: str, prefix: str = "") -> frozenset[str]:
    return frozenset(f"{namespace}::{prefix}{word}" for word in names.split())


POINTWISE = _names(
    "aten",
    """
    __ilshift__ __ixor__ __lshift__ __rshift__ __xor__ abs acos acosh add addcdiv addcmul angle asin
    asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil
    celu clamp clamp_max clamp_min clip clone conj_physical copysign cos cosh deg2rad digamma div elu eq equal erf erfc
    erfinv exp exp2 expm1 float_power floor fmax fmin fmod frac frexp gcd ge gelu gelu_backward gt hardshrink
    hardsigmoid hardtanh heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le
    leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
    logit logit_backward lt masked_fill max maximum min minimum mish mul mvlgamma nan_to_num native_dropout_backward
    ne neg nextafter polygamma positive pow rad2deg reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn
    sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus softshrink sqrt square sub tan tanh
    tanh_backward threshold threshold_backward true_divide trunc where xlogy
    """,
) | _names(
    "aten",
    """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w entr erfcx hermite_polynomial_h hermite_polynomial_he i0e i1 i1e laguerre_polynomial_l
    legendre_polynomial_p log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtri
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 xlog1py zeta
    """,
    prefix="special_",
)

VIEWS = _names("aten", "alias as_strided expand permute select slice split squeeze t unsqueeze view") | _names(
    "prims", "broadcast_in_dim"
)

# Casts, tensors made of sizes alone, reductions, indexing.
_OTHERS = _names(
    "aten",
    """
    __and__ __or__ _grad_sum_to_size _to_copy _unsafe_view amax any arange argmax broadcast_tensors empty empty_like
    full full_like gather index lift_fresh_copy mean new_zeros ones reshape scalar_tensor std sum sum_to_size to triu
    type_as var var_mean zeros zeros_like
    """,
) | _names(
    "prims", "_low_memory_max_pool_offsets_to_indices convert_element_type div iota prepare_softmax_online sum var"
)

RECOMPUTABLE = POINTWISE | VIEWS | _OTHERS | {GETITEM}
RANDOM = _names("aten", "native_dropout rand_like randn_like")
FUSIBLE = RECOMPUTABLE | RANDOM
COMPUTE_INTENSIVE = _names(
    "aten",
    """
    _efficient_attention_forward _flash_attention_forward _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_mm addmm bmm convolution convolution_backward mm upsample_bilinear2d
    """,
)

LIFTED = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})

# Their results share the storage of the first argument; the partitioner need not know them all as views.
ALIASES = VIEWS | _names(
    "aten",
    """
    _conj _neg_view _unsafe_view copy_ detach diagonal lift_fresh split_with_sizes unbind unfold view_as_complex
    view_as_real
    """,
)

# `fx_graph_cse` (torch/_functorch/compile_utils.py) never merges these: `rand_ops` and `aten.empty`, and with them what
# `is_impure` (torch/_library/utils.py) finds: ops that write, and those tagged `nondeterministic_seeded`.
NEVER_MERGED = _names(
    "aten",
    """
    _cudnn_attention_backward _cudnn_attention_forward _cudnn_init_dropout_state _cudnn_rnn
    _efficient_attention_forward _flash_attention_forward _fused_dropout _scaled_dot_product_attention_math
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _standard_gamma bernoulli binomial copy_ dropout empty exponential
    multinomial native_dropout normal normal_functional poisson rand rand_like randint randint_like randn randn_like
    randperm rrelu rrelu_with_noise_functional uniform
    """,
) | _names(
    "prims", "inductor_rand_eager_offset inductor_rand_eager_offsets inductor_seed inductor_seeds normal uniform"
)

WRITES = "aten::copy_"
CAT = "aten::cat"


class OpTypes(NamedTuple):
    """Answers of the lists for one target."""

    recomputable: bool
    fusible: bool
    view: bool
    random: bool
    compute_intensive: bool
    lifted: bool
    cat: bool


@lru_cache(4096)
def types_of(target: str) -> OpTypes:
    """The types of a target, whatever its overload: `get_aten_target` (torch/_functorch/compile_utils.py)."""
    base = target.split(".", 1)[0]
    return OpTypes(
        base in RECOMPUTABLE,
        base in FUSIBLE,
        base in VIEWS,
        base in RANDOM,
        base in COMPUTE_INTENSIVE,
        target in LIFTED,
        base == CAT,
    )
