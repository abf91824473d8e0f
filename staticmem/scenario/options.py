"""How options are declared: once, as fields of `Request`, `Levers` and `SessionOptions`.

Flags, configs, variables of the environment, keywords of `staticmem.analyze`, help and the tables of the reference
pages are made from these declarations. What the kinds mean is in `kinds`, which a start without values does not need.

Trainers and other estimators have words of their own for options: an unknown flag or key gets them as a hint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import field, fields
from typing import Any, TypeVar

from staticmem.errors import UsageError, closest
from staticmem.ir.record import record

T = TypeVar("T")

SIZES, STEP, LEVERS, DEVICE, OUTPUT = "sizes", "the step", "levers of the step", "the device", "output"
SESSION, SERVING, HOST = "the session of the ONNX Runtime", "the serving engine", "the host"
# what an option may need of a step to act
TRAINED, UPDATED = "a training step (--optimizer, or --mode train)", "an optimizer (--optimizer adam)"
BACKWARD, RANKS, SERVED = "a backward (leave --no-backward out)", "--parallel STRATEGY", "--mode serve"
WORKERS = "--workers N"
# what options of a group have in common
GROUPS: dict[str, dict[str, Any]] = {
    SIZES: {"table": "step", "session": True},
    STEP: {"table": "step"},
    LEVERS: {"table": "step", "training": True, "needs": TRAINED},
    SERVING: {"table": "serve", "needs": SERVED},
    DEVICE: {"table": "device"},
    HOST: {"table": "host"},
    OUTPUT: {},
    SESSION: {},
}


@record(frozen=True)
class Option:
    """An option.

    Attributes:
        group: the heading that it has in `--help` and on the reference page.
        about: what it is: a clause without a period, for help, schema and reference.
        kind: of its values; one that `kinds.kind_of` knows.
        choices: the texts that it takes; `aliases` are further ones, which stand for some of these.
        unset: what holds where it is not given, if the default does not say it.
        example: a value as a config has it.
        details: further sentences for the reference page.
        table: where configs have it: "step" (`train`, `infer` and `generate`), "generate" (that alone), "device", or ""
            for a key of its own.
        training: it does not apply to an inference.
        needs: what a step has to have for it to act, where a note says that it does not; empty: errors, or notes of its
            own, say it.
        owners: the optimizers that have it; empty: it does not depend on the optimizer.
        session: a session of the ONNX Runtime has it too.
        provider: the only provider of the ONNX Runtime that has it.
        setting: configs and the environment can give it.
        flag: the flag, where it is not `--name`; `letter` is its short form.
    """

    name: str
    default: Any
    about: str
    group: str = ""
    kind: str = "text"
    metavar: str = ""
    choices: tuple[str, ...] = ()
    unset: str = ""
    example: str = ""
    details: str = ""
    table: str = ""
    training: bool = False
    needs: str = ""
    owners: tuple[str, ...] = ()
    session: bool = False
    provider: str = ""
    setting: bool = True
    flag: str = ""
    letter: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def spelt(self) -> str:
        """The flag that changes the default."""
        return self.flag.replace("--", "--no-", 1) if self.default is True else self.flag

    @property
    def choices_text(self) -> str:
        """What follows `about` in help: the choices, and the default where it says something."""
        default = self.default if self.default and self.default is not True else ""
        listed = ", ".join(f"{word} (default)" if word == default else word for word in self.choices)
        text = f": {listed}" if listed else ""
        if self.unset:
            return f"{text} (default: {self.unset})"
        return f"{text} (default {default})" if default and not self.choices else text


def option(default: T, group: str, kind: str, metavar: str, about: str, **more: Any) -> T:
    """A field of a class of options; the parameters are attributes of `Option`."""
    metadata = {"group": group, "kind": kind, "metavar": metavar, "about": about, **more}
    declaration: T = field(default=default, metadata=metadata)
    return declaration


def declared(cls: Any, order: tuple[str, ...] = ()) -> dict[str, Option]:
    """The options that a class declares by name, group after group; within a group those of `order` come first."""
    options = {f.name: f for f in fields(cls) if f.metadata}
    options = {name: options[name] for name in order} | options
    by_name = {}
    for one in sorted(options.values(), key=lambda f: list(GROUPS).index(f.metadata["group"])):
        attributes = {"flag": f"--{one.name.replace('_', '-')}", **GROUPS[one.metadata["group"]], **one.metadata}
        by_name[one.name] = Option(one.name, one.default, **attributes)
    return by_name


def checked_choice(flag: str, value: str, choices: tuple[str, ...]) -> str:
    """The value in lower case, if it is one of `choices`.

    Raises:
        UsageError: it is not; the error names the closest.
    """
    if value.lower() not in choices:
        raise unknown(flag, value, choices)
    return value.lower()


def unknown(name: str, value: str, choices: Iterable[str]) -> UsageError:
    """The error of a value that is not one of `choices`."""
    why = f"--{name} is one of {', '.join(choices)}."
    return UsageError(f"unknown {name} '{value}'", why, closest(value.lower(), choices), "SM134")


def at_least_one(flag: str, value: int, what: str) -> UsageError:
    """The error of a number that is less than 1; `what` is counted."""
    why = f"{what} are a whole number."
    return UsageError(f"--{flag} {value} is less than 1", why, f"Use --{flag} 1 or more.", code="SM160")


# By the name here: the words that mean it elsewhere (transformers, DeepSpeed, Megatron, torchtitan, ultralytics).
# A word may mean several: the first that the asker knows is taken.
_WORDS: tuple[tuple[str, str], ...] = (
    ("batch", "batch-size bs train-batch-size per-device-train-batch-size micro-batch-size mbs"),
    ("dims", "seq seq-len seq-length sequence-length max-length max-seq-length context tokens length"),
    ("resolution", "image-size imgsz img-size input-size size height width"),
    ("optimizer", "train training optim opt"),
    ("mode", "inference infer eval generate generation"),
    ("amp", "bf16 fp16 mixed-precision autocast"),
    ("dtype", "half precision float16 bfloat16 torch-dtype"),
    ("checkpoint", "gradient-checkpointing activation-checkpointing recompute"),
    ("accumulate", "gradient-accumulation gradient-accumulation-steps grad-accum"),
    ("devices", "gpus num-gpus ngpus world-size nproc-per-node nodes"),
    ("parallel", "fsdp fsdp2 ddp zero zero-stage deepspeed tp tensor-parallel pp strategy"),
    ("context_parallel", "cp cp-size context-parallel-size context-parallel-degree sequence-parallel ring"),
    ("expert_parallel", "ep ep-size expert-parallel-size expert-parallel-degree expert-model-parallel-size"),
    ("max_len", "max-model-len context-length max-total-tokens"),
    ("max_seqs", "max-num-seqs max-running-requests max-batch-size"),
    ("max_batched_tokens", "max-num-batched-tokens max-num-tokens chunked-prefill-size max-prefill-tokens"),
    ("utilization", "gpu-memory-utilization mem-fraction-static free-gpu-memory-fraction"),
    ("kv_dtype", "kv-cache-dtype"),
    ("replicas", "hsdp hybrid-shard replicate dp-replicate dp-replicate-size data-parallel-replicate-degree"),
    ("quantize", "4bit 8bit load-in-4bit load-in-8bit int8 quant quantization bits"),
    ("lora", "peft adapter adapters rank lora-r qlora"),
    ("gpu", "card device gpu-memory vram memory-limit"),
    ("clip_grad_norm", "max-grad-norm clip-grad grad-clip"),
    ("sdpa", "attention attn attn-implementation flash-attn flash-attention"),
    ("torch_version", "torch pytorch pytorch-version"),
    ("max_memory", "budget limit"),
    ("gpu", "budget limit"),
    ("prices", "price cost max-price hourly"),
    ("format", "json csv markdown"),
    ("output", "out output-file save html"),
)
# Degrees of Megatron, torchtitan, vLLM and DeepSpeed, which are a strategy here, the first word, and its devices
_DEGREES = (
    "tp tp-size tensor-parallel-size tensor-parallel-degree tensor-model-parallel-size",
    "pp pp-size pipeline-parallel-size pipeline-parallel-degree pipeline-model-parallel-size",
    "fsdp dp-shard dp-shard-size data-parallel-shard-degree",
    "ddp dp dp-size data-parallel-size",
)
# What trainers have and the memory of a step does not depend on
_WITHOUT_EFFECT = "lr learning-rate epochs steps max-steps num-train-epochs seed warmup scheduler dataset data".split()
WITHOUT_EFFECT = "Leave it out: the memory of a step does not depend on it."


def meant_name(word: str, names: Collection[str]) -> str:
    """The name of an option that a word of another tool means; empty where none of `names` is meant."""
    for name, synonyms in _WORDS:
        if name in names and _hyphened(word) in synonyms.split():
            return name
    return ""


def hint_for(word: str, names: Collection[str]) -> str:
    """A hint for a name that is not known: what it means, or what is spelled alike; empty where nothing is."""
    for strategy, *degrees in map(str.split, _DEGREES):
        if _hyphened(word) in degrees and "parallel" in names:
            return f"Write --parallel {strategy} --devices N; in a config, `parallel: {strategy}` and `devices: N`."
    meant = meant_name(word, names)
    if meant:
        return f"Did you mean '{meant}'?"
    if _hyphened(word) in _WITHOUT_EFFECT:
        return WITHOUT_EFFECT
    return closest(word.lower().replace("-", "_"), names)


def _hyphened(word: str) -> str:
    return word.lower().replace("_", "-")
