"""How many tokens of a text stand for its sound: the code tells, which computes how long its encoder's result is, or is
run on tensors without data.

Source: transformers, `get_audio_features` of models that read sound, `_get_feat_extract_output_lengths` and
`_get_subsampling_output_length` of their encoders.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

TOKENS = ("audio_token_id", "audio_token_index", "speech_token_id", "sound_token_id", "audio_placeholder_token_id")
_LENGTHS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
_FEATURES = ("get_audio_features", "get_speech_features")


def tokens_of_sound(model: Any, inputs: Mapping[str, torch.Tensor], batch: int, length: int) -> int | None:
    """Of each sample; None where the code does not tell. `length` is that of its sound: frames, or samples."""
    count = _counted(model, inputs, batch)
    return count if count is not None else _calculated(model, length)


def _counted(model: Any, inputs: Mapping[str, torch.Tensor], batch: int) -> int | None:
    """The embeddings that the code makes of sound without data."""
    compute = next(
        (getattr(m, name) for m in (model, *model.modules()) for name in _FEATURES if hasattr(m, name)), None
    )
    if compute is None:
        return None
    taken = inspect.signature(compute).parameters
    with torch.no_grad(), torch.device("meta"):
        try:
            result = compute(**{name: tensor for name, tensor in inputs.items() if name in taken})
        except Exception:  # it reads data
            return None
    pooled = getattr(result, "pooler_output", None)
    embeddings = [t for t in tree_flatten(result if pooled is None else pooled)[0] if isinstance(t, torch.Tensor)]
    return sum(t.numel() // t.shape[-1] for t in embeddings[:1]) // batch if embeddings else None


def _calculated(model: Any, length: int) -> int | None:
    """The length of the encoder's result as the code calculates it."""
    owners = (model, *model.modules())
    compute = next((getattr(owner, name) for owner in owners for name in _LENGTHS if hasattr(owner, name)), None)
    if compute is None:
        return None
    try:
        result = compute(torch.tensor([length], device="cpu"))
    except Exception:  # it takes other lengths too
        return None
    last = result[-1] if isinstance(result, (list, tuple)) else result
    return int(last.reshape(-1)[-1])
