"""The YAML that `llamafactory-cli train` takes, without the model and the data.

Source, LLaMA-Factory 0.9.5: src/llamafactory/hparams (`ModelArguments`, `FinetuningArguments`; the others are those of
`TrainingArguments`), src/llamafactory/hparams/parser.py (`compute_dtype`: `bf16` loads the model in bfloat16),
src/llamafactory/model/adapter.py (`init_adapter`: what is trained is then cast to float32, unless `pure_bf16` is set),
src/llamafactory/model/model_utils/checkpointing.py (checkpoints are on unless they are disabled).
"""

from __future__ import annotations

from staticmem.ir.dtypes import bfloat16
from staticmem.report.settings import Run, comment
from staticmem.report.settings.hf_trainer import arguments_of
from staticmem.report.settings.optimizers import name_of_transformers
from staticmem.scenario.adapters import FOUR_BITS, lora_of
from staticmem.scenario.precision import precision
from staticmem.scenario.request import Request

_OF_CHECKPOINTS = ("gradient_checkpointing", "gradient_checkpointing_kwargs")  # LLaMA-Factory has words of its own


def write(run: Run) -> str:
    """The text of the file."""
    import yaml  # late: for the YAML formats alone

    text: str = yaml.safe_dump(_configuration(run), sort_keys=False)
    return "\n".join([*comment(run), "# Add yours: model_name_or_path, template, dataset, learning_rate", text])


def _configuration(run: Run) -> dict[str, object]:
    request = run.request
    arguments = {name: value for name, value in arguments_of(run).items() if name not in _OF_CHECKPOINTS}
    config: dict[str, object] = {"stage": "sft", "do_train": True, **_method(request)}
    if run.length is not None:
        config["cutoff_len"] = run.length
    config |= arguments
    config["optim"] = name_of_transformers(request)
    if run.checkpointed.paths:
        config["use_reentrant_gc"] = False
    else:
        config["disable_gradient_checkpointing"] = True
    return config


def _method(request: Request) -> dict[str, object]:
    """What is trained, and in which type: a model that is whole in bfloat16 without autocast is `pure_bf16`."""
    if not request.lora:
        is_whole = precision("dtype", request.dtype) is bfloat16 and request.amp is None
        return {"finetuning_type": "full"} | ({"pure_bf16": True} if is_whole else {})
    assert isinstance(request.lora, str)
    lora = lora_of(request.lora)
    method: dict[str, object] = {
        "finetuning_type": "lora",
        "lora_rank": lora.r,
        "lora_alpha": int(lora.alpha),
        "lora_dropout": lora.dropout,
        "lora_target": "all" if lora.all_linear else ",".join(lora.targets),
    }
    if lora.save:
        method["additional_target"] = ",".join(lora.save)
    if lora.dora:
        method["use_dora"] = True
    if request.quantize in FOUR_BITS:
        method |= {
            "quantization_bit": 4,
            "quantization_type": request.quantize.partition("-")[0],
            "double_quantization": request.quantize.endswith("-dq"),
        }
    elif request.quantize == "int8":
        method["quantization_bit"] = 8
    return method
