"""`plan:` of a config: the models of a process and what it does with them, one instant after the other.

    plan:
      models: {student: student.pt2, teacher: teacher.pt2}
      instants:
        - load: teacher
        - step: {model: student, batch: 32, optimizer: adamw}
        - evaluate: {model: student, batch: 64, times: 20, gather: list}
        - save: {model: student, copies: model}

The steps of a plan have the options of `train`, `infer` and `generate` of the config, and their own over them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from staticmem.config.fields import DECODING, INFERENCE, OF_MODEL, STEP, Either, Entry, Table
from staticmem.documents import DocumentError, Node
from staticmem.frontends import architectures
from staticmem.scenario.kinds import UNKNOWN_KEY, WRONG_VALUE, Bytes, Choice, ListOf, Named, Switch, Text, Whole, wrong

MOST_INSTANTS = 10_000  # of a plan, once its repetitions are written out: each is replayed
STEPS_OF_TRAINING, BATCHES = 3, 3  # `times` by default: reserved memory may peak in any of the first three
NOTHING, LIST, CONCATENATED = "none", "list", "concat"
OUTPUTS, PREDICTIONS, LOSS = "outputs", "predictions", "loss"  # what is gathered of a batch
OF_GATHER = ("gathered", "keep", "labels", "accumulation_steps")  # keys that say more of `gather`
MODEL_ALONE, WITH_STATE = "model", "all"
PADDED, SORTED, TOKENS, PACKED = "padded", "sorted", "tokens", "packed"
RULES = (PADDED, SORTED, TOKENS, PACKED)
DRAWN = re.compile(r"(normal|lognormal|uniform)\(\s*([\d.]{1,12})\s*,\s*([\d.]{1,12})\s*\)")  # a distribution

# what is written of an instant beside the options of its step
_NAME = Entry(Text("validation"), "What it is called in the report.", "validation")
_MODEL = Entry(Text("student"), "The model, by its name in `models`.", "student")
_TIMES = Entry(Whole("3"), "How many steps or batches follow one another.", "3")
_PARTS = (MODEL_ALONE, WITH_STATE)


@dataclass(frozen=True)
class Word:
    """What an instant does: a sentence, the keys that it takes beside `name`, and the table of the config whose options
    its step has; empty where it runs no step."""

    about: str
    keys_of: Callable[[], Mapping[str, Entry]]
    mode: str = ""


def _of_lengths() -> Mapping[str, Entry]:
    source = "Where lengths come from: normal(512, 128), lognormal(6, 0.5), uniform(16, 1024), or a file."
    return {
        "dim": Entry(Text("seq"), "The open dimension that has them.", "seq"),
        "source": Entry(Text("normal(512, 128)"), source, "lengths.csv"),
        "column": Entry(Text("length"), "Column of a .csv or field of a .jsonl (default: length).", "n_tokens"),
        "rule": Entry(Choice(RULES), "How samples become batches: " + ", ".join(RULES) + ".", "padded"),
        "tokens": Entry(Whole("8192"), "The budget of the rule `tokens`, padding included.", "8192"),
        "bucket": Entry(Whole("64"), "Lengths are rounded up to multiples of it.", "64"),
        "least": Entry(Whole("1"), "Shorter samples count as so long.", "16"),
        "most": Entry(Whole("4096"), "Longer samples are cut to it.", "4096"),
        "seed": Entry(Whole("0", least=0), "Of the order in which samples come.", "0"),
    }


LENGTHS = Entry(Table(_of_lengths, required=("dim", "source")), "Batches of many lengths.", "{dim: seq, ...}")


def _step() -> Mapping[str, Entry]:
    return {"model": _MODEL, "times": _TIMES, "lengths": LENGTHS, **STEP}


def _evaluate() -> Mapping[str, Entry]:
    gather = Entry(
        Choice((NOTHING, LIST, CONCATENATED)),
        "What the loop does with outputs: nothing, appends them to a list on the GPU, or concatenates each time.",
        LIST,
    )
    size = Entry(Bytes(), "Bytes that are gathered of a batch, where it is not all outputs.", "4 MiB")
    keep = Entry(
        Choice((OUTPUTS, PREDICTIONS, LOSS)),
        "What is gathered of a batch: all outputs, the index of the largest along the last axis of the first output "
        "(argmax), or the loss alone.",
        PREDICTIONS,
    )
    labels = Entry(Switch(), "The loss and the labels are gathered too, a label for each prediction.", "true")
    to_cpu = "After so many batches what is gathered moves to the CPU, and cached memory goes back (Trainer's "
    to_cpu += "eval_accumulation_steps)."
    own = {"model": _MODEL, "times": _TIMES, "lengths": LENGTHS, "gather": gather, "gathered": size, "keep": keep}
    own |= {"labels": labels, "accumulation_steps": Entry(Whole("16"), to_cpu, "16")}
    ends = Entry(Switch(), "The loop is in a function, whose variables go when it returns (default).", "true")
    return {**own, "function": ends, **INFERENCE}


def _generate() -> Mapping[str, Entry]:
    return {"model": _MODEL, "times": _TIMES, **DECODING}


def _save() -> Mapping[str, Entry]:
    copies = Entry(
        Choice((NOTHING, *_PARTS)),
        "What is copied on the GPU meanwhile: nothing (torch.save copies tensor by tensor to the CPU), the model "
        "(deepcopy of state_dict()), or all, the optimizer's state too.",
        MODEL_ALONE,
    )
    full = Entry(
        Choice(_PARTS),
        "The full state dict of a model in shards (parallel: fsdp), each tensor gathered from all ranks: of the model, "
        "or all, the optimizer's state too (get_model_state_dict with full_state_dict).",
        MODEL_ALONE,
    )
    offload = Entry(Switch(), "Each tensor of it moves to the CPU when it is gathered (cpu_offload, default).", "true")
    stays = Entry(Switch(), "What is copied or gathered on the GPU stays.", "false")
    return {"model": _MODEL, "copies": copies, "full": full, "offload": offload, "stays": stays}


def _resume() -> Mapping[str, Entry]:
    what = "What the file on the GPU has (torch.load with map_location): the model, or all, the optimizer's state too."
    return {"model": _MODEL, "parts": Entry(Choice(_PARTS), what, WITH_STATE)}


def _copy() -> Mapping[str, Entry]:
    return {"model": _MODEL, "of": Entry(Text("student"), "The model that is copied.", "student")}


def _average() -> Mapping[str, Entry]:
    what = "How many tensors of a parameter's size the update of one has at a time; lerp_ has none (default)."
    return {"model": _MODEL, "temporaries": Entry(Whole("0", least=0), what, "3")}


def _sleep() -> Mapping[str, Entry]:
    what = "What goes to the CPU: the model with its gradients, or all, the optimizer's state too."
    return {"model": _MODEL, "parts": Entry(Choice(_PARTS), what, MODEL_ALONE)}


def _of_model() -> Mapping[str, Entry]:
    return {"model": _MODEL}


def _repeat() -> Mapping[str, Entry]:
    return {"times": _TIMES, "instants": Entry(ListOf(InstantKind(), bare=False), "What is repeated.")}


WORDS = {
    "load": Word("Puts a model on the GPU; without it, its first step does.", _of_model),
    "step": Word("Steps of training.", _step, "train"),
    "evaluate": Word("Batches of inference.", _evaluate, "infer"),
    "generate": Word("Generation with a decoder.", _generate, "generate"),
    "save": Word("Saves a checkpoint.", _save),
    "resume": Word("Loads a checkpoint to the GPU, beside the model.", _resume),
    "copy": Word("copy.deepcopy of a model on the GPU, under the name of another.", _copy),
    "average": Word("Updates an average of weights (EMA, SWA), which is a copy.", _average),
    "sleep": Word("Moves a model to the CPU.", _sleep),
    "wake": Word("Moves it back.", _of_model),
    "end": Word("Deletes a model and the variables of its loops.", _of_model),
    "empty_cache": Word("torch.cuda.empty_cache().", dict),
    "repeat": Word("Instants that are repeated.", _repeat),
}


@dataclass(frozen=True)
class ModelSource:
    """A model of a plan: its path, sizes of its open dimensions, and its parts: the path of a module in it (empty: all
    of it), and whose parameters this has, another model's or those that others have under the same name."""

    path: str
    dims: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Instant:
    """One instant: its word, the name of its model, the options of its step, and what else its table says."""

    word: str
    model: str
    name: str = ""
    times: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The models by name, and the instants in order, repetitions written out."""

    models: Mapping[str, ModelSource]
    instants: tuple[Instant, ...]


class InstantKind:
    """A word with its table: `step: {batch: 32}`; `load: teacher` is short for `load: {model: teacher}`."""

    def read(self, node: Node) -> tuple[str, dict[str, Any], Node]:
        value = node.value
        if isinstance(value, str) and value in WORDS:
            value = {value: (node, node._replace(value=None))}
        if not isinstance(value, dict) or len(value) != 1:
            raise wrong(node, f"It is one of {', '.join(WORDS)}, with its table.", "Example: step: {batch: 32}")
        [(word, (_, inner))] = value.items()
        if word not in WORDS:
            table = Table(lambda: {name: Entry(Text(""), about.about) for name, about in WORDS.items()})
            table.read(node)  # raises, with what is known
        if isinstance(inner.value, str) and "model" in WORDS[word].keys_of():
            return word, {"model": inner.value}, node
        return word, Table(lambda: _keys(word)).read(inner), node

    def schema(self) -> dict[str, Any]:
        kinds = {}
        for word, about in WORDS.items():
            inner = {"type": "object"} if word == "repeat" else Table(lambda word=word: _keys(word)).schema()  # type: ignore[misc]
            kinds[word] = {"description": about.about, "anyOf": [{"type": ["string", "null"]}, inner]}
        one = {"type": "object", "properties": kinds, "additionalProperties": False, "maxProperties": 1}
        return {"anyOf": [{"enum": list(WORDS)}, one]}


def _keys(word: str) -> Mapping[str, Entry]:
    return {"name": _NAME, **WORDS[word].keys_of()}


def _of_plan() -> Mapping[str, Entry]:
    about = "The models by name, each a path or a mapping; without it, `model` of the config is the only one."
    parts = "Modules in it, by their path ('' is all of it), and the model whose parameters each has."
    model = {**OF_MODEL, "parts": Entry(Named(Text("policy")), parts, "{policy: policy, reference: reference}")}
    return {
        "models": Entry(
            Named(Either(Text("model.pt2"), Table(lambda: model, required=("path",)))), about, "{student: student.pt2}"
        ),
        "instants": Entry(ListOf(InstantKind(), bare=False), "What the process does, in its order."),
    }


PLAN = Entry(Table(_of_plan, required=("instants",)), "A run of several instants in one process (docs/plan.md).")


def plan_of(values: Mapping[str, Any], folder: str, model: ModelSource | None, below: Mapping[str, Any]) -> Plan:
    """The plan of a config that has been read. `model` is that of the config, and `below` has the options of its
    tables `train`, `infer` and `generate`.

    Raises:
        DocumentError: an instant names no model of the plan, or there are too many of them.
    """
    models = {name: _source(given, folder) for name, given in values.get("models", {}).items()}
    if not models and model is not None:
        models = {"model": model}
    _check_parts(models)
    instants: list[Instant] = []
    for word, table, node in values["instants"]:
        _add(instants, word, table, node, models, below, folder)
    return Plan(models, tuple(instants))


def _source(given: Any, folder: str) -> ModelSource:
    of_it = given if isinstance(given, dict) else {"path": given}
    return ModelSource(architectures.below(folder, of_it["path"]), of_it.get("dims", {}), of_it.get("parts", {}))


def _check_parts(models: Mapping[str, ModelSource]) -> None:
    """Raises DocumentError where parts name nothing that is shared, or a model that has parts itself."""
    shared = Counter(owner for source in models.values() for owner in set(source.parts.values()))
    for name, source in models.items():
        for owner in source.parts.values():
            what = f"a part of '{name}' in this plan is '{owner[:60]}'"
            if owner == name or (owner in models and models[owner].parts):
                why = "A part is a model that has no parts itself."
                raise DocumentError(what, why, "Name the model that has the parameters.", UNKNOWN_KEY)
            if owner not in models and shared[owner] < 2:
                why = f"No model has this name ({', '.join(models)}), and no other model has such a part."
                raise DocumentError(what, why, "Correct the name.", UNKNOWN_KEY)


def _misfit(node: Node, what: str, why: str, hint: str) -> DocumentError:
    """The error of keys of an instant that do not go together."""
    return DocumentError(f"{node.place}: {what}", why, hint, WRONG_VALUE)


def _check_gather(table: Mapping[str, Any], node: Node) -> None:
    """Raises DocumentError where an evaluation says what it gathers, and gathers nothing, or says it twice."""
    given = [key for key in OF_GATHER if key in table]
    if given and table.get("gather", NOTHING) == NOTHING:
        why = "It says how an evaluation gathers, and this one does not."
        raise _misfit(node, f"`{given[0]}` without `gather`", why, "Add `gather: concat`, or `gather: list`.")
    if "gathered" in given and "keep" in given:
        why = "Both say what is gathered of a batch."
        raise _misfit(node, "`gathered` and `keep` together", why, "Leave one of them out.")
    if table.get("keep") == LOSS and table.get("labels"):
        why = "With the loss alone no labels are gathered."
        raise _misfit(node, "`keep: loss` with `labels`", why, "Leave `labels` out.")


def _check_save(table: Mapping[str, Any], node: Node) -> None:
    """Raises DocumentError where what a save says of copies is of none."""
    if "full" in table and "copies" in table:
        why = "`full` gathers the shards of all ranks, `copies` copies those of one."
        raise _misfit(node, "`full` and `copies` together", why, "Leave one of them out.")
    if "offload" in table and "full" not in table:
        why = "It says where a full state dict goes."
        raise _misfit(node, "`offload` without `full`", why, "Add `full: model`.")
    is_on_gpu = table.get("copies", NOTHING) != NOTHING or ("full" in table and not table.get("offload", True))
    if table.get("stays") and not is_on_gpu:
        why = "This save leaves nothing on the GPU that could stay."
        raise _misfit(node, "`stays` without a copy", why, "Add `copies: model`, or leave it out.")


def _add(
    instants: list[Instant],
    word: str,
    table: dict[str, Any],
    node: Node,
    models: Mapping[str, ModelSource],
    below: Mapping[str, Any],
    folder: str,
) -> None:
    if word == "repeat":
        once: list[Instant] = []
        for inner_word, inner_table, inner_node in table.get("instants", ()):
            _add(once, inner_word, inner_table, inner_node, models, below, folder)
        count = table.get("times", 1)
        if len(instants) + count * len(once) > MOST_INSTANTS:
            raise wrong(node, f"A plan has at most {MOST_INSTANTS:,} instants, repetitions included.", "Repeat less.")
        for number in range(count):
            instants += [replace(one, name=f"{one.name or one.word} {number + 1}") for one in once]
        return
    takes_model = "model" in WORDS[word].keys_of()
    name = table.get("model", next(iter(models), ""))
    if takes_model and name not in models:
        listed = ", ".join(models) or "none: write `model: FILE` into the config, or `models:` into the plan"
        what = f"{node.place}: no model '{name[:60]}' in this plan"
        raise DocumentError(what, f"Its models: {listed}.", "Correct the name.", UNKNOWN_KEY)
    if takes_model and "model" not in table and len(models) > 1:
        raise wrong(node, f"The plan has several models: {', '.join(models)}.", f"Add `model: {name}`.")
    if word == "copy" and (table.get("of") not in models or table["of"] == name):
        why = f"`of` is the model that is copied, another one: {', '.join(models)}."
        raise wrong(node, why, "Example: copy: {model: teacher, of: student}")
    if word == "evaluate":
        _check_gather(table, node)
    if word == "save":
        _check_save(table, node)
    mode = WORDS[word].mode
    own = {key: table[key] for key in table if key not in STEP and key not in DECODING}
    if "lengths" in own and not DRAWN.fullmatch(own["lengths"]["source"]):
        source = os.path.join(folder, own["lengths"]["source"])
        own["lengths"] = {**own["lengths"], "source": source}
    options: dict[str, Any] = {}
    if mode:
        given = {key: value for key, value in table.items() if key not in own}
        dims = {**models[name].dims, **below.get(mode, {}).get("dims", {}), **given.get("dims", {})}
        options = {"mode": mode, **below.get(mode, {}), **given, **({"dims": dims} if dims else {})}
    times = own.get("times", STEPS_OF_TRAINING if mode in ("train", "infer") else 1)
    instants.append(Instant(word, name if takes_model else "", own.get("name", ""), times, options, own))
