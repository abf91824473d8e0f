"""Makes staticmem/passes/module_parts.json: of what parts published module classes are made.

    python scripts/classes/class_parts.py SEEN.json "timm:*" "torchvision:*"        # adds their parts to SEEN.json
    python scripts/classes/class_parts.py SEEN.json +timm:resnet18 +torchvision:vgg11   # and the ATen calls of some
    python scripts/classes/class_parts.py SEEN.json "VERSIONS" > staticmem/passes/module_parts.json   # writes the table

Every model is made on the meta device, so that this needs no memory. Only names of attributes, parameters, classes and
ATen calls are taken.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from staticmem.passes.module_parts import CALLS, LEAVES, call_of

CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
STATISTICS = ("running_mean", "running_var")
Entry = dict[str, Any]
Seen = dict[str, Entry]
Made = tuple[str, Callable[[], Any]]


def class_name(module: Any) -> str:
    """The class as exports write it."""
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def is_container(name: str) -> bool:
    """Whether a class only holds others: of these, every owner's attribute is a class of its own."""
    return name.startswith("torch.nn.modules.container.") and name.rpartition(".")[2] in CONTAINERS


def collect(module: Any, name: str, seen: Seen, at: str = "") -> bool:
    """Adds what a module and those in it are made of; whether it has parameters."""
    entry = seen.setdefault(at or name, {"cls": name, "count": 0, "parts": {}, "tensors": {}, "bare": 0})
    entry["count"] += 1
    tensors = {**module._buffers, **module._parameters}
    for key in sorted(tensors.keys() - module._non_persistent_buffers_set):
        if tensors[key] is not None:
            tensor = entry["tensors"].setdefault(key, {"count": 0, "ranks": []})
            tensor["count"] += key in module._parameters or key in STATISTICS  # a file may lack other buffers
            tensor["ranks"] = sorted({*tensor["ranks"], tensors[key].dim()})
    owned = any(p is not None for p in module._parameters.values())
    found: dict[str, set[str]] = {}
    for attribute, child in module._modules.items():
        if child is None:
            continue
        key = "*" if attribute.isdigit() else attribute
        cls = class_name(child)
        inner = f"{at or name}/{key}" if is_container(cls) else cls
        owned |= collect(child, cls, seen, inner if is_container(cls) else "")
        found.setdefault(key, set()).add(inner)
    for key, classes in found.items():
        part = entry["parts"].setdefault(key, {"count": 0, "classes": []})
        part["count"] += 1
        part["classes"] = sorted({*part["classes"], *classes})
    entry["bare"] += not owned
    return owned


def run(model: Any, seen: Seen, done: set[frozenset[str]]) -> None:
    """Adds the ATen calls that each class makes itself, if no model of the same classes was run."""
    torch = importlib.import_module("torch")
    modules = {id(m): m for m in model.modules()}
    own = {key: class_name(module) for key, module in modules.items()}
    together = frozenset(own.values())
    if together in done:
        return
    done.add(together)
    size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    calls: dict[int, set[str]] = {}
    running: list[int] = []

    class Recorder(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if running:
                calls[running[-1]].add(call_of(func._schema.name))
            return func(*args, **(kwargs or {}))

    def enter(module: Any, _: Any) -> None:
        running.append(id(module))
        calls.setdefault(id(module), set())

    hook = importlib.import_module("torch.nn.modules.module")
    hooks = [
        hook.register_module_forward_pre_hook(enter),
        hook.register_module_forward_hook(lambda *_: running.pop() and None, always_call=True),
    ]
    try:
        device = next(model.parameters()).device
        with Recorder(), torch.no_grad():
            model.train()(torch.empty((2, *size), device=device))
    except Exception as error:
        print(f"cannot run: {type(error).__name__} {str(error)[:100]}", file=sys.stderr)
    else:
        for key, made in calls.items():
            if key in own and own[key] in seen:
                entry = seen[own[key]]
                entry["ran"] = entry.get("ran", 0) + 1
                for call in sorted(made & CALLS):
                    entry.setdefault("calls", {})[call] = entry.get("calls", {}).get(call, 0) + 1
                for attribute, child in modules[key]._modules.items():
                    if id(child) in calls and attribute in entry["parts"]:
                        entry["parts"][attribute]["called"] = entry["parts"][attribute].get("called", 0) + 1
    finally:
        for handle in hooks:
            handle.remove()


def timm_models(pattern: str) -> Iterator[Made]:
    """Every one, and of each file of models one without its classifier."""
    timm = importlib.import_module("timm")
    files: set[str] = set()
    for name in fnmatch.filter(timm.list_models(), pattern):
        yield name, partial(timm.create_model, name)
        file = timm.model_entrypoint(name).__module__
        if file not in files:
            files.add(file)
            yield name, partial(timm.create_model, name, num_classes=0)
            yield name, partial(timm.create_model, name, features_only=True)


def backbone(name: str) -> dict[str, Any]:
    """Models on a backbone would load its weights."""
    return (
        {"weights_backbone": None}
        if any(w in name for w in ("rcnn", "retina", "fcos", "ssd", "deeplab", "fcn", "lraspp"))
        else {}
    )


def torchvision_models(pattern: str) -> Iterator[Made]:
    """Classification, segmentation, detection, video, optical flow."""
    models = importlib.import_module("torchvision.models")
    for name in fnmatch.filter(models.list_models(exclude="quantized_*"), pattern):
        yield name, partial(models.get_model, name, weights=None, **backbone(name))


SOURCES = {"timm": timm_models, "torchvision": torchvision_models}


def add(word: str, seen: Seen, runs: bool) -> None:
    """Adds the models of `library:pattern`; `runs`: and the calls of those that take images."""
    torch = importlib.import_module("torch")
    library, _, pattern = word.partition(":")
    done: set[frozenset[str]] = set()
    for name, make in SOURCES[library](pattern):
        try:
            with torch.device("cpu" if name == pattern else "meta"):  # some initialise by copying, which meta cannot
                model = make()
        except Exception as error:  # what a library cannot make is no part of it
            print(f"{library}:{name}: {type(error).__name__} {str(error)[:100]}", file=sys.stderr)
            continue
        collect(model, class_name(model), seen)
        seen[class_name(model)]["model"] = 1
        if runs:
            run(model, seen, done)


def _leaves(entry: Entry) -> bool:
    """Whether every instance makes a call that no exporter drops."""
    ran, calls = entry.get("ran", 0), entry.get("calls", {})
    return bool(ran) and any(count == ran and call in LEAVES for call, count in calls.items())


def table(seen: Seen) -> list[Any]:
    """Classes by number; of each the parts, with the classes that they may be, and the tensors that it owns.

    `!` after a name: a library hands it out as a model; `=`: a container, of this class.
    `?` after a name: a file may not show it, as some instances lack it, or it has no parameters and may make no node.
    """
    names = sorted(seen)
    number = {name: index for index, name in enumerate(names)}
    bare = {name for name in names if seen[name]["bare"]}
    leaves = {name for name in names if _leaves(seen[name])}
    rows: list[Any] = []
    for name in names:
        entry = seen[name]
        parts = {}
        for key, part in sorted(entry["parts"].items()):
            sure = leaves if entry.get("ran") and part.get("called") == entry["ran"] else set()
            always = part["count"] == entry["count"] and not any(c in bare - sure for c in part["classes"])
            parts[key if always else f"{key}?"] = [number[c] for c in part["classes"]]
        owned = sorted(entry["tensors"].items())
        tensors = {k if t["count"] == entry["count"] else f"{k}?": t["ranks"] for k, t in owned}
        kind = "!" if entry.get("model") else "" if name == entry["cls"] else f"={entry['cls'].rpartition('.')[2]}"
        row = [name + kind, parts, tensors]
        if entry.get("ran"):
            made = sorted(entry.get("calls", {}).items())
            row.append([call if count == entry["ran"] else f"{call}?" for call, count in made])
        rows.append(row)
    return rows


def main(path: str, words: list[str]) -> None:
    """Collects into `path`, or writes the table to standard output."""
    warnings.simplefilter("ignore")
    file = Path(path)
    seen: Seen = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    models = [word for word in words if ":" in word]
    for word in models:
        add(word.removeprefix("+"), seen, word.startswith("+"))
    if models:
        file.write_text(json.dumps(seen), encoding="utf-8")
        return
    about = f"parts of module classes; scripts/classes/class_parts.py, from {words[0]}"
    rows = json.dumps(table(seen), separators=(",", ":"), ensure_ascii=True).replace('],["', '],\n["')
    print(f'{{"about":{json.dumps(about)},"classes":{rows}}}')


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
