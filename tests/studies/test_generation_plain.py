"""Files of torch.export without a recording: what transformers' own functions hold is known, which no trace shows."""

from collections.abc import Callable
from typing import Any

import pytest

import staticmem

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

pytestmark = pytest.mark.torch
SIZES: dict[str, Any] = {"vocab_size": 100, "max_position_embeddings": 2048}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        **SIZES,
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=128, n_layer=2, n_head=8, n_positions=2048, vocab_size=100),
}


class Decoder(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids, use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_export_has_the_peaks_of_a_recording(name: str) -> None:
    """Keys and values that are repeated, and the weights that the attention returns, live as long as their variables:
    with both caches, and without generation, where the mask has the rows of the batch."""
    model, ids = Decoder(MODELS[name]()).to(torch.bfloat16).eval(), torch.zeros(2, 16, dtype=torch.long)
    auto = torch.export.Dim.AUTO
    plain = torch.export.export(model, (ids,), dynamic_shapes=((auto, auto),), strict=False)
    for cache in ("dynamic", "static"):
        asked: dict[str, Any] = {"mode": "generate", "batch": 3, "prompt": 300, "new_tokens": 40, "cache": cache}
        figures = [staticmem.analyze(plain, **asked), staticmem.analyze(model, (ids,), **asked)]
        assert len({report.peak.live_bytes for report in figures}) == 1, cache
        assert figures[0].peak.phase == "prefill"
    sizes = [str(dim) for dim in plain.graph_module.graph.find_nodes(op="placeholder")[-1].meta["val"].shape]
    inference = [
        staticmem.analyze(plain, mode="infer", dims={sizes[0]: 3, sizes[1]: 300}),
        staticmem.analyze(model, (torch.zeros(3, 300, dtype=torch.long),), mode="infer"),
    ]
    assert len({report.peak.live_bytes for report in inference}) == 1


def test_blocks_of_a_cache_that_has_grown_may_be_larger_than_its_tensors() -> None:
    """Keys and values of two layers, 1.6 MiB each: what is left of a block below 1 MiB stays with it. A static cache is
    allocated once."""
    model, ids = Decoder(MODELS["llama"]()).to(torch.bfloat16).eval(), torch.zeros(2, 16, dtype=torch.long)
    asked: dict[str, Any] = {"mode": "generate", "batch": 64, "prompt": 8, "new_tokens": 392, "gpu": "a100-sxm-80gb"}
    over = {}
    for cache in ("dynamic", "static"):
        peak = staticmem.analyze(model, (ids,), **asked, cache=cache).peak
        assert peak.allocated_bytes is not None
        over[cache] = peak.bands["allocated"].high - peak.allocated_bytes
        assert peak.phase == "decode" or cache == "static"
    rest = 2 * 2 * (2**20 - 512)
    assert over["static"] < rest <= over["dynamic"]
