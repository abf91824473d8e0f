"""Predictions beside what vLLM 0.19.0 printed while it started on H100 80 GB with `gpu_memory_utilization` 0.95.

Source: jgchn/llm-d-planner, accuracy/results/v0.19.0/results_raw.csv (2026), figures only: GiB rounded to two places,
tokens exact. Configs have the figures of the models' own config.json.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import pytest

from staticmem.devices.gpus import find
from staticmem.ir import dtypes
from staticmem.serving.decoder import decoder_of
from staticmem.serving.engine import Asked, Engine, Stage
from staticmem.serving.rules import rules_of
from staticmem.units import GIB, Band

HALF_A_CENT = int(0.005 * GIB)  # what rounding to two places hides


def config(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    return {"model_type": kind, **dict(zip([*names.split(), "max_position_embeddings"], sizes, strict=True)), **more}


def packed(kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


LLAMA = (4096, 14336, 32, 32, 8, 128256, 131072)
MODELS = {
    "CodeLlama-7b": config("llama", (4096, 11008, 32, 32, 32, 32016, 16384)),
    "gemma-2-9b": config("gemma2", (3584, 14336, 42, 16, 8, 256000, 8192), head_dim=256, sliding_window=4096),
    "granite-3.1-2b": config("granite", (2048, 8192, 40, 32, 8, 49155, 131072), tie_word_embeddings=True),
    "granite-3.1-8b": config("granite", (4096, 12800, 40, 32, 8, 49155, 131072), tie_word_embeddings=True),
    "Llama-3.1-8B": config("llama", LLAMA),
    "Llama-3.1-8B-w8a8": config("llama", LLAMA, quantization_config=packed("int")),
    "Llama-3.3-70B-fp8": config(
        "llama", (8192, 28672, 80, 64, 8, 128256, 131072), quantization_config=packed("float")
    ),
    "Qwen2.5-7B": config(
        "qwen2", (3584, 18944, 28, 28, 4, 152064, 32768), sliding_window=131072, use_sliding_window=False
    ),
    "Qwen2.5-72B": config(
        "qwen2", (8192, 29568, 80, 64, 8, 152064, 32768), sliding_window=131072, use_sliding_window=False
    ),
    "Qwen3-30B-A3B": config(
        "qwen3_moe", (2048, 6144, 48, 32, 4, 151936, 40960), head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip


class Reading(NamedTuple):
    """A row. `rank`: of a pipeline the stage whose weights the row has."""

    model: str
    tensor: int
    pipeline: int
    length: int
    dtype: str
    loads_as: str
    kv_dtype: str
    weights: float
    activation: float
    outside: float
    graphs: float
    tokens: int
    concurrency: float
    rank: int = 0


READINGS = [
    Reading("CodeLlama-7b", 1, 1, 8192, "bfloat16", "", "", 12.56, 0.77, 0.25, 0.89, 126256, 15.41),
    Reading("gemma-2-9b", 1, 1, 8192, "bfloat16", "", "", 17.22, 3.65, 0.25, 1.09, 168880, 20.6),
    Reading("granite-3.1-2b", 1, 1, 8192, "bfloat16", "", "", 4.74, 0.75, 0.46, 0.84, 908048, 110.85),
    Reading("granite-3.1-8b", 1, 1, 8192, "bfloat16", "", "", 15.25, 0.85, 0.46, 0.98, 384432, 46.93),
    Reading("Llama-3.1-8B", 1, 1, 8192, "bfloat16", "", "fp8", 14.99, 1.89, 0.25, 0.91, 952032, 116.21),
    Reading("Llama-3.1-8B", 1, 1, 8192, "bfloat16", "", "", 14.99, 1.89, 0.25, 0.91, 476016, 58.11),
    Reading("Llama-3.1-8B", 1, 1, 8192, "bfloat16", "fp8", "", 8.49, 1.89, 0.25, 0.87, 529248, 64.61),
    Reading("Llama-3.1-8B", 1, 1, 8192, "float16", "", "", 14.99, 1.89, 0.25, 0.91, 476016, 58.11),
    Reading("Llama-3.1-8B", 1, 1, 8192, "float32", "", "", 29.98, 2.21, 0.25, 0.79, 175296, 21.4),
    Reading("Llama-3.1-8B", 1, 1, 2048, "bfloat16", "", "", 14.99, 1.89, 0.25, 0.91, 476016, 232.43),
    Reading("Llama-3.1-8B", 1, 1, 32768, "bfloat16", "", "", 14.99, 1.89, 0.25, 0.91, 476016, 14.53),
    Reading("Llama-3.1-8B", 1, 2, 8192, "bfloat16", "", "", 7.51, 1.1, 0.07, 0.65, 1075312, 131.26),
    Reading("Llama-3.1-8B", 1, 4, 8192, "bfloat16", "", "", 3.28, 1.05, 0.07, 0.51, 2257264, 275.54, rank=1),
    Reading("Llama-3.1-8B", 2, 1, 8192, "bfloat16", "", "", 7.51, 1.89, 2.07, 0.76, 1044688, 127.53),
    Reading("Llama-3.1-8B", 4, 1, 8192, "bfloat16", "", "", 3.77, 1.89, 2.13, 0.67, 2209792, 269.75),
    Reading("Qwen2.5-7B", 1, 1, 8192, "bfloat16", "", "", 14.25, 2.21, 0.24, 0.87, 1096000, 133.79),
    Reading("Qwen2.5-7B", 2, 1, 8192, "bfloat16", "", "", 7.12, 2.21, 2.06, 0.71, 2390592, 291.82),
    Reading("Qwen2.5-72B", 2, 1, 8192, "bfloat16", "", "", 67.8, 2.29, 2.09, 1.61, 19920, 2.43),
    Reading("Qwen3-30B-A3B", 1, 1, 8192, "bfloat16", "", "", 56.88, 2.68, 0.27, 1.41, 168288, 20.54),
    Reading("Llama-3.3-70B-fp8", 2, 1, 8192, "bfloat16", "", "", 33.88, 1.96, 2.1, 1.79, 244304, 29.82),
    Reading("Llama-3.1-8B-w8a8", 1, 1, 8192, "float16", "", "", 8.49, 1.89, 0.25, 0.94, 529200, 64.6),
]


@cache
def started(row: Reading) -> Engine:
    """The engine of a row, on a card of 79.19 GiB; its host limited sequences to 1,024 and steps to 8,192 tokens."""
    rules, dtype = rules_of("vllm@0.19.0"), {"bfloat16": dtypes.bfloat16, "float16": dtypes.float16}
    kind = dtype.get(row.dtype, dtypes.float32)
    decoder = decoder_of(MODELS[row.model], row.model, rules.data, kind, row.loads_as)
    card = replace(find("h100-sxm-80gb"), usable=int(79.19 * GIB))
    tokens, sequences = rules.defaults(card)
    item = 1 if row.kv_dtype else kind.itemsize
    return Engine(
        decoder, card, rules, Asked(0.95, row.length, sequences, tokens, item, False, row.tensor, row.pipeline)
    )


def stage(row: Reading) -> Stage:
    return started(row).stages[row.rank]


def error(predicted: float, read: float) -> float:
    return abs(predicted / read - 1)


def holds(band: Band, read: float) -> bool:
    return band.low - HALF_A_CENT <= read * GIB <= band.high + HALF_A_CENT


@pytest.mark.parametrize("row", READINGS)
def test_weights_and_activations_are_read_so(row: Reading) -> None:
    assert error(stage(row).weights.expected / GIB, row.weights) <= 0.005
    assert error(stage(row).activation.expected / GIB, row.activation) <= 0.01
    assert holds(stage(row).weights, row.weights)
    assert holds(stage(row).activation, row.activation)


@pytest.mark.parametrize("row", READINGS)
def test_bands_hold_what_is_measured(row: Reading) -> None:
    assert holds(stage(row).outside, row.outside)
    assert holds(stage(row).graphs, row.graphs)
    tokens = started(row).tokens
    assert tokens.low <= row.tokens <= tokens.high
    assert error(tokens.expected, row.tokens) <= 0.03
    assert all(started(row).refusal(end) is None for end in ("low", "expected", "high"))


def test_tokens_and_concurrency_over_all_rows() -> None:
    assert median(error(started(row).tokens.expected, row.tokens) for row in READINGS) <= 0.001
    assert median(error(started(row).concurrency, row.concurrency) for row in READINGS) <= 0.001
