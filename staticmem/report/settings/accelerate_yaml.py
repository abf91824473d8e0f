"""The YAML that `accelerate launch --config_file` takes.

Source, accelerate 1.15: src/accelerate/commands/config/config_args.py (`ClusterConfig`, which refuses unknown keys),
src/accelerate/commands/config/cluster.py (keys of `fsdp_config` and `deepspeed_config`), src/accelerate/accelerator.py
(`no_sync`: without `sync_each_batch` FSDP2 keeps whole gradients between micro-batches).
"""

from __future__ import annotations

from staticmem.report.settings import Run, comment
from staticmem.scenario.strategies import DEEPSPEED

_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


def write(run: Run) -> str:
    """The text of the file."""
    import yaml  # late: for this format alone

    text: str = yaml.safe_dump(_configuration(run), sort_keys=False)
    return "\n".join([*comment(run), *_write_script_lines(run), text])


def _write_script_lines(run: Run) -> list[str]:
    """What accelerate takes in Python, as comments."""
    lines = [f"# In the script: a DataLoader with batch_size={run.batch}"]
    if run.request.accumulate > 1 and run.strategy.library != DEEPSPEED:
        sync = ", sync_each_batch=True" if run.strategy.shards_modules else ""
        plugin = f"GradientAccumulationPlugin(num_steps={run.request.accumulate}{sync})"
        lines.append(f"# and Accelerator(gradient_accumulation_plugin={plugin})")
    return lines


def _configuration(run: Run) -> dict[str, object]:
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": run.strategy.accelerate or "NO",
        "mixed_precision": "no" if run.half is None else _MIXED[run.half.name],
        "num_machines": 1,
        "num_processes": run.devices,
    }
    if run.strategy.shards_modules:
        fsdp: dict[str, object] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if run.sharded.paths else "NO_WRAP",
            "fsdp_activation_checkpointing": bool(run.checkpointed.paths),
        }
        if run.sharded.cls:
            fsdp["fsdp_transformer_layer_cls_to_wrap"] = run.sharded.cls
        config["fsdp_config"] = fsdp
    if run.strategy.library == DEEPSPEED:
        config["deepspeed_config"] = _deepspeed(run)
    return config


def _deepspeed(run: Run) -> dict[str, object]:
    """What accelerate makes DeepSpeed's JSON of; sizes of buckets are DeepSpeed's defaults, as in the prediction."""
    assert run.request.parallel is not None
    config: dict[str, object] = {
        "zero_stage": int(run.request.parallel[-1]),
        "gradient_accumulation_steps": run.request.accumulate,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
    }
    if run.request.clip_grad_norm:
        config["gradient_clipping"] = 1.0
    return config
