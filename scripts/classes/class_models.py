"""Published models to run on meta tensors: which there are, how to build one, and a choice with all of their classes.

    python scripts/classes/class_models.py [--skip FILE] > scripts/classes/class_tables.txt

Every model of timm, torchvision and transformers is built (small configurations of transformers; no weights). Of those,
models are chosen greedily until every part that any of them has is in a chosen one. A part is a class of a module
together with the names and classes of its children, so that blocks with and without an optional layer count apart.
`--skip`: models never to choose, such as those that accuracy is measured on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

SECONDS = 30
Built = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
Part = tuple[str, frozenset[tuple[str, str]]]
_SMALL = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "num_hidden_layers": 2, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "d_kv": 16, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "hidden_dim": 128, "vocab_size": 500, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "rotary_dim": 8, "word_embed_proj_dim": 64,
    "attention_hidden_size": 64,
}  # fmt: skip


def specs() -> list[str]:
    """All names: `timm:resnet50`, `tv:video.r3d_18`, `hf:BertForMaskedLM`."""
    import timm
    import torchvision

    kinds = {"quantization.", "detection."}  # code paths of their own; lists of images of any size
    tv = [n for n in _torchvision_names(torchvision.models) if not n.startswith(tuple(kinds))]
    return [*(f"timm:{n}" for n in timm.list_models()), *(f"tv:{n}" for n in tv), *(f"hf:{n}" for n in _transformers())]


def _torchvision_names(models: Any) -> list[str]:
    prefixes = {f"torchvision.models.{p}": f"{p}." for p in ("segmentation", "video", "optical_flow", "detection")}
    prefixes["torchvision.models.quantization"] = "quantization."
    made = []
    for name in models.list_models():
        module = models.get_model_builder(name).__module__
        prefix = next((p for m, p in prefixes.items() if module.startswith(m)), "")
        made.append(prefix + name.removeprefix("quantized_") if prefix != "quantization." else prefix + name)
    return sorted(made)


def _transformers() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    kinds = (
        "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
        "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_SEMANTIC_SEGMENTATION", "MODEL_FOR_AUDIO_CLASSIFICATION",
        "MODEL_FOR_CTC", "MODEL_FOR_DEPTH_ESTIMATION",
        "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_SEQUENCE_CLASSIFICATION", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL",
    )  # fmt: skip
    names: dict[str, None] = {}
    for kind in kinds:
        for found in getattr(auto, f"{kind}_MAPPING_NAMES", {}).values():
            for name in (found,) if isinstance(found, str) else found:
                names[name] = None
    return list(names)


def build(spec: str) -> Built:
    """A model in training mode on the meta device, with arguments. Raises what the library raises."""
    kind, _, name = spec.partition(":")
    with torch.device("meta"):
        if kind == "timm":
            import timm

            model = timm.create_model(name)
            size = (
                model.default_cfg["input_size"] if isinstance(model.default_cfg, dict) else model.default_cfg.input_size
            )
            return model.train(), (torch.empty(2, *size),), {}
        return _torchvision(name) if kind == "tv" else _of_transformers(name)


def _torchvision(name: str) -> Built:
    import torchvision

    group, _, model = name.rpartition(".")
    made = torchvision.models.get_model(model, **({"weights_backbone": None} if group == "segmentation" else {}))
    shape = {"video": (2, 3, 16, 224, 224), "optical_flow": (1, 3, 128, 128)}.get(group, (2, 3, 299, 299))
    if "vit" in model or "swin" in model or "maxvit" in model:
        shape = (*shape[:-2], 224, 224)
    images = (torch.empty(shape),) * (2 if group == "optical_flow" else 1)
    return made.train(), images, {"num_flow_updates": 2} if group == "optical_flow" else {}


def _of_transformers(name: str) -> Built:
    import transformers

    # without data nobody can tell whether rows are packed sequences; with data, one sequence a row, they are not
    transformers.masking_utils.find_packed_sequence_indices = lambda *a, **k: None
    cls = getattr(transformers, name)
    errors: list[Exception] = []
    # experts as they are by default, then a loop over them: the default ones may take half precision only. As it runs,
    # then as exporters see it: what the data of a mask decides, nobody can tell without data
    for experts, shrink, traced in itertools.product((None, "eager"), (True, False), (False, True)):
        transformers.utils.import_utils.is_torchdynamo_compiling = lambda traced=traced: traced
        try:
            config = cls.config_class()
            _shrink(config, shrink, experts)
            model = cls(config).train()
        except Exception as error:  # a configuration whose parts do not fit
            errors.append(error)
            continue
        for kwargs in _inputs(config, name):
            try:
                with torch.no_grad():
                    model(**kwargs)
            except Exception as error:  # other inputs, then
                errors.append(error)
            else:
                return model, (), kwargs
    raise errors[0]


def _shrink(config: Any, sizes: bool, experts: str | None) -> None:
    for key, value in _SMALL.items():
        if "layers" in key or key == "n_layer" or (sizes and not _by_parts(config, key)):
            with contextlib.suppress(Exception):  # some are computed from others, or differ by layer
                if isinstance(getattr(config, key), int):
                    setattr(config, key, min(value, getattr(config, key)))
    padding = getattr(config, "pad_token_id", 0)
    if padding is None or (isinstance(padding, int) and padding >= getattr(config, "vocab_size", padding + 1)):
        config.pad_token_id = 0
    if experts is not None:
        config._experts_implementation = experts
    with contextlib.suppress(Exception):
        if isinstance(config.layer_types, list):
            config.layer_types = config.layer_types[: getattr(config, "num_hidden_layers", 2)]
    for key in getattr(config, "sub_configs", {}):
        if getattr(config, key, None) is not None:
            _shrink(getattr(config, key), sizes, experts)


def _by_parts(config: Any, key: str) -> bool:
    """Whether heads have sizes of their own for what is rotated and what is not (multi-head latent attention)."""
    return key in ("head_dim", "num_key_value_heads") and hasattr(config, "qk_rope_head_dim")


def _inputs(config: Any, name: str) -> Iterator[dict[str, Any]]:
    """What a model of unknown kind may take."""
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 224)
    size = size if isinstance(size, int) else 224
    channels = getattr(config, "num_channels", 3)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    images = torch.empty(2, channels if isinstance(channels, int) else 3, size, size)
    bins = getattr(config, "num_mel_bins", 80)
    yield {"input_ids": ids, "use_cache": False}
    yield {"input_ids": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    yield {"pixel_values": images}
    yield {"input_values": torch.empty(2, 8000)}
    yield {"input_values": torch.empty(2, getattr(config, "max_length", 1024), bins if isinstance(bins, int) else 80)}
    frames = 2 * getattr(config, "max_source_positions", 1500)
    speech = torch.empty(2, bins if isinstance(bins, int) else 80, frames)
    yield {"input_features": speech, "decoder_input_ids": ids, "use_cache": False}
    yield {"input_ids": ids, "pixel_values": images}
    yield {"pixel_values": torch.empty(2, getattr(config, "num_frames", 8), 3, size, size)}


def parts(model: torch.nn.Module) -> set[Part]:
    """Classes of published modules, each with its children."""
    made = set()
    for module in model.modules():
        name = _class(module)
        if name.startswith(("torchvision.", "timm.", "transformers.")) and type(module).forward is not None:
            children = frozenset((n, _class(c)) for n, c in module.named_children() if not n.isdigit())
            made.add((name, children))
    return made


def _class(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


class TookTooLongError(Exception):
    """A model took more than its time."""


def within(seconds: int, run: Callable[[], Any]) -> Any:
    """The result of `run`, which gets this many seconds (POSIX)."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        return run()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def cover(found: dict[str, set[Part]]) -> list[str]:
    """Names whose parts together are all parts; at each step the one that adds most, of equals the first."""
    left = dict(found)
    missing = set().union(*found.values()) if found else set()
    chosen = []
    while missing:
        best = max(left, key=lambda name: len(left[name] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


def main(skip: set[str]) -> None:
    """Writes the choice to standard output; what cannot be built is named on standard error."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, set[Part]] = {}
    began = time.monotonic()
    names = [name for name in specs() if name not in skip]
    for name in names:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # some libraries print while they are imported
                found[name] = within(SECONDS, lambda name=name: parts(build(name)[0]))
        except Exception as error:  # whatever a library raises for one of its models
            print(f"{name}: {type(error).__name__} {str(error)[:120]!r}", file=sys.stderr, flush=True)
    chosen = cover(found)
    print("\n".join(chosen))
    total = len(set().union(*found.values())) if found else 0
    print(
        f"{len(found)} of {len(names)} models built, {total} parts, {len(chosen)} models chosen, "
        f"{time.monotonic() - began:.0f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip", type=Path, help="file of names never to choose, one a line")
    given = parser.parse_args()
    main(set(given.skip.read_text(encoding="utf-8").split()) if given.skip else set())
