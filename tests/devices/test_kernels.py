"""The workspaces of the kernels of a real step."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from prepared import run_step

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.devices.conv import BACKWARD_DATA, BACKWARD_FILTER, FORWARD, passes_of
from staticmem.devices.kernels import KernelWorkspaces, Need, Setup
from staticmem.eager.context import Eager
from staticmem.eager.trace import Buffer, Convolution, Indices, Read, Trace
from staticmem.engine.step import StepResult
from staticmem.frontends import open_model
from staticmem.ir import dtypes
from staticmem.ir.model_file import resolve
from staticmem.ops import rules
from staticmem.ops.indexing import embedding
from staticmem.ops.scattering import index_put
from staticmem.passes.pipeline import bind
from staticmem.scenario.step import Scenario

MODELS = Path(__file__).parents[2] / "models"


@lru_cache(maxsize=4)
def step(name: str, batch: int = 16, mode: str = "train") -> StepResult:
    model = open_model(str(MODELS / name))
    optimizer = "sgd" if mode == "train" else None
    return run_step(bind(model, resolve(model, batch=batch)), Scenario(mode=mode, optimizer=optimizer))


def needs(result: StepResult, setup: Setup | None = None) -> list[tuple[str, Need]]:
    model = KernelWorkspaces(result.trace, setup)
    kernels = result.trace.kernels
    return [(kernels[k].name, need) for k in range(len(kernels)) for need in model.needs(k)]


def test_passes_of_resnet18() -> None:
    """20 convolutions: all have a forward and a weight gradient, all but the first a data gradient."""
    reads = [read for reads in step("resnet18.pt2").trace.reads.values() for read in reads]
    passes = [conv for read in reads if isinstance(read, Convolution) for conv in passes_of(read, False)]
    assert Counter(conv.direction for conv in passes) == {FORWARD: 20, BACKWARD_DATA: 19, BACKWARD_FILTER: 20}


def test_backward_takes_a_workspace_behind_each_gradient() -> None:
    result = step("resnet18.pt2")
    for name, need in needs(result, Setup("sm_80")):
        if name == "aten.convolution_backward.default":
            assert need.after in (0, 1)
            assert (
                need.what == ("cuDNN backward data" if need.after == 0 else "cuDNN backward filter") or need.after == 0
            )
        elif name == "aten.convolution.default":
            assert need.after == 0


def test_the_onnx_file_has_the_same_convolutions_as_the_export() -> None:
    found = []
    for name in ("resnet18.pt2", "resnet18.onnx"):
        result = step(name)
        model = KernelWorkspaces(result.trace)
        needs = [need for kernel in range(len(result.trace.kernels)) for need in model.needs(kernel)]
        found.append([need for need in needs if need.what.startswith("cuDNN")])
    assert found[0] == found[1]


def test_largest_workspace_of_vgg16() -> None:
    """On sm_80 both gradients of the second layer copy its input and its result: 2 x 16 x 64 x 224 x 224 x 4 bytes."""
    sizes = dict.fromkeys(("forward", "backward data", "backward filter"), 0)
    for _, need in needs(step("vgg16.pt2"), Setup("sm_80", torch="2.15")):
        if need.what.startswith("cuDNN "):
            what = need.what.removeprefix("cuDNN ")
            sizes[what] = max(sizes[what], need.band.expected)
    both = 2 * 16 * 64 * 224 * 224 * 4
    assert sizes["backward data"] == pytest.approx(both, rel=0.01)
    assert sizes["backward filter"] == pytest.approx(both, rel=0.05)  # and partial sums


def test_a_smaller_plan_is_there_for_when_memory_is_short() -> None:
    for _, need in needs(step("vgg16.pt2"), Setup("sm_80")):
        if need.what.startswith("cuDNN") and need.band.expected:
            assert need.fallbacks[-1] == 0
            assert all(size < need.band.expected for size in need.fallbacks)


def test_cublas_has_a_workspace_for_each_thread_and_keeps_it() -> None:
    gemms = [
        need for name, need in needs(step("resnet18.pt2"), Setup("sm_80")) if name.startswith(("aten.addmm", "aten.mm"))
    ]
    assert {need.keep for need in gemms if need.what == "cuBLAS workspace"} == {
        "cuBLAS, main thread", "cuBLAS, backward thread",
    }  # fmt: skip
    assert {need.band.expected for need in gemms} == {8519680}


def test_torch_2_15_keeps_none() -> None:
    gemms = [need for _, need in needs(step("resnet18.pt2"), Setup("sm_80", torch="2.15")) if "cuBLAS" in need.what]
    assert gemms
    assert all(need.keep is None for need in gemms)


def test_inference_has_forward_workspaces_only() -> None:
    whats = {need.what for _, need in needs(step("resnet18.pt2", mode="infer"), Setup("sm_80"))}
    assert "cuDNN forward" in whats
    assert not any("backward" in what for what in whats)


def test_without_tf32_and_on_older_cards_there_is_less() -> None:
    def total(setup: Setup) -> int:
        return sum(need.band.expected for _, need in needs(step("vgg16.pt2"), setup) if "cuDNN" in need.what)

    assert total(Setup("sm_80", allow_tf32=False)) < total(Setup("sm_80")) / 5
    assert total(Setup("sm_75")) < total(Setup("sm_80")) / 5


def test_columns_have_nothing_smaller_to_fall_back_to() -> None:
    model = open_model(str(MODELS / "vgg16.pt2"))
    result = run_step(
        bind(model, resolve(model, batch=2)), Scenario(mode="train", optimizer="sgd", amp=dtypes.bfloat16)
    )
    found = [need for _, need in needs(result, Setup("sm_75")) if "columns" in need.what]
    assert {need.what for need in found} >= {"columns of forward", "columns of backward filter"}
    assert all(need.fallbacks == () for need in found)


def test_bounds_enclose_the_expected() -> None:
    result = step("resnet18.pt2")
    for _, need in needs(result, Setup("sm_90")):
        assert need.band.low <= need.band.expected <= need.band.high
    totals = []
    for bound in ("low", "expected", "high"):
        model = KernelWorkspaces(result.trace, Setup("sm_90"), bound)
        totals.append(sum(w.nbytes for k in range(len(result.trace.kernels)) for w in model.workspaces(k)))
    assert totals == sorted(totals)
    with pytest.raises(ValueError, match="bound"):
        KernelWorkspaces(result.trace, bound="middle")


def test_the_allocator_takes_the_model() -> None:
    result = step("vgg16.pt2")
    bare = simulate(process_of_trace(result.trace).events)
    model = KernelWorkspaces(result.trace, Setup("sm_80"))
    events = process_of_trace(result.trace, model)
    full = simulate(events.events, fallbacks=events.fallbacks)
    assert full.peak_allocated > bare.peak_allocated


def lone(name: str, phase: str, *shapes: tuple[int, ...], reads: Read | None = None) -> KernelWorkspaces:
    """One kernel that makes buffers of these shapes."""
    rules()  # all families, as the rules that name these kernels are imported before a trace has them
    trace = Trace()
    trace.begin(phase)
    kernel = trace.kernel(name)
    for number, shape in enumerate(shapes):
        trace.buffers.append(Buffer(number, 4, shape, dtypes.float32, "temporary", "", kernel, number))
    if reads is not None:
        trace.reads[kernel] = (reads,)
    return KernelWorkspaces(trace)


def test_embedding_backward_sorts_before_it_makes_the_gradient() -> None:
    name = "aten.embedding_dense_backward.default"
    first, second = lone(name, "backward", (1000, 64), reads=Indices(16 * 512)).workspaces(0)
    assert (first.nbytes, first.after, first.held) == (4 * 8 * 8192, -2, True)
    assert (second.nbytes, second.after) == ((819 + 1000) * 64 * 4, -1)


def test_index_put_accumulates_in_backward_only() -> None:
    name = "aten.index_put.default"
    assert [w.nbytes for w in lone(name, "backward", (100, 100), reads=Indices(70)).workspaces(0)] == [4 * 8 * 70]
    assert lone(name, "forward", (100, 100), reads=Indices(70)).workspaces(0) == ()


@pytest.mark.parametrize("name", ["embedding", "index_put"])
def test_rules_say_how_many_indices_there_are(name: str) -> None:
    e = Eager()
    table, ids = e.empty((1000, 64), dtypes.float32), e.empty((16, 512), dtypes.int64)
    table.requires_grad = True
    e.trace.begin("forward")
    if name == "embedding":
        out = embedding(e, table, ids)
    else:
        out = index_put(e, table, [ids], e.empty((64,), dtypes.float32))
    e.trace.begin("backward")
    assert out.grad_fn is not None
    out.grad_fn.formulas[0].compute(e, [e.empty_like(out)], [True])
    assert e.trace.reads == {e.running: (Indices(16 * 512),)}


ROWS = 2 * 4 * 128 * 4  # bytes of a float32 for each query


@pytest.mark.parametrize(
    ("kernel", "taken"),
    [
        ("flash", [(ROWS, True), (ROWS * 64, True)]),
        # two blocks of 64 queries a head, each with a header of 16 bytes; the product is gone when its sum is there
        ("efficient", [(ROWS * 64, False), (ROWS, True), (ROWS, True), (ROWS * 64 + 2 * 4 * 2 * 16, True)]),
    ],
)
def test_attention_backward(kernel: str, taken: list[tuple[int, bool]]) -> None:
    shape = (2, 4, 128, 64)
    name = f"aten._scaled_dot_product_{kernel}_attention_backward.default"
    found = lone(name, "backward", shape, shape, shape).workspaces(0)
    assert [(w.nbytes, w.held) for w in found] == taken


def test_sums_and_copies_of_a_real_step() -> None:
    """ConvNeXt: biases of its linear layers are summed over 16 x 56 x 56 rows; its downsampling norms read permuted, so
    the first convolution, whose input is not, gets a gradient in channels_last: 16 x 96 x 56 x 56 numbers."""
    model = open_model(str(MODELS.parent / "tests" / "data" / "graphs" / "convnext_tiny.pt2"))
    result = run_step(bind(model, resolve(model, batch=16)), Scenario(mode="train", optimizer="sgd"))
    found = needs(result)
    sums = [need.band.expected for name, need in found if need.what == "partial sums" and "sum" in name]
    assert max(sums) == 138_412_032
    copies = {(name, need.band.expected) for name, need in found if need.what == "contiguous copy"}
    norms = {"aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"}
    assert {name for name, _ in copies} - norms == {"aten.convolution_backward.default"}
    assert ("aten.convolution_backward.default", 16 * 96 * 56 * 56 * 4) in copies


def test_kernels_that_take_nothing() -> None:
    assert lone("aten.relu.default", "forward", (4, 4)).workspaces(0) == ()


def test_the_search_of_benchmark_mode_runs_once_and_empties_the_cache() -> None:
    """A search for each different pass of ResNet-18 in the first step, in a buffer of at least the plan's size."""
    result = step("resnet18.pt2")
    setup = Setup("sm_80", benchmark=True)
    found = needs(result, setup)
    searches = {need.once for _, need in found if need.once is not None}
    assert searches
    model = KernelWorkspaces(result.trace, setup)
    made = process_of_trace(result.trace, model)
    ran = [origin.step for origin in made.origins if origin.what.endswith(": search")]
    assert len(ran) == len(searches) == len(made.empties)
    assert set(ran) == {1}
    replay = simulate(made.events, fallbacks=made.fallbacks)
    given_back = [event for event in replay.segment_events if event.action == "segment_free"]
    assert given_back
    assert replay.retries == 0
