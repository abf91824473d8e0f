"""`Request`: everything that a user can ask of one analysis, as the user writes it.

The command line, configs and Python all make a `Request`; what its options mean is decided here and nowhere else.
A field left out has the default of this class.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from staticmem.errors import UsageError, closest
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Note
from staticmem.ir.record import record
from staticmem.scenario.adapters import QUANTIZED, Quantized, lora_of, lora_text
from staticmem.scenario.combinations import STEPS, check, of_owners
from staticmem.scenario.effects import idle
from staticmem.scenario.generation import EXAMPLE, GREEDY, sampling_of
from staticmem.scenario.losses import has_terms, loss_text
from staticmem.scenario.optimizers import LOW_RANK, REFUSED, args_text, low_rank_of, split_targets
from staticmem.scenario.options import DEVICE, LEVERS, OUTPUT, SIZES, STEP, declared, option
from staticmem.scenario.presets import NAMES_OF_TRANSFORMERS, PRESETS, described, with_preset, with_release
from staticmem.scenario.step import (
    AFTER_FORWARD,
    CACHES,
    COMPILE_MODES,
    DEFAULT_MODE,
    LEVER_OPTIONS,
    LOSSES,
    OPTIMIZERS,
    ROTATE_METHODS,
    ROTATES_AT_ONCE,
    ROTATES_IN_TURNS,
    WHOLE,
    ContextShare,
    ExpertShare,
    Generation,
    Levers,
    Scenario,
)
from staticmem.scenario.strategies import STRATEGIES
from staticmem.version import DEFAULTS_CHANGED, REFERENCE_RELEASE, release_of_step, torch_release

GENERATE = "generate"
MODES = ("train", "infer", GENERATE)
_CHOICES = (  # options whose words are checked at once
    "preset", "zero_grad", "method", "cudnn", "module_loading", "inplace_activations", "parallel", "outputs",
    "rotate_method",
)  # fmt: skip
PRECISIONS = ("none", "fp32", "fp16", "bf16")
MOST_RANKS = 1024  # that share a sequence, or experts; a step runs as many turns
ALL = sys.maxsize  # for `top`: every tensor


# fmt: off
@record(frozen=True, kw_only=True)
class Request(Levers):
    """One analysis as requested. None is "not given"; each field is declared with what it means."""

    batch: int | None = option(
        None, SIZES, "whole", "N", "size of axis 0 of every input", letter="-b", example="32",
        details="Where the export fixed the same size for all inputs it is changed (a 1 stays; several sizes are an "
        "error). If the file leaves it open and you do not give it, 1 is assumed and the report says so",
    )
    resolution: int | tuple[int, int] | None = option(
        None, SIZES, "resolution", "N|HxW", "height and width of 4-D image inputs, one number for both", example="224",
        details="In ONNX files whose input a `Transpose` shows to be channels last (TensorFlow, Keras) these are "
        "axes 1 and 2. Where the shape looks so and nothing shows it, an error asks for `--dim input[axis]=N`",
    )
    dims: Mapping[str, int] | None = option(
        None, SIZES, "dims", "NAME=N", "size of another open dimension, by its name", flag="--dim",
        example="{seq: 512}", details="Its name is that in the file, or `input[axis]`",
    )
    mode: str | None = option(
        None, STEP, "choice", "MODE", "what is analysed", choices=MODES, table="", session=True,
        unset="train if an optimizer is given", example="train",
        details="`train` without an optimizer is forward and backward, `generate` the prefill and the last decode step "
        "of a decoder ([generation](generation.md))",
    )
    prompt: int | None = option(
        None, STEP, "whole", "N", "tokens of the prompt, with --mode generate", example="2048",
        table="generate",
    )
    new_tokens: int | None = option(
        None, STEP, "whole", "N", "tokens that are generated, with --mode generate", example="512",
        table="generate",
    )
    cache: str = option(
        "dynamic", STEP, "choice", "KIND", "cache of keys and values, with --mode generate",
        choices=CACHES, example="static", table="generate",
        details="`dynamic` grows by concatenation, `static` is allocated in advance, as `cache_implementation` of "
        "transformers",
    )
    sampling: str = option(
        GREEDY, STEP, "text", "HOW", "how tokens are chosen, with --mode generate", example=EXAMPLE, table="generate",
        details="`greedy`, `sample` with the defaults of transformers, or settings of `do_sample=True`: `top-k` (0: "
        "none), `top-p` and `temperature` ([generation](generation.md#sampling))",
    )
    preset: str | None = option(
        None, STEP, "choice", "NAME", "defaults of a training library for what is not given", choices=tuple(PRESETS),
        training=True, example="hf-trainer",
        details="The report says what it set. [Presets](levers.md#presets) has the options and their sources",
    )
    optimizer: str | None = option(
        None, STEP, "choice", "NAME", "optimizer of the step, which makes it training", choices=OPTIMIZERS,
        aliases=tuple(NAMES_OF_TRANSFORMERS),
        training=True, example="adam",
        details="adafactor-hf is that of transformers, lion that of timm; those with a number of bits are of "
        "bitsandbytes; muon leaves what is no hidden matrix to AdamW: [levers](levers.md#optimizers). Names that "
        "`TrainingArguments(optim=)` of transformers takes stand for these",
    )
    optimizer_impl: str = option(
        "foreach", STEP, "choice", "IMPL", "PyTorch's implementation of the optimizer",
        choices=("foreach", "fused", "for-loop"), training=True, example="foreach",
        details="`foreach` is PyTorch's default on CUDA",
    )
    optim_target_modules: str | tuple[str, ...] = option(
        (), STEP, "names", "NAME",
        "modules whose weights galore-adamw and apollo-adamw project: all-linear, or parts of paths",
        training=True, owners=LOW_RANK, example="[attn, mlp]",
        details="As a list for `TrainingArguments(optim_target_modules=)` of transformers: a part of a path, a path, "
        "or a regular expression of whole paths; linear layers alone ([levers](levers.md#galore-and-apollo))",
    )
    optim_args: str | Mapping[str, Any] | None = option(
        None, STEP, "pairs", "KEY=VALUE,...", "options of galore-adamw and apollo-adamw",
        training=True, owners=LOW_RANK, example="{rank: 128, update_proj_gap: 200}",
        unset="rank=128,update_proj_gap=200",
        details="As `TrainingArguments(optim_args=)` of transformers: `rank`, `update_proj_gap`, `scale`, `proj_type`, "
        "and for apollo-adamw `proj` and `scale_type` ([levers](levers.md#galore-and-apollo))",
    )
    momentum: float = option(
        0.0, STEP, "fraction", "M", "momentum of sgd or rmsprop",
        training=True, owners=("sgd", "rmsprop"), example="0.9",
    )
    loss: str | Mapping[Any, str] = option(
        "auto", STEP, "loss", "LOSS", "the loss, or that of each output; auto chooses by the output's shape",
        choices=LOSSES, training=True, example="auto",
        details="The report says what was chosen. `none`: the first output is the loss, or the gradient that backward "
        "starts from has its size; `outputs`: backward starts from all outputs, each with a gradient of its size. "
        "`out=cross-entropy,aux=0.4*cross-entropy` sums losses of outputs ([several "
        "outputs](levers.md#several-outputs)); the others are those of libraries: [losses](levers.md#losses)",
    )
    target_length: int | None = option(
        None, STEP, "whole", "N", "labels of the longest target, with --loss ctc", training=True, example="50",
        unset="as many as the output has frames, which is the most that can be aligned",
    )
    dtype: str | None = option(
        None, STEP, "precision", "TYPE", "casts the whole model, as model.to(dtype)", choices=PRECISIONS,
        example="bf16",
    )
    amp: str | None = option(
        None, STEP, "precision", "TYPE", "mixed precision, as torch.autocast around the forward", choices=PRECISIONS,
        example="bf16",
    )
    sdpa: str = option(
        "auto", STEP, "choice", "KERNEL", "kernel of scaled_dot_product_attention; auto chooses as PyTorch does",
        choices=("auto", "cudnn", "flash", "efficient", "math"), example="auto",
        details="As on an sm_90 GPU; the report says what was chosen and why. Where PyTorch has no such kernel for the "
        "inputs (flash takes no mask and no float32), the automatic choice stands and the report says so",
    )
    compile: bool | str | tuple[str, ...] = option(
        (), STEP, "modules", "CLASS|PATH", "runs under torch.compile: the whole model, or modules by class or path",
        example="true",
        details="Without a value the whole model; each module of a class or path is compiled for itself. `*` stands "
        "for one part of a path. The loss and the optimizer stay eager ([compile](compile.md))",
    )
    compile_mode: str = option(
        DEFAULT_MODE, STEP, "choice", "MODE", "the mode of torch.compile", choices=COMPILE_MODES,
        example="reduce-overhead",
        details="With `compile`. `reduce-overhead` runs what is compiled as CUDA graphs, in a pool of their own; "
        "`max-autotune` does so too, and measures kernels on the card ([compile](compile.md#cuda-graphs))",
    )
    lora: str | Mapping[str, Any] | None = option(
        None, STEP, "adapters", "KEY=VALUE,...", "low-rank adapters beside layers of a frozen model, as PEFT has them",
        example="{r: 16, alpha: 32, dropout: 0.05, targets: [q_proj, v_proj]}",
        details="`r`, `alpha`, `dropout`, `targets` (ends of paths with `+` between them, a regular expression, or "
        "`all-linear`), `dtype`, `save`, `input_grads`, `dora` ([adapters](adapters.md))",
    )
    quantize: str | None = option(
        None, STEP, "choice", "TYPE",
        "type of the weights of linear layers, as bitsandbytes or torchao (`wo`) holds them",
        choices=("none", *QUANTIZED), example="nf4",
        details="`-dq`: double quantisation; `wo`: weight-only, for inference. Training needs `lora` "
        "([adapters](adapters.md#quantised-weights))",
    )
    kbit_training: bool = option(
        False, STEP, "switch", "", "prepare_model_for_kbit_training: what is not quantised is in float32",
        details="With `quantize`, in training; `dtype` is then the type of products alone",
    )
    unfold_batchnorm: bool = option(
        False, STEP, "switch", "", "puts a batch norm behind every convolution with a bias",
        details="For files whose norms were folded away (an inference export analysed for training)",
    )
    inplace_activations: str = option(
        "auto", STEP, "choice", "POLICY", "what ran in place, where the file does not say",
        choices=("auto", "none", "all"), example="auto",
        details="ONNX files do not say which activations ran in place",
    )
    parallel: str | None = option(
        None, LEVERS, "choice", "STRATEGY", "strategy of several GPUs: the report is of the one that needs the most",
        choices=("none", *STRATEGIES), example="zero3",
        details="The batch is that of one rank ([parallel.md](parallel.md))",
    )
    devices: int | None = option(None, LEVERS, "whole", "N", "how many GPUs share the work", example="8")
    expert_parallel: int | None = option(
        None, LEVERS, "whole", "N", "ranks that share the routed experts of each layer, with --parallel fsdp",
        example="4", details="It divides `devices`. The band of the peak reaches from balanced to the worst routing "
        "([parallel.md](parallel.md#experts))",
    )
    context_parallel: int | None = option(
        None, LEVERS, "whole", "N", "ranks that share the sequence of each sample, alone or with --parallel fsdp",
        example="4", details="Sizes are those of the whole sequence. With `fsdp` it divides `devices` "
        "([parallel.md](parallel.md#long-sequences))",
    )
    rotate_method: str = option(
        ROTATES_AT_ONCE, LEVERS, "choice", "METHOD", "how keys and values come from other ranks that share a sequence",
        choices=ROTATE_METHODS, example=ROTATES_IN_TURNS,
        details="With `context_parallel`. PyTorch's `set_rotate_method`: one all-gather, or around the ring",
    )
    method: str = option(
        "liveness", STEP, "choice", "METHOD", "textbook shows the textbook estimate beside the answer",
        choices=("liveness", "textbook"), table="", setting=False, details="[The estimate](textbook.md)",
    )
    gpu: str | None = option(
        None, DEVICE, "text", "NAME|SIZE", "a GPU by name or size (h100-sxm-80gb, 24GB), and whether the step fits",
        table="", session=True, unset="an H100 SXM 80 GB is assumed", example="24GB",
        details="Without one the report does not say whether the step fits",
    )
    gpus_file: str | os.PathLike[str] | None = option(
        None, DEVICE, "text", "FILE", "YAML with GPUs of your own, over those of the package", session=True,
        example="gpus.yaml", details="[hardware](hardware.md)",
    )
    alloc_conf: str | None = option(
        None, DEVICE, "text", "CONF", "settings of the allocator, as in PYTORCH_ALLOC_CONF", table="",
        example="expandable_segments:True",
        details="`expandable_segments:True,max_split_size_mb:128` ([allocators](allocators.md))",
    )
    torch_version: str | None = option(
        None, DEVICE, "text", "V", "the PyTorch that runs the step", unset="2.13", example="2.9",
        details="Decides workspaces of cuBLAS, which cuDNN, and what autograd saved before 1.11. Before 2.0 optimizers "
        "run as for-loops, gradients are zeroed, and attention is written out, where nothing else is said. "
        "`1.12+cu113` names a build for another CUDA than that on PyPI",
    )
    module_loading: str | None = option(
        None, DEVICE, "choice", "WHEN", "when kernels come to the GPU, as CUDA_MODULE_LOADING",
        choices=("lazy", "eager"), unset="as that PyTorch does, eager before 1.13", example="lazy",
        details="At their first use, or all with the context. A driver before R515 loads eagerly "
        "([hardware](hardware.md))",
    )
    tf32: bool = option(True, DEVICE, "switch", "", "torch.backends.cudnn.allow_tf32 is on")
    channels_last: bool = option(
        False, DEVICE, "switch", "", "model and inputs are in torch.channels_last",
        details="Convolutions need smaller workspaces",
    )
    cudnn_benchmark: bool = option(
        False, DEVICE, "switch", "", "torch.backends.cudnn.benchmark is on",
        details="The first step searches with large workspaces ([workspace](workspace.md))",
    )
    cudnn: str = option(
        "tables", DEVICE, "choice", "SOURCE", "source of workspaces of convolutions: tables, or an installed library",
        choices=("tables", "library"), example="tables",
        details="An installed libcudnn is exact (`pip install 'staticmem[cudnn]'`)",
    )
    profile: str | os.PathLike[str] | None = option(
        None, DEVICE, "text", "FILE", "YAML with your own figures of context, libraries and cuBLAS", session=True,
        example="profile.yaml", details="[hardware](hardware.md)",
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
            why, hint = REFUSED[self.optimizer.lower()], f"Use one of {' and '.join(LOW_RANK)}."
            raise UsageError(f"the optimizer '{self.optimizer}' is not covered", why, hint, "SM161")
        if self.optimizer is not None and self.optimizer.lower() in NAMES_OF_TRANSFORMERS:
            name, impl = NAMES_OF_TRANSFORMERS[self.optimizer.lower()]
            object.__setattr__(self, "optimizer", name)
            if impl is not None and self.optimizer_impl == OPTIONS["optimizer_impl"].default:
                object.__setattr__(self, "optimizer_impl", impl)
        for name in _CHOICES:
            object.__setattr__(self, name, self._choice(name))
        if self.parallel == "none":
            object.__setattr__(self, "parallel", None)
        if self.dims is None:
            object.__setattr__(self, "dims", {})
        if self.optim_args is not None:
            object.__setattr__(self, "optim_args", args_text(self.optim_args))
        for name in ("checkpoint", "checkpoint_save", "input_grad", "optim_target_modules"):
            value = getattr(self, name)  # the command line and configs give lists
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "optim_target_modules", split_targets(self.optim_target_modules))
        object.__setattr__(self, "compile", _modules(self.compile))
        if self.lora is not None:
            text = lora_text(self.lora)
            object.__setattr__(self, "lora", None if text.lower() in ("", "none") else text)
        object.__setattr__(self, "loss", loss_text(self.loss))
        if isinstance(self.resolution, int):
            object.__setattr__(self, "resolution", (self.resolution, self.resolution))
        elif self.resolution is not None and len(self.resolution) != 2:
            what = f"a resolution of {len(self.resolution)} numbers"
            raise UsageError(what, "It is a height and a width.", "Give two, or one for both.", "SM110")

    @property
    def names_device(self) -> bool:
        """Whether an option was given that only a card or its software can refuse."""
        given = (self.gpu, self.alloc_conf, self.torch_version, self.module_loading, self.profile)
        return any(value is not None for value in given) or self.cudnn != "tables"

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width, where a resolution is given."""
        assert not isinstance(self.resolution, int)
        return self.resolution

    def given(self, **words: Any) -> dict[str, Any]:
        """The options that differ from their defaults, as the step has them: words in lower case, adapters and types
        read, the mode that follows, and no lever of a training step in another; and the `words` of a verb but None.

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
            values.update({name: one.default for name, one in LEVER_OPTIONS.items() if one.training})
        given = {name: value for name, value in values.items() if value != OPTIONS[name].default}
        return given | {name: value for name, value in words.items() if value is not None} if words else given

    def scenario(self) -> tuple[Scenario, list[Note]]:
        """The validated scenario of the step, and notes on it.

        Raises:
            UsageError: an unknown choice, a value that is out of range, or options that do not go together.
        """
        given = self.given()
        for name, code in (("expert_parallel", "SM109"), ("context_parallel", "SM243")):
            if not 1 <= given.get(name, 1) <= MOST_RANKS:
                flag, why = OPTIONS[name].flag, f"It is a number of ranks from 1 to {MOST_RANKS:,}."
                raise UsageError(f"{flag} {given[name]} is out of range", why, f"Example: {flag} 4", code)
        check(COMBINATIONS, given)
        mode, optimizer = given["mode"], given.get("optimizer")
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
        made = {
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
        scenario = Scenario(**{**taken, **made})
        return scenario, self._notes(scenario, given)

    def _notes(self, scenario: Scenario, given: Mapping[str, Any]) -> list[Note]:
        """What is said of options that do not act, and of what the step takes as given."""
        mode, trains, optimizer = scenario.mode, scenario.training, given.get("optimizer")
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
        preset = set(PRESETS[self.preset].defaults) if self.preset is not None else set()
        options = {name: one for name, one in OPTIONS.items() if name not in preset}
        values = {name: getattr(self, name) for name in OPTIONS}
        notes += [Note("warning", "SM302", text) for text in idle(options, values, mode, scenario.optimizer)]
        autocast = given.get("amp") in dtypes.HALVES
        if self.float32_outputs and self.preset is None and not (autocast and trains):
            text = "--float32-outputs is not used: it casts what a training step gets from autocast (--amp bf16)"
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
    def on_ranks(self) -> bool:
        """Whether the step is one rank's of several."""
        return self.parallel is not None or (self.context_parallel or 1) > 1

    @property
    def compiles(self) -> bool:
        """Whether code of `torch.compile` runs in the step."""
        return bool(self.compile) or self.compile_optimizer

    def _choice(self, name: str) -> Any:
        """The value of an option with choices, in lower case."""
        value = getattr(self, name)
        return value if value is None else checked_choice(name.replace("_", "-"), value, OPTIONS[name].choices)


def _modules(value: bool | str | Iterable[str] | None) -> tuple[str, ...]:
    """`compile` as names of modules."""
    if isinstance(value, bool) or value is None:
        return (WHOLE,) if value else ()
    names = (value,) if isinstance(value, str) else tuple(value)
    return (WHOLE,) if WHOLE in names else tuple([name for name in names if name != "none"])


OPTIONS = declared(Request)
FIELDS = tuple(OPTIONS)
COMBINATIONS = {**dict(of_owners(OPTIONS.values())), **STEPS}
TAKEN = Scenario.__dataclass_fields__.keys() & OPTIONS.keys()  # that the scenario has as they are given


def request_of(options: Mapping[str, Any]) -> Request:
    """The request of some options, and of their preset; None is "not given".

    Raises:
        TypeError: an option that `Request` does not have.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return Request(**with_release(with_preset(given) if "preset" in given else given))


def as_flags(options: Mapping[str, Any]) -> str:
    """`--checkpoint Bottleneck --amp bf16`: the flags for options that differ from the defaults, to be copied."""
    import shlex

    parts: list[str] = []
    for name, value in options.items():
        one = OPTIONS[name]
        if value == one.default or (name == "dims" and not value):
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


def precision(name: str, word: str | None) -> DType | None:
    """A floating-point type by PyTorch's name or a short one; "none" is None."""
    if word is None or word.lower() == "none":
        return None
    dtype = dtypes.parse(word)
    if dtype not in (dtypes.float32, *dtypes.HALVES):
        raise unknown(name, word, PRECISIONS)
    return dtype
