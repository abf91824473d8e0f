"""Settings of training libraries for a step that was predicted: one file a library, which writes their text.

Names of settings are those of the releases that `scenario.presets` describes (transformers 5.23, accelerate 1.15), of
PyTorch 2.13 and of DeepSpeed 0.19; each file names their source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from staticmem.ir.dtypes import HALVES, DType, bfloat16
from staticmem.report.settings.optimizers import name_of_transformers
from staticmem.report.text import printable
from staticmem.scenario.adapters import lora_of
from staticmem.scenario.edits import BATCH_OF_LOOP, LOSS_OF_LOOP
from staticmem.scenario.precision import precision
from staticmem.scenario.presets import PRESETS
from staticmem.scenario.request import OPTIONS, Request, as_flags
from staticmem.scenario.strategies import DATA_PARALLEL, DEEPSPEED, PYTORCH, STRATEGIES, StrategyFacts, facts_of

_OF_PYTORCH = tuple([name for name in DATA_PARALLEL if STRATEGIES[name].library == PYTORCH])
_WHOLE = tuple([name for name in _OF_PYTORCH if STRATEGIES[name].keeps_whole])
_OF_DEEPSPEED = tuple([name for name in DATA_PARALLEL if STRATEGIES[name].library == DEEPSPEED])
OF_ADAPTERS, OF_ALL = "of adapters", "of all"  # which models are loaded in bfloat16: those below adapters, or all
OF_TARGETS, OF_OUTPUTS, OF_THE_MODEL = "of targets", "of outputs", "of the model"  # what gives the loss
ONE_DEVICE = StrategyFacts("one device", "", frozenset())


@dataclass(frozen=True)
class Modules:
    """Modules by path, and the name of the class that they share; empty where they share none that is known."""

    paths: tuple[str, ...] = ()
    cls: str = ""


@dataclass(frozen=True)
class Run:
    """A step as a library is told of it. `heading` are lines for its reader: figures, commands and notes.

    `sharded` are the modules that FSDP2 shards one by one, `checkpointed` those that are computed again. `inputs`: how
    many the model takes. `loss`: a function gives it, of the outputs and targets or of the outputs alone, or the model.
    `length`: the tokens of a sample, of a model of text.
    """

    request: Request
    heading: tuple[str, ...]
    sharded: Modules = Modules()
    checkpointed: Modules = Modules()
    inputs: int = 1
    loss: str = OF_TARGETS
    length: int | None = None

    @property
    def strategy(self) -> StrategyFacts:
        """What is known of the strategy of several devices."""
        return facts_of(self.request.parallel) or ONE_DEVICE

    @property
    def takes_arguments(self) -> bool:
        """Whether what a step gets of a micro-batch are arguments of the model, and no tensor alone."""
        return self.inputs > 1 or self.loss != OF_TARGETS

    @property
    def batch(self) -> int:
        """Samples of a micro-batch on each device."""
        return self.request.batch or 1

    @property
    def devices(self) -> int:
        return self.request.devices or 1 if self.request.parallel is not None else 1

    @property
    def half(self) -> DType | None:
        """The 16-bit type of mixed precision, which ZeRO has for a model that is cast too; None without one."""
        casts = ("amp", *self.strategy.casts)
        types = [precision(name, getattr(self.request, name)) for name in dict.fromkeys(casts)]
        return next((dtype for dtype in types if dtype in HALVES), None)


@dataclass(frozen=True)
class Library:
    """A library that trains. `file` is the name of what its module writes; `strategies` those that it can express.

    `sets` are the options of a request that its text sets; `preset` says what its loop does besides (`Preset`).
    `lets_go` are the variables of the loop that its text lets go of where the request does. `of_transformers`: it
    trains models of transformers alone, with optimizers that have a name there. `halves`: what of a model it loads in
    bfloat16 where mixed precision is in bfloat16; `only_halves`: it is told of no other model. `by_patterns`: layers
    with adapters may be given by a regular expression.
    """

    title: str
    module: str
    file: str
    strategies: tuple[str | None, ...]
    sets: frozenset[str]
    preset: str = ""
    sets_with_shards: frozenset[str] = frozenset()
    lets_go: frozenset[str] = frozenset()
    of_transformers: bool = False
    halves: str = ""
    only_halves: bool = False
    by_patterns: bool = True

    @property
    def takes_replicas(self) -> bool:
        """Whether its text says that groups of devices have the whole model each."""
        return "replicas" in self.sets

    def text(self, run: Run) -> str:
        """The settings as the text of a file, with a final newline."""
        write: Callable[[Run], str] = import_module(f"{__name__}.{self.module}").write
        return write(run)

    def as_run(self, request: Request) -> Request:
        """The request with what this library does whatever its settings say."""
        if not self.preset:
            return request
        if self._loads_halves(request):
            request = replace(request, dtype="bf16", amp="bf16")
        strategy = facts_of(request.parallel)
        of_deepspeed = strategy is not None and strategy.library == DEEPSPEED  # which accelerate does not wrap
        is_half = precision("amp", request.amp) in HALVES
        names = LOOP | _OF_ACCELERATE if is_half and not of_deepspeed else LOOP
        fixed = {k: d.value for k, d in PRESETS[self.preset].defaults.items() if k in names}
        return replace(request, **fixed)

    def _loads_halves(self, request: Request) -> bool:
        """Whether a model is loaded in bfloat16 and runs under autocast, where one of both is asked for."""
        half = [name for name in ("amp", "dtype") if precision(name, getattr(request, name)) is bfloat16]
        if request.lora:
            return bool(self.halves) and bool(half)
        return self.halves == OF_ALL and "amp" in half

    def takes(self, request: Request) -> bool:
        """Whether it can be told of a step that it runs so (`as_run`)."""
        if request.parallel not in self.strategies:
            return False
        if not self.of_transformers:
            return True
        if request.optimizer is not None and name_of_transformers(request) is None:
            return False
        types = [precision(name, getattr(request, name)) for name in ("dtype", "amp")]
        if request.lora:
            assert isinstance(request.lora, str)
            is_named = self.by_patterns or not lora_of(request.lora).pattern
            return is_named and (types == [bfloat16, bfloat16] or (types == [None, None] and not self.only_halves))
        strategy = facts_of(request.parallel)
        is_sharded = strategy is not None and strategy.shards_modules
        return not self.only_halves or (is_sharded and types == [bfloat16, bfloat16])

    def unset(self, request: Request) -> str:
        """Flags of what is predicted and not in the text."""
        strategy = facts_of(request.parallel)
        sets = self.sets | _OF_THE_ANALYSIS | (_OF_ACCELERATE if self.preset else frozenset())
        if strategy is not None and strategy.shards_modules:
            sets |= self.sets_with_shards
        kept = replace(request, let_go=tuple([name for name in request.let_go if name not in self.lets_go]))
        return as_flags({name: getattr(kept, name) for name in OPTIONS if name not in sets})


LOOP = frozenset("outputs zero_grad set_to_none".split())  # what a training loop does, whatever the settings say
_OF_ACCELERATE = frozenset({"float32_outputs"})  # what its copy of the model's forward does under mixed precision
_OPTIMIZER = frozenset("optimizer optimizer_impl momentum weight_decay nesterov dampening amsgrad centered".split())
_SHARED = LOOP | frozenset("batch accumulate devices parallel amp grad_scaler".split())
_TRAINER = _SHARED | _OPTIMIZER | {"clip_grad_norm", "checkpoint", "lora"}
# options of the data, of the file, or of the analysis alone
_OF_THE_ANALYSIS = frozenset(
    "resolution dims mode prompt new_tokens cache preset unfold_batchnorm inplace_activations method gpu gpus_file "
    "torch_version module_loading cudnn profile top".split()
)

LIBRARIES: dict[str, Library] = {
    "pytorch": Library(
        "PyTorch", "pytorch", "train_step.py", (None, *_OF_PYTORCH), _TRAINER | {"dtype", "channels_last", "replicas"},
        lets_go=frozenset({BATCH_OF_LOOP, LOSS_OF_LOOP}),
    ),
    "transformers": Library(
        "transformers", "hf_trainer", "training_arguments.py", (None, *DATA_PARALLEL), _TRAINER, "hf-trainer"
    ),
    "accelerate": Library(
        "accelerate", "accelerate_yaml", "accelerate.yaml", (None, *DATA_PARALLEL), _SHARED, "accelerate",
        frozenset({"checkpoint"}),
    ),
    "deepspeed": Library(
        "DeepSpeed", "deepspeed_json", "deepspeed.json", _OF_DEEPSPEED, (_SHARED - LOOP) | {"dtype", "clip_grad_norm"}
    ),
    "llama-factory": Library(
        "LLaMA-Factory", "llama_factory_yaml", "llama_factory.yaml", (None, *_WHOLE, *_OF_DEEPSPEED),
        _TRAINER | {"dtype", "quantize"}, "hf-trainer", of_transformers=True, halves=OF_ADAPTERS, by_patterns=False,
    ),
    "axolotl": Library(
        "axolotl", "axolotl_yaml", "axolotl.yaml", (None, *DATA_PARALLEL), _TRAINER | {"dtype"}, "hf-trainer",
        of_transformers=True, halves=OF_ALL, only_halves=True,
    ),
}  # fmt: skip


def comment(run: Run) -> list[str]:
    """The heading as comments of Python or YAML: what names of files contain ends no line."""
    return [f"# {printable(line)}".rstrip() for line in run.heading]
