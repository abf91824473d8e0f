"""What ONNX nodes of a module say of its class: the ATen calls of a class's own `forward` have to explain them.

How the TorchScript exporter writes calls is in torch/onnx/_internal/torchscript_exporter/symbolic_opset*.py. Only nodes
that stand for few calls are here: shape arithmetic, transposes and reshapes come from anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

_POOLS = ("avg_pool2d", "_adaptive_avg_pool2d", "avg_pool1d", "avg_pool3d", "_adaptive_avg_pool3d", "mean")
_NORMS = (
    "native_layer_norm", "native_group_norm", "native_batch_norm", "rms_norm", "var", "var_mean", "std", "std_mean",
)  # fmt: skip
_MAX_POOLS = (
    "max_pool2d_with_indices", "max_pool1d", "max_pool3d_with_indices", "_adaptive_max_pool2d", "adaptive_max_pool2d",
)  # fmt: skip
_RESIZED = ("nearest1d", "nearest2d", "linear1d", "bilinear2d", "bicubic2d")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "scaled_dot_product_attention", "einsum", "sum", "mul")

# ONNX operator -> ATen calls that the exporter writes it for
EXPLAINED = {
    "Conv": ("convolution",),
    "ConvTranspose": ("convolution",),
    "BatchNormalization": ("native_batch_norm",),
    "MatMul": _PRODUCTS,
    "Gemm": _PRODUCTS,
    "Softmax": ("_softmax", "scaled_dot_product_attention", "bmm"),  # attention that was taken apart
    "Relu": ("relu",),
    "LeakyRelu": ("leaky_relu",),
    "PRelu": ("_prelu_kernel",),
    "Elu": ("elu",),
    "HardSigmoid": ("hardsigmoid", "hardswish"),
    "HardSwish": ("hardswish",),
    "Sigmoid": ("sigmoid", "silu", "glu"),
    "Erf": ("gelu", "erf"),
    "Tanh": ("tanh", "gelu", "mish"),
    "Softplus": ("softplus", "mish"),
    "MaxPool": _MAX_POOLS,
    "AveragePool": _POOLS,
    "GlobalAveragePool": _POOLS,
    "ReduceMean": (*_POOLS, *_NORMS),
    "LayerNormalization": ("native_layer_norm",),
    "InstanceNormalization": ("native_group_norm", "native_batch_norm"),
    "Resize": tuple(f"upsample_{kind}" for kind in _RESIZED),
}

# ATen call -> ONNX operators, one of which it leaves behind
LEAVES = {
    "convolution": ("Conv", "ConvTranspose"),
    "relu": ("Relu",),
    "leaky_relu": ("LeakyRelu",),
    "elu": ("Elu",),
    "silu": ("Sigmoid",),
    "sigmoid": ("Sigmoid",),
    "gelu": ("Erf", "Tanh", "Gelu"),
    "tanh": ("Tanh",),
    "hardtanh": ("Clip",),
    "hardswish": ("HardSwish", "HardSigmoid", "Clip"),
    "hardsigmoid": ("HardSigmoid", "Clip"),
    "_softmax": ("Softmax",),
    "native_layer_norm": ("LayerNormalization", "ReduceMean"),
    "native_group_norm": ("InstanceNormalization", "GroupNormalization"),
    "max_pool2d_with_indices": ("MaxPool",),
    "avg_pool2d": ("AveragePool", "GlobalAveragePool"),
    "permute": ("Transpose",),
    "cat": ("Concat",),
}

CALLS = frozenset((*LEAVES, *(call for calls in EXPLAINED.values() for call in calls)))

_SAME = {"_native_batch_norm_legit": "native_batch_norm", "cudnn_batch_norm": "native_batch_norm"}


def call_of(name: str) -> str:
    """An ATen call by the name that is used here: in place or not, and its variants, are one."""
    name = name.removeprefix("aten::").partition(".")[0]
    if name.startswith(("_scaled_dot_product", "scaled_dot_product")):
        return "scaled_dot_product_attention"
    stripped = name[:-1] if name.endswith("_") else name
    return _SAME.get(stripped, stripped)


def fits(operators: Collection[str], may: Collection[str], must: Iterable[str]) -> bool:
    """Whether a class whose `forward` may make some calls, and makes others always, fits the nodes of a module."""
    for operator in operators:
        calls = EXPLAINED.get(operator)
        if calls is not None and not any(call in may for call in calls):
            return False
    return all(call not in LEAVES or any(o in operators for o in LEAVES[call]) for call in must)


__all__ = ["CALLS", "EXPLAINED", "LEAVES", "call_of", "fits"]
