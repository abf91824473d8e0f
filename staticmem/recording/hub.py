"""What the Hugging Face Hub says of a model: its config and the headers of its weights, fetched by a process of its own
(`recording.hub_child`) with bounds of time and memory, once in a process; and what is said of a checkpoint beside the
architecture that is built.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from staticmem import child
from staticmem.child import Failure
from staticmem.errors import UsageError
from staticmem.files import temporary_folder
from staticmem.frontends.architectures import HUB, Architecture, config_of, read_config
from staticmem.frontends.checkpoint import TORCH, Tensor, loaded_dtype, tensors_of_folder
from staticmem.frontends.packing import Packing, packing_of
from staticmem.ir import dtypes
from staticmem.ir.graph import Note
from staticmem.units import format_bytes

TIMEOUT = 180.0  # seconds of all requests together: 163 files of DeepSeek-V3, 8 at a time, take 30 on a slow line
MEMORY = 4 << 30  # bytes that the process may have
_OFFLINE_HINT = "Unset HF_HUB_OFFLINE, or fetch the config once: hf download OWNER/NAME config.json"
FAILURES: child.Failures = {
    "run": Failure("{name} cannot be read from the Hub", "{message}.", "Try it again.", "SM415"),
    "network": Failure(
        "{name} cannot be read from the Hub", "{message}.",
        "Check the network, HF_ENDPOINT and HTTPS_PROXY (HF_HUB_DOWNLOAD_TIMEOUT: seconds an answer takes).",
        "SM415",
    ),
    "offline": Failure("{name} cannot be read from the Hub", "{message}.", _OFFLINE_HINT, "SM415"),
    "gated": Failure(
        "{name} is gated, and not open to you", "{message}.",
        "Accept its conditions on its page and log in (hf auth login, or HF_TOKEN), or give a config.json.", "SM415",
    ),
    "missing": Failure(
        "{name} is not on the Hub", "{message}.",
        "Check the name. A private or gated one needs a token (hf auth login, or HF_TOKEN); a path must exist.",
        "SM415",
    ),
    "no config": Failure(
        "{name} has no config.json", "{message}.",
        "Check the name. Pipelines of diffusers, GGUF files and adapters have none: name the model that they are of.",
        "SM415",
    ),
    "memory": Failure("{name} has headers that take too much memory", "{message}.", "Give its config.json.", "SM415"),
    "crash": Failure("the process that asks the Hub ended", "{message}.", "Give the config.json of {name}.", "SM415"),
    "timeout": Failure(
        "the Hub took longer than {timeout} seconds", "The process was ended.", "Try it again, or give a config.json.",
        "SM415",
    ),
}  # fmt: skip
_fetched: dict[tuple[str, str], Described] = {}
NOT_PACKED = Packing({})


@dataclass(frozen=True)
class Described:
    """A config and the checkpoint beside it. `place` says where it is from, `unread` why there are no headers."""

    config: dict[str, Any]
    tensors: Sequence[Tensor] = ()
    place: str = ""
    unread: str = ""
    packing: Packing = NOT_PACKED


def describe(architecture: Architecture) -> Described:
    """The config of a model of transformers, in the dtype that the library would load, and its checkpoint.

    Raises:
        ModelFileError: it is no config of a model that is built (SM145, SM147).
        UsageError: huggingface_hub is not installed (SM146).
        RunError: the Hub does not give it (SM415).
    """
    described = _of_folder(architecture) if not architecture.revision else _of_hub(architecture)
    dequantize = architecture.options.get("dequantize") == "yes"
    packing = packing_of(described.config, architecture.given, dequantize)
    described = replace(described, config=packing.config, packing=packing)
    dtype = loaded_dtype(described.tensors)
    if dtype is None or _says_dtype(described.config):
        return described
    return replace(described, config={**described.config, "dtype": dtype})


def _of_folder(architecture: Architecture) -> Described:
    config = read_config(architecture.name)
    folder = os.path.dirname(architecture.name)
    try:
        return Described(config, tensors_of_folder(folder), f"{folder or 'the folder'}")
    except ValueError as error:
        return Described(config, (), folder, str(error))


def config_of_repository(architecture: Architecture) -> dict[str, Any]:
    """The config of a repository of the Hub as it is written, with how its weights are packed.

    Raises as `describe`.
    """
    return _of_hub(architecture).config


def _of_hub(architecture: Architecture) -> Described:
    key = architecture.name, architecture.revision
    if key not in _fetched:
        _fetched[key] = _fetch(architecture)
    return _fetched[key]


def _fetch(architecture: Architecture) -> Described:
    name = f"{HUB}:{architecture.name}" + (f"@{architecture.revision}" if architecture.revision != "main" else "")
    if importlib.util.find_spec("huggingface_hub") is None:
        hint = "pip install 'staticmem[hub]'; or give a config.json."
        raise UsageError("huggingface_hub is not installed", f"{name} is fetched with it.", hint, "SM146")
    if not architecture.given.startswith(f"{HUB}:"):
        sys.stderr.write(f"{architecture.given} is no path here: the Hugging Face Hub is asked for {name}\n")
    with temporary_folder() as folder:
        job = {
            "repository": architecture.name, "revision": architecture.revision, "seconds": TIMEOUT,
            "memory_limit": MEMORY, "answer": os.path.join(folder, "answer.json"),
        }  # fmt: skip
        answer = child.run("staticmem.recording.hub_child", job, folder, TIMEOUT, FAILURES, name=name)
    tensors = [Tensor(title, dtype, tuple(shape)) for title, dtype, shape in answer["tensors"]]
    commit = f" at {answer['commit'][:12]}" if answer["commit"] else ""
    return Described(config_of(answer["config"], name), tensors, f"{answer['place']}{commit}", answer["unread"])


def _says_dtype(content: Any) -> bool:
    """Whether a config, or a part of it, says the dtype of the weights."""
    if not isinstance(content, Mapping):
        return False
    return any(content.get(key) for key in ("dtype", "torch_dtype")) or any(map(_says_dtype, content.values()))


def notes_of(architecture: Architecture, described: Described, document: Mapping[str, Any]) -> list[Note]:
    """What the report says: where the config is from, of which dtype the weights are, and what of the checkpoint the
    architecture has not, or the other way round."""
    notes = []
    if architecture.revision:
        bare = "" if architecture.given.startswith(f"{HUB}:") else f"{architecture.given} is no path here: "
        text = f"{bare}the config of {architecture.name} was read from {described.place}{_said_of(described.tensors)}"
        notes.append(Note("assumption", "SM415", text))
    if described.unread:
        text = (
            f"the headers of the weights could not be read ({described.unread}): dtypes are those of the config alone"
        )
        notes.append(Note("warning", "SM416", text))
    if described.packing != NOT_PACKED:
        notes += _notes_of_packing(described.packing, document)
    owned = _owned(document["parameters"]), _owned(document["buffers"])
    if described.packing.layers and described.tensors:
        notes += _other_packing(described.tensors, document, *owned)
    elif described.tensors and all(tensor.dtype in TORCH for tensor in described.tensors):
        notes += _differences(described.tensors, *owned)
    return notes


def _notes_of_packing(packing: Packing, document: Mapping[str, Any]) -> list[Note]:
    """How the weights of the checkpoint are packed, or that they are loaded whole."""
    if packing.whole:
        text = (
            f"{packing.whole} has packed the weights of the checkpoint, and they are whole here: as was asked, or as "
            "transformers loads them by itself for a card that has no kernel for them"
        )
    elif packing.quantize:
        text = (
            f"its weights are packed by bitsandbytes, as the config says: {packing.quantize}, products in "
            f"{packing.compute or 'the type of the model'} (--quantize none, or dequantize=yes: they are whole)"
        )
    elif packing.layers:
        return [Note("assumption", "SM393", text) for text in told_of_layers(packing.layers, document)]
    else:
        return []
    return [Note("assumption", "SM393", text)]


_OF_SHAPES = {"I64": "int64"}  # the shape of a weight that is packed, as `weight_shape` of compressed-tensors
_KERNELS = {
    "fp8": "products run in the finegrained-fp8 kernel of transformers, which unpacks nothing; bands reach to DeepGEMM "
    "on Hopper, which copies its input in 8 bits",
    "mxfp4": "products run in the kernels that transformers takes from the Hub (package kernels, Triton 3.4), which "
    "unpack nothing; without them it loads the weights whole: dequantize=yes",
    "gptq": "products run in Marlin of gptqmodel, which unpacks nothing; bands reach to its code in PyTorch, which "
    "makes the whole weight of a layer for each product",
    "compressed-tensors": "they are packed until the first forward alone, which unpacks all of them: they are whole in "
    "the steps that are predicted, beside their scales",
}
_KERNELS["awq"] = _KERNELS["gptq"]


def told_of_layers(layers: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """What is said of layers that are recorded with their packed weights: how much they have, and what runs them."""
    method, packed = str(layers["quant_method"]), document["packed"]
    rows = {**_owned(document["parameters"]), **_owned(document["buffers"])}
    stored = sum(_bytes_of(*rows[name][:2]) for name in packed)
    numbers = sum(packed.values())
    text = (
        f"its weights are packed by {method}, as the config says: {numbers:,} numbers in {stored:,} bytes with their "
        f"scales, in 16 bits {2 * numbers:,}; {_KERNELS[method]}"
    )
    return [text]


def _bytes_of(shape: Sequence[int], dtype: str) -> int:
    return dtypes.ALL[dtype].nbytes(math.prod(shape))


def _said_of(tensors: Sequence[Tensor]) -> str:
    if not tensors:
        return ""
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[tensor.dtype] += tensor.elements
    elements = ", ".join(f"{count:,} {dtype}" for dtype, count in dtypes.most_common(4))
    return f"; the headers of its weights say {elements} ({format_bytes(sum(t.size for t in tensors))})"


def _owned(rows: Sequence[Sequence[Any]]) -> dict[str, tuple[tuple[int, ...], str, bool]]:
    """Of tensors in the document of a recording, by name: shape, dtype, and whether it shares another's storage."""
    owned: dict[str, tuple[tuple[int, ...], str, bool]] = {}
    last: list[str] = []
    for row in rows:
        shared, rest, shape, *more = row
        last = [*last[:shared], *rest.split(".")]
        dtype = more[0] if more else "float32"
        owned[".".join(last)] = (tuple(shape), dtype, len(more) > 2 and more[2] >= 0)
    return owned


def _other_packing(tensors: Sequence[Tensor], document: Mapping[str, Any], parameters: Any, buffers: Any) -> list[Note]:
    """A warning where the packed tensors of the checkpoint have other bytes than those that are built. As they are
    stored, those of compressed-tensors are not built: the model is whole when it runs."""
    there = Counter[str]()
    for tensor in tensors:
        if tensor.dtype not in TORCH and tensor.dtype not in _OF_SHAPES:
            there[tensor.dtype] += tensor.size
    owned = {**parameters, **buffers}
    built = Counter[str]()
    stored = document.get("stored") or {name: owned[name][:2] for name in document["packed"]}
    for shape, dtype in stored.values():
        if dtype not in TORCH.values() and dtype not in _OF_SHAPES.values():
            built[dtype] += _bytes_of(shape, dtype)
    if there.total() == built.total():
        return []
    listed = [", ".join(f"{size:,} of {dtype}" for dtype, size in sizes.items()) or "none" for sizes in (there, built)]
    text = (
        f"packed tensors of the checkpoint have other bytes than those that are built: {listed[0]} in its headers, "
        f"{listed[1]} here; the figures are of what is built"
    )
    return [Note("warning", "SM416", text)]


def _differences(tensors: Sequence[Tensor], parameters: Any, buffers: Any) -> list[Note]:
    """A warning where the checkpoint has more or fewer elements than the architecture could take from it.

    Names are no measure: transformers renames and joins tensors as it loads them. A tied weight may be in the file
    twice, and buffers may be or not.
    """
    own = sum(math.prod(shape) for shape, _, tied in parameters.values() if not tied)
    most = own + sum(math.prod(shape) for shape, _, tied in parameters.values() if tied)
    most += sum(math.prod(shape) for shape, _, _ in buffers.values())
    there = sum(tensor.elements for tensor in tensors)
    if own <= there <= most:
        return []
    shapes = {shape for shape, _, _ in (*parameters.values(), *buffers.values())}
    strange = max((t for t in tensors if t.shape not in shapes), key=lambda t: t.elements, default=None)
    example = "" if strange is None else f"; it has {strange.name} {list(strange.shape)}, which is not built"
    text = (
        f"the checkpoint has {there:,} elements, and the architecture that is built has {own:,}{example}: the figures "
        "are of the architecture (head=CLASS chooses another class)"
    )
    return [Note("warning", "SM416", text)]
