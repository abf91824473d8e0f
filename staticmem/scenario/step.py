"""`Scenario`: what one step does: mode, optimizer, loss, precision, levers. Sizes of inputs are bound before it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from staticmem.errors import UsageError
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.scenario.adapters import Lora, Quantized
from staticmem.scenario.generation import Sampling
from staticmem.scenario.losses import KINDS
from staticmem.scenario.optimizers import LOW_RANK, LowRank
from staticmem.scenario.options import LEVERS, declared, option
from staticmem.version import REFERENCE_RELEASE

TORCH_OPTIMIZERS = {  # name for `--optimizer`: class of torch.optim
    "sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad", "radam": "RAdam",
    "nadam": "NAdam", "adamax": "Adamax", "adadelta": "Adadelta", "adafactor": "Adafactor",
}  # fmt: skip
# of bitsandbytes.optim: those without "8bit" have states in float32, paged ones keep large states in managed memory
BITSANDBYTES = (
    "adam-8bit", "adamw-8bit", "lion-8bit", "adamw-32bit", "lion-32bit",
    "paged-adamw-8bit", "paged-adamw-32bit", "paged-lion-8bit", "paged-lion-32bit",
)  # fmt: skip
# AdamW of torchao.optim: states of 8 or 4 bits, or FP8 E4M3, with a scale for each block
TORCHAO = ("torchao-adamw-8bit", "torchao-adamw-4bit", "torchao-adamw-fp8")
# muon is torch.optim.Muon beside an AdamW, lion timm's, adafactor-hf transformers' Adafactor, those of `LOW_RANK` are
# of galore_torch and apollo_torch
OPTIMIZERS = (*TORCH_OPTIMIZERS, "muon", "lion", "adafactor-hf", *BITSANDBYTES, *TORCHAO, *LOW_RANK)
FUSED = ("sgd", "adam", "adamw", "adagrad", *BITSANDBYTES)  # have fused kernels
# losses that are the last op of the graph, which may have the last linear layer in it: the model computes it, or the
# training loop with what the model has returned
CAUSAL_LM = "causal-lm"
OF_THE_MODEL = (CAUSAL_LM, "fused-linear-cross-entropy")
AFTER_THE_MODEL = ("chunked-cross-entropy", "linear-cross-entropy", "ctc")
HEAD_LOSSES = (*OF_THE_MODEL, *AFTER_THE_MODEL)
OF_TRANSFORMERS = "transformers"  # a study resolves it: CAUSAL_LM for scores of tokens, else what `auto` chooses
LOSSES = (*KINDS, "outputs", OF_TRANSFORMERS, *HEAD_LOSSES)
# bytes of the buckets that DistributedDataParallel reduces at a time: the first, and others (`bucket_cap_mb` 25 of
# torch/nn/parallel/distributed.py; kDefaultFirstBucketBytes of torch/csrc/distributed/c10d/reducer.hpp)
DDP_FIRST_BUCKET, DDP_BUCKET = 1 << 20, 25 << 20
SQRT = "sqrt"
FIRST, AFTER_FORWARD = "first", "after-forward"  # when zero_grad() of a step runs
# where tensors that autograd saves are: on the GPU; on the CPU, by torch.autograd.graph.save_on_cpu (in pageable or in
# pinned memory), or by torchtune's OffloadActivations (with or without streams)
NONE_FROZEN = "none"  # for `freeze`: all parameters are trained, also where the file does not say it
NO_CHECKPOINTS = ("none",)  # for `checkpoint`: nothing runs in one, also where the file does not say it
ON_GPU, PAGEABLE, PINNED, STREAMS, TORCHTUNE = "none", "save-on-cpu", "pinned", "torchtune", "torchtune-no-streams"
OFFLOADS = (ON_GPU, PAGEABLE, PINNED, STREAMS, TORCHTUNE)
HELD, DROPPED = "held", "dropped"  # what the loop does with the model's outputs once it has the loss, or their use
WHOLE = "all"  # for `compile`: the whole model
DEFAULT_MODE = "default"  # of torch.compile
# those with CUDA graphs (torch/_inductor/__init__.py, list_mode_options)
GRAPH_MODES = ("reduce-overhead", "max-autotune")
AUTOTUNED = ("max-autotune", "max-autotune-no-cudagraphs")  # those that measure kernels on the card
COMPILE_MODES = (DEFAULT_MODE, *GRAPH_MODES, AUTOTUNED[1])
COMPILED_OPTIMIZERS = ("sgd", "adam", "adamw")  # whose compiled step was measured
CACHES = ("dynamic", "static")
MAX_TOKENS = 1 << 30
# how keys and values come from other ranks: `set_rotate_method`
ROTATES_AT_ONCE, ROTATES_IN_TURNS = "allgather", "alltoall"
ROTATE_METHODS = (ROTATES_AT_ONCE, ROTATES_IN_TURNS)
MAX_LABELS = 1 << 20  # of a target: far more than any transcript has, and no size of a tensor overflows
MAX_PATTERN = 1000  # characters of a regular expression: longer ones are a mistake


# fmt: off
@record(frozen=True, kw_only=True)
class Levers:
    """Settings that make a step smaller, and other options of it (docs/levers.md). The defaults are PyTorch's."""

    checkpoint: str | tuple[str, ...] = option(
        (), LEVERS, "names", "CLASS|PATH",
        "modules that run under torch.utils.checkpoint, by class (Bottleneck) or path (layer1.*); or none",
        example="[Bottleneck]",
        details="`use_reentrant=False`. The full name of a class does too; `*` stands for one part of a path",
    )
    checkpoint_every: int = option(
        1, LEVERS, "whole", "K", "how many of those modules share a checkpoint",
        example="2", details="They follow each other in one parent",
    )
    checkpoint_save: str | tuple[str, ...] = option(
        (), LEVERS, "names", "OP", "calls whose results those checkpoints keep: mm, sdpa; mm/2 is every second one",
        example="[mm/2, sdpa]", details="Selective checkpoints (`create_selective_checkpoint_contexts`): names of ATen "
        "calls as kernels see them, so `addmm` or `mm` for a linear layer. `sdpa` is any fused attention",
    )
    checkpoint_segments: int | str = option(
        0, LEVERS, "segments", "N|sqrt", "segments of checkpoint_sequential: a number, or sqrt",
        example="sqrt", details="`sqrt` is the root of the number of modules in the Sequential",
    )
    checkpoint_sequential: str | None = option(
        None, LEVERS, "text", "PATH", "path of the Sequential that is divided into segments",
        example="layers", unset="the one with the most modules of its own",
    )
    accumulate: int = option(
        1, LEVERS, "whole", "N", "micro-batches a step; the batch is the size of one", example="4",
    )
    freeze: str | None = option(
        None, LEVERS, "text", "REGEX", "regular expression; parameters whose name contains a match are not trained",
        example="'^(?!fc)'", details="`'^(?!fc)'`: all but `fc`; `none`: all are trained",
    )
    weight_decay: float = option(0.0, LEVERS, "factor", "W", "weight decay of the optimizer", example="0.01")
    nesterov: bool = option(False, LEVERS, "switch", "", "Nesterov momentum of sgd", owners=("sgd",))
    dampening: float = option(
        0.0, LEVERS, "factor", "D", "dampening of sgd with momentum", example="0", owners=("sgd",)
    )
    amsgrad: bool = option(False, LEVERS, "switch", "", "AMSGrad of adam and adamw", owners=("adam", "adamw"))
    centered: bool = option(False, LEVERS, "switch", "", "centered rmsprop", owners=("rmsprop",))
    offload_optimizer: bool = option(
        False, LEVERS, "switch", "", "optimizer state and its update are on the CPU"
    )
    offload_activations: str = option(
        ON_GPU, LEVERS, "choice", "WORD", "what autograd saves in the forward of the model is on the CPU",
        choices=OFFLOADS, example=PINNED,
        details="`save-on-cpu` is `torch.autograd.graph.save_on_cpu()`, `pinned` the same with `pin_memory=True`, "
        "`torchtune` its `OffloadActivations` ([levers](levers.md#saved-tensors-on-the-cpu))",
    )
    inplace_abn: bool = option(
        False, LEVERS, "switch", "", "batch norms with their ReLU as InPlaceABN, which saves the result alone",
        details="mapillary's package. ReLU becomes leaky ReLU ([levers](levers.md#batch-norms-in-place))",
    )
    grad_scaler: bool = option(False, LEVERS, "switch", "", "torch.amp.GradScaler around loss and step")
    set_to_none: bool = option(
        True, LEVERS, "switch", "", "zero_grad(set_to_none=True); else gradients stay, zeroed, through the forward",
    )
    zero_grad: str = option(
        FIRST, LEVERS, "choice", "WORD", "when zero_grad() of a step runs: before its forward, or after",
        choices=(FIRST, AFTER_FORWARD), example=AFTER_FORWARD,
        details="`after-forward` is Lightning's: gradients of the step before are there through the forward",
    )
    clip_grad_norm: bool = option(False, LEVERS, "switch", "", "torch.nn.utils.clip_grad_norm_ before the step")
    input_grad: str | tuple[str, ...] = option(
        (), LEVERS, "names", "NAME|all", "inputs that require a gradient, by name; all: every floating-point one",
        example="[x]", details="As `x.requires_grad_()`; their gradients stay as those of parameters do",
    )
    retain_graph: bool = option(
        False, LEVERS, "switch", "", "backward(retain_graph=True): what it reads stays until it returns",
        details="The graph then ends with the function that called it. A loop that keeps the loss in a variable keeps "
        "its graph through the next forward too, which is not counted",
    )
    compile_optimizer: bool = option(
        False, LEVERS, "switch", "", "torch.compile(optimizer.step): the update makes no temporary tensor",
        owners=COMPILED_OPTIMIZERS, details="[compile](compile.md)",
    )
    activation_memory_budget: float = option(
        1.0, LEVERS, "fraction", "SHARE", "share of what the compiler would save for the backward that it may save",
        example="0.5", details="With `compile`. PyTorch's `torch._functorch.config.activation_memory_budget`: 1 saves "
        "what is cheapest in time, 0 computes all of the forward again ([compile](compile.md))",
    )
    backward: bool = option(
        True, LEVERS, "switch", "", "the backward runs; else the forward alone, which records what one would read",
    )
    outputs: str = option(
        HELD, LEVERS, "choice", "WORD", "whether the loop holds the model's outputs until the next forward returns",
        choices=(HELD, DROPPED), example=DROPPED, training=False,
        details="`held`: `outputs = model(x)` has them until the next step assigns it anew. `dropped`: nothing has "
        "them once the loss is computed, as with trainers, or in inference before the next call "
        "([levers](levers.md#outputs-of-the-model))",
    )
    float32_outputs: bool = option(
        False, LEVERS, "switch", "", "outputs come back from autocast in float32, as from accelerate's prepare()",
        details="With `amp`. Scores of a large vocabulary take twice the memory then "
        "([levers](levers.md#outputs-in-float32))",
    )
# fmt: on


LEVER_OPTIONS = declared(Levers)


@record(frozen=True)
class Generation:
    """What `generate` is asked: tokens of the prompt, tokens that are new, the kind of cache, one of `CACHES`, and how
    tokens are sampled (None: greedily).

    Raises:
        UsageError: there is no token.
    """

    prompt: int
    new_tokens: int
    cache: str = "dynamic"
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        for flag, count in (("prompt", self.prompt), ("new-tokens", self.new_tokens)):
            if not 1 <= count <= MAX_TOKENS:
                raise UsageError(
                    f"--{flag} {count} is not a number of tokens",
                    f"It is a whole number from 1 to {MAX_TOKENS:,}.",
                    "Try --prompt 2048 --new-tokens 512.",
                    code="SM124",
                )

    @property
    def steps(self) -> int:
        """Decode steps: the prefill gives the first new token."""
        return self.new_tokens - 1

    @property
    def longest(self) -> int:
        """Tokens in the cache when the last step is done: the last new token never gets into it."""
        return self.prompt + self.steps


@record(frozen=True)
class ExpertShare:
    """The experts of a layer are divided over `ranks`. `worst`: all tokens that can go to those of one rank do."""

    ranks: int
    worst: bool = False


@record(frozen=True)
class ContextShare:
    """The sequence is divided over `ranks`, of which this is number `rank`, with `length` tokens of it. `rotate`, one
    of `ROTATE_METHODS`: how the others' keys and values come to it."""

    ranks: int
    rank: int = 0
    rotate: str = ROTATES_AT_ONCE
    length: int = 0


@record(frozen=True)
class Scenario(Levers):
    """One configuration. `dtype` casts the whole model; `amp` runs the forward under `torch.autocast("cuda")`.

    `sdpa` is the kernel of scaled_dot_product_attention; "auto" chooses as PyTorch does on an sm_90 device.

    `compile` has the modules that run under torch.compile, by class or path, or `WHOLE`; `compile_mode` is its mode.

    `ddp`: DistributedDataParallel is around the model, which decides where compiled code is cut.

    `target_length`: labels of a target of `ctc`; None: as many as the output has frames.

    `low_rank`: what the optimizers of `LOW_RANK` are asked; they need it.

    `experts`: the share of one rank of expert parallelism; `context`: that of one rank of context parallelism.

    `torch` is the release of PyTorch that runs the step: what autograd saves and which calls there are.

    `optimizer_impl` "foreach" is an optimizer's default on CUDA: Adafactor's is its for-loop, the 8-bit ones are fused.

    Raises:
        UsageError: a lever's value is out of range. `combinations` has what does not go together.
    """

    mode: str = "infer"
    optimizer: str | None = None
    optimizer_impl: str = "foreach"
    momentum: float = 0.0
    loss: str = "auto"
    dtype: DType | None = None
    amp: DType | None = None
    sdpa: str = "auto"
    torch: tuple[int, int] = REFERENCE_RELEASE
    compile: tuple[str, ...] = ()
    lora: Lora | None = None
    compile_mode: str = DEFAULT_MODE
    quantize: Quantized | None = None
    generation: Generation | None = None
    ddp: bool = False
    target_length: int | None = None
    low_rank: LowRank | None = None
    experts: ExpertShare | None = None
    context: ContextShare | None = None

    def __post_init__(self) -> None:
        _at_least_one("accumulate", self.accumulate, "Micro-batches a step are a whole number.")
        _at_least_one("checkpoint-every", self.checkpoint_every, "Modules that share a checkpoint are a whole number.")
        segments = self.checkpoint_segments
        if segments != SQRT and (not isinstance(segments, int) or segments < 0):
            raise UsageError(
                f"--checkpoint-segments {segments} is not a number of segments",
                f"It is a whole number from 1, or {SQRT}.",
                "Try --checkpoint-segments sqrt.",
                code="SM160",
            )
        if not 0 <= self.momentum < 1:
            why = "It is a fraction: 0 <= momentum < 1."
            raise UsageError(f"--momentum {self.momentum} is out of range", why, "Try 0.9.", "SM132")
        if self.target_length is not None and not 1 <= self.target_length <= MAX_LABELS:
            why = f"It is the labels of the longest target, from 1 to {MAX_LABELS:,}."
            what = f"--target-length {self.target_length} is out of range"
            raise UsageError(what, why, "Try --target-length 50.", "SM130")
        if self.checkpoint_save:
            _check_names(self.checkpoint_save)
        if self.freeze is not None:
            _pattern(self.freeze)
        if not 0 <= self.activation_memory_budget <= 1:
            raise UsageError(
                f"--activation-memory-budget {self.activation_memory_budget} is not a share",
                "It is between 0 (nothing is saved but inputs) and 1 (the default).",
                "Try 0.5.",
                code="SM168",
            )
        if self.weight_decay < 0:
            raise UsageError(
                f"--weight-decay {self.weight_decay} is negative", "It is a factor from 0.", "Try 0.01.", code="SM161"
            )

    @property
    def gradients_at_start(self) -> bool:
        """Whether gradients of the step before are there when the forward runs. Those of CUDA graphs are not, whenever
        zero_grad() runs: the forward takes their memory."""
        graphs = self.cuda_graphs and WHOLE in self.compile
        return not self.set_to_none or (self.zero_grad == AFTER_FORWARD and not graphs)

    @property
    def cuda_graphs(self) -> bool:
        """Whether compiled code runs as CUDA graphs."""
        return self.compile_mode in GRAPH_MODES

    @property
    def training(self) -> bool:
        return self.mode == "train"


def _at_least_one(flag: str, value: int, why: str) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"--{flag} {value} is less than 1", why, f"Use --{flag} 1 or more.", code="SM160")


def _check_names(names: Iterable[str]) -> None:
    from staticmem.scenario.checkpointing import NAME  # few steps have one

    for name in names:
        if NAME.fullmatch(name) is None:
            raise UsageError(
                f"--checkpoint-save {name[:80]!r} names no call",
                "It is the name of an ATen call, as mm or max.dim, or sdpa, and /2 for every second one.",
                "Example: --checkpoint-save mm/2 --checkpoint-save sdpa",
                code="SM160",
            )


def _pattern(text: str) -> None:
    try:
        if len(text) > MAX_PATTERN:
            raise UsageError(
                f"--freeze is {len(text)} characters long",
                f"A regular expression has at most {MAX_PATTERN} here.",
                "Use a shorter one.",
                code="SM162",
            )
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--freeze '{text}' is not a regular expression", f"Python says: {error}.", "Try '^(?!fc)'.", code="SM162"
        ) from error
