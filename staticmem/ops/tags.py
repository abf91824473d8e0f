"""What PyTorch says of its own ops, and the sets of ops that its stages name.

`tagged("pointwise")` has the targets without overload of ATen ops whose native function has that tag. `tags.json` has
them, from PyTorch itself (`scripts/releases/op_tags.py`); it is read when the first tag is asked for. A set that
differs from a tag on purpose is a tag and a named difference here, with its reason. What an op is to the rules is its
kind (`ops.registry`): a family says that of its ops.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Literal

from staticmem.ops.registry import in_place

Tag = Literal[
    "core",  # of the Core ATen set
    "data_dependent_output",  # its result is a number that is in the data
    "dynamic_output_shape",  # sizes of its result are in the data
    "inplace_view",  # changes sizes or strides of its input
    "nondeterministic_seeded",  # draws random numbers
    "pointwise",  # computes each element by itself
    "reduction",
    "view",  # no tag: a result shares memory with an argument, by the schema
    "view_copy",  # a view whose result is copied
]


@lru_cache(maxsize=1)
def _read_tags() -> dict[str, str]:
    tags: dict[str, str] = json.loads(Path(__file__).with_name("tags.json").read_text(encoding="utf-8"))
    return tags


@lru_cache(maxsize=16)
def tagged(tag: Tag) -> frozenset[str]:
    """ATen ops an overload of which has the tag, those in place too: `"aten::mul" in tagged("pointwise")`."""
    return aten(_read_tags()[tag])


def aten(names: str) -> frozenset[str]:
    """Targets of ATen ops by their names."""
    return frozenset([f"aten::{name}" for name in names.split()])


def _functional(tag: Tag) -> frozenset[str]:
    """Of a tag what graphs of `torch.compile` can have calls of: they have none in place."""
    return frozenset([base for base in tagged(tag) if not in_place(base)])


# -- sizes in the data -------------------------------------------------------------------------------------------------

# Sizes of the result are in the data: a recording says the size, and an export has a symbol for it. Of the tag
# `dynamic_output_shape` what else there is has its size by an argument in most calls (`one_hot`), or is a composite of
# these (`repeat_interleave`), or what none of them calls.
FOUND = aten("nonzero_numpy") | {"torchvision::nms"}  # these have no tag, and as many results as the data have
DATA_SIZED = aten("nonzero argwhere masked_select index _unique2 unique_dim unique_consecutive bincount")


@lru_cache(maxsize=1)
def graph_breaks() -> frozenset[str]:
    """At which Dynamo ends a graph, whatever the arguments: `index` has sizes in the data where it reads a mask. Older
    and composite names of the same ops are in exports."""
    named = aten("is_nonzero unique _unique") | FOUND
    return DATA_SIZED - {"aten::index"} | tagged("data_dependent_output") | named


# -- the partitioner of AOTAutograd ------------------------------------------------------------------------------------
# `get_default_op_list` of torch/_functorch/partitioners.py (2.15; 2.13 has the same lists)


def partitioner_pointwise() -> frozenset[str]:
    """`pointwise_ops`."""
    return _functional("pointwise")


PARTITIONER_VIEWS = aten("alias as_strided expand permute select slice split squeeze t unsqueeze view") | {
    "prims::broadcast_in_dim"
}
# Its casts, tensors made of sizes alone, reductions and indexing
PARTITIONER_OTHERS = aten(
    "__and__ __or__ _grad_sum_to_size _to_copy _unsafe_view amax any arange argmax broadcast_tensors empty empty_like "
    "full full_like gather index lift_fresh_copy mean new_zeros ones reshape scalar_tensor std sum sum_to_size to triu "
    "type_as var var_mean zeros zeros_like"
) | {
    "prims::_low_memory_max_pool_offsets_to_indices",
    "prims::convert_element_type",
    "prims::div",
    "prims::iota",
    "prims::prepare_softmax_online",
    "prims::sum",
    "prims::var",
}
PARTITIONER_RANDOM = aten("native_dropout rand_like randn_like")
PARTITIONER_COMPUTE_INTENSIVE = aten(
    "_efficient_attention_forward _flash_attention_forward _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention _scaled_mm addmm bmm convolution convolution_backward mm upsample_bilinear2d"
)
# Their results share the storage of the first argument; the partitioner need not know them all as views. `copy_` is the
# one call in place that its graphs have, and `_unsafe_view` a view that the schema does not say.
PARTITIONER_ALIASES = PARTITIONER_VIEWS | aten(
    "_conj _neg_view _unsafe_view copy_ detach diagonal lift_fresh split_with_sizes unbind unfold view_as_complex "
    "view_as_real"
)


def never_merged() -> frozenset[str]:
    """What `fx_graph_cse` (torch/_functorch/compile_utils.py) never merges: `rand_ops` and `aten.empty`, and with them
    what `is_impure` (torch/_library/utils.py) finds: ops that write, and those tagged as random."""
    prims = "inductor_rand_eager_offset inductor_rand_eager_offsets inductor_seed inductor_seeds normal uniform"
    random = _functional("nondeterministic_seeded") | {f"prims::{name}" for name in prims.split()}
    return random | aten("copy_ empty")


# -- views in the graphs of torch.compile ------------------------------------------------------------------------------

# Views of one tensor that a trace of AOTAutograd has calls of: it has `as_strided` and the like in place of others
TRACED_VIEWS = aten("alias as_strided diagonal expand permute select slice squeeze t transpose unsqueeze view")
# `view_op_packets` of torch/_inductor/constant_folding.py: the element that is known may not be in a part of the tensor
UNIFORM_VIEWS = TRACED_VIEWS - aten("diagonal select transpose") | {"prims::broadcast_in_dim"}
# `is_view` of Inductor is by the schema; these are what its graphs have, and `_unsafe_view`, which its lowering views
LOWERED_VIEWS = TRACED_VIEWS | aten("_unsafe_view detach reshape split split_with_sizes unbind")


# -- elementwise calls of Inductor -------------------------------------------------------------------------------------

# Tagged, and no call that elementwise code is seen to end in: those of `special_` are calls of ATen here, and so are
# functions without a trace; `max` and `min` name reductions too, and those of two tensors are traced as `maximum` and
# `minimum`; composite ones are traced as the calls that they are made of.
_NOT_ELEMENTWISE = aten(
    "__ilshift__ __ixor__ _conj_physical angle clip conj_physical equal float_power frexp gcd hardshrink isneginf "
    "isposinf lcm logaddexp2 logit logit_backward max min mvlgamma positive relu6 rrelu sinc softshrink"
)
# Elementwise, and without the tag in native_functions.yaml
_ALSO_ELEMENTWISE = aten("__and__ __or__ _to_copy hardswish")


@lru_cache(maxsize=1)
def inductor_pointwise() -> frozenset[str]:
    """What Inductor's passes take for elementwise (`torch.Tag.pointwise in target.tags`)."""
    special = {base for base in tagged("pointwise") if base.startswith("aten::special_")}
    return _functional("pointwise") - special - _NOT_ELEMENTWISE | _ALSO_ELEMENTWISE | {"prims::convert_element_type"}


def plain_pointwise() -> frozenset[str]:
    """Of these what has the plain lowering, one call of `ops` for each tensor argument less one and one for each
    number: all but copies and three whose backward counts otherwise; and functions that passes do not look through."""
    copies = aten("_to_copy clone") | {"prims::convert_element_type"}
    counted_apart = aten("gelu_backward native_dropout_backward silu_backward")
    functions = aten("exponential special_erf special_erfcx special_i0e special_i1 special_i1e special_ndtri zeta")
    prims = "convert_element_type div fma mul add sub maximum minimum exp where frexp_mantissa"
    return inductor_pointwise() - copies - counted_apart | functions | {f"prims::{name}" for name in prims.split()}


# Constants that are computed where they are read
CHEAP_CONSTANTS = aten("full zeros ones full_like zeros_like ones_like new_full new_zeros new_ones scalar_tensor")
# `ops_like_padding` of torch/_inductor/graph.py (`mark_nodes_dislike_padding`)
LIKE_PADDING = aten("var_mean sum mean prod any amin amax min max argmin argmax scatter_reduce")
# `needs_realized_inputs` of torch/_inductor/lowering.py; every fallback belongs to it too
NEED_REALIZED = aten(
    "as_strided as_strided_copy avg_pool2d avg_pool2d_backward bmm convolution convolution_backward "
    "max_pool2d_with_indices max_pool3d_with_indices max_pool2d_with_indices_backward mm upsample_nearest2d "
    "_upsample_nearest_exact2d _int_mm"
)
# What Inductor makes one call of, in the backward too: `make_fallback` there, and what has neither a lowering nor a
# decomposition
LEFT_TO_ATEN = aten(
    "_embedding_bag embedding_bag adaptive_max_pool3d cdist histc multinomial _transformer_encoder_layer_fwd"
)
SIZED_BY_NUMBERS = aten("view expand full")  # of those in patterns of attention; their numbers differ between places
