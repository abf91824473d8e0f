"""Custom ops of torchvision and transformers: sizes worked out by hand from the sources named in `rules/custom.py`."""

from __future__ import annotations

import our_side
from observe import Case, Observation, call, f, i

from staticmem.ir import dtypes

BOXES = f(6, 5).fixed


def observed(case: Case, *pattern: bool) -> Observation:
    return our_side.run(case, pattern or case.patterns()[0])


def test_roi_align_saves_boxes_only() -> None:
    seen = observed(call("torchvision::roi_align", f(2, 8, 10, 12), BOXES, 0.25, 3, 3, 2, False))
    assert seen.forward == [(6 * 8 * 9 * 4, 1728)]
    assert seen.saved == ["in1"]
    assert seen.backward == [(2 * 8 * 10 * 12 * 4, 7680)]


def test_roi_pool_saves_positions_of_maxima() -> None:
    seen = observed(call("torchvision::roi_pool", f(2, 8, 10, 12), BOXES, 0.25, 3, 3, roots=(0,)))
    assert seen.forward == [(1728, 1728), (1728, 3456)]
    assert seen.saved == ["in1", "new0"]


def test_position_sensitive_windows_share_the_channels() -> None:
    seen = observed(call("torchvision::ps_roi_align", f(2, 18, 10, 12), BOXES, 0.25, 3, 3, 2, roots=(0,)))
    assert seen.outputs[0] is not None
    assert seen.outputs[0].shape == (6, 2, 3, 3)


def test_kept_boxes_are_at_most_all() -> None:
    seen = observed(call("torchvision::nms", f(100, 4).fixed, f(100).fixed, 0.5))
    assert seen.forward == [(800, 800)]
    assert seen.outputs[0] is not None
    assert seen.outputs[0].dtype == dtypes.int64.name


def test_deformable_convolution_has_one_node_for_five_tensors() -> None:
    x, weight, bias = f(2, 4, 8, 9), f(6, 4, 3, 3), f(6)
    offset, mask = f(2, 18, 8, 9), f(2, 9, 8, 9)
    args = (1, 1, 1, 1, 1, 1, 1, 1, True)
    seen = observed(call("torchvision::deform_conv2d", x, weight, offset, mask, bias, *args))
    assert seen.outputs[0] is not None
    assert seen.outputs[0].shape == (2, 6, 8, 9)
    assert seen.saved == ["in0", "in1", "in2", "in3", "in4"]
    assert [n for n, _ in seen.backward] == [2304, 864, 10368, 5184, 24]


def test_products_of_experts_make_both_gradients_at_once() -> None:
    seen = observed(call("transformers::grouped_mm_fallback", f(10, 4), f(3, 4, 5), i(3)))
    assert seen.forward == [(200, 200)]
    assert seen.saved == ["in0", "in1"]
    assert [n for n, _ in seen.backward] == [160, 240]


def test_rows_that_torchtitan_adds_are_gathered_in_backward() -> None:
    seen = observed(call("torchtitan::deterministic_scatter_add", f(6, 4).fixed, i(10, 4), f(10, 4)))
    assert seen.forward == [(96, 96)]
    assert seen.saved == ["in1"]
    assert [n for n, _ in seen.backward] == [160]


def test_quantised_values_take_one_byte_after_a_temporary_of_four() -> None:
    """torch/ao/quantization/fx/_decomposed.py: scaled, rounded and clamped in the input's type, then converted."""
    args = (f(4, 8).fixed, 0.1, 0, 0, 255)
    seen = observed(call("quantized_decomposed::quantize_per_tensor", *args, dtype=dtypes.uint8))
    assert [n for n, _ in seen.forward] == [128, 32]
    assert seen.outputs[0] is not None
    assert seen.outputs[0].dtype == "uint8"
    back = observed(call("quantized_decomposed::dequantize_per_channel", i(4, 8), f(4).fixed, i(4)))
    assert [n for n, _ in back.forward] == [128, 128]


def test_a_weight_of_four_bits_gets_no_gradient() -> None:
    seen = observed(call("com.microsoft::MatMulNBits", f(2, 6, 32), i(48, 1, 2), f(48).fixed, columns=48))
    assert seen.forward == [(2 * 6 * 48 * 4, 2304)]
    assert seen.saved == ["in1"]
    assert seen.backward == [(2 * 6 * 32 * 4, 1536)]
