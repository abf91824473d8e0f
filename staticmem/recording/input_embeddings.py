"""What `enable_input_require_grads()` of transformers hooks: adapters beside frozen layers need to know it.

Sources: transformers/modeling_utils.py, `enable_input_require_grads`, which hooks what `get_input_embeddings()` gives
of each model within a model, and `gradient_checkpointing_enable`, which calls it for models of tokens since
transformers 5; peft/peft_model.py, `_prepare_model_for_gradient_checkpointing`.
"""

from __future__ import annotations

from typing import Any

import torch

_HOOKS = ("make_inputs_require_grad", "make_inputs_require_grads")


def input_embeddings(module: torch.nn.Module) -> dict[str, Any]:
    """The key `input_embeddings` of a recording; nothing for modules that are not of transformers."""
    embeddings: dict[int, torch.nn.Module] = {}  # by id
    for child in module.modules():
        if not hasattr(child, "enable_input_require_grads"):
            continue
        try:
            embedding = child.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(embedding, torch.nn.Module):
            embeddings.setdefault(id(embedding), embedding)
    paths = [path for path, child in module.named_modules() if id(child) in embeddings and path]
    if not paths:
        return {}
    hooked = any(
        getattr(hook, "__name__", "") in _HOOKS
        for child in embeddings.values()
        for hook in child._forward_hooks.values()
    )
    return {"input_embeddings": {"paths": paths, "require_grad": hooked}}
