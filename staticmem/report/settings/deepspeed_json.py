"""The JSON of DeepSpeed.

Source, DeepSpeed 0.19: deepspeed/runtime/constants.py (keys of the batch, `bf16`, `fp16`, `gradient_clipping`),
deepspeed/runtime/zero/config.py (`zero_optimization`), deepspeed/runtime/zero/utils.py (`ZERO_SUPPORTED_OPTIMIZERS`;
others need `zero_allow_untested_optimizer`). The sizes of buckets are those of the prediction (`parallel.division`).
"""

from __future__ import annotations

import json

from staticmem.ir.dtypes import bfloat16
from staticmem.parallel.division import ZeroConfig
from staticmem.report.settings import Run

_TESTED = ("adam", "adamw", "adagrad")  # of those that torch.optim has


def configuration(run: Run) -> dict[str, object]:
    """The configuration as plain data. The optimizer is made in Python, as its learning rate is."""
    request, sizes = run.request, ZeroConfig()
    assert request.parallel is not None
    stage = int(request.parallel[-1])
    zero: dict[str, object] = {"stage": stage, "reduce_bucket_size": sizes.reduce_bucket_size}
    if stage < 3:
        zero["overlap_comm"] = False  # true takes a second bucket
    else:
        zero |= {
            "stage3_prefetch_bucket_size": sizes.prefetch_bucket_size,
            "stage3_param_persistence_threshold": sizes.param_persistence_threshold,
            "stage3_max_live_parameters": sizes.max_live_parameters,
            "stage3_max_reuse_distance": sizes.max_reuse_distance,
            "sub_group_size": sizes.sub_group_size,
        }
    config: dict[str, object] = {
        "train_batch_size": run.batch * request.accumulate * run.devices,
        "train_micro_batch_size_per_gpu": run.batch,
        "gradient_accumulation_steps": request.accumulate,
        "zero_optimization": zero,
        # said in any case: `GRADIENT_CLIPPING_DEFAULT` of deepspeed/runtime/constants.py is 1.0
        "gradient_clipping": 1.0 if request.clip_grad_norm else 0.0,
    }
    if run.half is not None:
        config["bf16" if run.half is bfloat16 else "fp16"] = {"enabled": True}
    if request.optimizer not in _TESTED:
        config["zero_allow_untested_optimizer"] = True
    return config


def write(run: Run) -> str:
    """The text of the file; JSON has no comments, so the heading is not in it."""
    return json.dumps(configuration(run), indent=2) + "\n"
