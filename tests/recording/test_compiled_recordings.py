"""Recordings as compiled code: live memory of steps, from Inductor's code of PyTorch 2.15 on fake
CUDA tensors. Adam, the loss the mean of the output, which is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.studies import Study, request_of


def step(name: str, amp: str | None = None, mode: str = "train") -> Study:
    import compiled_models as models
    import torch

    functions = {"mish": models.Mish.apply, "halved": lambda x: models.Halved.apply(torch.nn.functional.gelu(x))}
    functions["again"] = models.Again.apply
    with torch.device("meta"):
        model: Any = models.Layers(functions[name]) if name in functions else getattr(models, name)()
        sizes = {"Images": (16, 3, 64, 64), "RelativePositions": (64, 128, 256)}
        x = torch.empty(sizes.get(name, (16, 64, 512)))
    words = {"optimizer": "adam", "loss": "mean", "outputs": "dropped", "compile": True, "amp": amp}
    if mode == "infer":
        words = {"mode": mode, "outputs": "dropped", "compile": True, "amp": amp}
    return Study.open(model.train(mode == "train"), request_of(words), (x,))


def network_step(name: str, mode: str, amp: str | None) -> Study:
    import compiled_networks as networks
    import torch

    model: Any = getattr(networks, name)()
    inputs = [torch.empty(model.sizes[0])]
    inputs += [torch.zeros(size, dtype=torch.int64) for size in model.sizes[1:]]
    training = {"optimizer": "adam", "loss": "cross-entropy", "amp": amp}
    words = {"compile": True, "mode": mode, "outputs": "dropped", **(training if mode == "train" else {})}
    return Study.open(model.train(mode == "train"), request_of(words), tuple(inputs))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "amp", "measured"),
    [
        ("mish", "bf16", 171_101_184),
        ("halved", None, 191_785_984),
        ("OwnLayers", None, 84_794_368),
        ("OwnLayers", "bf16", 66_161_664),
        ("Rounded", None, 33_761_792),
        ("Images", "bf16", 86_815_744),
        ("GatedHalves", None, 114_686_976),
        ("GatedHalves", "bf16", 98_173_952),
    ],
)
def test_the_backward_of_custom_functions_is_in_the_compiled_graph(name: str, amp: str | None, measured: int) -> None:
    """What it reads of the forward is saved or computed again, as the partitioner chooses; autocast is on in it as in
    the forward; attributes of `ctx` live until the loss does."""
    study = step(name, amp)
    assert study.lifetimes.peak_bytes == measured
    assert study.result.compiled is not None
    assert study.result.compiled.graphs == 1
    assert not study.result.compiled.unpredicted


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 24_146_432), ("bf16", 15_215_104)])
def test_gradients_of_convolutions_are_copied_to_the_order_of_the_kernel(amp: str | None, measured: int) -> None:
    """`flatten(2).transpose(1, 2)` of scores: their gradient comes in channels last, and is made contiguous. Peaks are
    of Inductor's code of PyTorch 2.14.1, run without a GPU, with AdamW and the mean of the scores as loss."""
    import torch
    from several_outputs import Detector

    options = {"optimizer": "adamw", "loss": "mean", "outputs": "dropped", "compile": True, "amp": amp}
    study = Study.open(Detector().train(), request_of(options), (torch.empty(4, 3, 160, 160),))
    assert study.lifetimes.peak_bytes == measured


@pytest.mark.torch
def test_a_function_that_runs_autograd_itself_runs_eagerly() -> None:
    """The code before and behind it is compiled, and gives what its backward reads."""
    study = step("again")
    assert study.lifetimes.peak_bytes == 225_342_464
    assert study.result.compiled is not None
    assert len(study.result.compiled.unpredicted) == 4
    assert "SM204" in {note.code for note in study.result.notes}


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 239_049_728), ("bf16", 174_104_576)])
def test_a_tensor_that_is_unpacked_is_indexed(amp: str | None, measured: int) -> None:
    """`q, k, v = tensor` is one unbind in eager code; Dynamo takes three indices."""
    study = step("RelativePositions", amp)
    assert [op.target for op in study.graph.ops if op.base == "aten::unbind"] == ["aten::unbind.__iter__"] * 2
    assert study.lifetimes.peak_bytes == measured


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "amp", "mode", "measured"),
    [
        ("Recurrent", None, "train", 14_255_104),
        ("Recurrent", "bf16", "train", 18_115_584),
        ("Attends", None, "infer", 27_279_360),
    ],
)
def test_fused_kernels_of_eager_code(name: str, amp: str | None, mode: str, measured: int) -> None:
    """Compiled code calls the kernel of a GRU's cell between products, and runs attention by its parts."""
    study = step(name, amp, mode)
    assert study.lifetimes.peak_bytes == measured
    assert "SM205" not in {note.code for note in study.result.notes}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "mode", "amp", "measured"),
    [
        ("Rays", "train", None, 98_433_536),
        ("Rays", "train", "bf16", 58_437_120),
        ("Towers", "train", "bf16", 14_187_520),
        ("Routed", "train", None, 39_124_992),
        ("Enlarged", "infer", None, 124_013_568),
        ("Ranked", "infer", None, 12_185_088),
    ],
)
def test_which_loads_are_equal_decides_what_is_one_kernel(name: str, mode: str, amp: str | None, measured: int) -> None:
    """Slices of one element that are padded, sums along rows before them and after, reshapes that add dimensions of
    size 1, and elements that computed indices pick: each decides which kernels there are, which values exist, or what
    is written over."""
    assert network_step(name, mode, amp).lifetimes.peak_bytes == measured


@pytest.mark.torch
@pytest.mark.parametrize(
    ("mode", "amp", "measured"),
    [("train", None, 23_522_304), ("train", "bf16", 13_056_512), ("infer", None, 21_197_312)],
)
def test_normed_weights_are_in_the_compiled_graph(mode: str, amp: str | None, measured: int) -> None:
    """Weight norm is taken apart but for its backward; spectral norm writes its vectors with `out=`."""
    study = network_step("Waves", mode, amp)
    assert study.lifetimes.peak_bytes == measured
    assert not {"SM204", "SM205"} & {note.code for note in study.result.notes}


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 30_725_120), ("bf16", 16_448_000)])
def test_the_band_holds_ops_that_inductor_takes_apart(amp: str | None, measured: int) -> None:
    """Fourier transforms and complex numbers are one call each here, with the backward of eager code."""
    study = network_step("Filtered", "train", amp)
    assert "SM205" in {note.code for note in study.result.notes}
    band = study.report.peak.bands["live"]
    assert band.low <= measured <= band.high


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 50_767_360), ("bf16", 33_493_504)])
def test_a_sum_of_a_whole_tensor_in_parts_gives_it_a_buffer(amp: str | None, measured: int) -> None:
    """One learned factor for all elements: its gradient is a sum over a whole tensor, which Inductor writes to memory
    to know its order, and goes through in that order. Peaks are of Inductor's code of PyTorch 2.14.1."""
    assert network_step("ScaledSquares", "train", amp).lifetimes.peak_bytes == measured


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 69_617_152), ("bf16", 36_720_128)])
def test_depthwise_convolutions_copy_what_their_backward_reads(amp: str | None, measured: int) -> None:
    """In a backward the order of a weight's gradient decides in which order its operands are, and that of a depthwise
    one is no channels last. Peaks are of Inductor's code of PyTorch 2.14.1."""
    assert network_step("Depthwise", "train", amp).lifetimes.peak_bytes == measured


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 55_405_056), ("bf16", 35_899_904)])
def test_views_of_values_without_a_buffer_are_other_loads(amp: str | None, measured: int) -> None:
    """Sums over rows and over pixels of one buffer are one kernel only where their index expressions have one text.
    Peaks are of Inductor's code of PyTorch 2.14.1."""
    assert network_step("RowsAndPixels", "train", amp).lifetimes.peak_bytes == pytest.approx(measured, abs=512)


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 26_011_648), ("bf16", 16_965_632)])
def test_an_activation_in_place_writes_to_the_product_that_it_views(amp: str | None, measured: int) -> None:
    """The result of a linear layer over rows is a view of a product: the backward reads the product that was written
    to. Peaks are of Inductor's code of PyTorch 2.14.1."""
    assert network_step("ActivatedInPlace", "train", amp).lifetimes.peak_bytes == measured


@pytest.mark.torch
def test_group_norms_copy_images_in_channels_last() -> None:
    """On CUDA their input is contiguous. The peak is of Inductor's code of PyTorch 2.14.1."""
    assert network_step("GroupsOfPixels", "train", None).lifetimes.peak_bytes == 50_571_264


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 109_728_256), ("bf16", 57_297_920)])
def test_rows_that_are_written_across_are_read_in_several_loops(amp: str | None, measured: int) -> None:
    """A kernel that sums over channels and writes images with channels first does not hold a row at once: what its
    first loop computes and the next one reads is in memory. Peaks are of Inductor's code of PyTorch 2.14.1."""
    assert network_step("NormedChannels", "train", amp).lifetimes.peak_bytes == measured


@pytest.mark.torch
@pytest.mark.parametrize(("amp", "measured"), [(None, 10_376_704), ("bf16", 6_464_512)])
def test_loops_are_cut_as_those_of_a_reduction_beside_them(amp: str | None, measured: int) -> None:
    """What is computed for each element goes through its loops as a sum over rows does where that makes both one
    kernel, and is no longer one with what goes through them in the first way. Each load counts for the order of loops,
    and what stands behind a result of a row is in another loop over it. Peaks are of Inductor's code of PyTorch
    2.14.1."""
    study = network_step("NormedPixels", "train", amp)
    band = study.report.peak.bands["live"]
    assert study.lifetimes.peak_bytes == measured
    assert band.low <= measured <= band.high


@pytest.mark.torch
@pytest.mark.parametrize(
    ("dim", "amp", "measured"), [(1, None, 12_164_608), (1, "bf16", 6_892_032), (None, "bf16", 6_892_032)]
)
def test_a_weight_norm_without_kernel_is_made_of_other_ops(dim: int | None, amp: str | None, measured: int) -> None:
    """Over all dimensions, or over all but one in the middle. Peaks are of Inductor's code of PyTorch 2.14.1."""
    import compiled_networks as networks
    import torch

    options = {"optimizer": "adam", "loss": "cross-entropy", "outputs": "dropped", "compile": True, "amp": amp}
    model = networks.NormedFilters(dim).train()
    study = Study.open(model, request_of(options), (torch.empty(networks.NormedFilters.sizes[0]),))
    assert study.lifetimes.peak_bytes == measured
    assert "SM205" not in {note.code for note in study.result.notes}
