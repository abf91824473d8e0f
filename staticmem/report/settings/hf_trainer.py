"""`TrainingArguments` of transformers, as a Python module.

Source, transformers 5.23: src/transformers/training_args.py (`TrainingArguments`; `_process_fsdp_args` has the keys of
`fsdp_config`), src/transformers/trainer.py (`optimizer_cls_and_kwargs`; `sync_each_batch`, without which FSDP2 keeps
whole gradients between micro-batches). `gradient_checkpointing` is an alias from 5.x on, which 4.x has alone.
"""

from __future__ import annotations

from staticmem.ir.dtypes import bfloat16, float16
from staticmem.report.settings import Run, comment
from staticmem.report.settings.deepspeed_json import configuration
from staticmem.report.settings.optimizers import class_of, keywords, name_of_transformers
from staticmem.report.settings.pytorch import lora_text
from staticmem.scenario.adapters import lora_of
from staticmem.scenario.strategies import DEEPSPEED

# what stands above `max_grad_norm=0.0`: the default of transformers is another, and its clipping takes memory
_NO_CLIPPING = (
    "    # 0 turns clipping off, as it was predicted: without this line gradients are clipped to a norm of 1.0, which",
    "    # takes memory; --clip-grad-norm predicts and writes that",
)


def write(run: Run) -> str:
    """The text of a module."""
    request = run.request
    arguments = arguments_of(run)
    name = name_of_transformers(request)
    imports = ["from transformers import TrainingArguments"]
    after = []
    if name is not None:
        arguments["optim"] = name
    else:
        module, cls = class_of(request)
        imports.insert(0, f"import {module}")
        kwargs = {"lr": 1e-4, **keywords(request)}
        after += [
            "# Trainer(..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs); lr is yours: it decides no memory"
        ]
        after += [f"optimizer_cls_and_kwargs = ({cls}, {kwargs!r})"]
    if request.lora:
        assert isinstance(request.lora, str)
        imports.insert(0, "import peft")
        after += ["# model = peft.get_peft_model(model, lora)", f"lora = {lora_text(lora_of(request.lora))}"]
    said = {} if request.clip_grad_norm else {"max_grad_norm": _NO_CLIPPING}
    rows = []
    for key, value in arguments.items():
        rows += [*said.get(key, ()), f"    {key}={value!r},"]
    lines = [*comment(run), "", *sorted(imports, key=lambda line: (line.startswith("from"), line)), ""]
    return "\n".join([*lines, "args = TrainingArguments(", *rows, ")", *after]) + "\n"


def arguments_of(run: Run) -> dict[str, object]:
    """The arguments that decide memory."""
    request = run.request
    arguments: dict[str, object] = {
        "output_dir": "output",
        "per_device_train_batch_size": run.batch,
        "gradient_accumulation_steps": request.accumulate,
        "max_grad_norm": 1.0 if request.clip_grad_norm else 0.0,
    }
    if request.weight_decay:
        arguments["weight_decay"] = request.weight_decay  # of all optimizers: those of transformers take it from here
    if run.half is not None:
        arguments |= {"bf16": run.half is bfloat16, "fp16": run.half is float16}
    if run.checkpointed.paths and not run.strategy.shards_modules:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if run.strategy.shards_modules:
        arguments |= _fsdp(run)
    if run.strategy.library == DEEPSPEED:
        arguments["deepspeed"] = configuration(run)
    return arguments


def _fsdp(run: Run) -> dict[str, object]:
    config: dict[str, object] = {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if run.sharded.paths else "NO_WRAP",
        "activation_checkpointing": bool(run.checkpointed.paths),
    }
    if run.sharded.cls:
        config["transformer_layer_cls_to_wrap"] = [run.sharded.cls]
    arguments: dict[str, object] = {"fsdp": True, "fsdp_config": config}
    if run.request.accumulate > 1:
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return arguments
