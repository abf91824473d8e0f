"""Outputs that come back from autocast in float32.

Source: accelerate 1.15, `convert_outputs_to_fp32` (utils/operations.py), around the forward and its autocast.
"""

from __future__ import annotations

from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Tensor
from staticmem.engine.features import Feature
from staticmem.ir import dtypes
from staticmem.ir.dtypes import HALVES
from staticmem.ops.casts import to_copy


class Float32Outputs(Feature):
    """Copies of the outputs of half precision: the caller gets them when all are made, and the model's own end."""

    def end_forward(self, outputs: list[Tensor]) -> list[Tensor]:
        e, interpreter = self.e, self.step.interpreter
        env, owners = interpreter.env, interpreter.owners
        names = [name for name in interpreter.graph.outputs if isinstance(env.get(name), Tensor)]
        halves = [name for name in dict.fromkeys(names) if env[name].dtype in HALVES]
        e.open_scope()
        copies = {name: to_copy(e, env[name], dtypes.float32) for name in halves}
        for name, copy in copies.items():
            own = owners.pop(name, None)
            owners[name] = copy, e.take(copy, Reason.VALUE, name)
            env[name] = copy
            if own is not None:
                e.end(*own)
        e.close_scope()
        return [env[name] for name in names]
