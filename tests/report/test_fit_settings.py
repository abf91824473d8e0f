"""Settings of libraries: they are read back, name what the libraries have, and the step in PyTorch runs."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import staticmem
from staticmem.errors import UsageError
from staticmem.report.fit import Fit
from staticmem.report.settings import LIBRARIES, Modules, Run
from staticmem.report.settings.optimizers import WRITTEN, class_of, keywords, name_of_transformers
from staticmem.scenario.optimizers import LOW_RANK, NAMES_OF_TRANSFORMERS, OPTIMIZERS
from staticmem.scenario.request import Request, request_of

BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"
HEADING = ("figures of 'a\nb.pt2'",)
NAMES = ("layers.0", "layers.1", "layers.2")

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": "adam"},
    "micro-batches": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "accumulate": 4, "outputs": "dropped"},
    "float16": {"optimizer": "adamw", "amp": "fp16", "grad_scaler": True, "clip_grad_norm": True},
    "bfloat16": {"optimizer": "adamw-8bit", "amp": "bf16", "zero_grad": "after-forward", "channels_last": True},
    "whole": {"optimizer": "adamw", "optimizer_impl": "fused", "dtype": "bf16", "set_to_none": False},
    "checkpoints": {"optimizer": "adafactor-hf", "checkpoint": "Block"},
    "adapters": {"optimizer": "paged-adamw-8bit", "lora": "r=16,alpha=32,dropout=0.1,targets=q_proj+v_proj,save=head"},
    "ddp": {"optimizer": "adamw", "accumulate": 2, "parallel": "ddp", "devices": 4, "amp": "bf16"},
    "fsdp": {"optimizer": "adamw", "accumulate": 2, "parallel": "fsdp", "devices": 4, "amp": "bf16", "checkpoint": "B"},
    "zero2": {"optimizer": "lion", "parallel": "zero2", "devices": 4, "clip_grad_norm": True},
    "zero3": {"optimizer": "adamw", "accumulate": 2, "parallel": "zero3", "devices": 4, "amp": "bf16"},
    "zero1": {"optimizer": "adamw", "parallel": "zero1", "devices": 4, "dtype": "fp16"},
}


def run_of(options: dict[str, Any]) -> Run:
    request = replace(request_of(options), batch=8)
    sharded = Modules(NAMES, "B") if request.parallel == "fsdp" else Modules()
    return Run(request, HEADING, sharded, Modules(NAMES, "B") if request.checkpoint else Modules())


CASES = [
    (name, case) for name in LIBRARIES for case, asked in REQUESTS.items()
    if LIBRARIES[name].takes(LIBRARIES[name].as_run(request_of(asked)))
]  # fmt: skip


@pytest.mark.parametrize(("name", "case"), CASES)
def test_texts_are_read_back(name: str, case: str) -> None:
    run = run_of(REQUESTS[case])
    library = LIBRARIES[name]
    text = library.text(run)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    if library.file.endswith(".py"):
        compile(text, library.file, "exec")
        assert text.startswith("# figures of 'a b.pt2'\n")
    elif library.file.endswith(".yaml"):
        config = yaml.safe_load(text)
        assert config.get("num_processes", run.devices) == run.devices
        sizes = {"micro_batch_size", "per_device_train_batch_size", "num_processes"}
        assert sizes & config.keys()
    else:
        assert json.loads(text)["train_micro_batch_size_per_gpu"] == 8


def arguments(case: str) -> dict[str, Any]:
    """The arguments of `TrainingArguments`."""
    tree = ast.parse(LIBRARIES["transformers"].text(run_of(REQUESTS[case])))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and "Training" in ast.unparse(node.func))
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


def test_training_arguments() -> None:
    """The names are those of transformers 5.23, with which they were made by hand."""
    plain = arguments("plain")
    assert (plain["per_device_train_batch_size"], plain["gradient_accumulation_steps"]) == (8, 1)
    assert plain["max_grad_norm"] == 0.0
    assert "weight_decay" not in plain
    assert "optim" not in plain, "transformers has no name for Adam"
    half = arguments("float16")
    assert (half["fp16"], half["bf16"], half["max_grad_norm"], half["optim"]) == (True, False, 1.0, "adamw_torch")
    assert arguments("whole")["optim"] == "adamw_torch_fused"
    assert arguments("checkpoints")["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    sharded = arguments("fsdp")
    assert sharded["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["B"]
    assert sharded["fsdp_config"]["activation_checkpointing"]
    assert sharded["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert "gradient_checkpointing" not in sharded
    assert arguments("zero3")["deepspeed"]["zero_optimization"]["stage"] == 3
    cast = arguments("zero1")  # DeepSpeed's fp16 section casts the model, and the trainer has to agree
    assert cast["fp16"]
    assert cast["deepspeed"]["fp16"] == {"enabled": True}


ADAPTERS = {
    "optimizer": "adamw",
    "amp": "bf16",
    "accumulate": 4,
    "lora": "r=16,alpha=32,targets=q_proj+v_proj,save=head",
}
QUANTISED = {"optimizer": "paged-adamw-8bit", "dtype": "bf16", "quantize": "nf4-dq", "lora": "r=8,targets=all-linear"}


def told(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a library is told of a step, as it runs it."""
    library = LIBRARIES[name]
    request = library.as_run(request_of(options))
    assert library.takes(request)
    run = replace(run_of(options), request=replace(request, batch=8), length=512)
    config: dict[str, Any] = yaml.safe_load(library.text(run))
    return config


def test_llama_factory() -> None:
    """The names are those of 0.9.5, where checkpoints are on unless they are disabled."""
    adapters = told("llama-factory", ADAPTERS)
    assert (adapters["finetuning_type"], adapters["lora_target"], adapters["additional_target"]) == (
        "lora",
        "q_proj,v_proj",
        "head",
    )
    assert (adapters["bf16"], adapters["cutoff_len"], adapters["disable_gradient_checkpointing"]) == (True, 512, True)
    assert "pure_bf16" not in adapters
    quantised = told("llama-factory", QUANTISED)
    assert (quantised["quantization_bit"], quantised["quantization_type"], quantised["double_quantization"]) == (
        4,
        "nf4",
        True,
    )
    assert quantised["optim"] == "paged_adamw_8bit"
    assert told("llama-factory", {"optimizer": "adamw", "dtype": "bf16"})["pure_bf16"]
    whole = told("llama-factory", {"optimizer": "adamw", "amp": "bf16", "checkpoint": "Block"})
    assert (whole["finetuning_type"], whole["bf16"], whole["use_reentrant_gc"]) == ("full", True, False)
    assert told("llama-factory", REQUESTS["zero3"])["deepspeed"]["zero_optimization"]["stage"] == 3


def test_axolotl() -> None:
    """The names are those of 0.18. With `bf16` the model is loaded in it too, so that this is what is predicted."""
    library = LIBRARIES["axolotl"]
    assert library.as_run(request_of(ADAPTERS)).dtype == "bf16"
    adapters = told("axolotl", ADAPTERS)
    assert (adapters["adapter"], adapters["lora_target_modules"]) == ("lora", ["q_proj", "v_proj"])
    assert (adapters["bf16"], adapters["micro_batch_size"], adapters["sequence_len"]) == (True, 8, 512)
    sharded = told("axolotl", REQUESTS["fsdp"])
    assert (sharded["fsdp_version"], sharded["fsdp_config"]["transformer_layer_cls_to_wrap"]) == (2, "B")
    assert (sharded["fsdp_config"]["activation_checkpointing"], sharded["gradient_checkpointing"]) == (True, False)
    for one in ({"optimizer": "adamw", "amp": "bf16"}, REQUESTS["plain"], {**ADAPTERS, "amp": "fp16"}):
        assert not library.takes(library.as_run(request_of(one))), "embeddings in float32, or no name of an optimizer"


def test_settings_of_transformers_need_a_model_of_it() -> None:
    with pytest.raises(UsageError, match="axolotl trains models of transformers"):
        staticmem.fit(BLOCKS, "l4", optimizer="adamw", batch=4, library="axolotl")


def test_no_default_of_a_library_is_changed_unsaid() -> None:
    """Decay decides no memory of AdamW, so that its default stays; clipping does, and what turns it off says so."""
    asked: dict[str, Any] = {"optimizer": "adamw"}
    for library in ("pytorch", "transformers"):
        assert "weight_decay" not in LIBRARIES[library].text(run_of(asked))
        assert "weight_decay=0.1" in LIBRARIES[library].text(run_of({**asked, "weight_decay": 0.1}))
    off = "# 0 turns clipping off"
    assert off in LIBRARIES["transformers"].text(run_of(asked))
    assert off not in LIBRARIES["transformers"].text(run_of({**asked, "clip_grad_norm": True}))


def test_deepspeed() -> None:
    config = json.loads(LIBRARIES["deepspeed"].text(run_of(REQUESTS["zero3"])))
    assert config["train_batch_size"] == 8 * 2 * 4
    assert config["bf16"] == {"enabled": True}
    assert config["gradient_clipping"] == 0.0  # DeepSpeed clips where it is not told
    assert "zero_allow_untested_optimizer" not in config
    other = json.loads(LIBRARIES["deepspeed"].text(run_of(REQUESTS["zero2"])))
    assert (other["gradient_clipping"], other["zero_allow_untested_optimizer"]) == (1.0, True)
    assert other["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_accelerate() -> None:
    text = LIBRARIES["accelerate"].text(run_of(REQUESTS["fsdp"]))
    config = yaml.safe_load(text)
    assert (config["distributed_type"], config["mixed_precision"]) == ("FSDP", "bf16")
    assert config["fsdp_config"]["fsdp_version"] == 2
    assert "sync_each_batch=True" in text
    plain = yaml.safe_load(LIBRARIES["accelerate"].text(run_of(REQUESTS["plain"])))
    assert (plain["distributed_type"], plain["mixed_precision"]) == ("NO", "no")
    zero = yaml.safe_load(LIBRARIES["accelerate"].text(run_of(REQUESTS["zero2"])))
    assert (zero["deepspeed_config"]["zero_stage"], zero["deepspeed_config"]["gradient_clipping"]) == (2, 1.0)


def test_every_optimizer_has_a_class_but_those_with_groups_of_parameters() -> None:
    assert set(OPTIMIZERS) - set(WRITTEN) == {"muon", *LOW_RANK}
    for name in WRITTEN:
        module, cls = class_of(Request(optimizer=name))
        assert cls.startswith(f"{module}.")


def test_names_of_transformers_mean_what_presets_say() -> None:
    for optimizer, impl in NAMES_OF_TRANSFORMERS.values():
        name = name_of_transformers(Request(optimizer=optimizer, optimizer_impl=impl or "foreach"))
        assert NAMES_OF_TRANSFORMERS[str(name)] == (optimizer, impl)
    assert name_of_transformers(Request(optimizer="adam")) is None
    assert name_of_transformers(Request(optimizer="sgd", momentum=0.9)) is None
    assert name_of_transformers(Request(optimizer="sgd")) == "sgd"


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in WRITTEN if class_of(Request(optimizer=name))[0] == "torch"])
@pytest.mark.parametrize("impl", ["foreach", "for-loop"])
def test_keywords_are_those_of_the_class(name: str, impl: str) -> None:
    import torch

    request = Request(optimizer=name, optimizer_impl=impl, weight_decay=0.1)
    made_by = getattr(torch.optim, class_of(request)[1].rpartition(".")[2])
    options = made_by([torch.nn.Parameter(torch.ones(2, 2))], lr=1e-4, **keywords(request)).defaults
    assert options["weight_decay"] == 0.1
    assert options["foreach"] == (None if impl == "foreach" else False)


@pytest.mark.torch
@pytest.mark.parametrize("case", ["plain", "micro-batches", "checkpoints", "whole"])
def test_the_step_in_pytorch_runs(case: str) -> None:
    """On the CPU: every parameter is updated, and checkpointed blocks run twice."""
    import torch

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.runs = torch.nn.Linear(4, 4), 0

        def forward(self, x: Any) -> Any:
            self.runs += 1
            return torch.tanh(self.up(x))

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Block() for _ in NAMES])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    asked = {**REQUESTS[case], **({"optimizer": "adamw"} if case == "checkpoints" else {})}
    run = run_of(asked)
    text = LIBRARIES["pytorch"].text(run).replace('"cuda"', '"cpu"')
    names: dict[str, Any] = {}
    exec(compile(text, "train_step.py", "exec"), names)
    torch.manual_seed(0)
    model, optimizer = names["prepare"](Net())
    dtype = next(model.parameters()).dtype
    batches = [(torch.ones(names["BATCH"], 4, dtype=dtype), None)] * names["ACCUMULATE"]
    names["train_step"](model, optimizer, lambda outputs, _: outputs.sum(), batches)
    assert len(optimizer.state) == len([p for p in model.parameters() if p.grad is not None]) == 2 * len(NAMES)
    again = 2 if run.request.checkpoint else 1
    assert {layer.runs for layer in model.layers} == {again * names["ACCUMULATE"]}
    assert dtype == (torch.bfloat16 if case == "whole" else torch.float32)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["model", "function", "loop", "tuple"])
def test_the_script_of_a_file_runs(kind: str, tmp_path: Path) -> None:
    """As it is written for a file whose loss the model returns, or a recorded function or the loop gives."""
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 3)

        def forward(self, x: Any, weight: Any, target: Any) -> Any:
            y = self.head(x) * weight
            if kind == "model":
                return {"loss": torch.nn.functional.cross_entropy(y, target), "y": y}
            return y, target

    inputs = (torch.ones(8, 4), torch.ones(8, 1), torch.zeros(8, dtype=torch.int64))
    loss = {"function": lambda result: torch.nn.functional.cross_entropy(*result)}.get(kind)
    path = tmp_path / "net.pt2"
    staticmem.export(Net().train(), inputs, path, loss=loss)
    result = staticmem.fit(path, "l4", optimizer="adam", batch=8, accumulate=2, outputs="dropped")
    text = next(one.text for one in result.settings if one.library == "pytorch").replace('"cuda"', '"cpu"')
    names: dict[str, Any] = {}
    exec(compile(text, "train_step.py", "exec"), names)
    model, optimizer = names["prepare"](Net())
    before = model.head.weight.detach().clone()
    given: Any = dict(zip(("x", "weight", "target"), inputs, strict=True)) if kind != "tuple" else inputs
    of_targets = kind in ("loop", "tuple")
    batches = [(given, inputs[2]) if of_targets else given] * names["ACCUMULATE"]
    functions: dict[str, Any] = {"model": [], "function": [loss]}
    of_pairs = [lambda outputs, targets: torch.nn.functional.cross_entropy(outputs[0], targets)]
    names["train_step"](model, optimizer, *functions.get(kind, of_pairs), batches)
    assert not torch.equal(before, model.head.weight)


def test_notes_say_what_is_not_set() -> None:
    result: Fit = staticmem.fit(BLOCKS, "l4", optimizer="adamw", batch=4, freeze="embedding", amp="bf16")
    notes = {one.library: " ".join(one.notes) for one in result.settings}
    assert notes["pytorch"] == "This file cannot set these, which the prediction includes: --freeze embedding"
    assert "--freeze embedding" in notes["transformers"]
    assert "--optimizer adamw" in notes["accelerate"]
    assert "--optimizer" not in notes["transformers"]
    commands = {one.library: one.analyze for one in result.settings}
    assert "--float32-outputs" in commands["transformers"], "accelerate copies outputs"
    assert "--float32-outputs" not in commands["pytorch"]
    for one in result.settings:
        assert all(note in one.text for note in one.notes)
    zero = staticmem.fit(BLOCKS, "l4", optimizer="adamw", batch=4, devices=2, parallel="zero2", library="deepspeed")
    assert zero.settings[0].notes[-1].startswith("gradient_clipping 0.0 turns clipping off, as predicted")


@pytest.mark.parametrize(("name", "line"), [("batch@loop", "del inputs"), ("loss@loop", "del loss, outputs")])
def test_variables_of_the_loop_are_let_go_of_in_the_text(name: str, line: str) -> None:
    run = run_of({"optimizer": "adam", "let_go": (name, "x@model.py:7")})
    pytorch = LIBRARIES["pytorch"]
    assert line in pytorch.text(run)
    assert pytorch.unset(run.request) == "--let-go x@model.py:7"
    assert name in LIBRARIES["transformers"].unset(run.request)
