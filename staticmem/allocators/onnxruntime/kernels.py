"""Which kernels share or may reuse the buffer of an input.

Pairs are (input, output), as the kernels' registrations have them: `Alias` (the result is the input's buffer) and
`MayInplace` (it may be, where nothing else needs the input any more).
Source: KernelDefBuilder calls of onnxruntime/core/providers/cpu, onnxruntime/contrib_ops/cpu and, for CUDA,
onnxruntime/core/providers/cuda; the CPU rows were also measured op by op on onnxruntime 1.31
(tests/validate/test_ort_kernels.py). The rows of CUDA are read from the source alone.
"""

from __future__ import annotations

from collections.abc import Mapping

Pairs = tuple[tuple[int, int], ...]
Key = tuple[str, str]  # domain, op

_FIRST: Pairs = ((0, 0),)

_ALIAS_BOTH = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Optional", "OptionalGetElement")

_INPLACE_CPU = (
    "Relu", "Sigmoid", "Tanh", "Elu", "LeakyRelu", "Selu", "Softplus", "Softsign", "HardSigmoid", "ThresholdedRelu",
    "Celu", "Clip", "Softmax", "LogSoftmax", "Cast", "Scatter", "ScatterElements", "Shrink",
    "Trilu",
)  # fmt: skip

_CPU_MAY: dict[Key, Pairs] = {
    **{("", op): _FIRST for op in _INPLACE_CPU},
    ("com.microsoft", "FusedConv"): ((3, 0),),
    ("com.microsoft.nchwc", "Conv"): ((3, 0),),
}
_CPU_ALIAS: dict[Key, Pairs] = {
    **{("", op): _FIRST for op in _ALIAS_BOTH},
    ("", "BatchNormalization"): ((3, 1), (4, 2)),  # running statistics of training mode
}

ALIAS: Mapping[str, Mapping[Key, Pairs]] = {"cpu": _CPU_ALIAS, "cuda": _CPU_ALIAS}
MAY_INPLACE: Mapping[str, Mapping[Key, Pairs]] = {"cpu": _CPU_MAY, "cuda": _CPU_MAY}
