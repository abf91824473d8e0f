"""`Request`: everything that a user can ask of one analysis, as the user writes it.

The command line, configs and Python all make a `Request`; what its options mean is decided here and nowhere else.
A field left out has the default of this class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Note
from staticmem.ir.record import record
from staticmem.scenario.adapters import AdapterOptions, Quantized, lora_of, lora_text
from staticmem.scenario.checkpointing import Checkpointing
from staticmem.scenario.combinations import STEPS, check, of_owners
from staticmem.scenario.compiling import WHOLE, CompileOptions, compiled_modules
from staticmem.scenario.device import DeviceOptions, HostOptions
from staticmem.scenario.edits import Edits
from staticmem.scenario.generation import Generation, GenerationOptions, sampling_of
from staticmem.scenario.losses import LossOptions, has_terms, loss_text
from staticmem.scenario.optimizers import (
    LOW_RANK,
    NAMES_OF_TRANSFORMERS,
    REFUSED,
    OptimizerOptions,
    ProjectionOptions,
    args_text,
    low_rank_of,
    split_targets,
)
from staticmem.scenario.options import (
    BACKWARD,
    LEVERS,
    OUTPUT,
    RANKS,
    SERVED,
    STEP,
    TRAINED,
    UPDATED,
    WORKERS,
    checked_choice,
    declared,
    option,
)
from staticmem.scenario.precision import Precision, precision
from staticmem.scenario.presets import PRESETS, described, with_preset, with_release
from staticmem.scenario.sizes import Sizes
from staticmem.scenario.step import AFTER_FORWARD, Loop, Scenario
from staticmem.scenario.strategies import ContextShare, ExpertShare, RankOptions
from staticmem.version import DEFAULTS_CHANGED, REFERENCE_RELEASE, release_of_step, torch_release

GENERATE, SERVE = "generate", "serve"
MODES = ("train", "infer", GENERATE, SERVE)
# options whose words are checked at once
_CHOICES = (
    "preset zero_grad method cudnn module_loading inplace_activations parallel outputs rotate_method loading saving"
).split()
ALL = sys.maxsize  # for `top`: every tensor


# fmt: off
@record(frozen=True, kw_only=True)
class Request(
    Sizes, GenerationOptions, OptimizerOptions, ProjectionOptions, LossOptions, Precision, CompileOptions,
    AdapterOptions, Checkpointing, Edits, Loop, RankOptions, DeviceOptions,
    HostOptions,
):
    """One analysis as requested: the groups of options, and what is about all of them. None is "not given"."""

    mode: str | None = option(
        None, STEP, "choice", "MODE", "what is analysed", choices=MODES, table="", session=True,
        unset="train if an optimizer is given", example="train",
        details="`train` without an optimizer is forward and backward, `generate` the prefill and the last decode step "
        "([generation](generation.md)), `serve` an engine that serves the model ([serving](how-to/serve.md))",
    )
    preset: str | None = option(
        None, STEP, "choice", "NAME", "defaults of a training library for what is not given", choices=tuple(PRESETS),
        training=True, example="hf-trainer",
        details="[Presets](levers.md#presets)",
    )
    method: str = option(
        "liveness", STEP, "choice", "METHOD", "textbook shows the textbook estimate beside the answer",
        choices=("liveness", "textbook"), table="", setting=False, details="[The estimate](internals/textbook.md)",
    )
    top: int = option(
        10, OUTPUT, "whole", "N", "how many of the largest tensors are listed", session=True, setting=False,
    )
    # fmt: on
    # no options: set for the step of one device that a strategy changes (`parallel.rank`)
    within_ddp: bool = False
    experts: ExpertShare | None = None
    context: ContextShare | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.optimizer.lower() in REFUSED:
            why = REFUSED[self.optimizer.lower()]
            hint = f"Use one of {' and '.join(LOW_RANK)}."
            raise UsageError(f"the optimizer '{self.optimizer}' is not covered", why, hint, "SM161")
        if self.optimizer is not None and self.optimizer.lower() in NAMES_OF_TRANSFORMERS:
            name, impl = NAMES_OF_TRANSFORMERS[self.optimizer.lower()]
            object.__setattr__(self, "optimizer", name)
            if impl is not None and self.optimizer_impl == OPTIONS["optimizer_impl"].default:
                object.__setattr__(self, "optimizer_impl", impl)
        for name in _CHOICES:
            object.__setattr__(self, name, self._choice(name))
        object.__setattr__(self, "host", self.asks_host)
        if self.parallel == "none":
            object.__setattr__(self, "parallel", None)
        if self.dims is None:
            object.__setattr__(self, "dims", {})
        if self.optim_args is not None:
            object.__setattr__(self, "optim_args", args_text(self.optim_args))
        for name in ("checkpoint", "checkpoint_save", "input_grad", "let_go", "optim_target_modules"):
            value = getattr(self, name)  # the command line and configs give lists
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "optim_target_modules", split_targets(self.optim_target_modules))
        object.__setattr__(self, "compile", compiled_modules(self.compile))
        if self.lora is not None:
            text = lora_text(self.lora)
            object.__setattr__(self, "lora", None if text.lower() in ("", "none") else text)
        object.__setattr__(self, "loss", loss_text(self.loss))
        object.__setattr__(self, "resolution", self.image_size)

    def given(self, **of_verb: Any) -> dict[str, Any]:
        """The options that differ from their defaults, as the step has them: words in lower case, adapters and types
        read, the mode that follows, and no lever of a training step in another; and those `of_verb` but None.

        Raises:
            UsageError: an unknown choice.
        """
        values = {name: getattr(self, name) for name in OPTIONS}
        for name in ("mode", "optimizer", "optimizer_impl", "sdpa", "compile_mode", "quantize", "cache"):
            values[name] = self._choice(name)
        if not has_terms(values["loss"]):
            values["loss"] = self._choice("loss")
        values["mode"] = values["mode"] or ("train" if values["optimizer"] else "infer")
        if values["quantize"] == "none":
            values["quantize"] = None
        if self.lora is not None:
            values["lora"] = lora_of(str(self.lora))
        for name in ("dtype", "amp"):
            values[name] = precision(name, values[name])
        if values["mode"] != "train":  # of the levers of a training step only some apply
            levers = [OPTIONS[name] for name in TAKEN if OPTIONS[name].group == LEVERS]
            values.update({one.name: one.default for one in levers if one.training})
        given = {name: value for name, value in values.items() if value != OPTIONS[name].default}
        return given | {name: value for name, value in of_verb.items() if value is not None} if of_verb else given

    def scenario(self) -> tuple[Scenario, list[Note]]:
        """The validated scenario of the step, and notes on it.

        Raises:
            UsageError: an unknown choice, a value that is out of range, or options that do not go together.
        """
        given = self.given()
        RankOptions.check(self)
        check(COMBINATIONS, given)
        mode = given["mode"]
        optimizer = given.get("optimizer")
        torch = release_of_step(REFERENCE_RELEASE if self.torch_version is None else torch_release(self.torch_version))
        if torch < DEFAULTS_CHANGED:
            given.setdefault("sdpa", "math")  # code of that time writes attention out
        low_rank = None
        if mode == "train" and optimizer in LOW_RANK:
            low_rank = low_rank_of(optimizer, str(self.optim_args or ""), tuple(self.optim_target_modules))
        quantized = None
        if "quantize" in given:
            prepared = self.kbit_training and mode == "train"
            compute = given.get("dtype") or given.get("amp") or dtypes.float32
            quantized = Quantized(given["quantize"], compute, prepared, given.get("dtype"))
        generation = None
        if mode == GENERATE:
            sampling = sampling_of(self.sampling)
            generation = Generation(given["prompt"], given["new_tokens"], given.get("cache", "dynamic"), sampling)
        taken = {name: value for name, value in given.items() if name in TAKEN}
        derived = {
            "optimizer": optimizer if mode == "train" else None,
            "dtype": None if quantized is not None and quantized.prepared else given.get("dtype"),
            "torch": torch,
            "quantize": quantized,
            "generation": generation,
            "ddp": self.within_ddp and "compile" in given,
            "low_rank": low_rank,
            "experts": self.experts,
            "context": self.context,
        }
        scenario = Scenario(**{**taken, **derived})
        for group in _CHECKED:
            if not given.keys().isdisjoint(group.__annotations__):
                group.check(scenario)
        return scenario, self._notes(scenario, given)

    def _notes(self, scenario: Scenario, given: Mapping[str, Any]) -> list[Note]:
        """What is said of options that do not act, and of what the step takes as given."""
        mode = scenario.mode
        trains = scenario.training
        optimizer = given.get("optimizer")
        notes: list[Note] = []
        kind = "inference" if mode == "infer" else "generation"
        if not trains and "loss" in given and self.preset is None:
            how = "was asked for" if self.mode else "needs none; --mode train, or an optimizer, makes it a step"
            notes.append(Note("warning", "SM302", f"the loss ({given['loss']}) is not used: {kind} {how}"))
        if not trains and optimizer is not None:
            notes.append(Note("warning", "SM302", f"the optimizer ({optimizer}) is not used: {kind} was asked for"))
        if mode == GENERATE and self.outputs != OPTIONS["outputs"].default and self.preset is None:
            text = f"--outputs {self.outputs} is not used: generate() returns the numbers of tokens, and no scores"
            notes.append(Note("warning", "SM302", text))
        lacking = {  # what the step has not
            TRAINED: not trains,
            UPDATED: scenario.optimizer is None,
            BACKWARD: not (trains and scenario.backward),
            RANKS: not (self.parallel or self.context_parallel),
            SERVED: mode != SERVE,
            WORKERS: not self.workers,
        }
        preset = PRESETS[self.preset].defaults if self.preset is not None else ()
        for name, one in OPTIONS.items():
            if lacking.get(one.needs) and getattr(self, name) != one.default and name not in preset:
                needed = one.needs if trains or one.needs in (RANKS, SERVED, WORKERS) else TRAINED
                notes.append(Note("warning", "SM302", f"{one.spelt} is not used: it needs {needed}"))
        autocast = given.get("amp") in dtypes.HALVES
        if self.float32_outputs and self.preset is None and not (autocast and trains):
            text = "--float32-outputs is not used: it casts what a training step gets from autocast (--amp bf16)"
            notes.append(Note("warning", "SM302", text))
        if trains and self.optimizer == "sgd" and self.dampening and not self.momentum:
            text = "--dampening is not used: torch.optim.SGD dampens a momentum, and there is none (--momentum 0.9)"
            notes.append(Note("warning", "SM302", text))
        if self.preset is not None and not trains:
            text = f"the preset ({self.preset}) is not used: {kind} was asked for"
            notes.append(Note("warning", "SM302", text))
        elif self.preset is not None:
            text = described(self.preset, {name: getattr(self, name) for name in FIELDS})
            notes.append(Note("assumption", "SM129", text))
        if trains and optimizer is None:
            notes.append(Note("assumption", "SM303", "no optimizer: forward and backward only"))
        elif trains:
            notes.append(Note("assumption", "SM300", self._of_later_steps()))
        return notes

    def _of_later_steps(self) -> str:
        """What is there when the step begins."""
        text = "a step after the first: optimizer state exists, and "
        if not self.set_to_none:
            text += "so do gradients, which zero_grad(set_to_none=False) fills with zeros"
        elif self.zero_grad == AFTER_FORWARD:
            text += "zero_grad() sets gradients to None when the forward has run"
        else:
            text += "zero_grad() has set gradients to None"
        if self.torch_version is None or torch_release(self.torch_version) >= DEFAULTS_CHANGED:
            return text
        return f"{text}; before PyTorch 2.0 that, and --optimizer-impl for-loop, are the defaults"

    @property
    def communicators(self) -> int:
        """Groups of devices that a rank talks in: that of its data, and those of further dimensions of the mesh. One
        device has none."""
        mesh = ((self.replicas or 1) > 1, (self.expert_parallel or 1) > 1, (self.context_parallel or 1) > 1)
        return sum(mesh, start=int(self.parallel is not None))

    def _choice(self, name: str) -> Any:
        """The value of an option with choices, in lower case."""
        value = getattr(self, name)
        return value if value is None else checked_choice(name.replace("_", "-"), value, OPTIONS[name].choices)


# the order of help, of schemas and of pages; an option that is not here is the last of its heading
_ORDER = (
    "mode prompt new_tokens cache sampling preset optimizer optimizer_impl optim_target_modules optim_args momentum "
    "loss target_length dtype amp sdpa compile compile_mode lora quantize kbit_training unfold_batchnorm "
    "inplace_activations method checkpoint checkpoint_every checkpoint_save checkpoint_segments checkpoint_sequential "
    "accumulate freeze weight_decay nesterov dampening amsgrad centered offload_optimizer offload_activations "
    "inplace_abn let_go grad_scaler set_to_none zero_grad clip_grad_norm input_grad retain_graph compile_optimizer "
    "activation_memory_budget backward outputs float32_outputs parallel devices replicas offload_parameters "
    "expert_parallel context_parallel rotate_method"
)
OPTIONS = declared(Request, tuple(_ORDER.split()))
FIELDS = tuple(OPTIONS)
COMBINATIONS = {**dict(of_owners(OPTIONS.values())), **STEPS}
_CHECKED = (OptimizerOptions, LossOptions, CompileOptions, Checkpointing, Edits, Loop)  # that have ranges
TAKEN = Scenario.__dataclass_fields__.keys() & OPTIONS.keys()  # that the scenario has as they are given


def request_of(options: Mapping[str, Any]) -> Request:
    """The request of some options, and of their preset; None is "not given".

    Raises:
        TypeError: an option that `Request` does not have.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return Request(**with_release(with_preset(given) if "preset" in given else given))


def flags_of(request: Request) -> str:
    """The flags of all that a request asks for, but for its card: what its preset or release of PyTorch would set
    otherwise is among them."""
    told = {name: getattr(request, name) for name in ("mode", "preset", "optimizer", "torch_version")}
    return as_flags({name: getattr(request, name) for name in OPTIONS if name != "gpu"}, request_of(told))


def as_flags(options: Mapping[str, Any], usual: Request | None = None) -> str:
    """`--checkpoint Bottleneck --amp bf16`: the flags for options that differ from the defaults, to be copied. `usual`:
    what holds where none is given; its default is told too where it holds another value, if a flag can tell it."""
    import shlex

    parts: list[str] = []
    for name, value in options.items():
        one = OPTIONS[name]
        differs = usual is not None and getattr(usual, name) != value and (one.kind != "switch" or one.default)
        if (value == one.default and (value is None or not differs)) or (name == "dims" and not value):
            continue
        if name == "compile" and value == (WHOLE,):
            parts.append(one.flag)
        elif one.kind == "switch":
            parts.append(one.flag if value else f"--no-{one.flag[2:]}")
        elif name == "resolution":
            parts.append(f"{one.flag} {value[0]}x{value[1]}")
        else:
            several = list(value) if isinstance(value, tuple) else [value]
            several = [f"{key}={size}" for key, size in value.items()] if name == "dims" else several
            parts += [f"{one.flag} {shlex.quote(str(word))}" for word in several]
    return " ".join(parts)
