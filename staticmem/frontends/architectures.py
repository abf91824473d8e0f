"""Names of architectures that packages build, in place of a model file: `transformers:CONFIG.json`, `timm:NAME`,
`torchvision:NAME`, and `hf:OWNER/NAME[@REVISION]`, whose config is on the Hugging Face Hub; and of the model files that
staticmem carries: `models:resnet50`. This module reads such names and the config, which is hostile input, without torch
and without network.

A config of transformers may also be given by its path, or by that of the folder which has it. `recording.architectures`
has the model recorded.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staticmem import files
from staticmem.errors import ModelFileError, UsageError, closest

PIPELINES = "diffusers"
PACKAGES = ("transformers", "timm", "torchvision", PIPELINES)
_OF_PATHS = ("transformers", PIPELINES)
CARRIED = "models"
HUB = "hf"
# A build copies the files into the package (setup.py); a checkout has them beside it.
_FOLDERS = (Path(__file__).parents[1] / "examples", Path(__file__).parents[2] / "models")
CONFIG = "config.json"
INDEX = "model_index.json"  # of a pipeline of diffusers: its parts, each with a folder
_CONFIGS = (CONFIG, "scheduler_config.json")
LARGEST = 4 << 20  # bytes of a config: those with a label for each of 21,000 classes have some 1 MiB
MOST = 1 << 40  # of a number in a config
MOST_TOKENS = 1 << 20  # of a tokenizer's limit
_TOKENIZERS = math.inf  # of numbers in its config: a limit of 1e30 says that it has none
MOST_PARTS = 4096  # layers, blocks, heads, experts: the largest published models have a few hundred
_PARTS = re.compile(r"layers?$|depths?$|blocks?$|heads?$|stages$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,99}", re.ASCII)
_PART_OF_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_REPOSITORY = re.compile(rf"((?:{_PART_OF_ID}/)?{_PART_OF_ID})(?:@([A-Za-z0-9][\w./-]{{0,199}}))?", re.ASCII)
_BARE = re.compile(rf"{_PART_OF_ID}/{_PART_OF_ID}(?:@[A-Za-z0-9][\w./-]{{0,199}})?", re.ASCII)
_MODEL_FILES = (".onnx", ".pt2", ".json", ".py", ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf")
# what a config says of how it is run, which is not what it describes, and could name code to load
_OF_RUNS = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal", "_experts_implementation",
            "experts_implementation", "_name_or_path", "transformers_version")  # fmt: skip


@dataclass(frozen=True)
class Option:
    """What a name may say after a comma: `,seq=2048`. `choices` are its values; a number where it has none."""

    about: str
    packages: tuple[str, ...] = PACKAGES
    choices: tuple[str, ...] = ()
    text: bool = False


_YES = ("yes", "no")
_DETECTORS = ("transformers", "torchvision")
_TYPES = ("float32", "bfloat16", "float16")
OPTIONS: Mapping[str, Option] = {
    "head": Option("the class of transformers (default: the first of `architectures`)", ("transformers",), text=True),
    "attention": Option("default: what transformers takes", ("transformers",), ("sdpa", "eager")),
    "dtype": Option("of the weights (default: that of the config, else float32)", choices=_TYPES),
    "labels": Option("labels go in, the model's own loss comes out (default: in training)", ("transformers",), _YES),
    "use_cache": Option("keys and values come out (default: as the config says)", ("transformers",), _YES),
    "mask": Option("an attention mask of the padding goes in (default: no)", ("transformers",), _YES),
    "checkpointing": Option(
        "the checkpoints that the package has for its blocks (default: no)", ("transformers", "timm", PIPELINES), _YES
    ),
    "batch": Option("of the example (default: 2)"),
    "seq": Option("tokens of the example (default: 512, or the most that the model takes)", ("transformers",)),
    "size": Option("height and width of the example image (default: the model's own)"),
    "dequantize": Option("packed weights are loaded whole (default: no)", ("transformers",), _YES),
    "images": Option("beside the text of a sample (default: 1)", ("transformers",)),
    "boxes": Option("with their classes, of each image that a detector trains with (default: 8)", _DETECTORS),
    "frames": Option("of sound (default: as many as its encoder takes, else 512)", ("transformers",)),
    "samples": Option("of sound (default: 16000)", ("transformers",)),
    "latents": Option(
        "in training: made in the step by the frozen VAE and text encoders, or cached (default: step)",
        (PIPELINES,),
        ("step", "cached"),
    ),
    "frozen": Option(
        "dtype of the VAE and the text encoders (default: that of --amp in training, else dtype)", (PIPELINES,), _TYPES
    ),
    "steps": Option("of the denoiser in inference (default: 4; more need no more memory)", (PIPELINES,)),
    "guidance": Option("classifier-free guidance in inference (default: as the pipeline)", (PIPELINES,), _YES),
    "tiling": Option("the VAE works on tiles of an image (default: no)", (PIPELINES,), _YES),
    "slicing": Option("the VAE works on one image at a time (default: no)", (PIPELINES,), _YES),
    "part": Option("one part alone, in inference: unet, vae, text_encoder (default: all)", (PIPELINES,), text=True),
}


@dataclass(frozen=True)
class Architecture:
    """A model that a package builds. `name` is the path of a config, or the model's name in the package; with a
    `revision` it is that of a repository of the Hub."""

    package: str
    name: str
    given: str  # as the user wrote it
    options: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""

    @property
    def path(self) -> str:
        """The file that describes it, else what the user wrote."""
        return self.name if self.package in _OF_PATHS and not self.revision else self.given

    def number(self, option: str) -> int | None:
        """A size of the example."""
        value = self.options.get(option)
        return None if value is None else int(value)


def architecture_of(given: str) -> Architecture | None:
    """What a name means; None where it is an ordinary path of a model file.

    Raises:
        UsageError: options that are not known (SM149).
        ModelFileError: a package has no model of such a name, or there is no config (SM145).
    """
    package, colon, rest = given.partition(":")
    if colon and package == HUB:
        return _of_hub(rest, given)
    if not colon or package not in PACKAGES:
        if given.lower().endswith(".json") and os.path.isfile(given):
            return Architecture(PIPELINES if os.path.basename(given) == INDEX else "transformers", given, given)
        config = os.path.join(given, CONFIG)
        if given and os.path.isfile(config):
            return Architecture("transformers", config, given)
        if given and os.path.isfile(os.path.join(given, INDEX)):
            return Architecture(PIPELINES, os.path.join(given, INDEX), given)
        return _of_hub(given, given) if "/" in given and not os.path.exists(given) and is_bare_id(given) else None
    name, options = _with_options(rest, package, given)
    if package == "transformers":
        name = os.path.join(name, CONFIG) if os.path.isdir(name) else name
        if not os.path.isfile(name):
            hint = "Give a config.json, or a folder that has one; of the Hugging Face Hub hf:OWNER/NAME."
            raise ModelFileError(f"{name or given} does not exist", "There is no such file.", hint, "SM145")
    elif package == PIPELINES:
        name = _index_of(name, given)
    elif not _NAME.fullmatch(name):
        hint = f"Example: {package}:resnet50"
        raise ModelFileError(f"'{name}' is no model of {package}", "Names have letters, digits, _ and .", hint, "SM145")
    return Architecture(package, name, given, options)


def _index_of(folder: str, given: str) -> str:
    """The file that lists the parts of a pipeline."""
    name = os.path.join(folder, INDEX) if os.path.basename(folder) != INDEX else folder
    if os.path.isfile(name):
        return name
    hint = "Give the folder of a pipeline with the configs of its parts; no weights are read."
    if not os.path.exists(folder) and _REPOSITORY.fullmatch(folder):
        hint = f"Of the Hub fetch the configs: hf download {folder} --include '*.json' --local-dir FOLDER"
    raise ModelFileError(f"{folder or given} is no pipeline of diffusers", f"There is no {name}.", hint, "SM145")


def is_bare_id(given: str) -> bool:
    """Whether a name that is no path may be asked of the Hub without `hf:` before it: it has the form of an id, not the
    suffix of a file, its first part is no folder here (then a path is mistyped), and the user has installed the package
    that asks, and not switched it off.
    """
    text = given.partition(",")[0]
    if not _BARE.fullmatch(text) or text.lower().endswith(_MODEL_FILES) or os.path.exists(text.partition("/")[0]):
        return False
    return importlib.util.find_spec("huggingface_hub") is not None and not is_offline()


def is_offline() -> bool:
    """Whether the user has told huggingface_hub to ask nothing.

    Source: huggingface_hub 2.4, constants.py, `HF_HUB_OFFLINE`.
    """
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _of_hub(rest: str, given: str) -> Architecture:
    text, options = _with_options(rest, "transformers", given)
    match = _REPOSITORY.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        why = "It is OWNER/NAME, followed by @REVISION where it is not main."
        raise ModelFileError(f"'{text}' is no name of the Hub", why, f"Example: {HUB}:Qwen/Qwen3-8B", "SM145")
    return Architecture("transformers", match[1], given, options, match[2] or "main")


def carried_file(given: str) -> str:
    """The path of a model that staticmem carries, by its name; any other path as it is.

    Raises:
        ModelFileError: staticmem carries no model of this name.
    """
    package, colon, name = given.partition(":")
    if not colon or package != CARRIED:
        return given
    files_by_name = {path.stem: path for folder in _FOLDERS for path in folder.glob("*.pt2")}
    if name in files_by_name:
        return str(files_by_name[name])
    names = sorted(files_by_name)
    hint = closest(name, names) or f"Example: {CARRIED}:resnet50"
    raise ModelFileError(f"staticmem carries no model '{name}'", f"It has {', '.join(names)}.", hint, "SM101")


def model_name(path: str) -> str:
    """What a model is called in reports: its file, or the folder of a config, as all configs have one name."""
    folder, name = os.path.split(path)
    if name not in (CONFIG, INDEX):
        return name
    if not folder and os.path.isfile(path):
        folder = os.getcwd()
    return os.path.basename(folder) or name


def whole(given: str) -> str:
    """The same with its path from the root, for processes in other folders."""
    if is_name(given):
        package, _, rest = given.partition(":")
        return f"{package}:{os.path.abspath(rest)}" if package in _OF_PATHS else given
    return given if not os.path.exists(given) and is_bare_id(given) else os.path.abspath(given)


def is_name(given: str) -> bool:
    """Whether a model goes by a name of a package or of the Hub, not by a path."""
    package, colon, _ = given.partition(":")
    return bool(colon) and package in (*PACKAGES, CARRIED, HUB)


def below(folder: str, given: str) -> str:
    """The same with a path that begins in a folder, as those of a config do."""
    if is_name(given):
        package, _, rest = given.partition(":")
        return f"{package}:{os.path.join(folder, rest)}" if package in _OF_PATHS else given
    return os.path.join(folder, given)


def _with_options(text: str, package: str, given: str) -> tuple[str, dict[str, str]]:
    """A name and its options, read from the end: the name may have commas."""
    options: dict[str, str] = {}
    accepted = [name for name, one in OPTIONS.items() if package in one.packages]
    while match := re.fullmatch(r"(.*),([a-z_]+)=([^,=/\\]*)", text, re.DOTALL):
        text, name, value = match[1], match[2], match[3]
        if name not in accepted or name in options:
            why = f"It is given twice in '{given}'." if name in options else f"{package}: takes {', '.join(accepted)}."
            raise UsageError(
                f"option '{name}'", why, closest(name, accepted) or f"Example: {package}:NAME,batch=8", "SM149"
            )
        options[name] = _checked(name, value)
    return text, options


def _checked(name: str, value: str) -> str:
    one = OPTIONS[name]
    if one.choices and value not in one.choices:
        why = f"It is one of {', '.join(one.choices)}."
        raise UsageError(f"{name}={value}", why, f"Example: {name}={one.choices[0]}", "SM149")
    if one.text and not _NAME.fullmatch(value):
        raise UsageError(f"{name}={value}", "It is the name of a class.", f"Example: {name}=LlamaForCausalLM", "SM149")
    if not one.choices and not one.text and not re.fullmatch(r"[1-9]\d{0,8}", value, re.ASCII):
        raise UsageError(f"{name}={value}", "It is a whole number of at least 1.", f"Example: {name}=128", "SM149")
    return value


def read_config(path: str) -> dict[str, Any]:
    """The config in a file, without what it says of how the model is run.

    Raises:
        ModelFileError: it is no config of a model (SM145), or describes one that is not built (SM147).
    """
    try:
        text = files.read(path, LARGEST)
    except OSError as error:
        why = f"{error.strerror or error}."
        raise ModelFileError(f"{path} cannot be read", why, "Check the path and its rights.", "SM145") from error
    return config_of(text, path)


def config_of(text: bytes | str, path: str) -> dict[str, Any]:
    """The config in a text, without what it says of how the model is run; `path` is where it is from.

    Raises as `read_config`.
    """
    content = _content_of(text, path)
    if not isinstance(content.get("model_type"), str):
        why = "It has no 'model_type', by which transformers knows an architecture."
        hint = "Give the config.json of a model of transformers, an .onnx or a .pt2 file."
        raise ModelFileError(f"{path} is no config of a model", why, hint, "SM145")
    return {key: _without_runs(value) for key, value in content.items() if key not in _OF_RUNS}


def _content_of(text: bytes | str, path: str, most: float = MOST) -> dict[str, Any]:
    """What a config says, with numbers that are bounded."""
    try:
        if len(text) > LARGEST:
            raise ValueError(f"It has more than {LARGEST >> 20} MiB")
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{str(error)[:200] or type(error).__name__}."
        raise ModelFileError(f"{path} is no JSON", why, "Copy the config again.", "SM145") from error
    if not isinstance(content, dict):
        why, hint = "It is no object of JSON.", "Give the config of a model."
        raise ModelFileError(f"{path} is no config of a model", why, hint, "SM145")
    for key, value in all_items(content):
        _check(path, key, value, most)
    return content


def read_pipeline(path: str) -> dict[str, Any]:
    """The class of a pipeline, its settings, and its parts by name: library, class and config, of a tokenizer the most
    tokens that it takes. `path` is that of its index.

    Raises as `read_config`.
    """
    index = _read(path)
    title = index.get("_class_name")
    if not isinstance(title, str):
        why, hint = "It has no '_class_name', by which diffusers knows a pipeline.", f"Give the folder of an {INDEX}."
        raise ModelFileError(f"{path} is no pipeline of diffusers", why, hint, "SM145")
    parts, settings = {}, {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list):
            settings[name] = value
            continue
        if len(value) != 2 or not all(one is None or isinstance(one, str) for one in value):
            why = f"'{name[:60]}' is not [library, class]."
            raise ModelFileError(f"{path} is no pipeline of diffusers", why, "Copy it again.", "SM145")
        if None not in value:
            parts[name] = {"library": value[0], "class": value[1], **_part_of(os.path.dirname(path), name)}
    return {"class": title, "settings": settings, "parts": parts}


def _part_of(folder: str, name: str) -> dict[str, Any]:
    """The config of a part, None where it has none, and the most tokens that a tokenizer takes."""
    paths = [os.path.join(folder, name, file) for file in _CONFIGS] if _NAME.fullmatch(name) else []
    config = next((_read(path) for path in paths if os.path.isfile(path)), None)
    of_tokenizer = os.path.join(folder, name, "tokenizer_config.json")
    there = paths and os.path.isfile(of_tokenizer)
    length = _read(of_tokenizer, _TOKENIZERS).get("model_max_length") if there else None
    return {"config": config, "length": length if isinstance(length, int) and length < MOST_TOKENS else None}


def _read(path: str, most: float = MOST) -> dict[str, Any]:
    try:
        return _content_of(files.read(path, LARGEST), path, most)
    except OSError as error:
        why = f"{error.strerror or error}."
        raise ModelFileError(f"{path} cannot be read", why, "Check the path and its rights.", "SM145") from error


def all_items(content: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, at any depth; items of lists under the key of the list."""
    stack: list[tuple[str, Any]] = [("", content)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            yield from value.items()
            stack += value.items()
        elif isinstance(value, list):
            stack += [(key, item) for item in value]
            yield from ((key, item) for item in value)


def _check(path: str, key: str, value: Any, most: float) -> None:
    what = f"{path}: a model that is not built"
    if key == "auto_map" and value:
        why = "'auto_map' names Python code beside the weights, which would need to run. staticmem runs none."
        hint = "Write a function that builds the model: staticmem export file.py:FUNCTION -o model.pt2"
        raise ModelFileError(what, why, hint, "SM147")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and math.isinf(value):
        return  # "no limit" is infinite, as that of Mamba 2's time steps; a size cannot be
    most = MOST_PARTS if _PARTS.search(key) else most
    if not -MOST <= value <= most:
        why = f"'{key[:60]}' is {str(value)[:30]}, and at most {most:,} is taken."
        raise ModelFileError(what, why, "Check the config.", "SM147")


def _without_runs(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_runs(value) for key, value in content.items() if key not in _OF_RUNS}
    return [_without_runs(item) for item in content] if isinstance(content, list) else content
