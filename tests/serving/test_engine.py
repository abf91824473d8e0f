"""A serving engine's parts, worked out by hand, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.devices.gpus import find
from staticmem.errors import ModelFileError, StaticmemError, UsageError
from staticmem.ir import dtypes
from staticmem.report.schema import schema
from staticmem.scenario.request import Request
from staticmem.serving.cache import cache_of
from staticmem.serving.decoder import Decoder, decoder_of
from staticmem.serving.fit import script, serve_fit
from staticmem.serving.packing import packed_of
from staticmem.serving.profile_run import Run, profiled
from staticmem.serving.report import ServeReport
from staticmem.serving.rules import rules_of
from staticmem.serving.weights import Padding, shares, tensors
from staticmem.units import GIB, MIB

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "models" / "llama-3.1-8b.json")
PAGE = ROOT / "docs" / "how-to" / "serve.md"
SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip


def decoder(**more: Any) -> Decoder:
    return decoder_of({**SMALL, **more}, "config.json", rules_of("vllm").data, dtypes.bfloat16, "")


def test_tensors_of_two_ranks_by_hand() -> None:
    """Vocabulary 100 becomes 128, 64 a rank. Of four ranks each has a copy of one of two heads of keys."""
    (half,) = shares(3, 2, 1)
    sizes = {tensor.module: tensor.nbytes for tensor in tensors(decoder(), half, Padding(64))}
    assert sizes["embed_tokens"] == sizes["lm_head"] == 64 * 64 * 2
    assert sizes["layers.0.self_attn.qkv_proj"] == (4 * 8 + 2 * 1 * 8) * 64 * 2
    assert sizes["layers.0.self_attn.o_proj"] == 64 * 32 * 2
    assert sizes["layers.2.mlp.gate_up_proj"] == 2 * 48 * 64 * 2
    assert sizes["layers.0.self_attn.rotary_emb"] == 128 * 8 * 2
    assert "layers.1.self_attn.rotary_emb" not in sizes
    (quarter,) = shares(3, 4, 1)
    sizes = {tensor.module: tensor.nbytes for tensor in tensors(decoder(), quarter, Padding(64))}
    assert sizes["layers.0.self_attn.qkv_proj"] == (2 * 8 + 2 * 1 * 8) * 64 * 2


def test_parameters_are_those_of_the_model() -> None:
    """Llama 3.1 8B has 8,030,261,248 parameters (its card); beside them are a table of positions and four scales of
    each attention."""
    content = json.loads(Path(LLAMA).read_text())
    whole = decoder_of(content, LLAMA, rules_of("vllm").data, None, "")
    (one,) = shares(32, 1, 1)
    total = sum(tensor.nbytes for tensor in tensors(whole, one, Padding(64)))
    assert total == 2 * 8_030_261_248 + 131072 * 128 * 2 + 32 * 4 * 4


@pytest.mark.parametrize(
    ("more", "longest", "usual", "tables"),
    [
        ({}, 128, 128, (128,)),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 128, 128, (128,)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128, 128, (128,)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 512, 512, (512,)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 256, 256, (256,)),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 32}, 128, 32, (160,)),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 128, 128, (1024, 128)),
    ],
)
def test_positions_that_are_scaled(more: dict[str, Any], longest: int, usual: int, tables: tuple[int, ...]) -> None:
    one = decoder(**more)
    assert (one.positions, one.usual, one.tables) == (longest, usual, tables)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(32, 4, (8, 8, 8, 8)), (42, 4, (10, 11, 11, 10)), (9, 2, (5, 4))]
)
def test_layers_of_stages(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    """get_pp_indices: what is left over goes to the stages before the last."""
    divided = shares(layers, 1, stages)
    assert tuple(one.last - one.first for one in divided) == counts
    assert [one.embeds for one in divided] == [stage == 0 for stage in range(stages)]
    assert [one.answers for one in divided] == [stage == stages - 1 for stage in range(stages)]


def test_the_sampler_by_hand() -> None:
    """With a card's 4 processors, 8 sequences and a vocabulary of 1,048,576: logits of 16 MiB, three times 32 MiB in
    float32, 16 MiB of rows of the kernel, 8 MiB of cuBLAS; states are below 512 KiB."""
    large = decoder(vocab_size=2**20)
    (one,) = shares(3, 1, 1)
    run = Run(8, 8, False, 8 * MIB, 0, 4, 2**20)
    peaks = profiled(large, one, [1024], run)
    small = 3 * 1024 + 512  # of 8 tokens: the forward's result, the last states, noise
    assert peaks.activation - (16 + 3 * 32 + 16 + 8) * MIB in range(small + 1)
    assert peaks.phase.value == "the sampler"


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((0,) * 6, [(0, 1, 2, 3, 4, 5)]),
        ((8, 0) * 3, [(0, 2, 4), (1, 3, 5)]),
        ((8, 8, 0) * 2, [(0, 3), (1, 4), (2, 5)]),  # two of full attention: four others are two groups
        ((8,) * 5 + (0,) * 4, [(0, 1, 2, 3, 4), (5, 6, 7, 8)]),  # nearly as many: one group of each
    ],
)
def test_groups_of_layers(windows: tuple[int, ...], groups: list[tuple[int, ...]]) -> None:
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    one = decoder(num_hidden_layers=len(windows), layer_types=kinds, sliding_window=8)
    listed = [group.layers for group in cache_of(one, 1, 2, 16).groups]
    assert sorted(listed, key=lambda layers: layers[0]) == sorted(groups, key=lambda layers: layers[0])


def test_blocks_of_a_request_with_windows() -> None:
    """Gemma 2 9B as vLLM 0.19 reported it: of 21,110 blocks 168,880 tokens, 20.6 requests of 8,192: 512 blocks of
    full attention and 513 of windows of 4,096, while 8,192 tokens are worked on."""
    kinds = ["sliding_attention", "full_attention"] * 21
    one = cache_of(decoder(num_hidden_layers=42, layer_types=kinds, sliding_window=4096), 1, 2, 16)
    assert one.blocks_of_request(8192, 8192) == 1025
    assert one.tokens(21110) == 168880
    assert round(one.concurrency(21110, 8192, 8192), 1) == 20.6
    assert one.longest(1025, 8192, 9000) == 8192


@pytest.mark.parametrize(
    ("packing", "nbytes"),
    [
        ({}, [128 * 256 * 2]),
        ({"quant_method": "fp8"}, [128 * 256, 4]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, [128 * 256, 2 * 4]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, [128 * 128, 128 * 2 * 2]),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, [128 * 128, 128 * 2 * 2, 128]),
    ],
)
def test_packed_weights_by_hand(packing: dict[str, Any], nbytes: list[int]) -> None:
    packed = packed_of({"quantization_config": packing}, "config.json", "")
    assert list(packed.tensors(128, 256, dtypes.bfloat16)) == nbytes


def serve(**options: Any) -> ServeReport:
    return staticmem.serve(LLAMA, options.pop("gpu", "h100"), **options)


def test_what_is_left_is_the_cache() -> None:
    one = serve(max_len=8192).serve
    taken = one.weights_bytes + one.activation_bytes + one.non_torch_bytes
    assert one.kv_cache_bytes == one.requested_bytes - taken
    assert one.kv_cache_blocks == one.kv_cache_bytes // one.block_bytes
    assert one.block_bytes == 2 * 16 * 8 * 128 * 2 * 32
    assert one.kv_cache_tokens == 16 * one.kv_cache_blocks
    assert one.max_concurrency == round(one.kv_cache_tokens / 8192, 2)


def test_a_length_that_starts_is_the_longest() -> None:
    """Both sides of the limit that the report names."""
    refused = serve(gpu="l4")
    assert not refused.serve.starts
    longest = refused.serve.largest_max_len
    assert refused.serve.change == f"--max-len {longest}"
    assert f"model length is {longest}." in refused.serve.message
    assert serve(gpu="l4", max_len=longest).serve.starts
    assert not serve(gpu="l4", max_len=longest + 1).serve.starts


def test_the_most_sequences_that_start() -> None:
    most = serve(gpu="l4", max_len=8192, max_batched_tokens=16384).serve.largest_max_seqs
    assert serve(gpu="l4", max_len=8192, max_batched_tokens=16384, max_seqs=most).serve.starts
    assert not serve(gpu="l4", max_len=8192, max_batched_tokens=16384, max_seqs=most + 1).serve.starts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_len": 200000}, "greater than the derived max_model_len (131072)"),
        ({"max_seqs": 64, "max_batched_tokens": 32}, "must be greater than or equal to max_num_seqs (64)"),
        ({"utilization": 0.999}, "is less than desired GPU memory utilization"),
        ({"gpu": "12GB"}, "while weights are loaded"),
        ({"gpu": "16GB"}, "in the profile run"),
        ({"gpu": "20GB", "utilization": 0.8}, "No available memory for the cache blocks"),
        ({"parallel": "tp", "devices": 2, "utilization": 0.98}, "while graphs are captured"),
        ({"parallel": "tp", "devices": 3}, "must be divisible by tensor parallel size (3)"),
    ],
)
def test_an_engine_that_ends_says_why(options: dict[str, Any], said: str) -> None:
    report = serve(**{"max_len": 8192, **options})
    assert not report.serve.starts
    assert said in report.serve.message


def test_what_is_missing_by_the_parts() -> None:
    """Beside the engine's share stand CUDA graphs and what NCCL holds: together they are more than the card."""
    report = serve(max_len=8192, parallel="tp", devices=2, utilization=0.98)
    one, card = report.serve, find("h100-sxm-80gb").usable
    assert one.requested_bytes + one.cuda_graph_bytes + one.at_start_bytes - card == one.missing_bytes > 0
    small = serve(gpu="12GB").serve
    assert small.missing_bytes == small.weights_bytes + small.at_start_bytes - find("12GB").usable
    assert serve(max_len=200000).serve.missing_bytes == 0  # refused before anything is loaded
    assert serve(max_len=8192).serve.missing_bytes == 0
    length = serve(gpu="l4", max_len=131072).serve
    assert length.missing_bytes == 131072 // 16 * length.block_bytes - length.kv_cache_bytes


def test_requests_of_lengths(tmp_path: Path) -> None:
    """Of one length as many fit as the blocks say: 1,600 tokens are 100 of them. Half of 1,600 and half of 3,200 take
    150 on average, and less than as many fit in 95 of 100 draws. More than `max_seqs` never run."""
    one = serve(max_len=8192, lengths="uniform(1600, 1600)").serve
    assert one.at_once == one.at_once_95 == one.kv_cache_blocks // 100
    file = tmp_path / "lengths.txt"
    file.write_text("1600\n3200\n")
    two = serve(max_len=8192, lengths=str(file)).serve
    assert two.at_once is not None
    assert two.at_once_95 is not None
    assert two.at_once == pytest.approx(two.kv_cache_blocks / 150, rel=0.01)
    assert two.kv_cache_blocks / 200 < two.at_once_95 < two.at_once
    assert serve(max_len=8192, lengths="uniform(16, 16)").serve.at_once_95 == 1024
    assert serve(max_len=8192).serve.at_once is None
    with pytest.raises(UsageError, match="neither a distribution nor a file"):
        serve(lengths=str(tmp_path / "none.txt"))


def test_ranks_that_divide_the_heads() -> None:
    assert serve(max_len=8192, parallel="tp", devices=3).serve.change == "--parallel tp --devices 2"


def test_another_version_and_another_card_are_less_certain() -> None:
    read, later, other = serve(), serve(engine="vllm@0.25"), serve(gpu="a100-sxm-80gb")
    widths = [one.serve.bands["kv_cache"].high - one.serve.bands["kv_cache"].low for one in (read, later, other)]
    assert widths[0] < widths[2] < widths[1]
    assert [len(one.warnings) for one in (read, later, other)] == [0, 1, 1]
    assert "0.25" in later.warnings[0].text


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"engine": "sglang"}, "SM602"),
        ({"engine": "vlm"}, "SM602"),
        ({"kv_dtype": "banana"}, "SM134"),
        ({"load_as": "int4"}, "SM134"),
        ({"optimizer": "adam"}, "SM602"),
        ({"parallel": "fsdp", "devices": 2}, "SM602"),
        ({"devices": 2}, "SM602"),
        ({"parallel": "tp"}, "SM602"),
        ({"parallel": "pp", "devices": 64}, "SM602"),
        ({"gpu": "mi300x"}, "SM602"),
        ({"gpu": "p100-pcie-16gb"}, "SM602"),
        ({"gpu": "t4", "dtype": "bf16"}, "SM602"),
        ({"utilization": 2}, "SM602"),
        ({"top": 3}, "SM602"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as refused:
        serve(**options)
    assert refused.value.code == code
    assert refused.value.why


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ({**SMALL, "model_type": "mamba2"}, "SM601"),
        ({**SMALL, "vision_config": {"hidden_size": 8}}, "SM601"),
        ({**SMALL, "quantization_config": {"quant_method": "bitsandbytes"}}, "SM601"),
        ({name: size for name, size in SMALL.items() if name != "vocab_size"}, "SM145"),
        ({**SMALL, "hidden_size": -1}, "SM145"),
        ({**SMALL, "num_hidden_layers": True}, "SM145"),
    ],
)
def test_configs_that_are_not_covered(tmp_path: Path, content: dict[str, Any], code: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ModelFileError) as refused:
        staticmem.serve(str(path), "h100")
    assert refused.value.code == code


def test_a_graph_is_no_config() -> None:
    with pytest.raises(StaticmemError, match="no config of a model"):
        staticmem.serve(ROOT / "models" / "resnet18.pt2", "h100")


def test_json_has_the_fields_of_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", LLAMA, "--mode", "serve", "--gpu", "h100", "-f", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    described = schema("serve")
    assert list(printed) == list(described["properties"])
    assert list(printed["serve"]) == list(described["definitions"]["Serve"]["properties"])
    for kind in ("serve", "serve-sizing", "serve-sweep", "serve-fit"):
        assert json.loads((ROOT / "schemas" / f"{kind}-1.schema.json").read_text()) == schema(kind)


def test_the_fewest_cards_for_a_concurrency(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of each kind: half as many serve fewer. With prices the cheapest comes first, whatever its number."""
    words = ["size", LLAMA, "--mode", "serve", "--concurrency", "64", "--max-len", "32768", "-f", "json"]
    cards = ["--gpu", "h100", "--gpu", "h200", "--gpu", "l4"]
    assert main([*words, *cards]) == 0
    sizing = json.loads(capsys.readouterr().out)
    assert list(sizing) == list(schema("serve-sizing")["properties"])
    rows = {row["slug"]: row for row in sizing["cards"]}
    assert rows["l4"]["devices"] is None
    assert [row["slug"] for row in sizing["cards"]] == ["h100-sxm-80gb", "h200", "l4"]
    for slug in ("h100-sxm-80gb", "h200"):
        count = rows[slug]["devices"]
        enough = serve(gpu=slug, max_len=32768, parallel=rows[slug]["parallel"], devices=count).serve
        assert 64 <= enough.max_concurrency == rows[slug]["concurrency"]
        for way in ("tp", "pp"):
            assert serve(gpu=slug, max_len=32768, parallel=way, devices=count // 2).serve.max_concurrency < 64
    prices = tmp_path / "prices.yaml"
    prices.write_text("version: 1\ncurrency: EUR\nprices:\n  h100-sxm-80gb: {hour: 0.9}\n  h200: {hour: 2}\n")
    assert main([*words, *cards, "--prices", str(prices)]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"].startswith("4 x H100 SXM 80 GB serve 64 requests")


def test_cards_that_do_not_do(capsys: pytest.CaptureFixture[str]) -> None:
    """A card that was named has its reason; an engine that does not start holds nothing; what asks for too much says
    so in words that were given."""
    words = ["size", LLAMA, "--mode", "serve", "--gpu", "l4", "--gpu", "mi300x", "-f", "json"]
    assert main([*words, "--concurrency", "100000", "--max-len", "4096"]) == 0
    rows = json.loads(capsys.readouterr().out)["cards"]
    assert [(row["devices"], row["kv_cache_tokens"], row["concurrency"]) for row in rows] == [(None, 0, 0.0)] * 2
    assert "max_num_seqs" not in rows[0]["why"]
    for flags in (["--max-len", "500000"], ["--max-seqs", "8"], ["--max-batched-tokens", "8"]):
        assert main([*words, "--concurrency", "64", *flags]) == 2
        assert f"{flags[0]} {flags[1]}" in capsys.readouterr().err


def test_stages_where_heads_do_not_divide(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of 28 heads eight ranks have no equal parts: they have some of the layers each."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(Path(LLAMA).read_text()), "num_attention_heads": 28, "head_dim": 128}))
    words = ["size", str(config), "--mode", "serve", "--max-len", "32768", "--gpu", "l4", "-f", "json"]
    assert main([*words, "--concurrency", "16"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["cards"]
    assert (row["devices"], row["parallel"]) == (8, "pp")


def test_a_sweep_says_of_each_what_analyze_says(capsys: pytest.CaptureFixture[str]) -> None:
    """To the byte, on each card; a list of cards from one on divides where there are several."""
    words = ["sweep", LLAMA, "--mode", "serve", "--parallel", "tp", "--what-if", "devices=1,2", "--what-if"]
    assert main([*words, "max_len=8192,32768", "--gpu", "h100", "--gpu", "l4", "-f", "json"]) == 0
    sweep = json.loads(capsys.readouterr().out)
    assert list(sweep) == list(schema("serve-sweep")["properties"])
    assert len(sweep["rows"]) == 8
    for row in sweep["rows"]:
        length, devices = row["settings"]["max_len"], row["settings"]["devices"]
        divided = {"parallel": "tp", "devices": devices} if devices > 1 else {}
        alone = json.loads(serve(gpu=row["gpu"], max_len=length, **divided).to_json())
        assert row["serve"] == alone["serve"]
    assert main([*words, "max_len=32768", "--gpu", "l4", "-q"]) == 0
    assert capsys.readouterr().out == "2 configurations: probably does not start 2.\n"


def fitted(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    code = main(["fit", LLAMA, "--mode", "serve", *flags, "-f", "json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if result["fits"] else 1)
    return result


def test_fit_keeps_what_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is changed, and the answer is that of `analyze`, to the letter; the command has all that decides."""
    result = fitted(capsys, "--gpu", "h100", "--max-len", "8192")
    assert list(result) == list(schema("serve-fit")["properties"])
    assert (result["way"]["flags"], len(result["tried"])) == ("", 1)
    assert main([*result["analyze"].split()[1:], "-q"]) == 0
    assert capsys.readouterr().out.strip() == result["answer"]
    assert result["command"] == (
        "vllm serve MODEL --max-model-len 8192 --max-num-seqs 1024 --max-num-batched-tokens 8192 "
        "--gpu-memory-utilization 0.9"
    )


def test_fit_finds_the_longest_request_of_a_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    """At the low end of the band; one block more holds fewer. Blocks have 16 tokens."""
    result = fitted(capsys, "--gpu", "h100", "--concurrency", "64")
    assert result["way"]["flags"].startswith("--max-len ")
    length = int(result["way"]["flags"].split()[1])
    least = serve(max_len=length).serve.bands["kv_cache_tokens"].low // 16
    assert -(-length // 16) * 64 <= least < (length // 16 + 1) * 64
    assert result["way"]["max_concurrency"] == serve(max_len=length).serve.max_concurrency


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_fit_and_size_have_the_same_cards(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", gpu, "--concurrency", "100", "--max-len", "32768"]
    way = fitted(capsys, *words)["way"]
    assert main(["size", LLAMA, "--mode", "serve", *words, "-f", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["cards"]
    assert row["certain"]
    assert way["flags"] == f"--parallel {row['parallel']} --devices {row['devices']}"
    assert (way["max_concurrency"], way["kv_cache_tokens"]) == (row["concurrency"], row["kv_cache_tokens"])


def test_each_way_of_fit_is_what_analyze_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Given flags are kept, so that other changes are made; a way does where it starts at both ends of its bands."""
    result = fitted(capsys, "--gpu", "l4", "--max-len", "32768")
    assert result["fits"]
    assert "--max-model-len 32768" in result["command"]
    assert len(result["tried"]) > 2
    for way in result["tried"]:
        words = ["analyze", LLAMA, "--mode", "serve", "--gpu", "l4", "--max-len", "32768", *way["flags"].split()]
        assert main([*words, "-f", "json"]) == 0
        one = json.loads(capsys.readouterr().out)["serve"]
        assert all(way[name] == one[name] for name in ("starts", "certain", "kv_cache_tokens", "max_concurrency"))
        assert way["holds"] == (one["starts"] and one["certain"])
        assert way["holds"] == (way == result["way"])


def test_fit_where_nothing_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """With every lever given there is none; a fit that only less precision would do says so."""
    ranks = ["--gpu", "l4", "--max-len", "131072", "--parallel", "tp", "--devices", "2"]
    result = fitted(capsys, *ranks, "--concurrency", "100")
    assert (result["fits"], result["would_fit"]) == (False, [])
    kept = ["--gpu", "h100", "--max-len", "131072", "--utilization", "0.9", "--parallel", "tp", "--devices", "2"]
    assert fitted(capsys, *kept, "--concurrency", "8")["would_fit"] == ["precision"]
    result = fitted(capsys, *kept, "--concurrency", "8", "--allow", "precision")
    assert result["way"]["flags"] == "--kv-dtype fp8"
    assert "--kv-cache-dtype fp8" in result["command"]


def test_fit_writes_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a folder with the config its name is the model's; flags that do not apply are refused."""
    (tmp_path / "config.json").write_text(Path(LLAMA).read_text())
    words = ["fit", str(tmp_path / "config.json"), "--mode", "serve", "--gpu", "h100"]
    given = ["--max-len", "8192", "--dtype", "fp32", "--parallel", "pp", "--devices", "2"]
    assert main([*words, *given, "--write", str(tmp_path / "run")]) == 0
    script = (tmp_path / "run" / "serve.sh").read_text().splitlines()
    assert script[0] == "#!/bin/sh"
    assert script[-1].startswith(f"exec vllm serve {tmp_path} --max-model-len 8192 ")
    assert script[-1].endswith(" --dtype float32 --pipeline-parallel-size 2")
    refused = (["--global-batch", "8"], ["--allow", "adapters"], ["-f", "md"], ["--optimizer", "adam"])
    for more in (*refused, ["--concurrency", "64", "--max-seqs", "8"]):
        assert main([*words, *more]) == 2
        assert "[SM602]" in capsys.readouterr().err
    assert main(["fit", str(ROOT / "models" / "resnet18.pt2"), "--gpu", "l4", "--concurrency", "4"]) == 2
    assert "--concurrency and --mode serve go together" in capsys.readouterr().err


def test_rows_of_a_sweep_that_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A configuration with an error is a row; where all have one, so has the sweep. What a config says of steps of
    PyTorch is said not to be used, and what flags say of them is refused."""
    words = ["sweep", LLAMA, "--mode", "serve", "--gpu", "h100"]
    assert main([*words, "--what-if", "utilization=0.5,3", "-f", "csv"]) == 0
    printed = capsys.readouterr()
    assert [line.endswith("[SM602]") for line in printed.out.splitlines()[1:]] == [False, True]
    assert "1 of 2 configurations" in printed.err
    for more in (["--what-if", "batch=8,16"], ["--max-batch"], ["--meter", "live"], ["-f", "html"], ["--amp", "bf16"]):
        assert main([*words, *more]) == 2
        assert "[SM602]" in capsys.readouterr().err
    assert main(words[:-2]) == 2
    assert "no card to serve on" in capsys.readouterr().err
    config = tmp_path / "staticmem.yaml"
    train = "train: {optimizer: adam, amp: bf16}\nwhat_if: {max_len: [4096, 8192]}\n"
    config.write_text(f"version: 1\nmodel: {LLAMA}\ngpus: [h100]\n{train}")
    assert main(["sweep", str(config), "--mode", "serve", "-q"]) == 0
    printed = capsys.readouterr()
    assert "Not used of the config, as an engine runs no step of PyTorch: amp, optimizer" in printed.err
    assert printed.out.startswith("2 configurations: starts 2. The most tokens, 442,960, has")
    assert main(["sweep", LLAMA, "--gpu", "h100", "--what-if", "mode=infer,serve"]) == 2
    assert "engines and steps of PyTorch in one sweep" in capsys.readouterr().err


def test_concurrency_and_the_mode_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--mode", "serve"],
        ["--concurrency", "4"],
        ["--mode", "serve", "--concurrency", "4", "--no-batches"],
    ):
        assert main(["size", LLAMA, "--gpu", "h100", *words]) == 2
        assert "[SM602]" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--max-batch"], ["--explain-peak"], ["-f", "html"], ["--amp", "bf16"]])
def test_flags_of_a_step_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", LLAMA, "--mode", "serve", "--gpu", "h100", *flags]) == 2
    assert "[SM602]" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "levers"])
def test_other_verbs_say_where_it_is(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(ROOT / "models" / "resnet18.pt2")
    assert main([verb, model, "--mode", "serve", "--gpu", "h100"]) == 2
    assert "[SM600]" in capsys.readouterr().err


def test_flags_of_an_engine_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(ROOT / "models" / "seed.pt2"), "--max-seqs", "8"]) == 0
    assert "--max-seqs is not used: it needs --mode serve" in capsys.readouterr().out


def test_a_name_ends_no_comment_of_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "a\ntouch b"
    folder.mkdir()
    (folder / "config.json").write_text(Path(LLAMA).read_text())
    asked = Request(mode="serve", gpu="h100", max_len=8192)
    text = script(serve_fit(str(folder / "config.json"), asked, None, less_precise=False))
    comments, command = text.split("exec ")
    assert [line[:1] for line in comments.splitlines()] == ["#"] * 3
    assert shlex.split(command)[:3] == ["vllm", "serve", str(folder)]


def test_a_config_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "staticmem.yaml"
    config.write_text(f"version: 1\nmodel: {LLAMA}\nserve: {{max_len: 8192, kv_dtype: fp8}}\ngpus: [h100]\n")
    assert main(["analyze", "--config", str(config), "-q"]) == 0
    expected = serve(max_len=8192, kv_dtype="fp8").serve.kv_cache_tokens
    assert f"{expected:,} tokens" in capsys.readouterr().out


def test_the_table_of_the_page_is_what_flags_do() -> None:
    row = re.compile(r"^\| (?:`([^`]*)`|\(none\)) \| ([\d.]+) \| ([\d.]+) \| .* \| ([\d,]+) \|", re.M)
    rows = row.findall(PAGE.read_text())
    assert len(rows) == 11
    for flags, weights, activations, tokens in rows:
        words = flags.split()
        options: dict[str, Any] = {"max_len": 8192}
        while words:
            name = words.pop(0).removeprefix("--").replace("-", "_")
            value: Any = words.pop(0) if words and not words[0].startswith("--") else True
            options[name] = value if value is True or value[0].isalpha() else float(value)
            if name in ("max_len", "max_seqs", "max_batched_tokens", "devices"):
                options[name] = int(value)
        one = serve(**options).serve
        assert f"{one.weights_bytes / GIB:.2f}" == weights, flags
        assert f"{one.activation_bytes / GIB:.2f}" == activations, flags
        assert f"{one.kv_cache_tokens:,}" == tokens, flags
