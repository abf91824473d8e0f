"""What a CPU build of PyTorch cannot show: kernels that only CUDA has. Figures are derived from the sources named."""

from __future__ import annotations

import our_side
import pytest
from observe import Case, Observation, b, call, f, h, i

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner
from staticmem.eager.trace import Copies
from staticmem.ir import dtypes
from staticmem.ops.attention import native_multi_head_attention
from staticmem.ops.convolution import convolution
from staticmem.ops.normalization import rms_norm
from staticmem.ops.softmax import softmax

CUDNN = f(2, 4, 5, 6), f(4), f(4), f(4).fixed, f(4).fixed


def observed(case: Case, *pattern: bool) -> Observation:
    return our_side.run(case, pattern or case.patterns()[0])


def test_cudnn_batch_norm_has_no_statistics_in_inference() -> None:
    """aten/src/ATen/native/cudnn/BatchNorm.cpp: `save_mean = at::empty({0})`."""
    seen = observed(call("aten::batch_norm", *CUDNN, False, 0.1, 1e-5, True))
    assert seen.forward == [(960, 960)]
    assert seen.saved == ["in0", "in1", "in3", "in4"]


def test_cudnn_batch_norm_copies_an_input_without_a_dense_layout() -> None:
    """Normalization.cpp, `_batch_norm_impl_index`: `input.contiguous(input.suggest_memory_format())` is saved."""
    turned = f(2, 6, 5, 4).permute(0, 3, 2, 1)
    seen = observed(call("aten::batch_norm", turned, *CUDNN[1:], True, 0.1, 1e-5, True))
    assert [nbytes for nbytes, _ in seen.forward] == [960, 960, 16, 16]
    assert seen.saved == ["in1", "in3", "in4", "new0", "new2", "new3"]
    kept = observed(call("aten::batch_norm", f(2, 4, 5, 6).channels_last, *CUDNN[1:], True, 0.1, 1e-5, True))
    assert [nbytes for nbytes, _ in kept.forward] == [960, 16, 16]


def test_cudnn_batch_norm_copies_a_gradient_of_another_layout() -> None:
    """cudnn_batch_norm_backward: `grad_output_t.contiguous(input->suggest_memory_format())`."""
    x = f(2, 4, 5, 6).channels_last
    case = call("aten::batch_norm", x, *CUDNN[1:], True, 0.1, 1e-5, True, root="contiguous")
    assert [nbytes for nbytes, _ in observed(case).backward] == [960, 960, 16, 16]
    same = call("aten::batch_norm", x, *CUDNN[1:], True, 0.1, 1e-5, True)
    assert [nbytes for nbytes, _ in observed(same).backward] == [960, 16, 16]


def test_cudnn_batch_norm_makes_all_gradients() -> None:
    """cudnn_batch_norm_backward: grad_input_t, grad_weight_t and grad_bias_t are allocated without a look at a mask."""
    case = call("aten::batch_norm", *CUDNN, True, 0.1, 1e-5, True)
    for pattern in filter(any, case.patterns()):
        assert [nbytes for nbytes, _ in observed(case, *pattern).backward] == [960, 16, 16]
    table = call("aten::batch_norm", f(3, 4), *CUDNN[1:], True, 0.1, 1e-5, True)  # no image: not cuDNN's
    assert [nbytes for nbytes, _ in observed(table, True, False, False, False, False).backward] == [48]


def test_batch_norm_statistics_are_float32_in_half_precision() -> None:
    """cuda/Normalization.cu and cudnn/BatchNorm.cpp: statistics in the accumulation type."""
    seen = observed(call("aten::batch_norm", h(2, 4, 5, 6), f(4), f(4), f(4).fixed, f(4).fixed, True, 0.1, 1e-5, True))
    assert [nbytes for nbytes, _ in seen.forward] == [480, 16, 16]


def test_convolution_answers_in_channels_last_where_input_or_weight_prefers_it() -> None:
    """ConvUtils.h, `cudnn_conv_suggest_memory_format`."""
    weight = f(6, 4, 3, 3)
    for case in (
        call("aten::conv2d", f(2, 4, 6, 7).channels_last, weight),
        call("aten::conv2d", f(2, 4, 6, 7), weight.channels_last),
    ):
        seen = observed(case)
        assert seen.outputs[0] is not None
        assert seen.outputs[0].strides == (120, 1, 30, 6)
        by_weight = seen.grads["in1"]
        assert by_weight is not None
        assert by_weight.strides == (36, 1, 12, 4)


def test_rms_norm_is_one_kernel() -> None:
    """`_fused_rms_norm`: the reciprocal root mean square is float32, one a row."""
    seen = observed(call("aten::rms_norm", h(3, 4, 5), (5,), h(5), 1e-6))
    assert [nbytes for nbytes, _ in seen.forward] == [120, 48]
    assert seen.saved == ["in0", "in1", "new1"]
    assert [nbytes for nbytes, _ in seen.backward] == [120, 10]


def test_the_maximum_of_everything_spreads_its_gradient_with_masks() -> None:
    """FunctionsManual.cpp, `evenly_distribute_backward` for CUDA inputs: NaN masks, equality, count, share, product."""
    seen = observed(call("aten::max", f(4, 3)))
    assert [nbytes for nbytes, _ in seen.backward] == [12, 1, 12, 8, 4, 48]


def test_an_lstm_is_one_node() -> None:
    """aten/src/ATen/native/cudnn/RNN.cpp: saves input, state, weights, output and the reserve."""
    state = (f(1, 2, 8), f(1, 2, 8))
    weights = (f(32, 6), f(32, 8), f(32), f(32))
    case = call("aten::lstm.input", f(5, 2, 6), state, weights, True, 1, 0.0, True, False, False)
    seen = observed(case, *(True,) * 7)
    assert [v.shape for v in seen.outputs if v is not None] == [(5, 2, 8), (1, 2, 8), (1, 2, 8)]
    reserve = 5 * 8 * 10 * 4  # four gates and a cell for each of 5 x 2 steps, in float32
    assert [nbytes for nbytes, _ in seen.forward] == [320, 64, 64, reserve]
    assert seen.saved == ["in0", "in1", "in2", "in3", "in4", "in5", "in6", "new0", "new3"]
    assert [nbytes for nbytes, _ in seen.backward] == [240, 64, 64, 768, 1024, 128, 128]


def test_a_bidirectional_gru_has_both_directions_in_its_result() -> None:
    case = call("aten::gru.input", f(5, 2, 6), f(2, 2, 8), (f(24, 6), f(24, 8)) * 2, False, 1, 0.0, True, True, False)
    seen = observed(case)
    assert seen.outputs[0] is not None
    assert seen.outputs[0].shape == (5, 2, 16)


def test_a_step_of_a_gru_is_two_products_and_a_kernel() -> None:
    """cuda/RNN.cu, `_thnn_fused_gru_cell_cuda`: a workspace of five times the state; gradients of both gates, the
    state and each bias."""
    case = call("aten::gru_cell", f(3, 4), f(3, 5), f(15, 4), f(15, 5), f(15), f(15))
    seen = observed(case)
    assert [nbytes for nbytes, _ in seen.forward] == [180, 180, 60, 300]
    fused = [nbytes for nbytes, _ in seen.backward][:5]
    assert fused == [180, 180, 60, 60, 60]
    bare = observed(call("aten::gru_cell", f(3, 4), f(3, 5), f(15, 4), f(15, 5)))
    assert [nbytes for nbytes, _ in bare.backward][:3] == [180, 180, 60]


def attention(width: int, masked: bool = False, need_weights: bool = False) -> list[int]:
    """What nn.MultiheadAttention's op makes of a batch of 2 with 5 tokens and 2 heads, in bytes."""
    e = Eager(training=False)
    e.trace.begin("forward")
    e.open_scope()
    sizes = ((2, 5, width), (3 * width, width), (3 * width,), (width, width), (width,), (5, 5))
    x, w, b, proj, bias, mask = (e.empty(shape, dtypes.float32) for shape in sizes)
    made = len(e.trace.buffers)
    native_multi_head_attention(e, x, x, x, width, 2, w, b, proj, bias, mask if masked else None, need_weights)
    return [buffer.nbytes for buffer in list(e.trace.buffers)[made:] if buffer.nbytes]


def test_fused_attention_of_inference_has_a_packed_projection() -> None:
    """cuda/attention.cu: the projection of 3 x 16, the kernel's result (with its log-sum-exp and seeds), the output."""
    row = 2 * 5 * 16 * 4
    first, second, *rest, last = attention(16)
    assert (first, second, last) == (3 * row, row, row)
    assert set(rest) <= {8, 2 * 2 * 32 * 4}


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_of_inference_without_a_fused_kernel_has_all_scores(need_weights: bool) -> None:
    """A mask, weights that are asked for, or heads of 4: two packed projections, and scores of 2 x 5 x 5."""
    row, scores = 2 * 5 * 8 * 4, 2 * 2 * 5 * 5 * 4
    mean = [2 * 5 * 5 * 4] if need_weights else []  # over the heads
    assert attention(8, need_weights=need_weights) == [3 * row, 3 * row, scores, row, row, *mean]
    assert attention(8, True, need_weights) == [3 * row, 3 * row, scores, scores, row, row, *mean]
    assert attention(16, True, need_weights).count(scores) == 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_fused_encoder_layer_of_inference(norm_first: bool) -> None:
    """transformer.cpp: norms with their statistics, attention, and a feed-forward part of 32 features."""
    row = 2 * 5 * 16 * 4
    width = (f(16).fixed,) * 2
    weights = (f(48, 16).fixed, f(48).fixed, f(16, 16).fixed, f(16).fixed)
    ffn = (f(32, 16).fixed, f(32).fixed, f(16, 32).fixed, f(16).fixed)
    case = call(
        "aten::_transformer_encoder_layer_fwd", f(2, 5, 16).fixed, 16, 2, *weights, True, norm_first, 1e-5,
        *width, *width, *ffn,
    )  # fmt: skip
    seen = observed(case)
    sizes = [nbytes for nbytes, _ in seen.forward]
    assert sizes.count(2 * row) == 1  # between the two products
    assert sizes.count(row) == 5  # two norms, attention, its projection, the last product
    assert seen.outputs[0] is not None
    assert seen.outputs[0].shape == (2, 5, 16)


def test_checks_of_an_exporter_make_nothing() -> None:
    for case in (call("aten::_assert_async", b()), call("aten::_assert_tensor_metadata", i(4))):
        assert observed(case).forward == []


def older(release: tuple[int, int]) -> tuple[Eager, list[str]]:
    """An execution state of an older PyTorch, in its forward."""
    e = Eager()
    e.torch = release
    e.trace.begin("forward")
    return e, e.trace.kernels.names


def test_softmax_saved_its_input_before_1_11() -> None:
    """https://github.com/pytorch/pytorch/pull/65242."""
    for release, count in (((1, 10), 2), ((1, 11), 1)):
        e, _ = older(release)
        scores = e.empty((4, 8), dtypes.float32)
        scores.requires_grad = True
        e.hold(scores, Owner(Reason.OUTSIDE, "scores"))
        softmax(e, scores, -1)
        assert sum(hold.kind is Reason.SAVED for hold in e.trace.holds) == count


def test_convolution_saved_a_contiguous_input_before_1_11() -> None:
    """https://github.com/pytorch/pytorch/pull/69584; since then the kernel has a copy of its own."""
    for release, copies in (((1, 10), 1), ((1, 11), 0)):
        e, names = older(release)
        frames, weight = e.empty((8, 8, 3, 2), dtypes.float32), e.empty((4, 3, 1, 1), dtypes.float32)
        weight.requires_grad = True
        for tensor in (frames, weight):
            e.hold(tensor, Owner(Reason.OUTSIDE, ""))
        image = e.alias(frames, (2, 3, 8, 8), (1, 2, 48, 6))
        out = convolution(e, image, weight, None, 1, 0, 1, False, 0, 1)
        assert names.count("aten.clone.default") == copies
        saved = {hold.buffer for hold in e.trace.holds if hold.kind is Reason.SAVED}
        assert (frames.storage.id in saved) == (copies == 0)
        taken = [read for reads in e.trace.reads.values() for read in reads if isinstance(read, Copies)]
        assert taken == ([] if copies else [Copies((image.nbytes,))])
        assert out.is_contiguous


def test_rms_norm_was_a_chain_of_ops_before_2_9() -> None:
    """https://github.com/pytorch/pytorch/pull/153666."""
    e, names = older((2, 8))
    x, weight = e.empty((4, 8), dtypes.bfloat16), e.empty((8,), dtypes.bfloat16)
    for tensor in (x, weight):
        tensor.requires_grad = True
        e.hold(tensor, Owner(Reason.OUTSIDE, ""))
    out = rms_norm(e, x, (8,), weight)
    assert out.dtype is dtypes.bfloat16
    assert [name.split(".")[1] for name in names] == "_to_copy pow mean add_ rsqrt mul _to_copy mul".split()
