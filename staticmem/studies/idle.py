"""Options that act on ops which the model does not have: what of a request changes nothing of this graph."""

from __future__ import annotations

from collections.abc import Iterator, Set

from staticmem.ir.graph import Note
from staticmem.ops.registry import kinds_of
from staticmem.scenario.request import OPTIONS, Request

# what an option acts on
_ACTS_ON = {
    "tf32": "convolution",
    "cudnn_benchmark": "convolution",
    "cudnn": "convolution",
    "unfold_batchnorm": "convolution",
    "sdpa": "fused attention",
}


def idle_in(request: Request, bases: Set[str]) -> Iterator[Note]:
    """Notes of options that were given and act on no op of a graph; `bases` are those of its ops."""
    for name, kind in _ACTS_ON.items():
        if getattr(request, name) != OPTIONS[name].default and not any(_is(kind, base) for base in bases):
            text = f"{OPTIONS[name].flag} is not used: the model has no {kind}"
            yield Note("warning", "SM302", text.replace("--tf32", "--no-tf32"))


def _is(kind: str, base: str) -> bool:
    if kind == "convolution":
        return "convolution" in kinds_of(base)
    return "attention" in base or "encoder_layer" in base
