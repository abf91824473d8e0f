"""The process that builds an architecture on the meta device and records it, or exports its graph
(`recording.architectures`).

It loads no weights and no code but that of the installed packages, and asks no network. A config is hostile input: the
numbers of modules and of parameters are bounded, and so are the process's time and memory.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn
from unittest import mock

from staticmem.child import FailedError, answer, limit_memory
from staticmem.errors import StaticmemError, described
from staticmem.frontends.recording_format import ALL
from staticmem.recording import surroundings
from staticmem.recording.attempts import closed_when_late
from staticmem.recording.example_inputs import Built, Example
from staticmem.recording.labels import add_labels, loss_function
from staticmem.recording.model_inputs import ModelInputs

MOST_MODULES = 200_000
MOST_PARAMETERS = 1 << 46  # elements: 70,000 billion
MOST_REPAIRS = 6  # inputs that the code asks for one after the other


def main(path: str) -> NoReturn:
    gc.disable()  # cycles of PyTorch's are 50 MB of 80 layers, and looking for them takes a sixth of the time
    environment, started = dict(os.environ), time.time_ns()
    os.environ.update(surroundings.OFFLINE)
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"  # checks of contents, which compute what is dropped at once
    with surroundings.noted_reads() as names:

        def work(job: dict[str, Any]) -> dict[str, Any]:
            result = _work(job)
            return {**result, "facts": surroundings.facts_of_process(job["package"], names, environment, started)}

        os._exit(answer(path, work))  # half a second sooner than by taking the packages down: its files are written


def _work(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    limit_memory(job)
    try:
        built = _BUILDERS[job["package"]](job)
    except FailedError:
        raise
    except Exception as error:
        raise FailedError("run", described(error)) from error
    count = sum(p.numel() for p in built.module.parameters())
    if count > MOST_PARAMETERS:
        raise FailedError("refused", f"it has {count:,} parameters, and at most {MOST_PARAMETERS:,} are taken")
    gc.freeze()  # packages have a million objects, which a search for cycles in what is recorded need not go through
    built.module.to(device="meta")  # what its constructor made on the CPU
    dtype = job["options"].get("dtype")
    if dtype is not None and job["package"] in ("timm", "torchvision"):
        built.module.to(dtype=getattr(torch, dtype))
    return _written(job, built)


def _written(job: Mapping[str, Any], built: Built) -> dict[str, Any]:
    from staticmem.frontends.recording_format import pack
    from staticmem.recording.export import ExportRequest, graph_file

    built.module.train(job.get("train", True))
    lines: list[str] = []
    try:
        if job["kind"]:
            kwargs, axes = built.of_all_modes()
            request = ExportRequest(built.module, built.args, job["kind"], train=job["train"], kwargs=kwargs, axes=axes)
            data, lines = graph_file(request)
        else:
            with closed_when_late():
                document = _recorded(built, job)
            data = pack({**document, **loss_function(built.module)})
    except StaticmemError as error:
        raise FailedError("graph" if job["kind"] else "run", f"{error.what}: {error.why}") from error
    with open(job["file"], "wb") as file:
        file.write(data)
    return {"lines": lines}


def _recorded(built: Built, job: Mapping[str, Any]) -> dict[str, Any]:
    """The recording, with the inputs that the code turns out to need."""
    for _ in range(MOST_REPAIRS):
        before = built.changes
        try:
            return _recorded_once(built, job)
        except StaticmemError as error:
            if built.changes == before and not built.repair(error):
                raise
    return _recorded_once(built, job)


def _recorded_once(built: Built, job: Mapping[str, Any]) -> dict[str, Any]:
    """The recording; without labels where the forward takes them, and cannot compute its loss on fake tensors."""
    from staticmem.recording.matching import matched_without_data
    from staticmem.recording.record import Loop, record

    loop = Loop(built.of_mode, built.begin)
    as_given = job.get("sizes") is not None
    record_it = partial(
        record, input_values=built.input_values, as_given=as_given, part=job.get("part", ALL), spread=built.spread
    )
    try:
        with matched_without_data():
            document = record_it(built.module, built.args, built.kwargs, built.loss, axes=built.axes, loop=loop)
    except StaticmemError as error:
        fixed = "labels" in job.get("options", {}) or built.spread is not None
        if not built.of_mode or fixed or built.repair(error):
            raise
        kwargs, axes = built.of_all_modes()
        document = record_it(built.module, built.args, kwargs, axes=axes, loop=Loop(begin=built.begin))
        document["unlabelled"] = error.why
    told = {"use_cache": built.uses_cache, "own_loss": document["loss"]}
    told |= {"packed": built.packed, "stored": built.stored, "limits": {k: list(v) for k, v in built.limits.items()}}
    document["sizes"]["example"].update({name: value for name, (value, *_) in built.limits.items()})
    document["sizes"]["conditions"] += [f"Eq({name},{value})" for name, (value, *_) in built.limits.items()]
    told |= {"trained": built.trained}
    return {**document, **{key: value for key, value in told.items() if value}}


def _on_meta(build: Callable[[], Any]) -> Any:
    """What a constructor builds on the meta device. Some read numbers from tensors, which have none there: the rates of
    stochastic depth from `linspace`, the widths of RegNet from `arange` and `tensor`. Those are on the CPU, the latter
    two where they have to be: positions are added to weights.
    """
    try:
        with _bounded("linspace"):
            return build()
    except (NotImplementedError, RuntimeError) as error:  # as `item()` and `tolist()` of a tensor on meta
        if "meta tensor" not in str(error):
            raise
    with _bounded("linspace", "arange", "tensor"):
        return build()


@contextmanager
def _bounded(*on_cpu: str) -> Iterator[None]:
    """Within it modules are built on the meta device, and not without end. `on_cpu`: what makes tensors on the CPU."""
    import torch

    init_module, count = torch.nn.Module.__init__, 0

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise FailedError("refused", f"it has more than {MOST_MODULES:,} modules")
        init_module(self, *args, **kwargs)

    def moved(name: str) -> Any:
        make = getattr(torch, name)
        return mock.patch.object(torch, name, lambda *args, **kwargs: make(*args, **{"device": "cpu", **kwargs}))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.nn.Module, "__init__", init))
        for name in on_cpu:
            stack.enter_context(moved(name))
        stack.enter_context(torch.device("meta"))
        yield


# -- transformers ----------------------------------------------------------------------------------------------------


def _transformers(job: Mapping[str, Any]) -> Built:
    import torch
    import transformers

    whole, options = _read_config(job["config"]), job["options"]
    cls, config = _head(transformers, whole, options.get("head"))
    dtype = getattr(torch, options["dtype"]) if "dtype" in options else _dtype_of(config, whole)
    if job.get("packing", {}).get("quant_method") == "awq" and dtype is torch.bfloat16:
        dtype = torch.float16  # quantizers/quantizer_awq.py, `update_dtype`
    chosen = {"attn_implementation": options.get("attention"), "dtype": dtype}
    given = {name: value for name, value in chosen.items() if value is not None}
    model = _on_meta(lambda: cls._from_config(config, **given))
    if job["config"].get("tie_word_embeddings") is False:
        _give_head_its_own_weight(model)
    _widen_as_loading_does(model, config.dtype)
    packed, stored = _packed(model, job["packing"]) if "packing" in job else ({}, {})
    if options.get("checkpointing") == "yes":
        model.gradient_checkpointing_enable()
    inputs = ModelInputs(model, config, Example(job), options)
    built = inputs.make()
    add_labels(inputs, options.get("labels"))
    built.packed, built.stored = packed, stored
    configs = {id(c): c for c in (config, config.get_text_config())}.values()
    _set_cache(built, [c for c in configs if hasattr(c, "use_cache")], options.get("use_cache"))
    return built


def _packed(model: Any, packing: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    from staticmem.recording.packed_layers import pack

    with _bounded():
        return pack(model, packing)


def _set_cache(built: Built, configs: Sequence[Any], asked: str | None) -> None:
    """Has the forward give keys and values or not. Where nobody says it the config does, as in the library: a loop with
    `outputs = model(**batch)` then holds them, in training and in inference.
    """
    usual = [c.use_cache for c in configs]
    checkpoints = any(getattr(m, "gradient_checkpointing", False) for m in built.module.modules())
    built.uses_cache = asked == "yes" or (asked is None and any(usual) and not checkpoints)

    def begin(training: bool) -> None:
        for config, use in zip(configs, usual, strict=True):
            config.use_cache = asked == "yes" or (asked is None and use)

    built.begin = begin
    begin(False)


def _dtype_of(config: Any, whole: Any) -> Any:
    """The type of the weights by the config; None where it says none. That of a part, as of the text of a model that
    reads images too, often stands beside it: the checkpoint is the whole model's, and loading takes the type of its
    weights.
    """
    return next((c.dtype for c in (config, whole, whole.get_text_config()) if c.dtype is not None), None)


def _give_head_its_own_weight(model: Any) -> None:
    """The head of a checkpoint whose config says that it is not the embedding. Classes of the T5 family tie it whatever
    their config says, and a checkpoint that has both weights (mT5, T5 1.1, Flan-T5) unties it when it is loaded.

    Source: transformers 5.24, modeling_utils.py, `tie_weights`: no tie where both weights were loaded and differ.
    """
    import torch

    head = model.get_output_embeddings()
    if head is None:  # nor may it have embeddings at all
        return
    weight: Any = getattr(head, "weight", None)
    if weight is getattr(model.get_input_embeddings(), "weight", None) and weight is not None:
        head.weight = torch.nn.Parameter(torch.empty_like(weight), weight.requires_grad)


def _widen_as_loading_does(model: Any, dtype: Any) -> None:
    """Parameters and saved buffers that stay in float32 where a checkpoint is loaded in 16 bits: routers of experts,
    the second projection of T5's feed-forward in float16. The class lists patterns, which are searched in their names.

    Source: transformers 5.24, modeling_utils.py, `_get_dtype_plan`; core_model_loading.py, `build_glob_alternation` and
    `convert_and_load_state_dict_in_model`.
    """
    import torch

    plan = getattr(model, "_get_dtype_plan", None)
    patterns = [] if plan is None else [(pattern.replace("*", ".*"), to) for pattern, to in plan(dtype).items()]
    wider: dict[int, Any] = {}
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        to = next((to for pattern, to in patterns if re.search(pattern, name)), None)
        if to is not None and tensor.is_floating_point() and id(tensor) not in wider:
            data = tensor.detach().to(to)
            wider[id(tensor)] = data if name in buffers else torch.nn.Parameter(data, tensor.requires_grad)
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            own.update({name: wider[id(tensor)] for name, tensor in own.items() if id(tensor) in wider})


def _read_config(content: Mapping[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = content["model_type"]
    try:
        cls = CONFIG_MAPPING[kind]
    except KeyError as error:
        raise FailedError("config", f"it has no model_type '{kind[:60]}'") from error
    decode = getattr(cls, "_decode_special_floats", None)  # {"__float__": "Infinity"}, as the library writes it
    return cls.from_dict(dict(content) if decode is None else decode(dict(content)))


def _head(package: Any, config: Any, asked: str | None) -> tuple[Any, Any]:
    """The class of the model, and the part of the config that it is of."""
    listed = getattr(config, "architectures", None) or [None]
    name = asked or listed[0]
    if not isinstance(name, str):
        raise FailedError("refused", "the config has no 'architectures'; name a class: transformers:PATH,head=CLASS")
    cls = getattr(package, name, None) if name.isidentifier() else None
    if not (inspect.isclass(cls) and issubclass(cls, package.PreTrainedModel)):
        raise FailedError("refused", f"the installed transformers has no model '{name[:80]}'")
    for part in (config, config.get_text_config()):
        of: Any = getattr(cls, "config_class", None)
        if of is not None and isinstance(part, of):
            return cls, part
    if _is_named_for(config.model_type, name):
        return cls, config
    raise FailedError("refused", f"{name} is not a class for the model_type '{config.model_type}'")


def _is_named_for(kind: str, name: str) -> bool:
    """Whether the library has the class for configs of a type: some types have the code of another."""
    from transformers.models.auto import modeling_auto as auto

    tables = [vars(auto)[table] for table in vars(auto) if table.endswith("_MAPPING_NAMES")]
    named = [table.get(kind) for table in tables]
    return any(name == one or (isinstance(one, (list, tuple)) and name in one) for one in named)


# -- timm and torchvision --------------------------------------------------------------------------------------------


def _timm(job: Mapping[str, Any]) -> Built:
    import timm

    name, example = job["name"], Example(job)
    if not timm.is_model(name):
        raise FailedError("unknown", "the installed timm has no model of this name")
    side = job["options"].get("size")
    try:
        given = {"img_size": int(side)} if side else {}
        model = _on_meta(lambda: timm.create_model(name, pretrained=False, **given))
    except TypeError:  # it takes images of any size
        model = _on_meta(lambda: timm.create_model(name, pretrained=False))
    if job["options"].get("checkpointing") == "yes":
        model.set_grad_checkpointing()
    channels, height, width = model.default_cfg["input_size"]
    return _add_images(job, model, example, channels, height, width)


def _torchvision(job: Mapping[str, Any]) -> Built:
    import torch
    from torchvision import models

    from staticmem.recording.detectors import as_by_default, detector

    name, example = job["name"], Example(job)
    if name not in models.list_models():
        raise FailedError("unknown", "the installed torchvision has no model of this name")
    builder = models.get_model_builder(name)
    if ".models.detection." in builder.__module__:
        dtype = getattr(torch, job["options"].get("dtype") or "float32")
        return detector(_on_meta(lambda: as_by_default(builder)), example, dtype)
    try:
        model = _on_meta(lambda: models.get_model(name, weights=None, weights_backbone=None))
    except (TypeError, ValueError):  # it has no backbone of its own
        model = _on_meta(lambda: models.get_model(name, weights=None))
    if ".models.video" in type(model).__module__:
        raise FailedError("refused", "its input is a video, not a batch of images")
    side = _image_side(models, name, model)
    return _add_images(job, model, example, 3, side, side)


def _image_side(package: Any, name: str, model: Any) -> int:
    """Of the images of a network of torchvision: the one that it is built for, else what its weights were made with."""
    weights = package.get_model_weights(name)
    transform = next(iter(weights)).transforms() if len(weights) else None
    sizes = [getattr(transform, size, None) for size in ("crop_size", "resize_size")]
    usual = next((size[0] for size in sizes if size), 224)
    return int(getattr(model, "image_size", None) or usual)


def _add_images(job: Mapping[str, Any], model: Any, example: Example, channels: int, height: int, width: int) -> Built:
    import torch

    dtype = getattr(torch, job["options"].get("dtype") or "float32")
    sizes = [example.of("batch", 2), ("", channels), example.of("height", height), example.of("width", width)]
    image = torch.zeros([n for _, n in sizes], dtype=dtype, device="meta")
    return Built(model, (image,), axes=[{axis: title for axis, (title, _) in enumerate(sizes) if title}])


# -- diffusers -------------------------------------------------------------------------------------------------------


def _diffusers(job: Mapping[str, Any]) -> Built:
    from staticmem.recording.diffusion import built_of

    return built_of(job, _on_meta)


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Built]] = {
    "transformers": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
    "diffusers": _diffusers,
}
