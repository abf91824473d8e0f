"""Settings of training libraries for a step that was predicted: one file a library, which writes their text.

Names of settings are those of the releases that `scenario.presets` describes (transformers 5.23, accelerate 1.15), of
PyTorch 2.13 and of DeepSpeed 0.19; each file names their source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from staticmem.ir.dtypes import HALVES, DType
from staticmem.report.text import printable
from staticmem.scenario.edits import BATCH_OF_LOOP, LOSS_OF_LOOP
from staticmem.scenario.precision import precision
from staticmem.scenario.presets import PRESETS
from staticmem.scenario.request import OPTIONS, Request, as_flags
from staticmem.scenario.strategies import DATA_PARALLEL, DEEPSPEED, PYTORCH, STRATEGIES, StrategyFacts, facts_of

_OF_PYTORCH = tuple([name for name in DATA_PARALLEL if STRATEGIES[name].library == PYTORCH])
_OF_DEEPSPEED = tuple([name for name in DATA_PARALLEL if STRATEGIES[name].library == DEEPSPEED])
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
    """

    request: Request
    heading: tuple[str, ...]
    sharded: Modules = Modules()
    checkpointed: Modules = Modules()
    inputs: int = 1
    loss: str = OF_TARGETS

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
    `lets_go` are the variables of the loop that its text lets go of where the request does.
    """

    title: str
    module: str
    file: str
    strategies: tuple[str | None, ...]
    sets: frozenset[str]
    preset: str = ""
    sets_with_shards: frozenset[str] = frozenset()
    lets_go: frozenset[str] = frozenset()

    def text(self, run: Run) -> str:
        """The settings as the text of a file, with a final newline."""
        write: Callable[[Run], str] = import_module(f"{__name__}.{self.module}").write
        return write(run)

    def as_run(self, request: Request) -> Request:
        """The request with what this library's loop does whatever its settings say."""
        if not self.preset:
            return request
        fixed = {k: d.value for k, d in PRESETS[self.preset].defaults.items() if k in LOOP}
        return replace(request, **fixed)

    def unset(self, request: Request) -> str:
        """Flags of what is predicted and not in the text."""
        strategy = facts_of(request.parallel)
        sets = self.sets | _OF_THE_ANALYSIS
        if strategy is not None and strategy.shards_modules:
            sets |= self.sets_with_shards
        kept = replace(request, let_go=tuple([name for name in request.let_go if name not in self.lets_go]))
        return as_flags({name: getattr(kept, name) for name in OPTIONS if name not in sets})


LOOP = frozenset("outputs zero_grad set_to_none".split())  # what a training loop does, whatever the settings say
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
        "PyTorch", "pytorch", "train_step.py", (None, *_OF_PYTORCH), _TRAINER | {"dtype", "channels_last"},
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
}  # fmt: skip


def comment(run: Run) -> list[str]:
    """The heading as comments of Python or YAML: what names of files contain ends no line."""
    return [f"# {printable(line)}".rstrip() for line in run.heading]
