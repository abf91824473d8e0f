"""All cases, and the rules that none covers, each with its reason."""

from __future__ import annotations

import cases_elementary
import cases_fourier
import cases_indexing
import cases_layers
import cases_linear
import cases_losses
import cases_more
import cases_pointwise
import cases_programs
import cases_reduction
import cases_views

CASES = [
    *cases_pointwise.CASES,
    *cases_views.CASES,
    *cases_linear.CASES,
    *cases_reduction.CASES,
    *cases_indexing.CASES,
    *cases_layers.CASES,
    *cases_programs.CASES,
    *cases_more.CASES,
    *cases_elementary.CASES,
    *cases_fourier.CASES,
    *cases_losses.CASES,
]
_CHECK = "a check of the exporter: returns nothing"
_RESERVE = "only cuDNN runs it as one node, and only cuDNN knows its reserve"
_FUSED = "fused inference kernels without a fake implementation: tests/ops/test_cuda_only.py"
_DATA = "its size is in the data, which fake tensors lack: tests/ops/test_dynamic.py"
_CUSTOM = "a custom op of another library: tests/ops/test_custom_ops.py"
_INTEGERS = (
    "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QLinearAdd", "QLinearMul",
    "QLinearWhere", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearReduceMean",
    "QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "QAttention",
)  # fmt: skip
_DYNAMIC = (
    "nonzero", "argwhere", "nonzero_static", "nonzero_numpy", "masked_select", "_unique2", "_unique", "bincount",
    "unique_consecutive", "unique_dim",
)  # fmt: skip
_LIBRARIES = (
    "torchvision::nms", "torchvision::roi_align", "torchvision::roi_pool", "torchvision::ps_roi_align",
    "torchvision::ps_roi_pool", "torchvision::deform_conv2d", "transformers::grouped_mm_fallback",
    "torchtitan::deterministic_scatter_add", "com.microsoft::MatMulNBits", "quantized_decomposed::quantize_per_tensor",
    "quantized_decomposed::quantize_per_channel", "quantized_decomposed::quantize_per_channel_group",
    "quantized_decomposed::quantize_per_token", "quantized_decomposed::dequantize_per_tensor",
    "quantized_decomposed::dequantize_per_channel", "quantized_decomposed::dequantize_per_channel_group",
    "quantized_decomposed::dequantize_per_token", "quantized_decomposed::choose_qparams",
    "quantized_decomposed::choose_qparams_symmetric",
)  # fmt: skip
UNCOVERED: dict[str, str] = {
    "aten::gru_cell": "CUDA's fused kernel has no fake implementation: tests/ops/test_cuda_only.py",
    **{f"aten::{name}": _DATA for name in _DYNAMIC},
    **dict.fromkeys(_LIBRARIES, _CUSTOM),
    **{f"onnx::{name}": "an ONNX operator: tests/frontends/test_onnx_converters.py" for name in _INTEGERS},
    "onnx::DynamicQuantizeLSTM": "an ONNX operator: tests/frontends/test_onnx_contrib_sizes.py",
    "bitsandbytes::linear_4bit": "an op of bitsandbytes: tests/passes/requested/test_quantized_weights.py",
    "bitsandbytes::linear_8bit": "an op of bitsandbytes: tests/passes/requested/test_quantized_weights.py",
    "packed::linear": "an op that recordings write: tests/recording/test_packed_layers.py",
    "packed::experts": "an op that recordings write: tests/recording/test_packed_layers.py",
    "packed::grouped": "an op that recordings write: tests/recording/test_packed_layers.py",
    "inplace_abn::inplace_abn_": "an op of an extension: tests/passes/requested/test_inplace_abn.py",
    "torchao::linear_int8": "a layer of torchao: tests/passes/requested/test_weight_only.py",
    "torchao::linear_int4": "a layer of torchao: tests/passes/requested/test_weight_only.py",
    **{
        f"staticmem::{name}": "what a rank runs for its experts: tests/parallel/test_experts.py"
        for name in ("all_to_all", "exchanged_counts", "order_by_expert")
    },
    "staticmem::ring_attention": "attention of a rank, on CUDA alone: tests/parallel/test_context.py",
    "staticmem::cpu_tensor": "no op of PyTorch: tests/recording/test_recorded_code.py",
    "staticmem::own_backward": "stands for a custom autograd function: tests/passes/restoring/test_custom_functions.py",
    **{
        f"staticmem::{name}": "a call of generate that no single ATen call is: tests/studies/test_generation.py"
        for name in ("cache", "packed_queries", "next_token_logits")
    },
    "aten::item": "a number on the host: returns no tensor",
    "aten::_local_scalar_dense": "a number on the host: returns no tensor",
    "aten::_assert_async": _CHECK,
    "aten::_assert_scalar": _CHECK,
    "aten::_assert_tensor_metadata": _CHECK,
    "aten::sym_constrain_range": _CHECK,
    "aten::sym_constrain_range_for_size": _CHECK,
    "aten::float": "not an ATen op; some converters write it",
    "aten::to_copy": "not an ATen op; some converters write it",
    "prims::convert_element_type": "appears after decomposition only; the same function as aten::_to_copy",
    "aten::normal": "its overloads with tensors for mean and std have no fake kernel",
    "aten::rms_norm": "one fused kernel on CUDA, composed in a CPU build",
    "aten::scaled_dot_product_attention": "the choice of kernel needs a CUDA build: tests of its own",
    "aten::lstm.input": _RESERVE,
    "aten::gru.input": _RESERVE,
    "aten::rnn_tanh.input": _RESERVE,
    "aten::rnn_relu.input": _RESERVE,
    "aten::_native_multi_head_attention": _FUSED,
    "aten::_transformer_encoder_layer_fwd": _FUSED,
}
