"""Which architectures of the installed transformers are answered: each that has a config without weights is built,
recorded and analysed in inference and in training. Where one is not answered, the library's own model is called: a
config that it cannot run itself is counted apart. `--state FILE` goes on after a stop; `--page FILE` writes both lists.

    python scripts/readings/transformers_architectures.py --state state.jsonl --minutes 3 --page PAGE.md
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Heads in the order in which one is chosen: what people ask of a model first
HEADS = """
CAUSAL_LM IMAGE_TEXT_TO_TEXT MULTIMODAL_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ MASKED_LM IMAGE_CLASSIFICATION
VIDEO_CLASSIFICATION AUDIO_CLASSIFICATION CTC OBJECT_DETECTION UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION
""".split()
LAYERS = re.compile(r"(?!num_(feat_extract|conv))(num_.*layers?|n_layers?|.*_layers|num_.*blocks|depth)$")
CPU_SECONDS = 120  # of one architecture: a busy machine takes longer, with the same answer
TIMEOUT = 1200.0  # seconds of one architecture that waits
LAYERS_KEPT = 2
NOT_BUILT = "its default config builds no model:"  # which is no model that somebody has
LENGTHS = (8, 24)  # of the tokens with which the library is called: two, as an error of one may be about it
STAGES = ("out_features", "out_indices", "_out_features", "_out_indices")


def architectures() -> dict[str, str]:
    """By model_type the class that is built; types that no model is of are left out."""
    from transformers.models.auto import modeling_auto as auto

    tables = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS]
    named = [name for name in sorted(vars(auto)) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")]
    more = [getattr(auto, name) for name in named]
    chosen: dict[str, str] = {}
    for table in (*tables, auto.MODEL_MAPPING_NAMES, *more):
        for kind, name in table.items():
            if name not in (None, ""):
                chosen.setdefault(kind, name if isinstance(name, str) else name[0])
    return dict(sorted(chosen.items()))


def small_config(kind: str, name: str, layers: bool) -> dict[str, Any]:
    """The default config of a type as a file would have it, with two layers where `layers` are few."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    config.architectures = [name]
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=not layers))
    return _with_few_layers(content) if layers else content


def _with_few_layers(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    counts = {k: v for k, v in content.items() if LAYERS.match(k) and isinstance(v, int) and not isinstance(v, bool)}
    few = {k: min(v, LAYERS_KEPT) for k, v in counts.items()}
    lengths = set(counts.values())
    result: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, list) and len(value) in lengths and all(isinstance(one, str) for one in value):
            result[key] = _of_all_kinds(value)
        elif key in STAGES:  # of which some are no longer there
            result[key] = None
        elif isinstance(value, dict) and value and all(str(layer).isdigit() for layer in value):  # by layer
            result[key] = {layer: one for layer, one in value.items() if int(layer) < LAYERS_KEPT}
        else:
            result[key] = few.get(key, _with_few_layers(value))
    return result


def _of_all_kinds(layers: list[str]) -> list[str]:
    """The kinds of a few layers, as many different ones as there are."""
    kinds = list(dict.fromkeys(layers))
    return (kinds if len(kinds) > 1 else layers)[:LAYERS_KEPT]


def tried(kind: str, name: str) -> dict[str, str]:
    """What is answered: by "inference" and "training" an empty text, or the reason."""
    from staticmem.frontends.recorded import RecordedModel
    from staticmem.studies import Request, Study

    answers = {}
    asked: dict[str, dict[str, Any]] = {"inference": {"mode": "infer"}, "training": {"optimizer": "adamw"}}
    for title, words in asked.items():
        reason = ""
        for layers in (True, False):
            try:
                document = recorded(small_config(kind, name, layers), title)
                report = Study(RecordedModel("<m>", document, "transformers"), Request(batch=2, **words)).report
                reason = "" if report.peak.live_bytes else "no figure"
            except Exception as error:
                reason = said(error)
                if getattr(error, "kind", "") == "run" and "cannot be recorded" not in reason:
                    reason = f"{NOT_BUILT} {reason}"
            if not reason:
                break
        answers[title] = reason
    return answers


def recorded(content: dict[str, Any], part: str) -> Any:
    """The document of the recording, made as the process of an analysis makes it."""
    from staticmem.frontends import recording_format
    from staticmem.frontends.architectures import read_config
    from staticmem.recording import architecture_child as child

    with tempfile.TemporaryDirectory() as folder:
        file, path = os.path.join(folder, "recording"), os.path.join(folder, "config.json")
        Path(path).write_text(json.dumps(content), "utf-8")
        job = {
            "package": "transformers", "name": path, "config": read_config(path), "options": {}, "sizes": None,
            "memory_limit": 8 << 30, "kind": "", "file": file, "part": part,
        }  # fmt: skip
        child._work(job)
        return recording_format.unpack(Path(file).read_bytes(), path)


def not_run_by_library(kind: str, name: str, reason: str) -> str:
    """Why the library cannot run its own model with the default config, whatever goes in: it has no such class or no
    forward, one that takes no tensors, or its code fails on tokens, of any length, with the error of `reason`. Empty
    where it runs, or where that is not certain: other inputs than tokens may be wrong."""
    import torch
    import transformers
    from torch._dispatch.python import enable_python_dispatcher
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = getattr(transformers, name, None)
    if cls is None:
        return "transformers has no class of this name"
    try:
        if cls.forward is torch.nn.Module.forward:
            return "its class has no forward"
    except ImportError as missing:  # another package that it needs
        return said(missing)
    taken = inspect.signature(cls.forward).parameters
    objects = [one for one in list(taken.values())[1:] if one.default is one.empty and _is_object(one)]
    if objects:
        return f"its forward takes no tensors: {objects[0]}"
    if "input_ids" not in taken:
        return ""
    config = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        model = cls._from_config(config).eval()
    # the dispatcher in Python, as a recording has: errors of its kernels are in other words
    with torch.no_grad(), torch.device("meta"), enable_python_dispatcher():
        errors = {_error_on_tokens(model, length) for length in LENGTHS}
    error = errors.pop()
    same = not errors and error and _without_numbers(error) in _without_numbers(reason)
    return error if same else ""


def _is_object(parameter: inspect.Parameter) -> bool:
    """Whether it is of a class that is no tensor's."""
    given = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    said = str(parameter.annotation)
    return parameter.kind not in given and parameter.annotation is not parameter.empty and "Tensor" not in said


def _error_on_tokens(model: Any, length: int) -> str:
    import torch

    inputs = {"input_ids": torch.zeros((2, length), dtype=torch.long)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.zeros((2, length), dtype=torch.long)
    try:
        model(**inputs)
    except Exception as error:
        return said(error)
    return ""


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "0", text)


def said(error: BaseException) -> str:
    what = getattr(error, "what", "") or getattr(error, "message", "")
    text = f"{what}: {getattr(error, 'why', '')}" if what else f"{type(error).__name__}: {error}"
    return " ".join(text.replace("|", "/").split())[:300].strip(" :")


def _in_process(function: Callable[[], Any], pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        pipe.send(function())


def apart(function: Callable[[], Any]) -> tuple[Any, str]:
    """What a function gives in a process of its own, with a limit of time (this one has imported the packages, which
    takes long); else None, and why there is nothing."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(function, there))
    process.start()
    there.close()
    reason = ""
    try:
        if here.poll(TIMEOUT):
            return here.recv(), ""
        reason = f"longer than {TIMEOUT:.0f} seconds"
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGXCPU
        reason = f"longer than {CPU_SECONDS} seconds of CPU" if late else "its process ended"
    finally:
        process.kill()
        process.join()
    return None, reason


def tried_apart(kind: str, name: str) -> dict[str, str]:
    """The answers of an architecture, each with its reason."""
    answers, reason = apart(partial(tried, kind, name))
    return answers or {"inference": reason, "training": reason}


def library_apart(kind: str, one: dict[str, str]) -> str:
    """Why the library cannot run what inference and training are not answered for; empty where it can."""
    if not one["inference"] or one["inference"].startswith(NOT_BUILT):
        return ""
    error, _ = apart(partial(not_run_by_library, kind, one["class"], one["inference"]))
    return error or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", required=True, help="a file of JSON lines: what was tried")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after them")
    parser.add_argument("--every", type=int, default=1, help="one architecture in so many")
    parser.add_argument("--only", help="types that match an expression, tried again")
    parser.add_argument("--page", help="write the list of those that are not answered")
    args = parser.parse_args()
    ends = time.monotonic() + args.minutes * 60
    done = _read(args.state)
    chosen = list(architectures().items())[:: args.every]
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    _import_all()
    for kind, name in chosen:
        again = args.only is not None and re.search(args.only, kind)
        if (args.only is None and kind not in done) or again:
            if time.monotonic() > ends:
                break
            done[kind] = {"class": name, **tried_apart(kind, name)}
            _write(args.state, kind, done[kind])
    listed = {kind: done[kind] for kind, _ in chosen if kind in done}
    for kind, one in listed.items():
        if "library" not in one:
            one["library"] = library_apart(kind, one)
            _write(args.state, kind, one)
    models = [one for one in listed.values() if _runs(one)]
    for title in ("inference", "training"):
        answered = sum(not one[title] for one in models)
        share = answered / max(len(models), 1)
        print(f"{title}: {answered} of {len(models)} ({share:.1%}); {len(chosen) - len(listed)} left")
    if args.page:
        Path(args.page).write_text(page(listed), "utf-8")
    return 0


def _runs(one: dict[str, str]) -> bool:
    """Whether the library builds and runs the model by itself."""
    return not one["inference"].startswith(NOT_BUILT) and not one["library"]


def _write(path: str, kind: str, one: dict[str, str]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"type": kind, **one}) + "\n")


def _read(path: str) -> dict[str, dict[str, str]]:
    if not os.path.exists(path):
        return {}
    lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    return {line.pop("type"): line for line in lines}


def _import_all() -> None:
    import torch
    import transformers.modeling_utils  # noqa: F401

    import staticmem.recording.architecture_child
    import staticmem.studies  # noqa: F401

    torch.set_num_threads(1)


def page(listed: dict[str, dict[str, str]]) -> str:
    """The page of those that are not answered, by their reasons."""
    import transformers

    whole, tried_of = len(listed), len(architectures())
    built = {kind: one for kind, one in listed.items() if not one["inference"].startswith(NOT_BUILT)}
    broken = {kind: one for kind, one in built.items() if one["library"]}
    listed = {kind: one for kind, one in built.items() if not one["library"]}
    counts = {title: sum(not one[title] for one in listed.values()) for title in ("inference", "training")}
    made = "python scripts/readings/transformers_architectures.py --state FILE --page docs/generated/transformers.md"
    text = (
        f"Of {tried_of} architectures {whole} were tried. {len(built)} of these have a default config that builds a "
        f"model, and {len(listed)} one that the library can run: {counts['inference']} are answered for inference and "
        f"{counts['training']} for training, each with its default config (of two layers where that builds). These are "
        "not:"
    )
    answered = ", ".join(kind for kind, one in listed.items() if not one["inference"] and not one["training"])
    lines = [
        "# Architectures of transformers", "", f"Made by `{made}`, with transformers {transformers.__version__}.", "",
        text, "", "| type | class | inference | training |", "|---|---|---|---|",
    ]  # fmt: skip
    for kind, one in listed.items():
        if one["inference"] or one["training"]:
            same = one["inference"] == one["training"]
            training = "the same" if same else one["training"] or "answered"
            lines.append(f"| {kind} | {one['class']} | {one['inference'] or 'answered'} | {training} |")
    reasons = [one["inference"] or one["training"] for one in listed.values()]
    common = Counter(re.sub(r"'[^']*'|[0-9]+", "…", reason)[:60] for reason in reasons if reason)
    print(*(f"{count} {text}" for text, count in common.most_common(12)), sep="\n", file=sys.stderr)
    text = "The library cannot run these itself, whatever goes in: its own model was called."
    lines += ["", text, "", "| type | class | error of the library |", "|---|---|---|"]
    lines += [f"| {kind} | {one['class']} | {one['library']} |" for kind, one in broken.items()]
    lines += ["", f"Answered: {answered}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
