"""Names of architectures in place of a model file, and configs as hostile input: nothing here needs their packages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from staticmem.cli.main import main
from staticmem.errors import ModelFileError, UsageError
from staticmem.frontends import open_model
from staticmem.frontends.architectures import (
    LARGEST,
    MOST_PARTS,
    architecture_of,
    below,
    carried_file,
    model_name,
    read_config,
    whole,
)
from staticmem.frontends.packing import BUILT, Packing, packing_of

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 80, "vocab_size": 128256}


def config(folder: Path, content: Any = LLAMA) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_a_name_means(tmp_path: Path) -> None:
    path = str(config(tmp_path))
    for given in (path, str(tmp_path), f"transformers:{path}", f"transformers:{tmp_path}"):
        found = architecture_of(given)
        assert found is not None
        assert (found.package, found.name, dict(found.options)) == ("transformers", path, {})
    found = architecture_of(f"transformers:{path},seq=2048,labels=yes,head=LlamaForCausalLM")
    assert found is not None
    assert (found.name, found.options["head"], found.number("seq")) == (path, "LlamaForCausalLM", 2048)
    found = architecture_of("timm:vit_small_patch14.dinov2,size=518")
    assert found is not None
    assert (found.package, found.name, found.path) == ("timm", "vit_small_patch14.dinov2", found.given)
    for ordinary in ("model.pt2", "torchvision.models:resnet50", "file.py:build", "", "-", "C:\\models\\net.onnx"):
        assert architecture_of(ordinary) is None


def test_models_that_staticmem_carries(capsys: pytest.CaptureFixture[str]) -> None:
    path = carried_file("models:resnet50")
    assert Path(path).name == "resnet50.pt2"
    assert Path(path).is_file()
    assert architecture_of("models:resnet50") is None
    assert (whole("models:resnet50"), below("folder", "models:resnet50")) == ("models:resnet50", "models:resnet50")
    for ordinary in ("resnet50.pt2", "models/resnet50.pt2", "C:\\models\\net.onnx", ""):
        assert carried_file(ordinary) == ordinary
    with pytest.raises(ModelFileError, match="carries no model 'resnet5'") as error:
        carried_file("models:resnet5")
    assert error.value.hint == "Did you mean 'resnet50'?"
    with pytest.raises(ModelFileError, match="carries no model"):
        carried_file("models:../data/net")
    assert main(["analyze", "models:resnet18", "--optimizer", "adam", "-q"]) == 0
    assert "training resnet18.pt2" in capsys.readouterr().out


def test_a_name_may_have_commas(tmp_path: Path) -> None:
    folder = tmp_path / "a,b=c"
    folder.mkdir()
    found = architecture_of(f"transformers:{config(folder)},seq=8")
    assert found is not None
    assert (found.name, found.options) == (str(folder / "config.json"), {"seq": "8"})


def test_a_limit_may_be_infinite(tmp_path: Path) -> None:
    """Mamba 2 says so of its time steps."""
    text = json.dumps({**LLAMA, "model_type": "mamba2", "time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in text
    assert read_config(str(config(tmp_path, text)))["time_step_limit"] == [0.0, float("inf")]
    with pytest.raises(ModelFileError, match="not built"):
        read_config(str(config(tmp_path, {**LLAMA, "vocab_size": 10**400})))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("timm:resnet50,depth=3", "SM149"),
        ("timm:resnet50,batch=0", "SM149"),
        ("timm:resnet50,batch=1e9", "SM149"),
        ("timm:resnet50,seq=128", "SM149"),
        ("timm:resnet50,batch=1,batch=2", "SM149"),
        ("timm:resnet50,dtype=int8", "SM149"),
        ("timm:hf-hub:someone/model", "SM145"),
        ("timm:local-dir:/tmp", "SM145"),
        ("torchvision:", "SM145"),
        ("torchvision:../resnet50", "SM145"),
        ("transformers:meta-llama/Llama-3.1-70B", "SM145"),
        ("transformers:", "SM145"),
    ],
)
def test_names_that_are_refused(given: str, code: str) -> None:
    with pytest.raises((UsageError, ModelFileError)) as error:
        architecture_of(given)
    assert error.value.code == code
    assert error.value.hint


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("", "SM145"),
        ("{", "SM145"),
        ("[1, 2]", "SM145"),
        ("[" * 100_000, "SM145"),
        ('{"model_type": ' + "9" * 10_000 + "}", "SM145"),
        ({"architectures": ["LlamaForCausalLM"]}, "SM145"),
        ({"model_type": 3}, "SM145"),
        ({**LLAMA, "auto_map": {"AutoModel": "modeling.Evil"}}, "SM147"),
        ({**LLAMA, "text_config": [{"auto_map": {"AutoConfig": "c.C"}}]}, "SM147"),
        ({**LLAMA, "num_hidden_layers": MOST_PARTS + 1}, "SM147"),
        ({**LLAMA, "depths": [2, 10**9]}, "SM147"),
        ({**LLAMA, "vocab_size": 10**15}, "SM147"),
        ({**LLAMA, "hidden_size": -(10**15)}, "SM147"),
        ('{"model_type": "llama", "rope_theta": NaN}', "SM147"),
        ('{"model_type": "llama", "x": "' + "a" * LARGEST + '"}', "SM145"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, content: Any, code: str) -> None:
    with pytest.raises(ModelFileError) as error:
        read_config(str(config(tmp_path, content)))
    assert error.value.code == code
    assert error.value.hint


def test_what_a_config_says_of_its_run_is_left_out(tmp_path: Path) -> None:
    """`attn_implementation` may name a kernel to load from the network."""
    runs = {"attn_implementation": "someone/kernels", "_attn_implementation": "x", "_name_or_path": "/a"}
    found = read_config(str(config(tmp_path, {**LLAMA, **runs, "text_config": {**runs, "hidden_size": 64}})))
    assert found == {**LLAMA, "text_config": {"hidden_size": 64}}


def test_paths_of_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert whole("timm:resnet50") == below("/configs", "timm:resnet50") == "timm:resnet50"
    assert whole("transformers:a/config.json") == f"transformers:{tmp_path / 'a' / 'config.json'}"
    assert (
        below("/configs", "transformers:a/config.json") == f"transformers:{os.path.join('/configs', 'a/config.json')}"
    )
    assert below("/configs", "/models/a.pt2") == "/models/a.pt2"


def test_every_verb_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else object())
    path = str(config(tmp_path))
    step = [path, "--no-config", "--optimizer", "adam"]
    for verb in (["analyze"], ["levers"], ["size"], ["sweep", "--what-if", "batch=1,2", "-j", "1"]):
        assert main([verb[0], *step, *verb[1:]]) == 2
        err = capsys.readouterr().err
        assert "transformers is not installed [SM146]" in err
        assert "pip install 'staticmem[transformers]'" in err
    assert main(["export", path, "-o", str(tmp_path / "model.pt2")]) == 2
    assert "SM146" in capsys.readouterr().err
    assert main(["export", path, "--input", "2x8:int64", "-o", str(tmp_path / "model.pt2")]) == 2
    assert "--input with" in capsys.readouterr().err


def test_what_a_model_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "llama-3"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert model_name(str(folder / "config.json")) == "llama-3"
    assert model_name("folder/model.pt2") == "model.pt2"
    assert model_name("config.json") == "config.json"
    monkeypatch.chdir(folder)
    assert model_name("config.json") == "llama-3"


def packed(**words: Any) -> dict[str, Any]:
    return {**LLAMA, "dtype": "float16", "quantization_config": {"quant_method": "bitsandbytes", **words}}


def test_packed_weights_are_those_of_quantize() -> None:
    """As BitsAndBytesConfig of transformers has its defaults."""
    four = packed(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    double = packed(load_in_4bit=True, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head"])
    eight = packed(load_in_8bit=True)
    whole_config = {**LLAMA, "dtype": "float16"}
    for config, expected in (
        (four, ("nf4", "bfloat16")),
        (double, ("fp4-dq", "float32")),
        (eight, ("int8", "float16")),
        (whole_config, ("", "")),
    ):
        assert packing_of(config, "c", False) == Packing(whole_config, *expected)
        assert packing_of(config, "c", True).config == whole_config
        assert not packing_of(config, "c", True).quantize


@pytest.mark.parametrize("parts", [("text_config",), ("thinker_config", "text_config")])
def test_packed_weights_of_a_part(parts: tuple[str, ...]) -> None:
    """At any depth: Qwen2.5-Omni has its text two levels down."""
    inside = packed(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    whole_config: dict[str, Any] = {**LLAMA, "dtype": "float16"}
    for part in reversed(parts):
        inside, whole_config = {part: inside}, {part: whole_config}
    assert packing_of(inside, "c", False) == Packing(whole_config, "nf4", "bfloat16")


def test_parts_that_are_packed_in_several_ways() -> None:
    other = packed(quant_method="gptq", bits=4)
    with pytest.raises(ModelFileError, match="several 'quantization_config'") as error:
        packing_of({"text_config": packed(load_in_4bit=True), "vision_config": other}, "c", False)
    assert error.value.code == "SM147"
    same = {**other, "text_config": other}
    assert packing_of(same, "c", False).layers == {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("words", "dequantize", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, True, "as they are, and not whole"),
        ({"quant_method": "hqq"}, False, "packed by hqq"),
        ({"quant_method": "fbgemm_fp8"}, False, "packed by fbgemm_fp8"),
        ({"quant_method": None}, False, "does not name"),
        ({"load_in_4bit": True, "llm_int8_skip_modules": ["visual"]}, False, "llm_int8_skip_modules"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, False, "bnb_4bit_quant_type"),
    ],
)
def test_packings_that_are_not_built(words: dict[str, Any], dequantize: bool, said: str) -> None:
    with pytest.raises(ModelFileError) as error:
        packing_of(packed(**words), "c", dequantize)
    assert error.value.code == "SM147"
    assert said in error.value.why
    told = "dequantize=yes is the model" in error.value.hint
    assert told == (words.get("quant_method") == "fbgemm_fp8")


def test_methods_that_transformers_loads_whole() -> None:
    for method in ("fp8", "mxfp4", "compressed-tensors"):
        whole_config = {**LLAMA, "dtype": "float16"}
        assert packing_of(packed(quant_method=method), "c", True) == Packing(whole_config, whole=method)


@pytest.mark.parametrize("method", BUILT)
def test_methods_whose_layers_are_recorded(method: str) -> None:
    found = packing_of(packed(quant_method=method), "c", False)
    assert (found.layers, found.quantize) == ({"quant_method": method}, "")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("modls:resnet50", "Did you mean 'models:resnet50'?"),
        ("tim:resnet50,batch=8", "Did you mean 'timm:resnet50,batch=8'?"),
        ("torchvison:vgg11", "Did you mean 'torchvision:vgg11'?"),
        ("model.py:build", "Export what the function returns: staticmem export model.py:build -o model.pt2"),
        ("c:none", "Check the path."),
    ],
)
def test_a_mistyped_package_is_meant(given: str, hint: str) -> None:
    with pytest.raises(ModelFileError, match="does not exist") as error:
        open_model(given)
    assert error.value.hint == hint
