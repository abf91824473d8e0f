"""Layers with the packed weights of a checkpoint: what they keep and make, worked out by hand from the sources that
`recording.packed_layers` and the rules of their products name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staticmem.child import FailedError
from staticmem.errors import StaticmemError, UsageError
from staticmem.frontends.recorded import RecordedModel
from staticmem.recording import packed_layers
from staticmem.recording.record import record
from staticmem.studies import Request, Study

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

WIDTH, ROWS = 512, 64
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


class Net(torch.nn.Module):  # type: ignore[misc]
    """Two layers in a block, and a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)])
        self.head = torch.nn.Linear(WIDTH, 8)
        self.dtype = torch.bfloat16

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks[1](self.blocks[0](x)))


def recorded(packing: dict[str, Any]) -> RecordedModel:
    with torch.device("meta"):
        net = Net().to(torch.bfloat16)
    packed, _ = packed_layers.pack(net, packing)
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="meta")
    return RecordedModel("<net>", {**record(net, (x,)), "packed": packed}, "recording")


def peak(packing: dict[str, Any], **options: Any) -> Any:
    return Study(recorded(packing), Request(mode="infer", **options))


def test_gptq_keeps_words_zero_points_scales_and_groups() -> None:
    """4 bits: 8 numbers in a word along columns; a scale and a zero point for 128 columns of each row; the group of
    each column. The head is in no block."""
    model = recorded(GPTQ)
    graph = Study(model, Request(mode="infer")).graph
    kept = {p.fqn: (p.value.dtype.name, p.value.shape, p.count) for p in graph.parameters}
    assert kept["blocks.0.qweight"] == ("int32", (WIDTH // 8, 2 * WIDTH), 2 * WIDTH * WIDTH)
    assert kept["blocks.0.qzeros"] == ("int32", (4, 2 * WIDTH // 8), 0)
    assert kept["blocks.0.scales"] == ("bfloat16", (4, 2 * WIDTH), 0)
    assert kept["blocks.0.g_idx"] == ("int32", (WIDTH,), 0)
    assert kept["blocks.1.qzeros"] == ("int32", (8, WIDTH // 8), 0)
    assert kept["head.weight"][0] == "bfloat16"
    assert sum(p.count for p in graph.parameters) == sum(p.numel() for p in Net().parameters())


def test_a_fused_product_makes_its_result_alone() -> None:
    """Marlin reads the packed weight; where it is not compiled the whole weight is there during the product."""
    fused, asymmetric = peak(GPTQ), peak({**GPTQ, "sym": False})
    assert fused.report.peak.live_bytes + 2 * WIDTH * 2 * WIDTH == asymmetric.report.peak.live_bytes
    on_card = peak(GPTQ, gpu="a100-sxm-40gb").meters.allocated
    assert on_card.high - on_card.expected >= 2 * WIDTH * 2 * WIDTH - 512


def test_only_modules_that_the_config_names_are_packed() -> None:
    graph = Study(recorded({**GPTQ, "modules_in_block_to_quantize": [["1"]]}), Request(mode="infer")).graph
    assert {p.fqn for p in graph.parameters if p.value.dtype.name == "int32"} == {
        "blocks.1.qweight", "blocks.1.qzeros", "blocks.1.g_idx",
    }  # fmt: skip


def test_adapters_beside_gptq_keep_the_whole_weight() -> None:
    """PyTorch's code multiplies by the unpacked weight, which autograd saves where the input needs a gradient."""
    step: dict[str, Any] = {"mode": "train", "optimizer": "adamw", "lora": "r=4,alpha=8,targets=0+1"}
    study = Study(recorded(GPTQ), Request(**step))
    made = [name for name in study.result.trace.kernels.names if name == "packed.dequantize"]
    assert len(made) == 1  # the input of the first layer needs none
    trained = {p.fqn for p in study.graph.parameters if p.trainable}
    assert trained == {f"blocks.{i}.lora_{half}.default.weight" for i in (0, 1) for half in "AB"}


def test_bits_and_layers_that_are_none() -> None:
    with pytest.raises(FailedError, match="16 bits"):
        recorded({**GPTQ, "bits": 16})
    with pytest.raises(FailedError, match="finds no layer"):
        recorded({**GPTQ, "modules_in_block_to_quantize": [["absent"]]})


# -- with transformers -------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 512, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 256, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1000, "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"], "dtype": "bfloat16",
}  # fmt: skip


def built(folder: Path, content: dict[str, Any], packing: dict[str, Any], options: str = "", **asked: Any) -> Study:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": packing}))
    asked = {"mode": "infer", "batch": 2, "dims": {"seq": 64}, **asked}
    return Study.open(f"transformers:{folder}{options}", Request(**asked))


def test_fp8_in_blocks(tmp_path: Path) -> None:
    """A byte a number, a float32 for 128 x 128 of them, and an output head as it was."""
    study = built(tmp_path, LLAMA, FP8)
    kept = {p.fqn: (p.value.dtype.name, p.value.shape) for p in study.graph.parameters}
    assert kept["model.layers.0.mlp.up_proj.weight"] == ("float8_e4m3fn", (512, 256))
    assert kept["model.layers.0.mlp.up_proj.weight_scale_inv"] == ("float32", (4, 2))
    assert kept["lm_head.weight"] == ("bfloat16", (1000, 256))
    (note,) = [note for note in study.report.assumptions if note.code == "SM393"]
    assert "packed by fp8" in note.text


def test_a_card_without_fp8_has_weights_whole(tmp_path: Path) -> None:
    """Below compute capability 8.9 transformers loads them whole by itself."""
    for gpu, dtypes in (("a100-sxm-40gb", {"bfloat16"}), ("h100-sxm-80gb", {"bfloat16", "float32", "float8_e4m3fn"})):
        study = built(tmp_path, LLAMA, FP8, gpu=gpu)
        assert {p.value.dtype.name for p in study.graph.parameters} == dtypes
    asked = built(tmp_path, LLAMA, FP8, quantize="none")
    assert {p.value.dtype.name for p in asked.graph.parameters} == {"bfloat16"}
    halves = built(tmp_path, LLAMA, FP8, dtype="fp16")
    assert {p.value.dtype.name for p in halves.graph.parameters} == {"float16", "float32", "float8_e4m3fn"}


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    """4 bits a number, and a byte for 32 of them."""
    study = built(tmp_path, GPT_OSS, {"quant_method": "mxfp4"})
    kept = {p.fqn: (p.value.dtype.name, p.value.shape) for p in study.graph.parameters}
    experts = "model.layers.0.mlp.experts"
    assert kept[f"{experts}.gate_up_proj"] == ("uint8", (4, 256, 128))
    assert kept[f"{experts}.gate_up_proj_scales"] == ("uint8", (4, 256, 8))
    assert kept[f"{experts}.down_proj_scales"] == ("uint8", (4, 256, 4))
    with pytest.raises(UsageError, match="packed by mxfp4") as error:
        built(tmp_path, GPT_OSS, {"quant_method": "mxfp4"}, mode="train", optimizer="adamw").result  # noqa: B018
    assert "dequantize=yes" in error.value.hint


def test_packed_weights_generate(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"mode": "generate", "prompt": 64, "new_tokens": 16, "dims": None}
    for packing in (FP8, GPTQ, {**GPTQ, "quant_method": "awq"}):
        study = built(tmp_path, LLAMA, packing, **asked)
        assert study.report.generation is not None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"mode": "train", "optimizer": "adamw"}, "training"),
        ({"compile": True}, "--compile"),
        ({"parallel": "fsdp", "devices": 2, "mode": "train", "lora": "r=8,alpha=8,targets=q_proj"}, "--parallel fsdp"),
        ({"mode": "train", "lora": "r=8,alpha=8,targets=q_proj,dora=true"}, "dora"),
    ],
)
def test_what_does_not_go_with_packed_weights(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(StaticmemError, match="packed by fp8") as error:
        built(tmp_path, LLAMA, FP8, **asked).report  # noqa: B018
    assert (error.value.code, said in error.value.what) == ("SM188", True)
