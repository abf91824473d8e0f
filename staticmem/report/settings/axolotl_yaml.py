"""The YAML that `axolotl train` takes, without the model and the data.

Source, axolotl 0.18: src/axolotl/utils/schemas (`AxolotlInputConfig`, `FSDPConfig`), src/axolotl/utils/config (a model
is loaded in bfloat16 where `bf16` is set), src/axolotl/core/builders/base.py (the rest are `TrainingArguments`),
src/axolotl/loaders/model.py (`_configure_embedding_dtypes`: with neither adapters nor FSDP embeddings and the head are
in float32, so that no text is written for these).
"""

from __future__ import annotations

from staticmem.report.settings import Run, comment
from staticmem.report.settings.deepspeed_json import configuration
from staticmem.report.settings.optimizers import name_of_transformers
from staticmem.scenario.adapters import BASE, lora_of
from staticmem.scenario.request import Request
from staticmem.scenario.strategies import DEEPSPEED


def write(run: Run) -> str:
    """The text of the file."""
    import yaml  # late: for the YAML formats alone

    text: str = yaml.safe_dump(_configuration(run), sort_keys=False)
    return "\n".join([*comment(run), "# Add yours: base_model, datasets, learning_rate, output_dir", text])


def _configuration(run: Run) -> dict[str, object]:
    request = run.request
    config: dict[str, object] = {
        "micro_batch_size": run.batch,
        "gradient_accumulation_steps": request.accumulate,
        "optimizer": name_of_transformers(request),
        "bf16": True,
        "max_grad_norm": 1.0 if request.clip_grad_norm else 0.0,
        "gradient_checkpointing": bool(run.checkpointed.paths) and not run.strategy.shards_modules,
        **_adapter(request),
    }
    if run.length is not None:
        config["sequence_len"] = run.length
    if request.weight_decay:
        config["weight_decay"] = request.weight_decay
    if config["gradient_checkpointing"]:
        config["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if run.strategy.shards_modules:
        config |= {"fsdp_version": 2, "fsdp_config": _fsdp(run)}
    if run.strategy.library == DEEPSPEED:
        config["deepspeed"] = configuration(run)
    return config


def _adapter(request: Request) -> dict[str, object]:
    if not request.lora:
        return {}
    assert isinstance(request.lora, str)
    lora = lora_of(request.lora)
    adapter: dict[str, object] = {
        "adapter": "lora",
        "lora_r": lora.r,
        "lora_alpha": int(lora.alpha),
        "lora_dropout": lora.dropout,
    }
    adapter |= {"lora_target_linear": True} if lora.all_linear else {"lora_target_modules": list(lora.targets)}
    if lora.save:
        adapter["lora_modules_to_save"] = list(lora.save)
    if lora.dtype == BASE:
        adapter["peft_autocast_adapter_dtype"] = False
    if lora.dora:
        adapter["peft_use_dora"] = True
    return adapter


def _fsdp(run: Run) -> dict[str, object]:
    config: dict[str, object] = {
        "reshard_after_forward": True,
        "activation_checkpointing": bool(run.checkpointed.paths),
    }
    if run.sharded.cls:
        config |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": run.sharded.cls}
    return config
