"""`--quantize`: what bitsandbytes stores and makes, worked out by hand from the sources that pass and rules name."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import staticmem
from staticmem.allocators.from_trace import PACKED_LATER, loaded_packed
from staticmem.allocators.peaks import outline
from staticmem.devices.meters import process_on
from staticmem.errors import UsageError
from staticmem.studies import Request, Study

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

WIDTH, WORDS, BATCH, TOKENS = 512, 96, 4, 16
LORA = "r=8,alpha=16,targets=up+down"


@cache
def program() -> Any:
    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(WORDS, WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
            self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, ids: Any) -> Any:
            return self.head(self.down(torch.relu(self.up(self.tokens(ids)))))

    with torch.device("meta"):
        return torch.export.export(Net().train(), (torch.zeros(BATCH, TOKENS, dtype=torch.int64),), strict=False)


def analyzed(**options: Any) -> Any:
    return staticmem.analyze(program(), **options)


def stored(report: Any) -> dict[str, int]:
    return {t.name: t.bytes for t in report.alive if t.name.startswith(("up.", "down.", "head.", "tokens."))}


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


NUMBERS = 2 * WIDTH * WIDTH  # of each of the two weights
BLOCKS = NUMBERS // 64


def test_nf4_packs_two_numbers_a_byte_with_a_float_for_64_of_them() -> None:
    """QuantState of `quantize_4bit`: absmax, and a table of 16 numbers a layer. The head has the last parameter."""
    names = stored(analyzed(mode="infer", quantize="nf4", dtype="bf16"))
    assert names["up.weight"] == names["down.weight"] == NUMBERS // 2
    assert names["up.weight.absmax"] == rounded(4 * BLOCKS)
    assert names["up.weight.quant_map"] == 512
    assert names["head.weight"] == rounded(2 * WIDTH * WORDS)
    assert names["up.bias"] == rounded(2 * 2 * WIDTH)


def test_double_quantisation_has_absmax_in_bytes() -> None:
    """absmax in 8 bits, its own absmax for 256 of them, a table of 256 numbers, and the offset."""
    names = stored(analyzed(mode="infer", quantize="nf4-dq", dtype="bf16"))
    assert names["up.weight.absmax"] == rounded(BLOCKS)
    assert names["up.weight.nested_absmax"] == rounded(4 * BLOCKS // 256)
    assert (names["up.weight.nested_quant_map"], names["up.weight.offset"]) == (1024, 512)


def test_int8_has_a_scale_for_each_row() -> None:
    names = stored(analyzed(mode="infer", quantize="int8", dtype="fp16"))
    assert (names["up.weight"], names["up.weight.SCB"]) == (NUMBERS, rounded(4 * 2 * WIDTH))


def kernels(name: str, **options: Any) -> list[str]:
    """The phases in which a kernel runs, in order."""
    trace = Study.open(program(), Request(**options)).result.trace
    return [kernel.phase for kernel in trace.kernels if kernel.name == f"bitsandbytes.{name}.default"]


@pytest.mark.parametrize("kind", ["nf4", "nf4-dq", "int8"])
def test_weights_are_on_the_device_in_16_bits_before_they_are_packed(kind: str) -> None:
    """bitsandbytes/nn/modules.py: `Params4bit._quantize` and `Int8Params.cuda` move it to the GPU and pack it there."""
    study = Study.open(program(), Request(mode="infer", quantize=kind, dtype="fp16", gpu="a100-sxm-40gb"))
    process = process_on(study.result, study.device)
    names = study.result.trace.buffers.names
    moments = [id for id, what in process.origins.whats.items() if what == PACKED_LATER]
    assert [process.sizes[id] for id in moments] == [2 * NUMBERS, 2 * NUMBERS]
    calls = list(process.calls)
    for id, name in zip(moments, ("up.weight", "down.weight"), strict=True):
        assert names[process.origins[calls[calls.index(~id) - 1]].buffer] == name  # the weight is packed, then it goes
        statistics = [at for at in calls[: calls.index(id)] if names[process.origins[at].buffer].startswith(f"{name}.")]
        assert not statistics
    packed = loaded_packed(process)
    assert [call for call in calls if call not in moments and ~call not in moments] == list(packed.calls)
    ends = outline(packed.calls, packed.sizes)
    assert study.meters.allocated.low <= ends.peak_allocated <= study.meters.allocated.high
    assert study.meters.reserved.low <= ends.peak_reserved <= study.meters.reserved.high
    assert any(note.code == "SM211" for note in study.report.assumptions)


def test_products_make_the_weight_in_forward_and_in_backward() -> None:
    """The first layer's input needs no gradient, as the table before it is frozen: its weight is not made again."""
    options = {"mode": "train", "quantize": "nf4", "dtype": "bf16", "lora": LORA}
    assert kernels("dequantize_4bit", **options) == ["forward", "forward", "backward"]
    assert kernels("dequantize_blockwise", **options) == []
    doubled = kernels("dequantize_blockwise", **{**options, "quantize": "nf4-dq"})
    assert doubled == ["forward", "forward", "backward"]


def test_adapters_stand_beside_packed_weights() -> None:
    """float32 adapters, bf16 tables and biases, packed weights."""
    report = analyzed(mode="train", quantize="nf4", dtype="bf16", lora=LORA)
    assert report.parameters.trainable_count == 2 * 8 * 3 * WIDTH
    assert set(report.parameters.by_dtype) == {"bfloat16", "float32", "uint8"}


def kept_on_ctx(**options: Any) -> set[int]:
    """Bytes of the activations that nodes hold as attributes of `ctx` at the peak."""
    report = analyzed(mode="train", dtype="fp16", lora="r=8,targets=up", **options)
    return {t.bytes for t in report.alive if "attributes of ctx" in " ".join(t.why)}


INPUT_OF_DOWN = BATCH * TOKENS * 2 * WIDTH * 2  # 64 rows of 1,024 numbers; that of `up` needs no gradient


def test_int8_layers_keep_their_input_on_ctx_and_four_bit_ones_do_not() -> None:
    """MatMul8bitLt: `ctx.tensors = (CAt, subA, A)`."""
    assert INPUT_OF_DOWN in kept_on_ctx(quantize="int8")
    assert not kept_on_ctx(quantize="nf4")


def test_checkpoints_free_no_input_of_an_int8_layer() -> None:
    """Hooks of saved tensors do not see attributes of `ctx`."""
    assert INPUT_OF_DOWN in kept_on_ctx(quantize="int8", checkpoint=("up", "down"))


def test_inputs_of_int8_layers_live_until_the_next_loss() -> None:
    """The loss of the step before is a variable that has its graph, as far as the loss of this one."""
    request = Request(mode="train", dtype="fp16", lora="r=8,targets=up", quantize="int8")
    trace = Study.open(program(), request).result.trace
    buffers, phases = trace.buffers, dict(trace.phases)
    before = [k for k, name in enumerate(buffers.names) if "attributes of ctx" in name]
    assert [buffers.nbytes[k] for k in before] == [INPUT_OF_DOWN]
    assert all(phases["forward"] < buffers.died[k] <= phases["backward"] for k in before)


def test_weights_of_four_bits_count_with_their_numbers() -> None:
    plain, packed = (analyzed(mode="infer", dtype="bf16", **kw).parameters for kw in ({}, {"quantize": "nf4"}))
    assert packed.count == plain.count
    assert plain.bytes - packed.bytes == 2 * NUMBERS * 3 // 2
    assert packed.by_dtype["uint8"].count == 2 * NUMBERS


def test_prepared_models_are_in_float32_but_for_products() -> None:
    plain = analyzed(mode="train", quantize="nf4", dtype="bf16", lora=LORA)
    prepared = analyzed(mode="train", quantize="nf4", dtype="bf16", lora=LORA, kbit_training=True)
    assert stored(prepared)["head.weight"] == 2 * stored(plain)["head.weight"]
    assert stored(prepared)["up.bias"] == stored(plain)["up.bias"]
    assert prepared.peak.live_bytes > plain.peak.live_bytes


WRONG: dict[str, dict[str, Any]] = {
    "weights without adapters": {"mode": "train", "quantize": "nf4"},
    "prepared without quantised weights": {"mode": "train", "kbit_training": True},
    "divided weights": {"mode": "infer", "quantize": "nf4", "parallel": "zero3", "devices": 2},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_refused(case: str) -> None:
    with pytest.raises(UsageError) as error:
        analyzed(**WRONG[case])
    assert error.value.code == "SM188"
    assert error.value.hint
